"""Run a transfer plan: boxes of a block travel to the ranks that hold them in another layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch import Tensor

from mpishard.comm import counter, guard
from mpishard.comm.exchange import MESSAGE_NBYTES
from mpishard.comm.mesh import CartMesh

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
    if not plan.sends and not plan.recvs:
        if plan.local is not None:
            put(_narrow(out, plan.local[1]), _narrow(x, plan.local[0]))
        return out
    cuda = x.is_cuda
    comm = mesh.comm
    incoming = []
    requests: list[MPI.Request] = []
    for peer, box in plan.recvs:
        buffer = _host_buffer([hi - lo for lo, hi in box], x.dtype, cuda)
        incoming.append((box, buffer))
        requests += [comm.Irecv(part, peer, TAG) for part in byte_parts(buffer)]
    outgoing = []
    for _, box in plan.sends:
        block = _narrow(x, box)
        if cuda or not block.is_contiguous():
            buffer = _host_buffer(block.shape, x.dtype, cuda)
            buffer.copy_(block, non_blocking=cuda)
            block = buffer
        outgoing.append(block.resolve_conj().resolve_neg())
    if cuda:
        torch.cuda.current_stream(x.device).synchronize()
    for (peer, _), block in zip(plan.sends, outgoing):
        requests += [comm.Isend(part, peer, TAG) for part in byte_parts(block)]
    if counter.active:
        counter.record(op, len(plan.sends), sum(b.nbytes for b in outgoing))
    if plan.local is not None:
        put(_narrow(out, plan.local[1]), _narrow(x, plan.local[0]))
    with guard.waiting(op, [p for p, _ in plan.recvs], comm):
        MPI.Request.Waitall(requests)
    for box, buffer in incoming:
        put(_narrow(out, box), buffer.to(x.device) if accumulate else buffer)
    return out


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
        cuda = mesh.device.type == "cuda"
        block = _host_buffer([hi - lo for lo, hi in boxes[mesh.rank]], dtype, cuda)
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
    start, nbytes = block.data_ptr(), block.nbytes
    return [
        MPI.buffer.fromaddress(start + at, min(MESSAGE_NBYTES, nbytes - at)) for at in range(0, nbytes, MESSAGE_NBYTES)
    ]


def _host_buffer(shape: Sequence[int], dtype: torch.dtype, cuda: bool) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=cuda)


def _narrow(x: Tensor, box: Sequence[tuple[int, int]]) -> Tensor:
    for dim, (lo, hi) in enumerate(box):
        if hi - lo != x.shape[dim]:
            x = x.narrow(dim, lo, hi - lo)
    return x
