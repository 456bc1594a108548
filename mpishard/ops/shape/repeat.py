"""Repetition: tile, repeat, repeat_interleave, and grids of vectors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.use import use
from mpishard.layout import Placement, Replicate, Shard, bounds, layout_of, scaled
from mpishard.ops.rule.dim import int_list, ints, normal_dim, plain, resized, settled, whole_along
from mpishard.ops.shape.cat import cat
from mpishard.tensor.operand import mesh_of, on_mesh, resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


@implements(torch.Tensor.repeat, sharded="moves")
def repeat(self: ShardTensor, *given: Any, repeats: Any = None) -> ShardTensor:
    """Repeat along dims. Collective where a sharded dim is repeated: its blocks are balanced again."""
    counts = ints(given) if repeats is None else int_list(repeats)
    if len(counts) < self.ndim or min(counts, default=0) < 0:
        raise RuntimeError(f"repeat: {counts} are not numbers of repeats for {self.ndim} dims")
    x = resolved(self)
    for _ in range(len(counts) - x.ndim):
        x = x.unsqueeze(0)
    whole = [1 if x.sharding.sizes[d] is not None else n for d, n in enumerate(counts)]
    layout = x.sharding
    for d, n in enumerate(whole):
        layout = resized(layout, d, layout.shape[d] * n, layout.sizes[d])
    x = wrap(x.block.repeat(whole), layout, x.mesh)
    for d, n in enumerate(counts):
        if n != whole[d]:
            # with one gradient of all copies: of a half type it is added up in float32
            copies = [wrap(c, x.sharding, x.mesh) for c in x.block.expand(n, *x.block.shape).unbind()]
            x = cat(copies, d) if n else x.narrow(d, 0, 0)
    return x


@implements(torch.tile, torch.Tensor.tile, sharded="moves")
def tile(input: ShardTensor, *given: Any, dims: Any = None) -> ShardTensor:
    """Repeat along dims, the last ones where fewer numbers are given. As `repeat`."""
    counts = ints(given) if dims is None else int_list(dims)
    return repeat(input, (*(1,) * (input.ndim - len(counts)), *counts))


@implements(torch.repeat_interleave, torch.Tensor.repeat_interleave, sharded="local")
def repeat_interleave(
    input: Any, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> ShardTensor:
    """Repeat each cell of a dim where it is. Not collective, but for repeats that are sharded."""
    mesh = mesh_of((input, repeats))
    if repeats is None:  # the numbers of the cells, each as often as it is told
        cells = torch.arange(input.numel(), device=mesh.device)
        return repeat_interleave(on_mesh(cells, mesh), input, 0, output_size=output_size)
    repeats = plain(repeats)
    if isinstance(repeats, Tensor) and (repeats.ndim > 1 or repeats.dtype not in (torch.int64, torch.int32)):
        raise RuntimeError(
            f"repeats must be 0-dim or 1-dim tensor of integers, got {repeats.ndim} dims of {repeats.dtype}"
        )
    x = settled(input) if isinstance(input, ShardTensor) else on_mesh(input, mesh)
    if dim is None:
        x, dim = x.reshape(-1), 0
    d = normal_dim(dim, x.ndim)
    layout = x.sharding
    n = layout.shape[d]
    if not isinstance(repeats, Tensor):
        torch.zeros(0, device="cpu").repeat_interleave(repeats, 0)  # torch's own error of what is no number
        repeats = torch.tensor(repeats, device="cpu")
    counts = repeats.reshape(-1)
    if counts.numel() not in (1, n):
        raise RuntimeError("repeats must have the same size as input along dim")
    if counts.numel() and int(counts.min()) < 0:
        raise RuntimeError("repeats can not be negative")
    cut = layout.sizes[d]
    # one number for all cells: by formula, as the extent may be that of all ranks
    ends = (0, n * int(counts)) if counts.numel() == 1 else bounds(tuple(counts.tolist()))
    if output_size not in (None, ends[-1]):
        raise RuntimeError(f"repeat_interleave: output_size {output_size} is not the sum of the repeats, {ends[-1]}")
    if counts.numel() == 1:
        out = resized(layout, d, ends[-1], None if cut is None else scaled(cut, int(counts)))
        return wrap(x.block.repeat_interleave(int(counts), d), out, x.mesh)
    lo, hi = layout.interval(d, x.mesh.coords)
    mine = counts[lo:hi].to(x.device)
    sizes = None if cut is None else tuple(ends[b] - ends[a] for a, b in zip(bounds(cut)[:-1], bounds(cut)[1:]))
    block = x.block.repeat_interleave(mine, d, output_size=ends[hi] - ends[lo])
    return wrap(block, resized(layout, d, ends[-1], sizes), x.mesh)


@implements(*spellings("meshgrid"), sharded="gathers")
def meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[ShardTensor, ...]:
    """Expand vectors to a grid, sharded as they are. Not collective, unless two share a mesh dim: one is gathered."""
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        tensors = tuple(tensors[0])
    mesh = mesh_of(tensors)
    vectors = [on_mesh(t, mesh) for t in tensors]
    vectors = [v if v.ndim else v.reshape(1) for v in vectors]
    if len(vectors) == 1:
        return (vectors[0].view(-1),)  # type: ignore[return-value]
    order = list(range(len(vectors)))
    if indexing == "xy" and len(vectors) > 1:
        order[:2] = [1, 0]  # the first two dims of the grid are swapped
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for k, v in enumerate(vectors):
        mesh_dims = v.sharding.sharded_mesh_dims
        if any(type(placements[m]) is Shard for m in mesh_dims):
            vectors[k] = whole_along(v, (0,))  # a mesh dim can shard one of them only
            continue
        for m in mesh_dims:
            placements[m] = Shard(order.index(k))
    shape = [vectors[k].sharding.shape[0] for k in order]
    sizes = [vectors[k].sharding.sizes[0] for k in order]
    layout = layout_of(mesh.shape, placements, shape, sizes)
    others = layout.sharded_mesh_dims
    blocks = [use(v.block, mesh, tuple(m for m in others if m not in v.sharding.sharded_mesh_dims)) for v in vectors]
    grids = tuple(wrap(g, layout, mesh) for g in torch.meshgrid(*blocks, indexing=indexing or "ij"))
    for grid, v in zip(grids, vectors):
        # many cells in one place, into which torch does not write; a block may have but one of them
        grid._gathered_view = math.prod(shape) > v.sharding.shape[0]
    return grids
