"""What a step does on one rank, in order: operations with their arithmetic and bytes, and what travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mpishard.comm.mesh import CartMesh
from mpishard.comm.null import Event, NullComm
from mpishard.testing import LiveMemory

# operations that make room and write nothing
_ROOM = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class Operation(NamedTuple):
    """One operation of torch.

    Attributes
    ----------
    name : str
    flops : int
        Additions and multiplications of products: convolutions, matrix products, attention.
    nbytes : int
        Read and written, each tensor once.
    dtype : torch.dtype
        In which it computes.
    """

    name: str
    flops: int
    nbytes: int
    dtype: torch.dtype


class Trace(LiveMemory):
    """Record a step on a planning mesh while it is active; and the bytes that live, as `LiveMemory`.

    Not collective.

    Attributes
    ----------
    events : list of Operation or Event
        In order, since the last `clear`.
    """

    # they stand for those of the rank that is planned
    _ignored = ()

    def __init__(self, mesh: CartMesh) -> None:
        super().__init__()
        self.events: list[Operation | Event] = []
        comm = mesh.comm
        assert isinstance(comm, NullComm), "a mesh for planning"
        self._listeners: list[Callable[[Event], object]] = comm.listeners

    def __enter__(self) -> Trace:
        self._listeners.append(self.events.append)
        super().__enter__()
        return self

    def __exit__(self, *of: Any) -> None:
        super().__exit__(*of)
        # a bound method of another list compares unequal
        self._listeners.remove(self.events.append)

    def clear(self) -> None:
        """Forget the events; what lives goes on to be counted. Not collective."""
        self.events.clear()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.events.append(_operation(func, args, kwargs or {}, out))
        return out


def _operation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Operation:
    packet = func._overloadpacket
    name = packet.__name__
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
    dtype = (given or results or [torch.empty(0, device="meta")])[0].dtype
    if name in _ROOM or func.is_view:
        return Operation(name, 0, 0, dtype)
    count = flop_registry.get(packet)
    flops = int(count(*args, **kwargs, out_val=out)) if count is not None else 0
    return Operation(name, flops, sum(map(_nbytes, (*given, *results))), dtype)


def _nbytes(x: torch.Tensor) -> int:
    n = x.numel() * x.itemsize
    # an expanded tensor is read where it lies
    return min(n, x.untyped_storage().nbytes()) if x.layout is torch.strided else n
