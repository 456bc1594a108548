"""Twins of views: the copying ones, and those that change a tensor's shape in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpishard.errors import UnsupportedOperationError, described
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor

_COPIED = """
alias diagonal expand permute select slice split split_with_sizes squeeze t transpose unbind unfold unsqueeze
view_as_complex view_as_real view
""".split()

_IN_PLACE = "squeeze unsqueeze transpose swapaxes swapdims t".split()


def _slice(input: ShardTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return input[(*(slice(None),) * (dim % input.ndim), slice(start, end, step))]


_OTHER: dict[str, Callable[..., Any]] = {
    "alias": lambda x: x,
    "slice": _slice,
    "expand": lambda x, size, **_: x.expand(size),
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


def _in_place(name: str) -> Callable[..., Any]:
    view = getattr(torch.Tensor, name)

    def rule(self: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
        if self.requires_grad and self.is_leaf:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        out = view(self, *args, **kwargs)
        if out._gathered_view and not self._gathered_view:
            raise UnsupportedOperationError(
                described(
                    f"{name}_ of a sharded dim of one cell",
                    expected="dims of one cell that every rank holds",
                    got=list(self._layout.placements),
                    fix=f"use {name}, which gathers the cell",
                )
            )
        self._local, self._layout, self._root, self._halo = out._local, out._layout, None, None
        return self

    return rule


for _name in _IN_PLACE:
    implements(getattr(torch.Tensor, f"{_name}_"), sharded="local")(_in_place(_name))
