"""Run a transfer plan: boxes of a block travel to the ranks that hold them in another layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpishard.comm import counter, guard, thread, traced
from mpishard.comm.interruption import under_way
from mpishard.comm.memory.buffer import address, pieces
from mpishard.comm.mesh import CartMesh
from mpishard.comm.tag import Flight, hashed
from mpishard.comm.transport import nccl
from mpishard.comm.transport.choice import transport_of
from mpishard.layout.remembered import remembered

if TYPE_CHECKING:
    from mpishard.layout import Transfer

# of a scatter, at the source: blocks that travel at once
_ON_THE_WAY, _ON_THE_WAY_NBYTES = 64, 1 << 24


def run_transfer(
    mesh: CartMesh,
    plan: Transfer,
    x: Tensor,
    shape: Sequence[int],
    op: str = "redistribute",
    *,
    accumulate: bool = False,
    call: object = (),
    inner: Sequence[int] = (),
    sent: Sequence[int] = (),
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
    call
        What all ranks know of the transfer.
    inner
        Dims of the result that are to lie innermost in memory; of what a compiler records, none.
    sent
        Dims that are to lie innermost in messages, the same on all ranks; best those of ``x``. Not of what overlaps.

    Raises
    ------
    DesyncError
        Other boxes came: those of another call.
    """
    if traced.recording is not None:
        return traced.recording.call(
            op, lambda t: run_transfer(mesh, plan, t, shape, op, accumulate=accumulate, call=call), [x], shape
        )
    if guard.DEBUG:
        guard.check(mesh.comm, text_of(op, call), None, x.dtype)
    tag = hashed(op, call, x.dtype)
    out = x.new_zeros(tuple(shape)) if accumulate else empty(x, tuple(shape), inner)
    put = Tensor.add_ if accumulate else Tensor.copy_
    if x.is_cuda:
        nccl.connect(mesh.all_ranks, x.device)
    if not plan.sends and not plan.recvs:
        _move(out, x, plan.local, put)
        return out
    sends = [(peer, _narrow(x, box)) for peer, box in plan.sends]
    into = [(peer, _narrow(out, box)) for peer, box in plan.recvs]
    if sent:
        order = order_of(len(shape), sent)
        sends, into = ([(peer, block.permute(order)) for peer, block in side] for side in (sends, into))
    # what lies in the result as it travels arrives there
    recvs = [
        (peer, block if block.is_contiguous() and not accumulate else block.new_empty(block.shape))
        for peer, block in into
    ]
    if counter.active:
        counter.record(op, len(sends), sum(block.nbytes for _, block in sends))
    posted = transport_of(mesh.all_ranks, x).post(sends, recvs, text_of(op, call), tag, bulk=True)
    with under_way(op, mesh.comm, posted.wait):
        _move(out, x, plan.local, put, sent)
    # in the order of the plan: sums are the same in every run
    for (_, block), (_, came) in zip(into, recvs):
        if came is not block:
            put(block, came)
    return out


@remembered
def text_of(op: str, call: object) -> str:
    """Return what errors and the watchdog say; layouts take microseconds to write out. Not collective."""
    return f"{op} {call}"


def empty(x: Tensor, shape: tuple[int, ...], inner: Sequence[int]) -> Tensor:
    """Return an empty tensor with the dims ``inner`` innermost in memory. Not collective."""
    if not inner:
        return x.new_empty(shape)
    return x.new_empty_strided(shape, _strides(shape, inner))


def _strides(shape: Sequence[int], inner: Sequence[int]) -> list[int]:
    """Return the strides of a dense tensor with the dims ``inner`` innermost in memory."""
    strides, step = [0] * len(shape), 1
    for d in reversed(order_of(len(shape), inner)):
        strides[d], step = step, step * max(1, shape[d])
    return strides


@lru_cache(maxsize=4096)
def order_of(ndim: int, inner: Sequence[int]) -> tuple[int, ...]:
    """Return the dims from the outermost in memory to the innermost, which are ``inner``. Not collective."""
    return (*(d for d in range(ndim) if d not in inner), *inner)


@lru_cache(maxsize=4096)
def _back(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the permutation that undoes one."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _move(out: Tensor, x: Tensor, local: Any, put: Callable[..., Any], inner: Sequence[int] = ()) -> None:
    """Put what stays on this rank: the (source, target) boxes, if any.

    With dims ``inner`` innermost it is copied as it lies first, and then turned round. In the block itself, cells of a
    row are as far apart as its columns are long; where that is a power of two they drive each other out of the cache.
    """
    if local is None:
        return
    block = _narrow(x, local[0])
    if inner:
        order = order_of(x.ndim, inner)
        block = block.permute(order).contiguous().permute(_back(order))
    put(_narrow(out, local[1]), block)


def scatter_blocks(
    mesh: CartMesh,
    src: int,
    x: Tensor | None,
    box_of: Callable[[int], Sequence[tuple[int, int]]],
    dtype: torch.dtype,
) -> Tensor:
    """Return this rank's box of the tensor ``x`` that rank ``src`` holds.

    Collective. A rank other than the source holds nothing but its own block. The source packs a block while those
    before it travel, within a bound of bytes.

    Parameters
    ----------
    mesh, src
        The mesh, and the mesh rank of the source.
    x
        The tensor on the source, else None.
    box_of
        Mesh rank -> its box, in global indices. A rank asks for its own, the source for all.
    dtype
        Of ``x``.
    """
    comm, op = mesh.comm, "scatter_tensor"
    if guard.DEBUG:
        guard.check(comm, f"{op} from rank {src}", None, dtype)
    thread.require(comm)
    tag = hashed(op, src, dtype)
    if x is None:
        shape = [hi - lo for lo, hi in box_of(mesh.rank)]
        block = torch.empty(shape, dtype=dtype, pin_memory=mesh.device.type == "cuda", device="cpu")
        for part in byte_parts(block):
            Flight(comm, op, [(src, comm.Irecv(part, src, MPI.ANY_TAG), tag, part.nbytes)], []).wait()
        return block.to(mesh.device)
    sent, nbytes, flying = 0, 0, deque[tuple[int, Tensor, list[MPI.Request]]]()
    for rank in [r for r in range(mesh.size) if r != src]:
        block = _narrow(x, box_of(rank))
        block = block.contiguous().cpu().resolve_conj().resolve_neg()
        flying.append((rank, block, [comm.Isend(part, rank, tag) for part in byte_parts(block)]))
        sent, nbytes = sent + block.nbytes, nbytes + block.nbytes
        while nbytes > _ON_THE_WAY_NBYTES or len(flying) > _ON_THE_WAY:
            nbytes -= _arrived(flying.popleft(), op, comm)
    while flying:
        _arrived(flying.popleft(), op, comm)
    if counter.active:
        counter.record(op, mesh.size - 1, sent)
    return _narrow(x, box_of(src)).to(mesh.device).clone(memory_format=torch.contiguous_format)


def _arrived(parcel: tuple[int, Tensor, list[MPI.Request]], op: str, comm: MPI.Intracomm) -> int:
    """Wait until a block has left; return its bytes. Not collective."""
    rank, block, requests = parcel
    with guard.waiting(op, (rank,), comm):
        MPI.Request.Waitall(requests)
    return block.nbytes


def byte_parts(block: Tensor) -> list[MPI.buffer]:
    """Return a contiguous tensor's memory as byte buffers that MPI can count. Not collective."""
    start = block.data_ptr()
    return [address(start + at, n) for at, n in pieces(block.nbytes) if n]


def _narrow(x: Tensor, box: Sequence[tuple[int, int]]) -> Tensor:
    for dim, (lo, hi) in enumerate(box):
        if hi - lo != x.shape[dim]:
            x = x.narrow(dim, lo, hi - lo)
    return x
