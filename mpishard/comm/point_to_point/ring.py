"""Blocks that go round the ranks of a group while these compute."""

from __future__ import annotations

import torch
from mpi4py import MPI

from mpishard.comm import counter, guard
from mpishard.comm.device.driver import driver_at, driver_of
from mpishard.comm.memory.buffer import address, byte_view, dense, pieces
from mpishard.comm.mesh import Group
from mpishard.comm.point_to_point.device_message import Envelope, Relay

# others than those of exchanges and single messages: what travels there never meets a block
ONWARD, SUMS, HOME = 21, 22, 23


class Message:
    """A tensor on its way to or from one rank; it must not be touched before `wait` returns it."""

    __slots__ = ("_group", "_op", "_relay", "_requests", "_tensor")

    def __init__(
        self, tensor: torch.Tensor, group: Group, op: str, requests: list[MPI.Request], relay: Relay | None = None
    ) -> None:
        self._tensor, self._group, self._op, self._requests, self._relay = tensor, group, op, requests, relay

    def poke(self) -> None:
        """Let MPI make progress. Not collective."""
        if self._relay is not None:
            self._relay.poke()
        else:
            MPI.Request.Testall(self._requests)

    def wait(self) -> torch.Tensor:
        """Return the tensor. Neighborwise collective."""
        if self._relay is not None:
            relay, self._relay = self._relay, None
            relay.finish()
            if relay.into.nbytes:
                byte_view(self._tensor).copy_(relay.into.tensor[: self._tensor.nbytes])
            relay.release()
            relay.free()
            return self._tensor
        with guard.waiting(self._op, guard.unfinished(self._requests, ()), self._group.comm):
            MPI.Request.Waitall(self._requests)
        self._requests = []
        return self._tensor


def send(x: torch.Tensor, group: Group, dest: int, tag: int, op: str) -> Message:
    """Start to send ``x``, which may not be empty. Neighborwise collective."""
    x = dense(x)
    driver = driver_at(x)
    if driver is not None:
        relay = Relay(group.comm, driver, [Envelope(dest, tag, x.nbytes)], [], op, group.aware, tensors=([x], []))
        if group.aware:
            relay.out.tensor[: x.nbytes].copy_(byte_view(x))
        relay.start()
        return Message(x, group, op, [], relay)
    if counter.active:
        counter.record(op, 1, x.nbytes)
    at = x.data_ptr()
    return Message(x, group, op, [group.comm.Isend(address(at + a, n), dest, tag) for a, n in pieces(x.nbytes)])


def receive(
    numel: int, dtype: torch.dtype, device: torch.device, group: Group, source: int, tag: int, op: str
) -> Message:
    """Start to receive ``numel`` numbers, at least one. Neighborwise collective."""
    x = torch.empty(numel, dtype=dtype, device=device)
    driver = driver_of(device)
    if driver is not None:
        coming = [Envelope(source, tag, x.nbytes)]
        relay = Relay(group.comm, driver, [], coming, op, group.aware, tensors=([], [x]), counted=False)
        relay.start()
        return Message(x, group, op, [], relay)
    at = x.data_ptr()
    requests = [group.comm.Irecv(address(at + a, n), source, tag) for a, n in pieces(x.nbytes)]
    return Message(x, group, op, requests)
