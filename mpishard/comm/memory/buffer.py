"""Torch tensors as MPI buffers: by address, dense, on the host, in pieces that every MPI can count."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from mpi4py import MPI
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

MESSAGE_NBYTES = 1 << 30  # below every MPI's count limit; larger payloads travel in pieces

address = MPI.buffer.fromaddress

_DTYPES = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]
# torch copies none of these as cells: they go with a scale of their own, or take less than a byte
UNCOPIED = frozenset(d for d in _DTYPES if re.fullmatch(r"torch\.(qu?int.*|quint.*|u?int[1-7])", str(d)))


_functorch = torch._C._functorch  # type: ignore[attr-defined]
transforms_active = torch._C._are_functorch_transforms_active


def bare(x: torch.Tensor) -> torch.Tensor:
    """Return what has a tensor's memory: transforms of `torch.func` wrap all that is made inside them.

    Not collective. Without derivatives: for addresses, and numbers that have none.
    """
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def is_constant(x: torch.Tensor) -> bool:
    """Tell whether a tensor has no derivative, inside any transform. Not collective."""
    return not (x.is_floating_point() or x.is_complex())


def outside(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call outside of all transforms of `torch.func`, with what has the tensors' memory. As the call is."""
    own = [bare(x) if isinstance(x, torch.Tensor) else x for x in args]
    with temporarily_clear_interpreter_stack():
        return call(*own, **kwargs)


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as one block of memory that holds its values as they are. Not collective."""
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if x._is_zerotensor():  # type: ignore[attr-defined]
        x = x.clone()  # autograd's symbolic zeros own no memory, nor do views of them
    if not x.is_contiguous():
        x = x.contiguous()
    return x


def room_for(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` if it is as `dense` returns it, else memory for a copy that is. Not collective."""
    is_there = is_dense(x) and not x._is_zerotensor()  # type: ignore[attr-defined]
    return x if is_there else torch.empty(x.shape, dtype=x.dtype, device=x.device)


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


def cat(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return tensors of one dtype joined. Not collective.

    Torch's own under autocast refuses the half type that autocast does not cast to: of a rank that joins nothing, not.
    """
    if torch._C._is_any_autocast_enabled():  # type: ignore[attr-defined]
        with torch._C._DisableAutocast():
            return torch.cat(parts, dim)  # type: ignore[arg-type]
    return torch.cat(parts, dim)  # type: ignore[arg-type]


def pack(blocks: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the blocks' values one after the other. Not collective."""
    if all(b.is_contiguous() and b.dtype == dtype for b in blocks):
        return cat([b.view(-1) for b in blocks]).resolve_conj().resolve_neg()
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


def unfit(x: torch.Tensor) -> tuple[str, str] | None:
    """Return what a tensor is that is no numbers at strides, and how to make it that; None where it is.

    Not collective.
    """
    if x.is_quantized:
        return "a quantized one", "give x.dequantize()"
    if x.is_nested:
        return "a nested one", "give what it is made of, one by one: x.unbind()"
    if x.layout is not torch.strided:
        return f"one of layout {x.layout}", "give x.to_dense(), or what it is made of, one by one"
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(x).__name__}, which has no cells of its own", "give the plain tensors that it is made of"
    return None


def followed() -> tuple[str, str] | None:
    """Return what follows this thread's operations, to keep them as a graph, and what to do; None where nothing does.

    Not collective. What travels is no operation that it knows: its graph would hold what came in as a constant.
    """
    if torch._C._get_tracing_state() is not None:  # type: ignore[attr-defined]
        return "one inside torch.jit.trace", "trace what does not communicate, or call the function itself"
    if torch._C._len_torch_dispatch_stack():
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        if get_proxy_mode() is not None:
            return "one inside make_fx", "trace what does not communicate, or call the function itself"
    return None


def uncopied(x: torch.Tensor) -> tuple[str, str] | None:
    """Return what a tensor is whose cells torch does not copy, and what to give instead; None of others.

    Not collective.
    """
    return (f"one of {x.dtype}", "give its bytes: x.view(torch.uint8)") if x.dtype in UNCOPIED else None
