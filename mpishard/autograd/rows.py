"""Rows of a sharded tensor that ranks need of each other, by their global numbers.

A rank knows which rows it needs, and by formula whose they are; those who have them learn it once, when the plan is
made. After that a row travels once to each rank that needs it, and its cotangent once back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd.linear import Step, apply
from mpishard.autograd.redistribute import cells_step
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh, Group
from mpishard.layout import Layout, Spans, blocks_of, repeated
from mpishard.layout.partition import coords_of


def told_counts(counts: Tensor, group: Group | None) -> Tensor:
    """Return what every rank of a group has for this one, of a number for each. Collective over the group."""
    if group is None:
        return counts
    ones = repeated(((1, group.size),))
    return blocking.all_to_all_flat(counts, ones, ones, group, 8 * group.size)


def spans_among(mesh: CartMesh, mesh_dims: tuple[int, ...], counts: Tensor) -> Spans:
    """Return spans of so many rows for each rank along some mesh dims. Not collective."""
    extents = [mesh.shape[m] for m in mesh_dims]
    found, start = [], 0
    for peer in counts.nonzero().reshape(-1).tolist():
        coords = list(mesh.coords)
        for m, c in zip(mesh_dims, coords_of(peer, extents)):
            coords[m] = c
        stop = start + int(counts[peer])
        found.append((mesh.rank_at(coords), (start, stop)))
        start = stop
    return tuple(found)


class Rows:
    """Which rows come to this rank, and which it gives.

    Collective over the mesh dims that shard the rows.

    Parameters
    ----------
    mesh
        The mesh.
    layout, dim
        Of the tensor; its rows lie along ``dim``. No mesh dim is Partial.
    wanted
        Global numbers of rows that this rank needs, ascending, none twice; its own may be among them.
    op, call
        Name for counters and the watchdog; what all ranks know of this plan, and other plans have not.

    Attributes
    ----------
    give : Tensor
        Local numbers of the rows that this rank gives, by the rank that gets them.
    count : int
        How many rows come.
    """

    def __init__(
        self, mesh: CartMesh, layout: Layout, dim: int, wanted: np.ndarray[Any, Any], op: str, call: object
    ) -> None:
        self.count = len(wanted)
        mesh_dims, sizes = layout.shard_dims.get(dim, ()), layout.sizes[dim]
        group = mesh.group(mesh_dims) if mesh_dims else None
        owners = np.zeros(self.count, np.int64) if sizes is None else blocks_of(sizes, wanted)
        asked = torch.from_numpy(np.bincount(owners, minlength=1 if group is None else group.size))
        come, go = (spans_among(mesh, mesh_dims, n) for n in (asked, told_counts(asked, group)))
        numbers = cells_step(mesh, f"{op}, who needs what", 0, come, go, call)(torch.from_numpy(wanted))
        self.give = (numbers - layout.interval(dim, mesh.coords)[0]).to(mesh.device)
        self._dim = dim
        self._travel: Step = cells_step(mesh, op, dim, go, come, call)

    def fetch(self, block: Tensor) -> Tensor:
        """Return the wanted rows, given this rank's block. Collective over the ranks that share rows.

        Notes
        -----
        Adjoint: `add`.
        """
        return apply(self._travel, block.index_select(self._dim, self.give))

    def back(self, rows: Tensor) -> Tensor:
        """Return what other ranks have for the rows that this rank gives, one after the other as in ``give``.

        Collective over the ranks that share rows. ``rows`` lie as those that `fetch` returns.
        """
        return apply(self._travel.adjoint, rows)

    def add(self, rows: Tensor, block: Tensor) -> Tensor:
        """Return ``block`` with the ranks' ``rows``, which lie as those that `fetch` returns, added to their owners'.

        Collective over the ranks that share rows.

        Notes
        -----
        Adjoint: `fetch`, and the identity.
        """
        return block.index_add(self._dim, self.give, self.back(rows))
