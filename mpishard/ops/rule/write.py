"""Writing into tensors, and through views whose cells came from other ranks into what they were taken from."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from mpishard.autograd.linear import Step, apply, pair, same
from mpishard.comm.memory.buffer import bare
from mpishard.errors import UnsupportedOperationError
from mpishard.ops.rule.dim import plain, settled
from mpishard.tensor.shard_tensor import ShardTensor
from mpishard.tensor.strides import index_of

R = TypeVar("R", bound=Callable[..., Any])


def put_into(x: ShardTensor, result: Tensor) -> ShardTensor:
    """Write a result into ``x``, as an in-place function does. Collective where they are laid out differently.

    Raises
    ------
    RuntimeError
        Torch would not write numbers of the result's dtype there.
    """
    if not torch.can_cast(result.dtype, x.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {x.dtype}")
    return x.copy_(result)  # type: ignore[return-value]


def prepare_write(x: ShardTensor) -> None:
    """Sum the Partial dims of ``x``, which is about to be written into. Collective over them.

    Raises
    ------
    RuntimeError
        It is a leaf, and autograd is on.
    UnsupportedOperationError
        It is memory of a host program that may not be written.
    """
    settled(x)
    if x._halo is not None and not x._halo.writable:
        raise UnsupportedOperationError(
            f"field {x._halo.name!r} is read-only",
            expected="a tensor that may be written",
            got="a field made with writable=False",
            fix="write into a copy, u.tensor.clone()",
        )
    if x._root is not None and x.is_leaf and torch.is_grad_enabled():
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")


def beside(written: Tensor, x: Any) -> Any:
    """Return an operand's block, or a copy where it lies in part of what is written into. Not collective.

    Torch refuses that, on those ranks alone whose blocks lie so.
    """
    if x is written or not isinstance(x, Tensor) or not shares_memory(x, written):
        return x
    own, into = bare(x), bare(written)
    # by offsets: a compiler's tensors have no address
    starts = [t.storage_offset() * t.itemsize for t in (own, into)]
    same = starts[0] == starts[1] and own.shape == into.shape and own.stride() == into.stride()
    return x if same else x.clone()


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Tell whether two blocks lie in one storage, which is so without cells, too. Not collective."""
    return bare(x).untyped_storage()._cdata == bare(y).untyped_storage()._cdata


def kept(x: ShardTensor) -> ShardTensor:
    """Return what a function reads whose result is written into ``x``: a copy where its derivative reads it again.

    Not collective.
    """
    return x.clone() if torch.is_grad_enabled() and x.requires_grad else x  # type: ignore[return-value]


def require_writable(x: ShardTensor, name: str) -> None:
    """Refuse to write into what is a view in torch and a copy here. Not collective.

    Raises
    ------
    UnsupportedOperationError
        It is one.
    """
    if x._gathered_view:
        raise UnsupportedOperationError(
            f"{name}: writing into a view whose cells came from other ranks would not reach them",
            expected="a view of cells that stayed on their rank",
            got="a view that selects from, drops or gathers a sharded dim",
            fix="write through the tensor itself, x[index] = value, or into a copy, y = view.clone()",
        )


def into_plain(func: Any) -> Callable[[R], R]:
    """Decorate the rule of an in-place function.

    A plain tensor is the same on every rank, so what is written into it, and what says where, are gathered.
    Collective where they are sharded. What is written into a gathered view is written through.
    """

    def decorate(rule: R) -> R:
        @wraps(rule)
        def either(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, ShardTensor):
                if self._gathered_view and written_through(self, lambda y: rule(y, *args, **kwargs)):
                    return self
                return rule(self, *args, **kwargs)
            return func(self, *map(plain, args), **{k: plain(a) for k, a in kwargs.items()})

        return either  # type: ignore[return-value]

    return decorate


# -- views whose cells came from other ranks


def written_through(x: ShardTensor, write: Callable[[ShardTensor], Any]) -> bool:
    """Write into a gathered view and, as torch does, into the tensor that it was taken from.

    Collective where the writing is, and where the view is taken.

    Returns
    -------
    bool
        Whether that was possible. It is not for views of other kinds: the same on every rank.
    """
    if not _reaches(x):
        return False
    y: Any = _fresh(x).clone()
    write(y)
    _assign(x, y)
    return True


def _reaches(x: ShardTensor) -> bool:
    """Tell whether what is written into a view gets to a tensor that owns its cells. Not collective."""
    while x._gathered_view:
        if x._origin is None or not x._origin[1] or x._origin[1][0] not in _PUT:
            return False
        x = x._origin[0]
    return True


def _fresh(x: ShardTensor) -> Any:
    """Return a gathered view as it would be taken now. Collective as taking it is."""
    if not x._gathered_view or x._origin is None:
        return x
    base, (name, *given) = x._origin
    base = _fresh(base)
    if name == "[]":
        return base[index_of(given[0])]
    function = getattr(torch, name, None)
    return function(base, *given) if function else getattr(base, name)(*given)


def _assign(x: ShardTensor, y: Any) -> None:
    """Give a view new values, and what it was taken from. Collective where they are laid out differently."""
    if not x._gathered_view:
        x.copy_(y)
        return
    assert x._origin is not None
    base, (name, *given) = x._origin
    _PUT[name](base, y, *given)
    block = y.block
    if x.block.requires_grad and not torch.is_grad_enabled() and y.sharding == x.sharding:
        # the graph goes on, as that of torch's own view does, as if nothing had been written
        with torch.enable_grad():
            block = apply(_replacing(block.detach()), x.block)  # not into the graph: y itself, which others may hold
    x.block, x.sharding, x._root, x._halo = block, y.sharding, None, None


def _replacing(values: Tensor) -> Step:
    """Return the step whose result is ``values``, whatever it is given, and whose adjoint moves nothing."""
    step = Step(lambda _: values)
    step.adjoint = pair(same, same)
    return step


def _write(x: ShardTensor, write: Callable[[Any], Any]) -> None:
    """Write some cells of a view, or of what owns them. Collective where the writing is."""
    if not (x._gathered_view and written_through(x, write)):
        write(x)


def _put_permuted(base: ShardTensor, y: Tensor, order: tuple[int, ...]) -> None:
    _assign(base, y.permute([order.index(d) for d in range(len(order))]))


def _put_shape(base: ShardTensor, y: Tensor, to: Any = ()) -> None:
    _assign(base, y.view(base.dtype) if isinstance(to, torch.dtype) else y.reshape(tuple(base.shape)))


def _put_windows(base: ShardTensor, y: Tensor, dim: int, size: int, step: int) -> None:
    at = torch.arange(base.shape[dim], device=base.device).unfold(0, size, step).reshape(-1)
    _write(base, lambda x: x.index_copy_(dim, at, y.movedim(-1, dim + 1).flatten(dim, dim + 1)))


def _put_detached(base: ShardTensor, y: Tensor) -> None:
    with torch.no_grad():
        _assign(base, y)


# how a view's values are written into what it was taken from; there is none for cells that are in it twice
_PUT: dict[str, Callable[..., None]] = {
    "[]": lambda base, y, key: base.__setitem__(index_of(key), y),
    "conj": lambda base, y: _assign(base, y.conj()),
    "detach": _put_detached,
    "diagonal": lambda base, y, *plane: _write(base, lambda x: x.diagonal(*plane).copy_(y)),
    "imag": lambda base, y: _write(base, lambda x: x.imag.copy_(y)),
    "permute": _put_permuted,
    "real": lambda base, y: _write(base, lambda x: x.real.copy_(y)),
    "squeeze": _put_shape,
    "unfold": _put_windows,
    "unsqueeze": _put_shape,
    "view": _put_shape,
    "view_as_complex": lambda base, y: _assign(base, torch.view_as_real(y.resolve_conj())),
    "view_as_real": lambda base, y: _assign(base, torch.complex(*y.unbind(-1))),
}
