"""Halos that stand beside a block in its own storage, where a refresh moves strips and nothing is copied.

The array of a simulation mostly has room for its halo (ghost cells), and a tensor of our own may have, too. Which
cells those are is known by the mesh dims that cut the block, so it holds for every view that keeps these dims whole:
one level, one time, dims added in front. Widths may differ from position to position along a mesh dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpishard.comm.agreement import on_all
from mpishard.comm.halo import HaloExchanger
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout
from mpishard.tensor.shard_tensor import ShardTensor

Widths = tuple[tuple[int, int], ...]
_SAMPLED = 8  # cells per dim that are looked at, to notice that a host program has written


class ResidentHalo:
    """The halo around a block in the same storage.

    Parameters
    ----------
    mesh
        The mesh of the tensor.
    widths, sizes
        Of all positions along the mesh dims that cut the block: (lo, hi) of the halo, and owned cells. The same on
        all ranks.
    strides
        Of this rank's storage along these mesh dims, in elements.
    order
        Memory order of most ranks' arrays, as for a `HaloExchanger`. The same on all ranks.
    writable
        Whether the halo may be written.
    name
        What errors call the tensor.
    """

    __slots__ = ("_claim", "_layouts", "key", "mesh", "name", "order", "sizes", "strides", "widths", "writable")

    def __init__(
        self,
        mesh: CartMesh,
        widths: Mapping[tuple[int, ...], Widths],
        sizes: Mapping[tuple[int, ...], tuple[int, ...]],
        strides: Mapping[tuple[int, ...], int],
        order: str = "C",
        *,
        writable: bool = True,
        name: str = "",
    ) -> None:
        self.mesh, self.widths, self.sizes, self.strides = mesh, widths, sizes, strides
        self.order, self.writable, self.name = order, writable, name
        self.key = tuple(sorted(widths.items()))
        self._layouts: dict[Layout, dict[int, Widths]] = {}
        # (version of the storage, sampled cells, their values) where the halo was fresh
        self._claim: tuple[int, Tensor | None, Tensor | None] | None = None

    def again(self) -> ResidentHalo:
        """Return the same of another array of the same shape and strides, its halo not fresh. Not collective."""
        out = object.__new__(ResidentHalo)
        out.mesh, out.widths, out.sizes, out.strides = self.mesh, self.widths, self.sizes, self.strides
        out.order, out.writable, out.name = self.order, self.writable, self.name
        out.key, out._layouts, out._claim = self.key, self._layouts, None
        return out

    def along(self, layout: Layout) -> dict[int, Widths]:
        """Return the widths of all positions per dim of a view that keeps the dim whole. Not collective."""
        found = self._layouts.get(layout)
        if found is None:
            found = self._layouts[layout] = {
                d: self.widths[m]
                for d, m in layout.shard_dims.items()
                if m in self.widths and self.sizes[m] == layout.sizes[d]
            }
        return found

    def around(self, local: Tensor, layout: Layout, extents: Mapping[int, tuple[int, int]]) -> Tensor:
        """Return a block with so many cells (lo, hi) beside it per dim: a view, outside autograd. Not collective."""
        shape, strides, offset = list(local.shape), list(local.stride()), local.storage_offset()
        for d, (lo, hi) in extents.items():
            # of a dim of one cell, a view may have forgotten the stride
            strides[d] = self.strides[layout.shard_dims[d]]
            shape[d] += lo + hi
            offset -= lo * strides[d]
        return local.detach().as_strided(shape, strides, offset)

    def whole(self, local: Tensor, layout: Layout) -> Tensor:
        """Return a block with all of its halo. Not collective."""
        at = self.mesh.coords
        return self.around(local, layout, {d: w[layout.index(d, at)] for d, w in self.along(layout).items()})

    def refresh(self, local: Tensor, layout: Layout) -> None:
        """Refresh the halo of a block in place; the cells beyond a non-periodic edge stay. Neighborwise collective.

        Collective where the plan is new.
        """
        key = ("resident halo", layout, self.key, local.dtype, self.order)
        array = self.whole(local, layout)
        exchanger = self.mesh.plans.get(key)
        if exchanger is None:
            exchanger = self.mesh.plan(key, lambda: self._planned(array, layout))
        exchanger.renew(array)

    def _planned(self, array: Tensor, layout: Layout) -> HaloExchanger:
        along = self.along(layout)
        sizes = {d: layout.sizes[d] or () for d in along}
        mesh_dims = {d: layout.shard_dims[d][0] for d in along}
        return HaloExchanger.planned(self.mesh, sizes, along, array.shape, mesh_dims, array.dtype, self.order)

    def claim(self, x: ShardTensor, *, sampled: bool) -> None:
        """Note that the halo of ``x`` is fresh; ``sampled``: unless its owner writes cells. Not collective."""
        cells = values = None
        if sampled:
            cells = x._local.detach()[tuple(slice(None, None, max(1, n // _SAMPLED)) for n in x._local.shape)]
            values = cells.clone()
        self._claim = x._local._version, cells, values

    @property
    def declared(self) -> bool:
        """Whether its owner has said that the halo is fresh. Not collective."""
        return self._claim is not None and self._claim[1] is None

    def disclaim(self) -> None:
        """Note that the halo is not fresh. Not collective."""
        self._claim = None

    def claimed(self, local: Tensor) -> bool:
        """Tell whether the halo was fresh, and no write to the block has been seen on this rank. Not collective."""
        if self._claim is None:
            return False
        version, cells, values = self._claim
        return version == local._version and (cells is None or torch.equal(cells, values))  # type: ignore[arg-type]

    def fresh(self, local: Tensor) -> bool:
        """Tell whether the halo is fresh on all ranks. Collective where it was `claim`ed."""
        if self._claim is None:
            return False
        if not on_all(self.mesh, self.claimed(local), "halo_refresh"):
            self._claim = None
            return False
        return True


def resident(
    mesh: CartMesh, layout: Layout, widths: Mapping[int, Sequence[tuple[int, int]]], array: Tensor, **told: Any
) -> ShardTensor:
    """Return the tensor whose blocks lie in the ranks' ghosted arrays.

    Not collective: all ranks know the widths of all positions along each dim.

    Parameters
    ----------
    mesh, layout
        Of the tensor.
    widths
        (lo, hi) of every position along some sharded dims.
    array
        This rank's block with its halo.
    **told
        As of a `ResidentHalo`.
    """
    local = array
    for d, along in widths.items():
        lo, _ = along[layout.index(d, mesh.coords)]
        local = local.narrow(d, lo, layout.local_shape(mesh.coords)[d])
    by_mesh = {layout.shard_dims[d]: tuple(w) for d, w in widths.items()}
    sizes = {layout.shard_dims[d]: layout.sizes[d] or () for d in widths}
    strides = {layout.shard_dims[d]: array.stride(d) for d in widths}
    out = ShardTensor(local, layout, mesh)
    out._halo = ResidentHalo(mesh, by_mesh, sizes, strides, **told)
    return out
