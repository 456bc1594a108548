"""Blocks that go round the ranks of a group while these compute."""

from __future__ import annotations

import torch

from mpishard.comm import counter
from mpishard.comm.memory.buffer import dense
from mpishard.comm.mesh import Group
from mpishard.comm.tag import Label, hashed, said
from mpishard.comm.transport.choice import Posted, transport_of

OP = "ring_attention"
ONWARD, SUMS, HOME = "onward", "sums", "home"  # ways that cross each other: each has a tag of its own


class Transit:
    """A tensor on its way to or from one rank; it must not be touched before `wait` returns it."""

    __slots__ = ("_posted", "_tensor")

    def __init__(self, tensor: torch.Tensor, posted: Posted) -> None:
        self._tensor = tensor
        self._posted: Posted | None = posted

    def poke(self) -> None:
        """Let MPI make progress. Not collective."""
        if self._posted is not None:
            self._posted.poke()

    def wait(self) -> torch.Tensor:
        """Return the tensor. Neighborwise collective."""
        posted, self._posted = self._posted, None
        if posted is not None:
            posted.wait()
        return self._tensor


def send(x: torch.Tensor, group: Group, dest: int, way: str, label: Label) -> Transit:
    """Start to send ``x``, which may not be empty. Neighborwise collective."""
    x = dense(x)
    if counter.active:
        counter.record(OP, 1, x.nbytes)
    tag, transport = hashed(OP, way, label.number), transport_of(group, x)
    return Transit(x, transport.post([(dest, x)], [], said(OP, label), tag, in_order=False))


def receive(
    numel: int, dtype: torch.dtype, device: torch.device, group: Group, source: int, way: str, label: Label
) -> Transit:
    """Start to receive ``numel`` numbers, at least one. Neighborwise collective."""
    x = torch.empty(numel, dtype=dtype, device=device)
    tag, transport = hashed(OP, way, label.number), transport_of(group, x)
    return Transit(x, transport.post([], [(source, x)], said(OP, label), tag, in_order=False))
