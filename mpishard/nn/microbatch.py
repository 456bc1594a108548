"""Micro-batches: every rank cuts what it holds of a batch, and outputs are put together as the batch lay.

Of a batch that is sharded along its samples, a part has some of each block's: neighbours in a part are then no
neighbours in the batch. So what belongs to the samples, laid out differently, is cut by where they lie in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.errors import LayoutError
from mpishard.layout import Layout, balanced, bounds, layout_of, repeated, runs_of
from mpishard.tensor.operand import resolved
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class Cut(NamedTuple):
    """How samples are cut into parts, of each block a share: as `torch.tensor_split` has it.

    Attributes
    ----------
    mesh_dims, sizes
        The mesh dims that shard the samples, and how many are in each of their blocks: a single one where none does.
    count
        Of parts.
    rows
        Of a tensor that has several for each sample.
    """

    mesh_dims: tuple[int, ...]
    sizes: Sequence[int]
    count: int  # type: ignore[assignment]
    rows: int = 1

    @property
    def samples(self) -> int:
        """Of the whole batch."""
        return sum(n * k for n, k in runs_of(self.sizes))

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block sizes of the whole."""
        return repeated((self.rows * n, k) for n, k in runs_of(self.sizes))

    def part(self, i: int) -> tuple[int, ...]:
        """Return the block sizes of a part."""
        return repeated((self.share(n, i), k) for n, k in runs_of(self.sizes))

    def length(self, i: int) -> int:
        """Return the number of rows of a part."""
        return sum(self.share(n, i) * k for n, k in runs_of(self.sizes))

    def share(self, n: int, i: int) -> int:
        """Return how many rows of a block of ``n`` samples are in a part."""
        return self.rows * balanced(n, self.count)[i]

    def places(self, i: int) -> Tensor:
        """Return where the rows of a part lie in the whole, ascending."""
        found, at = [], 0
        for n, k in runs_of(self.sizes):
            first = at + self.rows * bounds(balanced(n, self.count))[i]
            blocks = self.rows * n * torch.arange(k, device="cpu")
            found.append((blocks[:, None] + torch.arange(first, first + self.share(n, i), device="cpu")).flatten())
            at += self.rows * n * k
        return torch.cat(found)

    def cuts(self, layout: Layout) -> bool:
        """Tell whether each rank has whole samples of its own in its block of a tensor."""
        return layout.sizes[0] == self.blocks and layout.shard_dims[0] == self.mesh_dims


def cut_of(x: Any, count: int) -> Cut | None:
    """Return how each rank cuts what it holds of a batch into so many parts; None of what is none. Not collective."""
    if not isinstance(x, Tensor) or not x.ndim:
        return None
    layout = x.sharding if isinstance(x, ShardTensor) else None
    if layout is None or layout.sizes[0] is None:
        return Cut((), (x.shape[0],), count)
    return Cut(layout.shard_dims[0], layout.sizes[0], count)


def rows_of(x: Tensor, cut: Cut) -> int:
    """Return how many rows there are for each sample of a batch.

    Not collective.

    Raises
    ------
    LayoutError
        They are no whole number.
    """
    rows, rest = divmod(x.shape[0], cut.samples)
    if rest or not rows:
        raise LayoutError(
            "Pipeline.step: a target that does not fit the batch",
            expected=f"as many rows for each of {cut.samples} samples",
            got=tuple(x.shape),
            fix="give targets of this batch",
        )
    return rows


def parts_of(x: Tensor, cut: Cut) -> list[Tensor]:
    """Return the parts of a batch, or of what has as many rows for each sample.

    Collective where that is laid out otherwise than the batch that ``cut`` is of.

    Raises
    ------
    LayoutError
        It has another number of rows.
    """
    rows = rows_of(x, cut)
    cut = cut._replace(rows=rows)
    if len(cut.sizes) == 1:
        return list(x.split([cut.length(i) for i in range(cut.count)]))
    if not isinstance(x, ShardTensor) or not cut.cuts(x.sharding):
        return [x[cut.places(i)] for i in range(cut.count)]
    layout, own = x.sharding, x.block.shape[0] // rows
    blocks = x.block.split([cut.share(own, i) for i in range(cut.count)])
    return [wrap(block, _laid(layout, cut.part(i)), x.mesh) for i, block in enumerate(blocks)]


def _laid(layout: Layout, sizes: Sequence[int]) -> Layout:
    """Return the layout of as many blocks of other rows."""
    rows = sum(n * k for n, k in runs_of(sizes))
    return layout_of(layout.mesh_shape, layout.placements, (rows, *layout.shape[1:]), (sizes, *layout.sizes[1:]))


def joined(parts: Sequence[Any], cut: Cut) -> Any:
    """Put outputs of parts together as the batch lay. Collective where they do not lie as its parts.

    Raises
    ------
    LayoutError
        They do not have as many rows for each sample.
    """
    if isinstance(parts[0], (tuple, list)):
        return tuple(joined(column, cut) for column in zip(*parts))
    parts = [resolved(p) if isinstance(p, ShardTensor) else p for p in parts]
    if len(cut.sizes) == 1:
        return torch.cat(parts)
    cut = cut._replace(rows=parts[0].shape[0] // cut.length(0))
    if any(p.shape[0] != cut.length(i) for i, p in enumerate(parts)):
        raise LayoutError(
            "Pipeline: outputs that cannot be put together",
            expected="as many rows for each sample of the batch",
            got=[tuple(p.shape) for p in parts],
            fix="return a row per sample from the last stage, or a batch that is not sharded along its samples",
        )
    if all(isinstance(p, ShardTensor) for p in parts):
        first = parts[0].sharding
        if first.shard_dims.get(0) == cut.mesh_dims and all(
            p.sharding == _laid(first, cut.part(i)) for i, p in enumerate(parts)
        ):
            whole = _laid(first, cut.blocks)
            return wrap(torch.cat([p.block for p in parts]), whole, parts[0].mesh)
    return torch.cat(parts)[torch.cat([cut.places(i) for i in range(cut.count)]).argsort()]
