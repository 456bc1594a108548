"""Values that are added at cells of one dim, many to a cell: every rank adds up its own, and the sums travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.layout import Layout, Partial, Replicate, Shard, layout_of
from mpishard.layout.remembered import remembered
from mpishard.ops.rule.agreement import agreed, blank, in_range
from mpishard.ops.rule.reduction import HALVES
from mpishard.tensor.operand import moved, on_mesh, resolved
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class Addition(NamedTuple):
    """Layouts: of the values, cut along the dim; of an index with a number for each; of the sums, whole along it."""

    values: Layout
    points: Layout
    sums: Layout


@remembered
def _plan(target: Layout, values: Layout, dim: int) -> Addition | None:
    over = [m for m, p in enumerate(values.placements) if type(p) is Shard and p.dim == dim]
    rest = [p if type(p) is Shard and p.dim != dim else Replicate() for p in target.placements]
    if not over or any(type(rest[m]) is Shard for m in over):
        return None

    def layout(shape: tuple[int, ...], held: Any, sizes: Any) -> Layout:
        placements = [held if m in over else p for m, p in enumerate(rest)]
        return layout_of(target.mesh_shape, placements, shape, [*target.sizes[:dim], sizes, *target.sizes[dim + 1 :]])

    n, cut = values.shape[dim], values.sizes[dim]
    points = [Shard(0) if m in over else Replicate() for m in range(len(rest))]
    return Addition(
        layout(values.shape, Shard(dim), cut),
        layout_of(target.mesh_shape, points, (n,), [cut]),
        layout(target.shape, Partial(), None),
    )


def add(x: ShardTensor, dim: int, index: Tensor, src: Any, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> bool:
    """Add to ``x`` what ``call(zeros, index, src)`` returns of a rank's own values; tell whether it was done.

    Not where the values lie whole on every rank, nor where they are no more than the sums: they travel then. The
    index is a vector along ``dim``, or has the shape of the values. Collective where it is done.
    """
    if not isinstance(src, ShardTensor) or src.mesh is not x.mesh or src.dtype != x.dtype or x.dtype == torch.bool:
        return False
    own, given = list(x.shape), list(src.shape)
    if len(own) != len(given) or own[:dim] + own[dim + 1 :] != given[:dim] + given[dim + 1 :] or given[dim] <= own[dim]:
        return False
    if list(index.shape) not in (given, given[dim : dim + 1]):
        return False
    values, mesh = resolved(src), x.mesh
    plan = _plan(x.sharding, values.sharding, dim)
    if plan is None:
        return False
    block = moved(values, plan.values).block
    cells = moved(on_mesh(index, mesh), plan.values if index.ndim == len(own) else plan.points).block
    here, n, shape = plan.sums.local_shape(mesh.coords), own[dim], block.shape

    def check(cells: Tensor) -> object:
        return in_range(cells, 0, n) or call(torch.zeros(here, device=cells.device), cells, blank(shape, cells))

    sums = agreed(
        lambda cells: call(block.new_zeros(here), cells, block), mesh, (plan.values, plan.sums), cells, check=check
    )
    x.block.add_(moved(wrap(sums, plan.sums, mesh), x.sharding).block)
    return True


def put_sums(block: Tensor, items: Sequence[Tensor | None], values: Tensor) -> Tensor:
    """Add values at cells of a block, in place. Not collective.

    Many of a half type are added up in float32, as torch's ``index_add`` does: its ``index_put`` does not.
    """
    if block.dtype not in HALVES:
        return torch.ops.aten.index_put_(block, items, values, True)  # type: ignore[no-any-return]
    return block.copy_(torch.ops.aten.index_put(block.float(), items, values.float(), True))
