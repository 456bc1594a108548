"""Plans by key, within a bound of bytes: the least recently used go, in the same order on all ranks."""

from __future__ import annotations

import gc
import sys
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from mpi4py import MPI

from mpishard.comm import guard
from mpishard.errors import alike

LIMIT_NBYTES = 64 << 20  # of one cache; a training step needs some hundred plans of ten kilobytes

# what plans point to and do not own
_SHARED = (type, ModuleType, BuiltinFunctionType, MPI.Comm, torch.dtype, torch.device, str, int, float)

_NUMBERS = {int, float}


class Plans(dict[Any, Any]):
    """A cache in two generations: a hit in the younger one, which is this dict, costs nothing but a look-up.

    When the younger one has grown to half the limit, it becomes the older one, whose plans go but for those that
    are used again meanwhile. Nothing but the order of the keys and the ``nbytes`` given decides what goes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[Any, int] = {}
        self._nbytes = 0
        self._older: dict[Any, Any] = {}
        self._older_sizes: dict[Any, int] = {}

    def recall(self, key: Any) -> Any:
        """Return the plan of a key that the younger generation has not, or None. Not collective."""
        plan = self._older.pop(key, None)
        if plan is not None:
            self.put(key, plan, self._older_sizes.pop(key))
        return plan

    def put(self, key: Any, plan: Any, nbytes: int) -> None:
        """Keep a plan; ``nbytes`` is the same on all ranks that keep it. Not collective."""
        if self._nbytes + nbytes > LIMIT_NBYTES // 2:
            self._older, self._older_sizes, self._nbytes = dict(self), self._sizes, 0
            self._sizes = {}
            super().clear()
        self[key], self._sizes[key] = plan, nbytes
        self._nbytes += nbytes

    def clear(self) -> None:
        """Forget all plans. Not collective."""
        super().clear()
        self._older, self._sizes, self._older_sizes, self._nbytes = {}, {}, {}, 0


class Compared(Plans):
    """Plans whose every use is compared on all ranks, key by key."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__()
        self._comm = comm

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a plan, after a comparison. Collective."""
        if self._comm != MPI.COMM_NULL:  # of a mesh that was freed, which says so itself
            guard.check(self._comm, text_of(key))
        return super().get(key, default)


def plans_on(comm: MPI.Intracomm) -> Plans:
    """Return a new cache of the plans of a communicator's ranks. Not collective."""
    return Compared(comm) if guard.DEBUG else Plans()


def text_of(key: Any) -> str:
    """Return what all ranks call a key. Not collective."""
    return alike(repr(key))


def nbytes_of(plan: Any, *shared: type) -> int:
    """Return the bytes of what only a plan holds; objects of the types ``shared`` are others'. Not collective."""
    seen: set[int] = set()
    todo, total, others = [plan], 0, (*_SHARED, *shared)
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, others):
            continue
        seen.add(id(x))
        total += sys.getsizeof(x, 0)
        if isinstance(x, torch.Tensor):
            total += x.nbytes
        elif type(x) is tuple and {*map(type, x)} <= _NUMBERS:
            continue
        elif isinstance(x, FunctionType):
            # not its globals
            todo += x.__closure__ or ()
        else:
            todo += gc.get_referents(x)
    return total
