"""The short forms in which torch's groups are called by themselves: `group.allreduce(x)`, `group.broadcast(x, 0)`.

`torch.distributed` calls a group with lists of tensors and one object of options. A group of torch's own takes single
tensors, too, with root and operation in place of that object, and keywords; programs and libraries use both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, GatherOptions

Group = TypeVar("Group", bound=dist.ProcessGroup)

# method -> its options, how many arguments are tensors or lists of them, and what the short form has after these
_FORMS: dict[str, tuple[type, int, tuple[str, ...]]] = {
    "allreduce": (dist.AllreduceOptions, 1, ("op",)),
    "broadcast": (dist.BroadcastOptions, 1, ("root",)),
    "reduce": (dist.ReduceOptions, 1, ("root", "op")),
    "allgather": (AllgatherOptions, 2, ()),
    "reduce_scatter": (dist.ReduceScatterOptions, 2, ("op",)),
    "gather": (GatherOptions, 2, ("root",)),
    "scatter": (dist.ScatterOptions, 2, ("root",)),
    "alltoall": (dist.AllToAllOptions, 2, ()),
}
_OPTION = {"op": "reduceOp", "root": "rootRank"}


def with_short_forms(group: type[Group]) -> type[Group]:
    """Let methods of a class of groups take torch's short forms, too. Not collective."""
    for name, form in _FORMS.items():
        setattr(group, name, _both(getattr(group, name), *form))
    return group


def _both(method: Callable[..., Any], options: type, count: int, fields: tuple[str, ...]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if len(args) == count + 1 and isinstance(args[count], options) and not kwargs:
            return method(self, *args)
        return method(self, *_long(method.__name__, args, kwargs, options, count, fields))

    return call


def _long(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], options: type, count: int, fields: tuple[str, ...]
) -> Iterator[Any]:
    """Yield the arguments of the form with options: of single tensors lists of one."""
    # torch's names: tensor(s), output(_tensor(s)), input(_tensor(s)); what is filled comes first
    named = sorted((k for k in kwargs if k.startswith(("tensor", "output", "input"))), reverse=True)
    tensors = [*args[:count], *(kwargs.pop(k) for k in named)]
    rest = args[count:]
    given = dict(zip(("opts",) if rest and isinstance(rest[0], options) else (*fields, "timeout"), rest)) | kwargs
    opts = given.pop("opts", None) or options()
    if len(tensors) != count or (odd := given.keys() - {*fields, "timeout"}):
        got = f"{len(tensors)} of tensors" if len(tensors) != count else f"{min(odd)!r}"
        raise TypeError(f"{name}: takes {count} of tensors, then {', '.join((*fields, 'timeout'))} or opts, got {got}")
    for field in given.keys() & {*fields}:
        setattr(opts, _OPTION[field], given[field])
    # a list of one rank's tensors beside its single one is one of the lists
    single = any(isinstance(t, Tensor) for t in tensors)
    yield from ([t] for t in tensors) if single else tensors
    yield opts
