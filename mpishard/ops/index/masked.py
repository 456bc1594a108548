"""Cells where a mask is true: as many as the data says, so the ranks tell each other how many they found.

Torch's order is row-major, so the cells lie in blocks of rows of what the mask covers: what is sharded over others of
its dims moves. What is picked is sharded along one dim, in blocks of what each rank found. Values that are written go
the same way back: each rank needs as many as its own part of the mask has true cells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.compiled import by_values
from mpishard.comm.collective.blocking import gather_counts
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout, Replicate, Shard, layout_of
from mpishard.layout.remembered import remembered
from mpishard.ops.index.basic import fitted_shape
from mpishard.ops.rule.dim import local_shape, mapped, require_dtype
from mpishard.tensor.operand import fitted, mesh_of, moved, on_mesh, resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


@remembered
def _in_rows(layout: Layout, lead: int, stop: int, mask: Layout | None = None) -> Layout:
    """Return a layout with dims ``[lead, stop)``, which a mask covers, in blocks of rows: cut along the first alone.

    Mesh dims that shard the mask, if it is given, and not the tensor cut it too.
    """
    mask_dims = () if mask is None else mask.sharded_mesh_dims
    cut = [
        (type(p) is Shard and lead <= p.dim < stop) or (type(p) is not Shard and m in mask_dims)
        for m, p in enumerate(layout.placements)
    ]
    over = tuple(m for m, own in enumerate(cut) if own)
    if over == layout.shard_dims.get(lead, ()):
        return layout
    placements = [Shard(lead) if own else p for own, p in zip(cut, layout.placements)]
    sizes = [None if lead <= d < stop else s for d, s in enumerate(layout.sizes)]
    if mask is not None and over == mask.shard_dims.get(0):
        sizes[lead] = mask.sizes[0]
    return layout_of(layout.mesh_shape, placements, layout.shape, sizes)


def _counted(found: int, rows: Layout, mesh: CartMesh, lead: int) -> tuple[int, tuple[int, ...] | None]:
    """Return how many cells all ranks found, and each of those along ``lead``. Collective over these."""
    over = rows.shard_dims.get(lead, ())
    if not over:
        return found, None
    counts = tuple(gather_counts("rows found", found, mesh.group(over), rows.shape).tolist())
    return sum(counts), counts


def _found_in(rows: Layout, lead: int, stop: int, total: int, counts: tuple[int, ...] | None) -> Layout:
    """Return the layout of what a mask picks: one dim in place of those that it covers. Not collective."""
    shape = (*rows.shape[:lead], total, *rows.shape[stop:])
    sizes = (*rows.sizes[:lead], counts, *rows.sizes[stop:])
    placements = [Shard(p.dim - stop + lead + 1) if type(p) is Shard and p.dim >= stop else p for p in rows.placements]
    return layout_of(rows.mesh_shape, placements, shape, sizes)


def require_extent(mask: Tensor, k: int, layout: Layout, dim: int) -> None:
    """Refuse a mask whose dim ``k`` has another extent than the dim that it covers. Not collective."""
    if mask.shape[k] != layout.shape[dim]:
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} at index {k} does not match the shape of the indexed "
            f"tensor {list(layout.shape)} at index {dim}"
        )


def _mask_block(mask: ShardTensor, layout: Layout, lead: int) -> Tensor:
    """Return this rank's part of a mask of a block of ``layout``. Collective where it moves."""
    stop = lead + mask.ndim
    placements = [
        Shard(p.dim - lead) if type(p) is Shard and lead <= p.dim < stop else Replicate() for p in layout.placements
    ]
    return moved(mask, layout_of(mask.mesh.shape, placements, mask.shape, layout.sizes[lead:stop])).block.bool()


def picked_where(x: Any, mask: Any, lead: int = 0) -> ShardTensor:
    """Return the cells of ``x`` where ``mask``, which covers its dims from ``lead`` on, is true. Collective."""
    mesh, stop = mesh_of((x, mask)), lead + mask.ndim
    x, mask = on_mesh(x, mesh), on_mesh(mask, mesh)
    for k in range(mask.ndim):
        require_extent(mask, k, x.sharding, lead + k)
    rows = _in_rows(x.sharding, lead, stop, mask.sharding)
    where, cells = _mask_block(mask, rows, lead), moved(x, rows).block
    found = torch.ops.aten.index(cells, [*[None] * lead, where])
    return wrap(found, _found_in(rows, lead, stop, *_counted(found.shape[lead], rows, mesh, lead)), mesh)


def _put_at_mask(x: Tensor) -> Tensor:
    return x.index_put((torch.ones(2, dtype=torch.bool, device=x.device),), x)


def put_where(y: ShardTensor, mask: Any, lead: int, value: Any, accumulate: bool) -> None:
    """Write (or add) rows of ``value`` where a mask of the dims from ``lead`` on is true. Collective."""
    require_dtype(y, _put_at_mask)
    value = value.to(y.dtype) if isinstance(value, Tensor) else torch.tensor(value, dtype=y.dtype, device=y.device)
    write_where(y, mask, lead, value, lambda v, rows: fitted_shape(v, rows.shape), accumulate)


def write_where(
    y: ShardTensor,
    mask: Any,
    lead: int,
    value: Any,
    shaped: Callable[[ShardTensor, Layout], Any],
    accumulate: bool = False,
) -> None:
    """Write values of the dtype of ``y`` where a mask of its dims from ``lead`` on is true. Collective.

    ``shaped`` makes them broadcast against the layout of what the mask picks.
    """
    mesh, layout, stop = y.mesh, y.sharding, lead + mask.ndim
    value, mask = on_mesh(value, mesh), on_mesh(mask, mesh)
    given, rows = value.sharding, _in_rows(layout, lead, stop)
    where = _mask_block(mask, rows, lead)
    here = local_shape(rows, mesh.coords)

    def spread(values: Tensor, where: Tensor) -> Tensor:
        """Return a block with the values where the mask is true, and zeros elsewhere. Collective."""
        out = _found_in(rows, lead, stop, *_counted(int(where.sum()), rows, mesh, lead))
        own = fitted(shaped(wrap(values, given, mesh), out), mesh, out)
        return torch.ops.aten.index_put(own.new_zeros(here), [*[None] * lead, where], own)  # type: ignore[no-any-return]

    new = by_values("values at a mask", spread, [value.block, where], here)
    if rows is not layout:
        new, where = moved(wrap(new, rows, mesh), layout).block, _mask_block(mask, layout, lead)
    items, old = [*[None] * lead, where], y.block
    if accumulate:
        new = torch.ops.aten.index_put(old, items, torch.ops.aten.index(new, items), True)
    else:
        new = torch.where(where.reshape(*where.shape, *(1,) * (y.ndim - stop)), new, old)
    old.copy_(new)


def _selected(x: Tensor) -> Tensor:
    return x.masked_select(torch.ones(2, dtype=torch.bool, device=x.device))


@implements(*spellings("masked_select"), sharded="moves")
def masked_select(input: Any, mask: Any) -> ShardTensor:
    """Return the cells where a mask is true. Collective."""
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_select: expected BoolTensor for mask, but got {mask.dtype}")
    require_dtype(input, _selected)
    shape = torch.broadcast_shapes(input.shape, mask.shape) or (1,)
    return picked_where(input.expand(shape), mask.expand(shape))


@implements(*spellings("nonzero", "argwhere"), sharded="moves")
def nonzero(input: ShardTensor, *, as_tuple: bool = False) -> Any:
    """Return the global indices of cells that are not zero. Collective where the tensor is sharded."""
    x, mesh = resolved(input), input.mesh
    if as_tuple and not x.ndim:
        x = x.reshape(1)
    rows = _in_rows(x.sharding, 0, x.ndim)
    local = moved(x, rows).block.nonzero()
    if x.ndim:
        local[:, 0] += rows.offset(mesh.coords)[0]
    cells = _found_in(rows, 0, x.ndim, *_counted(local.shape[0], rows, mesh, 0))
    found = wrap(local, mapped(cells, (0, -1), (cells.shape[0], x.ndim)), mesh)
    return found.unbind(1) if as_tuple else found


@implements(*spellings("nonzero_static"), sharded="moves")
def nonzero_static(input: ShardTensor, *, size: int, fill_value: int = -1) -> Any:
    """Return so many rows of `nonzero`, filled up where there are fewer. Collective where the tensor is sharded."""
    if size < 0:
        raise RuntimeError(f"nonzero_static: 'size' must be an non-negative integer, got {size}")
    found = nonzero(input)
    rest = size - found.shape[0]
    return found[:size] if rest <= 0 else torch.cat([found, found.new_full((rest, input.ndim), fill_value)])
