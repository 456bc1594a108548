"""Blocks that go round the ranks of a group while these compute."""

from __future__ import annotations

import torch
from mpi4py import MPI

from mpishard.comm import counter, guard
from mpishard.comm.buffer import address, dense, pieces, to_host
from mpishard.comm.mesh import Group

# others than those of exchanges and single messages: what travels there never meets a block
ONWARD, SUMS, HOME = 21, 22, 23


class Message:
    """A tensor on its way to or from one rank; it must not be touched before `wait` returns it."""

    __slots__ = ("_device", "_group", "_op", "_requests", "_tensor")

    def __init__(
        self, requests: list[MPI.Request], tensor: torch.Tensor, device: torch.device, group: Group, op: str
    ) -> None:
        self._requests, self._tensor, self._device, self._group, self._op = requests, tensor, device, group, op

    def poke(self) -> None:
        """Let MPI make progress. Not collective."""
        MPI.Request.Testall(self._requests)

    def wait(self) -> torch.Tensor:
        """Return the tensor, on its device. Neighborwise collective."""
        with guard.waiting(self._op, (), self._group.comm):
            MPI.Request.Waitall(self._requests)
        self._requests = []
        return self._tensor.to(self._device)


def send(x: torch.Tensor, group: Group, dest: int, tag: int, op: str) -> Message:
    """Start to send ``x``, which may not be empty. Neighborwise collective."""
    host = dense(x) if x.is_cpu else to_host(dense(x))
    if counter.active:
        counter.record(op, 1, host.nbytes)
    at = host.data_ptr()
    return Message(
        [group.comm.Isend(address(at + a, n), dest, tag) for a, n in pieces(host.nbytes)], host, x.device, group, op
    )


def receive(
    numel: int, dtype: torch.dtype, device: torch.device, group: Group, source: int, tag: int, op: str
) -> Message:
    """Start to receive ``numel`` numbers, at least one. Neighborwise collective."""
    host = torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")
    at = host.data_ptr()
    requests = [group.comm.Irecv(address(at + a, n), source, tag) for a, n in pieces(host.nbytes)]
    return Message(requests, host, device, group, op)
