"""Torch tensors as MPI buffers: by address, dense, on the host, in pieces that every MPI can count."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from mpi4py import MPI

from mpishard.comm import traced

MESSAGE_NBYTES = 1 << 30  # below every MPI's count limit; larger payloads travel in pieces

address = MPI.buffer.fromaddress


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as one block of memory that holds its values as they are. Not collective."""
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if not x.is_contiguous():
        x = x.contiguous()
    if traced.recording is None and x.data_ptr() == 0 and x.numel():
        x = x.clone()  # autograd's symbolic zeros own no memory
    return x


def is_dense(x: torch.Tensor) -> bool:
    """Whether ``x`` is one block of memory that holds its values as they are. Not collective."""
    return x.is_contiguous() and not (x.is_conj() or x.is_neg())


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``x`` in host memory that MPI may read at once. Not collective."""
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    host.copy_(x, non_blocking=True)
    if x.is_cuda:
        # MPI reads the copy next, and knows nothing of streams
        torch.cuda.current_stream(x.device).synchronize()
    return host


def pack(blocks: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the blocks' values one after the other. Not collective."""
    if all(b.is_contiguous() and b.dtype == dtype for b in blocks):
        return torch.cat([b.view(-1) for b in blocks]).resolve_conj().resolve_neg()
    flat = blocks[0].new_empty(sum(b.numel() for b in blocks), dtype=dtype)
    for b, (lo, hi) in zip(blocks, spans([b.numel() for b in blocks])):
        flat[lo:hi].view(b.shape).copy_(b)
    return flat


def as_bytes(x: torch.Tensor) -> MPI.buffer:
    """Return the memory of a dense tensor. Not collective."""
    return address(x.data_ptr(), x.nbytes)


def byte_view(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, 1-D, outside autograd. Not collective."""
    # one element counts as contiguous whatever its strides are, of which torch would see no bytes
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)


def pieces(nbytes: int) -> Sequence[tuple[int, int]]:
    """Cut a payload into messages: (offset, length) in bytes. Not collective."""
    if nbytes <= MESSAGE_NBYTES:
        return ((0, nbytes),)
    return [(a, min(MESSAGE_NBYTES, nbytes - a)) for a in range(0, nbytes, MESSAGE_NBYTES)]


def spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return where blocks of these lengths begin and end, one after the other. Not collective."""
    ends = list(accumulate(counts))
    return list(zip([0, *ends], ends))
