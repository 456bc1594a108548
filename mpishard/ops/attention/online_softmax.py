"""Attention of queries to one block of keys, tile by tile: the online softmax and its backward.

Scores exist for a tile only, so memory is that of the operands. Half types are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpishard.layout import Shard, layout_of
from mpishard.ops.attention.layout import Stretches
from mpishard.ops.rule.reduction import HALVES
from mpishard.tensor.stream import chosen, drawn_into

TILE = 1 << 20  # scores in memory at once
FUSED = 1 << 23  # scores of one call of a fused kernel, if it can be cut: between calls, messages make progress
_EDGE = 64  # a tile is no smaller than this, whatever the batch
_ROWS = 4096  # rows of a fused tile: with fewer, the kernel's own blocks shrink, and keys' cotangents have more sums


class Dropout(NamedTuple):
    """Probability, seed, shape of all scores, and this rank's interval of every batch dim."""

    p: float
    seed: int
    shape: tuple[int, ...]
    batch: tuple[tuple[int, int], ...]

    def factor(self, rows: tuple[int, int], columns: tuple[int, int], like: Tensor) -> Tensor:
        """Return 0 or 1 / (1 - p) for these global cells, whatever the mesh. Not collective."""
        if self.p == 1:
            return torch.zeros((), dtype=like.dtype, device=like.device)
        box = (*self.batch, rows, columns)
        # the box as the middle one of three blocks in every dim
        layout = layout_of(
            (3,) * len(box),
            [Shard(d) for d in range(len(box))],
            self.shape,
            [(lo, hi - lo, n - hi) for (lo, hi), n in zip(box, self.shape)],
        )
        kept = torch.empty([hi - lo for lo, hi in box], dtype=torch.bool, device="cpu")
        drawn_into(kept, layout, (1,) * len(box), self.seed, chosen(1 - self.p))
        return kept.to(like.device).to(like.dtype).div_(1 - self.p).view(-1, *kept.shape[-2:])


class Tile(NamedTuple):
    """Rows of the local queries and columns of a block of keys, and where they lie in the sequences.

    Attributes
    ----------
    batch, rows, columns
        Cells of the batch, of the local queries and of the block.
    row, column
        Global position of the first.
    diagonal
        Where a causal mask ends within the tile: columns that the first row sees, less one. Else None.
    fused
        Whether torch's fused kernel can do it: nothing is hidden, or all above the diagonal.
    """

    batch: slice
    rows: slice
    columns: slice
    row: int
    column: int
    diagonal: int | None
    fused: bool


def tiles(rows: Stretches, columns: Stretches, batch: int, causal: bool, fusable: bool) -> Iterator[Tile]:
    """Cut the scores of a block into tiles, without those that a causal mask hides. Not collective.

    ``fusable``: whether a kernel that keeps no scores can be used.
    """
    for r in rows:
        for c in columns:
            hidden, partly = (c.start >= r.start + r.count, c.start + c.count - 1 > r.start) if causal else (False,) * 2
            if hidden:
                continue
            fused = fusable and (not partly or c.start == r.start)
            deep = max(batch, 1)
            if fused:
                across = c.count
                # the mask of the kernel begins in its corner
                pieces = 1 if partly else -(-r.count // max(FUSED // across, _ROWS))
                down = -(-r.count // pieces)
                # its threads share the batch
                deep = min(deep, max(FUSED // (down * across), torch.get_num_threads()))
            else:
                cells = max(TILE // max(batch, 1), _EDGE * _EDGE)
                across = min(max(_EDGE, int(cells**0.5)), c.count)
                down = min(max(cells // across, _EDGE), r.count)
            for i in range(0, r.count, down):
                n = min(down, r.count - i)
                for j in range(0, c.count, across):
                    m = min(across, c.count - j)
                    row, column = r.start + i, c.start + j
                    if causal and column > row + n - 1:
                        break
                    diagonal = row - column if causal and column + m - 1 > row else None
                    here, there = slice(r.at + i, r.at + i + n), slice(c.at + j, c.at + j + m)
                    for b in range(0, max(batch, 1), deep):
                        yield Tile(slice(b, b + deep), here, there, row, column, diagonal, fused)


def is_needed(rows: Stretches, columns: Stretches, causal: bool) -> bool:
    """Tell whether any of the columns is seen by any of the rows. Not collective."""
    return any(not causal or c.start <= r.start + r.count - 1 for r in rows for c in columns)


def dense_features(x: Tensor) -> Tensor:
    """Return queries, keys or values as fused kernels read them. Not collective.

    Features are neighbours in memory for them, whatever the strides say; torch's own function looks at these before.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


class Operand(NamedTuple):
    """How a block of queries, keys or values is brought to (batch, cells, features): heads repeated, batch spread."""

    batch: tuple[int, ...]
    group: int

    def flat(self, x: Tensor) -> Tensor:
        """Return the block with all batch dims as one, in the dtype of the sums. Not collective."""
        if x.dtype in HALVES:
            x = x.float()
        if self.group > 1:
            x = x.repeat_interleave(self.group, -3)
        # a number, as -1 says nothing where there are no cells
        x = x.expand(*self.batch, *x.shape[-2:]).reshape(math.prod(self.batch), *x.shape[-2:])
        return dense_features(x)

    def is_shared(self, shape: Sequence[int]) -> bool:
        """Tell whether cells of a block of ``shape`` belong to several batch cells. Not collective."""
        return self.group > 1 or tuple(shape[:-2]) != self.batch

    def folded(self, g: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the cotangent of a block of ``shape``: the adjoint of `flat`. Not collective."""
        g = g.view(*self.batch, *g.shape[-2:])
        if self.group > 1:
            g = g.unflatten(-3, (-1, self.group)).sum(-3)
        return g.sum_to_size(tuple(shape))


class Scores:
    """The scores of tiles.

    Parameters
    ----------
    q
        (batch, rows, features), scaled.
    masks
        Broadcast against (*batch, rows, columns); boolean (True: seen) or added.
    batch
        Batch shape of this rank's scores.
    dropout
        What is dropped, if anything.
    """

    def __init__(self, q: Tensor, masks: Sequence[Tensor], batch: tuple[int, ...], dropout: Dropout | None) -> None:
        self.q, self.masks, self.batch, self._dropout = q, masks, batch, dropout

    def fusable(self, features: int) -> bool:
        """Tell whether a fused kernel can be used for values of ``features``. Not collective."""
        return (
            self.q.is_cpu
            and len(self.q) > 0
            and not self.masks
            and self._dropout is None
            and self.q.shape[-1] == features > 0
            and torch.backends.cuda.flash_sdp_enabled()  # which means the CPU's kernel too
        )

    def cells(self, mask: Tensor, tile: Tile, offset: int) -> Tensor:
        """Return a mask's view of a tile; ``offset``: of the tile's columns in the masks. Not collective."""
        if mask.shape[-2] != 1:
            mask = mask[..., tile.rows, :]
        if mask.shape[-1] != 1:
            mask = mask[..., tile.columns.start + offset : tile.columns.stop + offset]
        return mask

    def of(self, tile: Tile, k: Tensor, offset: int) -> Tensor:
        """Return the scores (batch, rows, columns) of a tile. Not collective."""
        s = self.q[:, tile.rows] @ k[:, tile.columns].mT
        if self.masks:
            shaped = s.view(*self.batch, *s.shape[-2:])
            for mask in self.masks:
                own = self.cells(mask, tile, offset)
                if own.dtype == torch.bool:
                    shaped.masked_fill_(~own, -torch.inf)
                else:
                    shaped.add_(own)
        if tile.diagonal is not None:
            hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(tile.diagonal + 1)
            s.masked_fill_(hidden, -torch.inf)
        return s

    def factor(self, tile: Tile, s: Tensor) -> Tensor | None:
        """Return what dropout multiplies the weights of a tile with. Not collective."""
        if self._dropout is None:
            return None
        rows, columns = (tile.row, tile.row + s.shape[-2]), (tile.column, tile.column + s.shape[-1])
        return self._dropout.factor(rows, columns, s)


def _fused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor] | None:
    """Return the attention to some keys, and the logarithm of the sum of exponentials of every row.

    None where scores may be NaN: of a row of nothing else the kernel makes 0, and 0 for the logarithm.
    """
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), 0.0, causal, scale=1.0
    )
    return (out[0], log_sum[0].unsqueeze(-1)) if log_sum.all() else None


class OnlineSoftmax:
    """Weighted sums of values so far, with the largest score and the sum of weights of every row."""

    def __init__(self, scores: Scores, features: int) -> None:
        batch, rows, _ = scores.q.shape
        self._scores = scores
        self._top = scores.q.new_full((batch, rows, 1), -torch.inf)
        self._sum = scores.q.new_zeros((batch, rows, 1))
        self._out = scores.q.new_zeros((batch, rows, features))

    def add(self, work: Iterator[Tile], k: Tensor, v: Tensor, offset: int, poke: Callable[[], None]) -> None:
        """Attend to the tiles of one block. Not collective."""
        for tile in work:
            here, there = (tile.batch, tile.rows), (tile.batch, tile.columns)
            before, out = self._top[here], self._out[here]
            fused = _fused(self._scores.q[here], k[there], v[there], tile.diagonal is not None) if tile.fused else None
            if fused is not None:
                share, log_sum = fused
                top = safe = torch.maximum(before, log_sum)
                p = weight = (log_sum - top).exp_()
            else:
                s = self._scores.of(tile, k, offset)
                top = torch.maximum(before, s.amax(-1, keepdim=True))
                # a row that has seen nothing yet
                safe = top.masked_fill(top == -torch.inf, 0)
                p = s.sub_(safe).exp_()
                weight = p.sum(-1, keepdim=True)
            rescale = (before - safe).exp_()
            self._sum[here] = self._sum[here] * rescale + weight
            out.mul_(rescale)
            if fused is not None:
                out.addcmul_(p, share)
            else:
                factor = self._scores.factor(tile, p)
                out.baddbmm_(p if factor is None else p.mul_(factor), v[there])
            self._top[here] = top
            poke()

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the attention and the logarithm of the sum of exponentials of every row. Not collective."""
        nothing = self._sum == 0
        out = self._out.div_(self._sum).masked_fill_(nothing, 0)
        # where nothing is seen all scores are -inf, and so are their exponentials
        return out, (self._top + self._sum.log()).masked_fill_(nothing, 0)


class Backward(NamedTuple):
    """Cotangent of the result, and what every tile's backward needs of the forward."""

    scores: Scores
    g: Tensor
    out: Tensor
    log_sum: Tensor
    dot: Tensor  # sum of g * result over the features
    dq: Tensor
    dmasks: Sequence[Tensor | None]

    def add(
        self,
        work: Iterator[Tile],
        k: Tensor,
        v: Tensor,
        offset: int,
        into: Sequence[Tensor],
        poke: Callable[[], None],
    ) -> None:
        """Add the tiles' cotangents of queries, keys, values and masks. Not collective."""
        scores, (dk, dv) = self.scores, into
        for tile in work:
            here, there = (tile.batch, tile.rows), (tile.batch, tile.columns)
            if tile.fused:
                grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *(x.unsqueeze(0) for x in (self.g[here], scores.q[here], k[there], v[there], self.out[here])),
                    self.log_sum[here].squeeze(-1).unsqueeze(0),
                    0.0,
                    tile.diagonal is not None,
                    scale=1.0,
                )
                for total, share in zip((self.dq[here], dk[there], dv[there]), grads):
                    total.add_(share[0])
                poke()
                continue
            p = scores.of(tile, k, offset).sub_(self.log_sum[:, tile.rows]).exp_()
            g = self.g[:, tile.rows]
            dp = g @ v[:, tile.columns].mT
            factor = scores.factor(tile, p)
            if factor is not None:
                dp *= factor
                dv[:, tile.columns] += (p * factor).mT @ g
            else:
                dv[:, tile.columns] += p.mT @ g
            ds = dp.sub_(self.dot[:, tile.rows]).mul_(p)
            self.dq[:, tile.rows] += ds @ k[:, tile.columns]
            dk[:, tile.columns] += ds.mT @ scores.q[:, tile.rows]
            for dmask in self.dmasks:
                if dmask is not None:
                    own = scores.cells(dmask, tile, offset)
                    own.add_(ds.view(*scores.batch, *ds.shape[-2:]).sum_to_size(own.shape))
            poke()
