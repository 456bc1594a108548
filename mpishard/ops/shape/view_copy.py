"""Twins of views: the copying ones, and those that change a tensor's shape in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpishard.ops.rule.dim import ints, normal_dim, settled, trivially_sharded
from mpishard.ops.shape.view import squeezed_dims
from mpishard.tensor.registry import aten, implements
from mpishard.tensor.shard_tensor import ShardTensor

_COPIED = """
alias diagonal expand narrow permute select slice split split_with_sizes squeeze t transpose unbind unfold unsqueeze
view_as_complex view_as_real view
""".split()

_IN_PLACE = "unsqueeze transpose swapaxes swapdims t".split()


def _slice(input: ShardTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if input.ndim == 0:
        raise IndexError("slice() cannot be applied to a 0-dim tensor.")
    return input[(*(slice(None),) * normal_dim(dim, input.ndim), slice(start, end, step))]


_OTHER: dict[str, Callable[..., Any]] = {
    "alias": lambda x: x,
    "slice": _slice,
    "expand": lambda x, size, *, implicit=False: x.expand(size),  # noqa: ARG005 (torch's name)
    "unfold": lambda x, dimension, size, step: x.unfold(dimension, size, step),
    "view": lambda x, size=None, dtype=None: x.view(size if dtype is None else dtype),
}


def _copying(view: Callable[..., Any]) -> Callable[..., Any]:
    def rule(*args: Any, **kwargs: Any) -> Any:
        found = view(*args, **kwargs)
        return found.clone() if isinstance(found, torch.Tensor) else tuple(t.clone() for t in found)

    return rule


for _name in _COPIED:
    _twin = getattr(torch, f"{_name}_copy", None)
    if _twin is not None:
        implements(_twin, sharded="local")(_copying(_OTHER[_name] if _name in _OTHER else getattr(torch, _name)))
implements(torch.Tensor.narrow_copy, sharded="local")(_copying(torch.narrow))


def become(x: ShardTensor, other: ShardTensor) -> ShardTensor:
    """Make ``x`` what another tensor, such as a view of it, is; any halo beside its block is left. Not collective."""
    x.block, x.sharding, x._root, x._halo = other.block, other.sharding, None, None
    x._trail, x._origin = other._trail, other._origin
    return x


def _as_it_is(x: ShardTensor) -> ShardTensor:
    """Return what a view is taken from that ``x`` becomes: a gathered view knows that tensor. Not collective."""
    if not x._gathered_view:
        return x
    twin = x._twin(x.block)
    twin._origin = x._origin
    return twin


@implements(torch.Tensor.squeeze_, sharded="local")
def squeeze_(self: ShardTensor, dim: Any = None) -> ShardTensor:
    """Drop dims of one cell, in place. Not collective, unless such a dim is sharded: then its owner broadcasts.

    What is written into the tensor later is written into the owner's cell, too, where other views of it lie.
    """
    if self.requires_grad and self.is_leaf:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    x = _as_it_is(settled(self))
    dims = squeezed_dims(x.sharding, None if dim is None else ints((dim,)))
    with torch.enable_grad():  # as below
        if not any(d in x.sharding.shard_dims and not trivially_sharded(x.sharding, d) for d in dims):
            return become(self, torch.squeeze(x, dims))
        # an index: of its result it is known what it was taken from
        out = x._twin(x.block)[tuple(0 if d in dims else slice(None) for d in range(x.ndim))]
    self._gathered_view = True
    return become(self, out)


def _in_place(name: str) -> Callable[..., Any]:
    view = getattr(torch.Tensor, name)

    def rule(self: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
        if self.requires_grad and self.is_leaf:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        # under no_grad too what changes its shape keeps its graph
        with torch.enable_grad():
            return become(self, view(_as_it_is(self), *args, **kwargs))

    return rule


for _name in _IN_PLACE:
    implements(getattr(torch.Tensor, f"{_name}_"), sharded="local")(_in_place(_name))
implements(*aten("slice"), sharded="local")(_slice)
