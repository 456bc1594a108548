"""Halos that stand beside a block in its own storage, where a refresh moves strips and nothing is copied.

The array of a simulation mostly has room for its halo (ghost cells), and a tensor of our own may have, too. Which
cells those are is known by the mesh dims that cut the block, so it holds for every view that keeps these dims whole:
one level, one time, dims added in front. Widths may differ from position to position along a mesh dim.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.agreement import on_all
from mpishard.comm.halo.exchanger import HaloExchanger, Width, width_pair
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError
from mpishard.layout import Layout, by_dim
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
    foreign
        Whether a host program writes into the storage, which torch does not see.

    Attributes
    ----------
    quiet : bool
        Whether only torch writes now, as while a hook runs.
    generation : int
        How many arrays the field was before. The same on all ranks.
    """

    __slots__ = (
        "__weakref__",
        "_claim",
        "_layouts",
        "_sampled",
        "_seen",
        "foreign",
        "generation",
        "key",
        "mesh",
        "name",
        "order",
        "quiet",
        "sizes",
        "strides",
        "widths",
        "writable",
    )

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
        foreign: bool = False,
    ) -> None:
        self.foreign = foreign
        if foreign:
            _simulations.add(mesh)
        self.mesh, self.widths, self.sizes, self.strides = mesh, widths, sizes, strides
        self.order, self.writable, self.name, self.quiet = order, writable, name, False
        self.generation = 0
        # part of the keys of plans: one for tensors that are cut alike is none for a slice of another one's cells
        self.key = tuple((m, along, sizes[m]) for m, along in sorted(widths.items()))
        self._layouts: dict[Layout, dict[int, Widths]] = {}
        # (version of the storage, sampled cells, their values) where the halo was fresh
        self._claim: tuple[int, _Sample | None, bytes | Tensor | None] | None = None
        # cells that autograd may have saved, how to know whether they changed, and the version that they had
        self._seen: tuple[_Sample | _AllCells, bytes | Tensor, int] | None = None
        # of the block that was sampled last
        self._sampled: _Sample | None = None

    def again(self) -> ResidentHalo:
        """Return the same of another array of the same shape and strides, its halo not fresh. Not collective."""
        out = object.__new__(ResidentHalo)
        out.mesh, out.widths, out.sizes, out.strides = self.mesh, self.widths, self.sizes, self.strides
        out.order, out.writable, out.name, out.quiet = self.order, self.writable, self.name, False
        out.generation = self.generation + 1
        out.key, out._layouts, out.foreign = self.key, self._layouts, self.foreign
        out._claim = out._seen = out._sampled = None
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
        self.exchanger(local, layout).renew(self.whole(local, layout))

    def exchanger(self, local: Tensor, layout: Layout) -> HaloExchanger:
        """Return what refreshes halos of such blocks. Collective where it is new."""
        key = ("resident halo", layout, self.key, local.dtype, self.order)
        return self.mesh.plans.get(key) or self.mesh.plan(key, lambda: self._planned(local, layout))

    def _planned(self, local: Tensor, layout: Layout) -> HaloExchanger:
        along = self.along(layout)
        sizes = {d: layout.sizes[d] or () for d in along}
        mesh_dims = {d: layout.shard_dims[d][0] for d in along}
        shape = self.whole(local, layout).shape
        return HaloExchanger.planned(self.mesh, sizes, along, shape, mesh_dims, local.dtype, self.order)

    def claim(self, local: Tensor, *, sampled: bool) -> None:
        """Note that the halo of a block is fresh; ``sampled``: unless its owner writes cells. Not collective."""
        cells = values = None
        if sampled:
            cells = self._sample(local)
            values = cells.values()
        self._claim = local._version, cells, values

    @property
    def declared(self) -> bool:
        """Whether its owner has said that the halo is fresh. Not collective."""
        return self._claim is not None and self._claim[1] is None and not self.quiet

    def disclaim(self) -> None:
        """Note that the halo is not fresh. Not collective."""
        self._claim = None

    def claimed(self, local: Tensor) -> bool:
        """Tell whether the halo was fresh, and no write to the block has been seen on this rank. Not collective."""
        if self._claim is None:
            return False
        version, cells, values = self._claim
        return version == local._version and (cells is None or cells.has(values))

    def fresh(self, local: Tensor) -> bool:
        """Tell whether the halo is fresh on all ranks. Collective where it was `claim`ed."""
        if self._claim is None:
            return False
        if not on_all(self.mesh, self.claimed(local), "halo_refresh"):
            self._claim = None
            return False
        return True

    def ensure(self, local: Tensor, layout: Layout) -> None:
        """Refresh the halo of a block unless it is fresh on all ranks. Neighborwise collective."""
        if not self.fresh(local):
            self.refresh(local, layout)
            if self.quiet:
                self.claim(local, sampled=False)

    def watch(self, local: Tensor, *, all_cells: bool) -> None:
        """Remember what autograd may save now, all cells or a sample: see `notice_writes`. Not collective."""
        if self.foreign and torch.is_grad_enabled():
            if self.written():
                self.overwritten()
            if all_cells or self._seen is None or self._seen[2] != local._version:
                cells = _AllCells(local) if all_cells else self._sample(local)
                self._seen = cells, cells.values(), local._version
                _watched.add(self)

    def written(self) -> bool:
        """Tell whether what was watched has changed unseen: not by torch, which knows. Not collective."""
        if self._seen is None:
            return False
        cells, values, version = self._seen
        return version == cells.block._version and not cells.has(values)

    def counted(self) -> None:
        """Go on watching after a write of which autograd was let know. Not collective."""
        if self._seen is not None and self._seen[2] != self._seen[0].block._version:
            cells = self._seen[0]
            self._seen = cells, cells.values(), cells.block._version

    def overwritten(self) -> None:
        """Let autograd know that what was watched has changed. Not collective."""
        if self._seen is not None:
            torch.autograd.graph.increment_version(self._seen[0].block)
            self.unwatch()

    def unwatch(self) -> None:
        """Look no more, until the next use: autograd was let know of all writes to come. Not collective."""
        self._seen = None
        _watched.discard(self)

    def sampled(self, layout: Layout) -> tuple[slice, ...]:
        """Return where in the whole array the sample of a block lies. Not collective."""
        at = self.mesh.coords
        starts = {d: w[layout.index(d, at)][0] for d, w in self.along(layout).items()}
        shape = layout.local_shape(at)
        return tuple(
            slice(starts.get(d, 0), starts.get(d, 0) + n, step.step)
            for d, (n, step) in enumerate(zip(shape, _sampled(tuple(shape))))
        )

    def sample_of(self, local: Tensor, cells: Any) -> None:
        """Take numpy's view of a block's sample, where there is one: torch takes longer to make it. Not collective."""
        self._sampled = _Sample(local, cells)

    def _sample(self, local: Tensor) -> _Sample:
        if self._sampled is None or self._sampled.block is not local:
            self._sampled = _Sample(local)
        return self._sampled


_watched: weakref.WeakSet[ResidentHalo] = weakref.WeakSet()
# those that host programs have arrays on
_simulations: weakref.WeakSet[CartMesh] = weakref.WeakSet()


def notice_writes(mesh: CartMesh) -> None:
    """Let autograd notice, on all ranks, what a host program has written since a field was used.

    Collective where a host program has arrays on the mesh: what of them a rank has looked at, or keeps, is its own
    affair. Called when a backward begins: for what is found changed, it raises; not for other arrays of the program.
    """
    if mesh not in _simulations:
        return
    mine = [halo for halo in _watched if halo.mesh is mesh]
    written = {(halo.name, halo.generation) for halo in mine if halo.written()}
    if not on_all(mesh, not written, "backward"):
        comm = mesh.all_ranks.comm
        with guard.waiting("backward", (), comm):
            written = comm.allreduce(written, set.union)  # in pairs: of as many names as fields were written
        for halo in mine:
            if (halo.name, halo.generation) in written:
                halo.overwritten()


class _Sample:
    """A few cells of a block, at each of its uses: of host memory by numpy, which takes a third of torch's time."""

    __slots__ = ("_cells", "block")

    def __init__(self, block: Tensor, cells: Any = None) -> None:
        # not one that autograd knows: a block that is kept would keep its graph
        self.block = block.detach() if block.requires_grad else block
        self._cells = cells
        if cells is not None:
            return
        index = _sampled(block.shape)
        try:
            self._cells = self.block.numpy()[index]
        except (TypeError, RuntimeError):
            # of a GPU, of dtypes that numpy has not, conjugate
            self._cells = self.block[index]

    def values(self) -> bytes | Tensor:
        """Return what the cells are now. Not collective."""
        return _bits(self._cells).clone() if isinstance(self._cells, Tensor) else self._cells.tobytes()

    def has(self, values: Any) -> bool:
        """Tell whether the cells are what they were. Not collective."""
        if isinstance(values, Tensor):
            return torch.equal(_bits(self._cells), values)
        return bool(self._cells.tobytes() == values)


class _AllCells:
    """All cells of a block, by a few numbers that change with them."""

    __slots__ = ("block",)

    def __init__(self, block: Tensor) -> None:
        self.block = block.detach()

    def values(self) -> Tensor:
        """Return the numbers as they are now. Not collective."""
        return _fingerprint(self.block)

    def has(self, values: Any) -> bool:
        """Tell whether the cells are what they were. Not collective."""
        return torch.equal(self.values(), values)


@lru_cache(256)
def _sampled(shape: tuple[int, ...]) -> tuple[Any, ...]:
    return (*(slice(None, None, max(1, n // _SAMPLED)) for n in shape), ...)


def _bits(cells: Tensor) -> Tensor:
    """Return cells as integers, of which each equals itself: a NaN, as of land in an ocean's field, does not."""
    cells = cells.resolve_conj().resolve_neg()
    if cells.is_complex():
        cells = torch.view_as_real(cells)
    return cells.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[cells.itemsize])


def _fingerprint(cells: Tensor) -> Tensor:
    """Return a few numbers that change with the cells: sums over the other dims, weighed along each."""
    # with a dim in front, as torch sums over all dims where it is given none
    bits = _bits(cells)[None]
    sums = [bits.sum([d for d in range(bits.ndim) if d != k], dtype=torch.int64) for k in range(1, bits.ndim)]
    return torch.stack([(s * (2 * torch.arange(len(s), device=s.device) + 1)).sum() for s in sums])


def room(name: str, mesh: CartMesh, layout: Layout, ghost: Width | Mapping[int, Width]) -> dict[int, Widths]:
    """Return the widths of all positions per sharded dim, for storage of our own. Not collective.

    There is none beyond an edge of the domain: nothing would ever fill it, and without it windows lie denser.
    """
    given = by_dim(name, ghost, layout.ndim) if isinstance(ghost, Mapping) else dict.fromkeys(layout.shard_dims, ghost)
    out = {}
    for d, width in sorted(given.items()):
        mesh_dims = layout.shard_dims.get(d, ())
        try:
            lo, hi = width_pair(width)
        except (TypeError, ValueError):
            lo = hi = -1
        if min(lo, hi) < 0 or len(mesh_dims) != 1:
            raise LayoutError(
                f"{name}: ghost= does not fit",
                expected=f"a width >= 0, or (lo, hi), of dims that one mesh dim shards: {dict(layout.shard_dims)}",
                got=ghost,
                fix="give {tensor dim: width} of such dims",
            )
        along = [(lo, hi)] * len(layout.sizes[d] or ())
        if not mesh.periodic[mesh_dims[0]]:
            along[0] = (0, along[0][1])
            along[-1] = (along[-1][0], 0)
        out[d] = tuple(along)
    return out


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
