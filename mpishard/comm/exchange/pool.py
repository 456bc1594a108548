"""Exchanges that are kept for the next use of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from mpishard.comm.device.driver import driver_of
from mpishard.comm.exchange.device import DeviceExchange
from mpishard.comm.exchange.host import Exchange, Parts
from mpishard.comm.mesh import CartMesh


class ExchangePool:
    """Exchanges of the same messages: as many as are in flight at a time, on every device that asks.

    Parameters
    ----------
    mesh, mesh_dims
        The mesh, and the dims along which the peers lie.
    sends, recvs, dtype, op
        As for `Exchange`.
    """

    def __init__(
        self, mesh: CartMesh, mesh_dims: tuple[int, ...], sends: Parts, recvs: Parts, dtype: torch.dtype, op: str
    ) -> None:
        self._mesh, self._mesh_dims, self._dtype, self._op = mesh, mesh_dims, dtype, op
        self._sends, self._recvs = sends, recvs
        self._made: list[Exchange | DeviceExchange] = []

    def take(self, device: torch.device) -> Exchange | DeviceExchange | None:
        """Return an exchange that is not in flight, or None where nothing travels. Not collective."""
        if not self._sends and not self._recvs:
            return None
        for exchange in self._made:
            if not exchange.busy and exchange.device == device:
                if isinstance(exchange, DeviceExchange):
                    exchange.acquire()
                return exchange
        group, driver = self._mesh.group(self._mesh_dims), driver_of(device)
        made: Exchange | DeviceExchange
        if driver is None:
            made = Exchange(group, self._sends, self._recvs, self._dtype, self._op, self._mesh.storages)
        else:
            made = DeviceExchange(group, self._sends, self._recvs, self._dtype, driver, self._op)
        self._mesh.own(made.free)
        self._made.append(made)
        return made


def kernel_of(exchange: Exchange | DeviceExchange, x: Tensor) -> DeviceExchange | None:
    """Return the exchange where one kernel can move its cells of ``x``. Not collective."""
    return exchange if isinstance(exchange, DeviceExchange) and exchange.kernel_serves(x) else None
