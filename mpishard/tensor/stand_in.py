"""What a compiled function is given in the place of ShardTensors: tensors that have their global shapes and no data.

One call of `mpishard.tensor.compiler` has them from its arguments to its results; nobody else may keep one.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import deque
from collections.abc import Callable, MutableMapping, MutableSequence, Sequence
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mpishard.comm.agreement import most_of
from mpishard.comm.mesh import CartMesh
from mpishard.tensor.shard_tensor import ShardTensor

# of arguments, Dynamo hands these over as attributes of what it was given, past the graph
_VIEWS = ("mT", "mH", "real", "imag", "T", "H")


class _Copy(NamedTuple):
    """Of an argument that holds ShardTensors, with tensors without data in it; and what was in it at first."""

    copy: Any
    of: Any
    content: list[tuple[Any, Any]]


def _content_of(value: Any) -> list[tuple[Any, Any]]:
    """Return keys and values of what a function may write into, and nothing of what it may not. Not collective."""
    if isinstance(value, MutableSequence):
        return [*enumerate(value)]
    return [*value.items()] if isinstance(value, MutableMapping) else []


def write(into: Any, content: list[tuple[Any, Any]]) -> None:
    """Make that what is in a list or a mapping, or attributes of a ShardTensor. Not collective."""
    if isinstance(into, ShardTensor):
        vars(into).update(content)
        return
    if isinstance(into, MutableSequence):
        into.clear()
        into.extend(value for _, value in content)
        return
    values = dict(content)
    for key in [key for key in into if key not in values]:
        del into[key]
    for key, value in content:
        into[key] = value


class Call:
    """One call: which tensors without data stand in for which ShardTensors."""

    def __init__(self, mesh: CartMesh, spare: dict[Any, list[Tensor]]) -> None:
        self.mesh, self._spare = mesh, spare
        self.decided: int | None = None
        self.forget: Callable[[], object] = lambda: None
        self._of: dict[int, Tensor] = {}
        self._real: dict[int, tuple[Any, Tensor, ShardTensor, int]] = {}
        self._copies: dict[int, _Copy] = {}
        # of the same, by what was copied
        self._copy_of: dict[int, Any] = {}

    def given(self, value: Any) -> Any:
        """Return an argument with tensors without data, or itself where it holds no ShardTensors. Not collective."""
        if isinstance(value, ShardTensor):
            return self.stand_in(value)
        if id(value) in self._copy_of:
            return self._copy_of[id(value)]
        if not any(isinstance(x, ShardTensor) for x in pytree.tree_leaves(value)):
            return value
        parts, form = pytree.tree_flatten(value, is_leaf=lambda v: v is not value)
        copy = pytree.tree_unflatten([self.given(part) for part in parts], form)
        self._copy_of[id(value)] = copy
        self._copies[id(copy)] = _Copy(copy, value, _content_of(copy))
        return copy

    def stand_in(self, x: ShardTensor) -> Tensor:
        """Return the tensor for a ShardTensor: one for each. Not collective."""
        found = self._of.get(id(x))
        if found is None:
            key = (x.sharding.shape, x.dtype, x.device, x.requires_grad)
            spare = self._spare.get(key)
            found = self._of[id(x)] = spare.pop() if spare else _without_data(x)
            self._real[id(found)] = key, found, x, _uses_of(found)
        return found

    def real(self, x: Any) -> Any:
        """Return the ShardTensor for its tensor; anything else as it is. Not collective."""
        known = self._real.get(id(x))
        return x if known is None else known[2]

    def returned(self, out: Any) -> Any:
        """Return what the caller gets for a result: of a view of such a tensor, that of the ShardTensor.

        Not collective.
        """
        return pytree.tree_map(self._returned, out, is_leaf=lambda y: id(y) in self._copies)

    def _returned(self, y: Any) -> Any:
        if id(y) in self._copies:
            return self._copies[id(y)].of
        if self.is_unknown(y):
            for _, found, x, _ in self._real.values():
                if _storage_of(found) == _storage_of(y):
                    return _same_view(found, x, y)
        return self.real(y)

    def written(self) -> list[tuple[Any, Any]]:
        """Return what the function wrote into: lists and mappings among the arguments, attributes of ShardTensors.

        Not collective.
        """
        found = []
        for _, stand_in, x, _ in self._real.values():
            if names := [name for name in vars(stand_in) if name not in _attributes() and "_dynamo" not in name]:
                found.append((x, [(name, self.returned(vars(stand_in).pop(name))) for name in names]))
        for copy, of, before in self._copies.values():
            now = _content_of(copy)
            if [(key, id(y)) for key, y in now] == [(key, id(y)) for key, y in before]:
                continue
            kept = {id(y): x for (_, y), (_, x) in zip(before, _content_of(of))}
            found.append((of, [(key, kept[id(y)] if id(y) in kept else self.returned(y)) for key, y in now]))
        return found

    def is_unknown(self, x: Any) -> bool:
        """Tell whether it is a tensor without data that stands for nothing. Not collective."""
        return isinstance(x, Tensor) and getattr(x, "fake_mode", None) is _fake_mode() and id(x) not in self._real

    def decide(self, state: int) -> int:
        """Return the most of what the ranks are ready for. Collective."""
        self.decided = most_of(self.mesh, state, "compiled call")
        return self.decided

    def release(self) -> bool:
        """Keep the tensors for the next call; tell whether nobody else has kept one. Not collective.

        Where the function did (``self.last = x``), its owner gets the ShardTensor, also of a view.
        """
        for kept in (self._of, self._copies, self._copy_of):
            kept.clear()
        alone = True
        while self._real:
            _, (key, found, x, uses) = self._real.popitem()
            viewed = _uses_of(found) > uses
            if sys.getrefcount(found) == _ALONE and not viewed:
                self._spare.setdefault(key, []).append(found)
            else:
                alone = False
                _hand_over(found, x)
                if viewed:
                    for view in _views_of(found):
                        _hand_over(view, _same_view(found, x, view))
        return alone


def attributes_of(x: ShardTensor) -> list[str]:
    """Return the names of what a program has hung on a ShardTensor. Not collective."""
    return [name for name in vars(x) if not hasattr(ShardTensor, name)]


@functools.cache
def _attributes() -> frozenset[str]:
    with _fake_mode():
        return frozenset(vars(torch.empty(0, device="cpu")))


def _storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata  # type: ignore[no-any-return]


def _uses_of(x: Tensor) -> int:
    return torch._C._storage_Use_Count(_storage_of(x))  # type: ignore[attr-defined,no-any-return]


def _views_of(found: Tensor) -> list[Tensor]:
    return [
        y
        for y in gc.get_objects()
        if type(y) is type(found) and y is not found and _storage_of(y) == _storage_of(found)
    ]


def _cells_of(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()


def _same_view(found: Tensor, x: ShardTensor, y: Tensor) -> Any:
    """Return of ``x`` the view by attributes that ``y`` is of ``found``, or ``y`` itself. Not collective."""
    wanted, seen = _cells_of(y), {_cells_of(found)}
    views: list[tuple[Tensor, tuple[str, ...]]] = [(found, ())]
    for view, names in views:  # it grows
        if _cells_of(view) == wanted:
            return functools.reduce(getattr, names, x)
        for name in _VIEWS:
            try:
                next_view = getattr(view, name)
            except (RuntimeError, TypeError):  # of other dims, or not of real numbers
                continue
            if _cells_of(next_view) not in seen:
                seen.add(_cells_of(next_view))
                views.append((next_view, (*names, name)))
    return y


_ALONE = 2  # references: a local variable, and the argument of sys.getrefcount


def _hand_over(found: Any, x: Any) -> None:
    """Give ``x`` to all who have ``found``. Not collective."""
    for owner in gc.get_referrers(found):
        kind = type(owner)
        if kind in (list, deque):
            for i, v in enumerate(owner):
                if v is found:
                    owner[i] = x
        elif kind is set:
            owner.remove(found)
            owner.add(x)
        elif kind is CellType:  # of a closure; this function has none
            owner.cell_contents = x
        elif kind in (tuple, frozenset) or (issubclass(kind, tuple) and hasattr(kind, "_make")):
            _hand_over(owner, _with(owner, found, x))
        else:
            # from Python 3.13 on an object holds its attributes itself
            names = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
            for name, v in [*names.items()]:
                if v is found:
                    names[name] = x
            for part in kind.__mro__:
                for name in _listed(part.__dict__.get("__slots__", ())):
                    if getattr(owner, name, None) is found:
                        object.__setattr__(owner, name, x)


def _with(values: Any, found: Any, x: Any) -> Any:
    made = [x if v is found else v for v in values]
    return type(values)._make(made) if hasattr(values, "_make") else type(values)(made)


def _listed(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _without_data(x: ShardTensor) -> Tensor:
    with _fake_mode():
        return torch.empty(x.sharding.shape, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)


@functools.cache
def _fake_mode() -> Any:
    import torch._dynamo
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Unread(FakeTensorMode):
        """Dynamo of torch 2.8 reads what it logs where a view is taken past the graph, and cannot."""

        __torch_dispatch__ = torch._dynamo.disable(FakeTensorMode.__torch_dispatch__)

    return Unread(allow_non_fake_inputs=True)
