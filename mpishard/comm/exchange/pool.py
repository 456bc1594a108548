"""Exchanges that are kept for the next use of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from mpishard.comm import exit
from mpishard.comm.exchange.persistent import Exchange, Parts
from mpishard.comm.mesh import CartMesh
from mpishard.comm.tag import Label
from mpishard.comm.transport.choice import transport_of

_EXCHANGE_NBYTES = 8 << 10  # of requests and views, which come when they are used


class ExchangePool:
    """Exchanges of the same messages: as many as are in flight at a time, on every device that asks.

    Parameters
    ----------
    mesh, mesh_dims
        The mesh, and the dims along which the peers lie.
    sends, recvs, dtype, op, label
        As for an `Exchange`.
    """

    def __init__(
        self,
        mesh: CartMesh,
        mesh_dims: tuple[int, ...],
        sends: Parts,
        recvs: Parts,
        dtype: torch.dtype,
        op: str,
        label: Label,
    ) -> None:
        self._mesh, self._mesh_dims, self._dtype, self._op, self._label = mesh, mesh_dims, dtype, op, label
        self._sends, self._recvs = sends, recvs
        self._made: list[Exchange] = []

    def take(self, x: Tensor) -> Exchange | None:
        """Return an exchange beside ``x`` that is not in flight, or None where nothing travels. Not collective."""
        if not self._sends and not self._recvs:
            return None
        for exchange in self._made:
            if not exchange.storage.busy and exchange.device == x.device:
                if exchange.transport.driver is not None:
                    exchange.acquire()
                return exchange
        transport = transport_of(self._mesh.group(self._mesh_dims), x)
        made = Exchange(transport, self._sends, self._recvs, self._dtype, self._op, self._label, self._mesh.storages)
        self._mesh.own_weakly(made)
        self._made.append(made)
        return made

    def __del__(self) -> None:
        # forgotten with its plan; what is in flight, an error has left behind
        if exit.alive():
            for exchange in self._made:
                if not exchange.busy:
                    exchange.free()

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + (_EXCHANGE_NBYTES if self._sends or self._recvs else 0)
