"""Exchanges that are kept for the next use of a plan."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from mpishard.comm import lifetime, thread
from mpishard.comm.exchange.persistent import Exchange, Parts
from mpishard.comm.mesh import CartMesh
from mpishard.comm.transport.choice import transport_of

_EXCHANGE_NBYTES = 8 << 10  # of requests and views, which come when they are used


class ExchangePool:
    """Exchanges of the same messages: as many as are in flight at a time, on every device that asks.

    Parameters
    ----------
    mesh, mesh_dims
        The mesh, and the dims along which the peers lie.
    sends, recvs, rest
        As for an `Exchange`.
    """

    def __init__(
        self,
        mesh: CartMesh,
        mesh_dims: tuple[int, ...],
        sends: Parts,
        recvs: Parts,
        *rest: Any,
    ) -> None:
        self._mesh, self._mesh_dims = mesh, mesh_dims
        self._messages: tuple[Any, ...] = (sends, recvs, *rest)
        self._travels = bool(sends or recvs)
        self._made: list[Exchange] = []

    def take(self, x: Tensor) -> Exchange | None:
        """Return an exchange beside ``x`` that is not in flight, or None where nothing travels. Not collective."""
        thread.require(self._mesh.comm)
        if not self._travels:
            return None
        for exchange in self._made:
            if not exchange.storage.busy and exchange.device == x.device:
                if exchange.transport.driver is not None:
                    exchange.acquire()
                return exchange
        lifetime.free_discarded()
        transport = transport_of(self._mesh.group(self._mesh_dims), x)
        given = (*self._messages, self._mesh.storages)
        made = Exchange(transport, *given)
        self._mesh.own_weakly(made)
        self._made.append(made)
        return made

    def __del__(self) -> None:
        # forgotten with its plan; what is in flight, an error has left behind
        idle = [exchange for exchange in self._made if not exchange.busy]
        if idle:
            lifetime.discard(partial(_free, idle))

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + (_EXCHANGE_NBYTES if self._travels else 0)


def _free(exchanges: list[Exchange]) -> None:
    for exchange in exchanges:
        exchange.free()
