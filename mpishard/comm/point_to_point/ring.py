"""Blocks that go round the ranks of a group while these compute."""

from __future__ import annotations

import torch

from mpishard.comm import counter
from mpishard.comm.device.driver import driver_at, driver_of
from mpishard.comm.memory.buffer import address, byte_view, dense, pieces
from mpishard.comm.mesh import Group
from mpishard.comm.point_to_point.device_message import Envelope, Relay
from mpishard.comm.tag import Flight, Label, hashed, said

OP = "ring_attention"
ONWARD, SUMS, HOME = "onward", "sums", "home"  # ways that cross each other: each has a tag of its own


class Transit:
    """A tensor on its way to or from one rank; it must not be touched before `wait` returns it."""

    __slots__ = ("_flight", "_relay", "_tensor")

    def __init__(self, tensor: torch.Tensor, flight: Flight | None, relay: Relay | None = None) -> None:
        self._tensor, self._flight, self._relay = tensor, flight, relay

    def poke(self) -> None:
        """Let MPI make progress. Not collective."""
        if self._relay is not None:
            self._relay.poke()
        elif self._flight is not None:
            self._flight.test()

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
        if self._flight is not None:
            self._flight.wait()
        self._flight = None
        return self._tensor


def send(x: torch.Tensor, group: Group, dest: int, way: str, label: Label) -> Transit:
    """Start to send ``x``, which may not be empty. Neighborwise collective."""
    x = dense(x)
    tag, driver = hashed(OP, way, label.number), driver_at(x)
    if driver is not None:
        relay = Relay(
            group.comm,
            driver,
            [Envelope(dest, tag, x.nbytes)],
            [],
            OP,
            group.aware,
            tensors=([x], []),
            in_order=False,
            label=label,
        )
        if group.aware:
            relay.out.tensor[: x.nbytes].copy_(byte_view(x))
        relay.start()
        return Transit(x, None, relay)
    if counter.active:
        counter.record(OP, 1, x.nbytes)
    at, comm = x.data_ptr(), group.comm
    sends = [(dest, comm.Isend(address(at + a, n), dest, tag)) for a, n in pieces(x.nbytes)]
    return Transit(x, Flight(comm, said(OP, label), [], sends))


def receive(
    numel: int, dtype: torch.dtype, device: torch.device, group: Group, source: int, way: str, label: Label
) -> Transit:
    """Start to receive ``numel`` numbers, at least one. Neighborwise collective."""
    x = torch.empty(numel, dtype=dtype, device=device)
    tag, driver = hashed(OP, way, label.number), driver_of(device)
    if driver is not None:
        relay = Relay(
            group.comm,
            driver,
            [],
            [Envelope(source, tag, x.nbytes)],
            OP,
            group.aware,
            tensors=([], [x]),
            counted=False,
            in_order=False,
            label=label,
        )
        relay.start()
        return Transit(x, None, relay)
    at, comm = x.data_ptr(), group.comm
    recvs = [(source, comm.Irecv(address(at + a, n), source, tag), tag, n) for a, n in pieces(x.nbytes)]
    return Transit(x, Flight(comm, said(OP, label), recvs, []))
