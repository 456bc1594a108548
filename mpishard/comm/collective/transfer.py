"""Run a transfer plan: boxes of a block travel to the ranks that hold them in another layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpishard.comm import counter, guard
from mpishard.comm.collective import nccl
from mpishard.comm.device.driver import Driver, driver_at
from mpishard.comm.memory.buffer import address, dense, pieces
from mpishard.comm.mesh import CartMesh
from mpishard.comm.point_to_point.device_message import Envelope, Relay

if TYPE_CHECKING:
    from mpishard.layout import Transfer

TAG = 8


def run_transfer(
    mesh: CartMesh,
    plan: Transfer,
    x: Tensor,
    shape: Sequence[int],
    op: str = "redistribute",
    *,
    accumulate: bool = False,
) -> Tensor:
    """Return this rank's block of the target layout.

    Collective over the ranks that exchange boxes. Buffers are temporary: a transfer moves whole blocks, which
    a plan must not keep in memory.

    Parameters
    ----------
    mesh, plan
        The plan is this rank's.
    x
        This rank's block of the source layout.
    shape
        Shape of its block of the target layout.
    op
        Name for counters and the watchdog.
    accumulate
        Whether boxes that come overlap, and are added in ascending order of the ranks; what none covers is zero.
    """
    if guard.DEBUG:
        guard.check(mesh.comm, op, None, x.dtype)
    out = x.new_zeros(tuple(shape)) if accumulate else x.new_empty(tuple(shape))
    put = Tensor.add_ if accumulate else Tensor.copy_
    if x.is_cuda:
        nccl.connect(mesh.group(tuple(range(mesh.ndim))), x.device)
    if not plan.sends and not plan.recvs:
        _move(out, x, plan.local, put)
        return out
    driver = driver_at(x)
    if driver is not None:
        _run_on_device(mesh, driver, plan, x, out, op, put)
        return out
    comm = mesh.comm
    incoming = []
    requests: list[MPI.Request] = []
    for peer, box in plan.recvs:
        buffer = torch.empty([hi - lo for lo, hi in box], dtype=x.dtype)
        incoming.append((box, buffer))
        requests += [comm.Irecv(part, peer, TAG) for part in byte_parts(buffer)]
    outgoing = [_narrow(x, box).contiguous().resolve_conj().resolve_neg() for _, box in plan.sends]
    for (peer, _), block in zip(plan.sends, outgoing):
        requests += [comm.Isend(part, peer, TAG) for part in byte_parts(block)]
    if counter.active:
        counter.record(op, len(plan.sends), sum(b.nbytes for b in outgoing))
    _move(out, x, plan.local, put)
    with guard.waiting(op, guard.unfinished(requests, [p for p, _ in plan.recvs]), comm):
        MPI.Request.Waitall(requests)
    for box, buffer in incoming:
        put(_narrow(out, box), buffer)
    return out


def _run_on_device(
    mesh: CartMesh, driver: Driver, plan: Transfer, x: Tensor, out: Tensor, op: str, put: Callable[..., Any]
) -> None:
    """Run a plan on blocks in a GPU's memory. Collective over the ranks that exchange boxes."""
    link = mesh.group(tuple(range(mesh.ndim))).links.get("nccl")
    # both ends know a message's size: so both take the same way
    large = nccl.LEAST_NBYTES if link is not None else math.inf
    sides = [[(peer, box, _numel(box) * x.itemsize) for peer, box in side] for side in (plan.sends, plan.recvs)]
    small = [[m for m in side if m[2] < large] for side in sides]
    going, coming = ([Envelope(peer, TAG, nbytes) for peer, _, nbytes in side] for side in small)
    relay = Relay(mesh.comm, driver, going, coming, op, mesh.gpu_aware, counted=False)
    if counter.active:
        counter.record(op, len(sides[0]), sum(nbytes for *_, nbytes in sides[0]))
    try:
        for (_, box, nbytes), at in zip(small[0], relay.out_starts):
            block = _narrow(x, box)
            relay.out.tensor[at : at + nbytes].view(x.dtype).view(block.shape).copy_(block)
        arrived = []
        if link is not None:
            arrived = [(b, x.new_empty([hi - lo for lo, hi in b]), p) for p, b, nbytes in sides[1] if nbytes >= large]
            sends = [(peer, dense(_narrow(x, box))) for peer, box, nbytes in sides[0] if nbytes >= large]
            link.exchange(sends, [(peer, block) for _, block, peer in arrived])
        relay.start()
        _move(out, x, plan.local, put)
        relay.finish()
        found = {(peer, box): block for box, block, peer in arrived}
        for (peer, box, nbytes), at in zip(small[1], relay.into_starts):
            found[peer, box] = relay.into.tensor[at : at + nbytes].view(x.dtype).view(_narrow(out, box).shape)
        # in the order of the plan: sums are the same in every run
        for peer, box in plan.recvs:
            put(_narrow(out, box), found[peer, box])
        relay.release()
    finally:
        relay.free()


def _move(out: Tensor, x: Tensor, local: Any, put: Callable[..., Any]) -> None:
    """Put what stays on this rank: the (source, target) boxes, if any."""
    if local is not None:
        put(_narrow(out, local[1]), _narrow(x, local[0]))


def _numel(box: Sequence[tuple[int, int]]) -> int:
    return math.prod(hi - lo for lo, hi in box)


def scatter_blocks(
    mesh: CartMesh,
    src: int,
    x: Tensor | None,
    boxes: Sequence[Sequence[tuple[int, int]]],
    dtype: torch.dtype,
    op: str = "scatter_tensor",
) -> Tensor:
    """Return this rank's box of the tensor ``x`` that rank ``src`` holds.

    Collective. A rank other than the source holds nothing but its own block; the source packs one block at a
    time.

    Parameters
    ----------
    mesh, src
        The mesh, and the mesh rank of the source.
    x
        The tensor on the source, else None.
    boxes
        Per mesh rank, its box in global indices.
    dtype
        Of ``x``.
    op
        Name for counters and the watchdog.
    """
    comm = mesh.comm
    if x is None:
        shape = [hi - lo for lo, hi in boxes[mesh.rank]]
        block = torch.empty(shape, dtype=dtype, pin_memory=mesh.device.type == "cuda")
        with guard.waiting(op, (src,), comm):
            for part in byte_parts(block):
                comm.Recv(part, src, TAG)
        return block.to(mesh.device)
    sent = 0
    for rank, box in enumerate(boxes):
        if rank == src:
            continue
        block = _narrow(x, box)
        block = block.contiguous().cpu().resolve_conj().resolve_neg()
        with guard.waiting(op, (rank,), comm):
            for part in byte_parts(block):
                comm.Send(part, rank, TAG)
        sent += block.nbytes
    if counter.active:
        counter.record(op, len(boxes) - 1, sent)
    return _narrow(x, boxes[src]).to(mesh.device).clone(memory_format=torch.contiguous_format)


def byte_parts(block: Tensor) -> list[MPI.buffer]:
    """Return a contiguous tensor's memory as byte buffers that MPI can count. Not collective."""
    start = block.data_ptr()
    return [address(start + at, n) for at, n in pieces(block.nbytes) if n]


def _narrow(x: Tensor, box: Sequence[tuple[int, int]]) -> Tensor:
    for dim, (lo, hi) in enumerate(box):
        if hi - lo != x.shape[dim]:
            x = x.narrow(dim, lo, hi - lo)
    return x
