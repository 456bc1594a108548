"""Order statistics of lines that are cut: which cells have given ranks in order. No line is gathered.

`selected` is a radix selection over ranks. Cells are seen as integers that sort as they do, of which every step looks
at eight bits more: a reduction of 256 counts tells all ranks which of them the wanted cell has, and who has other bits
is out. Cells that are equal are told apart by their positions, as a stable sort does, in steps of the same kind. So a
rank holds and sends as much among thousands of ranks as among two.

Sources: E. L. G. Saukas and S. W. Song, "Efficient selection algorithms on distributed memory computers" (SC 1998),
for counts in place of cells; T. Alabi et al., "Fast k-selection algorithms for graphics processing units" (ACM JEA 17,
2012), for digits as the pivots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.linear import Chosen, apply
from mpishard.comm import traced
from mpishard.comm.collective import blocking
from mpishard.comm.memory.reduction_type import to_keys
from mpishard.comm.mesh import Group
from mpishard.ops.rule.reduction import Reduced
from mpishard.tensor.shard_tensor import ShardTensor

_BITS = 8
BUCKETS = 1 << _BITS
_NOWHERE = torch.iinfo(torch.int64).max
_BITS_OF = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Lines(NamedTuple):
    """The cells of a block as lines along some dims, in row-major order, of which other ranks hold other cells.

    Attributes
    ----------
    kept, dims
        The dims that number the lines, and those along which they run.
    counts, extents
        Lines of this block, and what it and the whole tensor have along ``dims``.
    starts
        Where this block begins along ``dims``.
    group
        The ranks that hold other cells of these lines.
    """

    kept: tuple[int, ...]
    dims: tuple[int, ...]
    counts: tuple[int, ...]
    own: tuple[int, ...]
    extents: tuple[int, ...]
    starts: tuple[int, ...]
    group: Group

    @classmethod
    def of(cls, x: ShardTensor, plan: Reduced) -> Lines:
        """Return the lines of a tensor along the dims of a reduction, some of which are sharded. Not collective."""
        kept = tuple(d for d in range(x.ndim) if d not in plan.dims)
        box = x.sharding.box(x.mesh.coords)
        n = [hi - lo for lo, hi in box]
        return cls(
            kept,
            plan.dims,
            tuple(n[d] for d in kept),
            tuple(n[d] for d in plan.dims),
            tuple(x.shape[d] for d in plan.dims),
            tuple(box[d][0] for d in plan.dims),
            x.mesh.group(plan.over),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """How many lines, and cells of each."""
        return math.prod(self.counts), math.prod(self.own)

    def lines(self, block: Tensor) -> Tensor:
        """Return a block as one line a row. Not collective."""
        return block.permute(*self.kept, *self.dims).reshape(self.shape)

    def block(self, lines: Tensor) -> Tensor:
        """Return the block that has such lines. Not collective."""
        order = (*self.kept, *self.dims)
        back = sorted(range(len(order)), key=order.__getitem__)
        return lines.reshape(*self.counts, *self.own).permute(back)

    def position(self, index: Tensor) -> Tensor:
        """Return where in the whole lines cells lie that have an index in those of the block. Not collective."""
        out, step = torch.zeros_like(index), 1
        for n, whole, start in zip(*(reversed(t) for t in (self.own, self.extents, self.starts))):
            out = out + (index % n + start) * step
            index = torch.div(index, n, rounding_mode="floor")
            step *= whole
        return out

    def local(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index in the block's lines of cells of the whole ones, and which are here. Not collective."""
        out, step, here = torch.zeros_like(position), 1, torch.ones_like(position, dtype=torch.bool)
        for n, whole, start in zip(*(reversed(t) for t in (self.own, self.extents, self.starts))):
            at = position % whole - start
            here = here & (at >= 0) & (at < n)
            out = out + at * step
            position = torch.div(position, whole, rounding_mode="floor")
            step *= n
        return torch.where(here, out, 0), here


def taken(x: ShardTensor, lines: Lines, find: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the values and the positions of some cells of every line, along a new last dim.

    Collective over the ranks that hold other cells of the lines.

    Parameters
    ----------
    find
        Gives the positions, of a line a row, the same on all of these ranks.

    Notes
    -----
    Adjoint: a cotangent goes to the cell that was taken.
    """
    position: Tensor

    def choose(t: Tensor) -> Tensor:
        nonlocal position
        cells = lines.lines(t)
        position = find(cells)
        return value_at(cells, position, lines)

    def spread(g: Tensor) -> Tensor:
        cells, (index, here) = g.new_zeros(lines.shape), lines.local(position)
        return lines.block(cells.scatter_add_(1, index, torch.where(here, g, 0)) if cells.shape[1] else cells)

    def collect(t: Tensor) -> Tensor:
        return blocking.all_reduce(_own(lines.lines(t), position, lines), lines.group)

    values = apply(Chosen(choose, spread, collect), x.block)
    return tuple(t.unflatten(0, lines.counts) if lines.kept else t[0] for t in (values, position))  # type: ignore[return-value]


def _own(cells: Tensor, position: Tensor, lines: Lines) -> Tensor:
    """Return the cells at these positions that are of this block, and zeros for others."""
    index, here = lines.local(position)
    # a rank without cells has none to choose from
    return torch.where(here, cells.gather(1, index), 0) if cells.shape[1] else cells.new_zeros(index.shape)


def value_at(cells: Tensor, position: Tensor, lines: Lines) -> Tensor:
    """Return the cells at these positions, bit by bit. Collective over the ranks that hold other cells of the lines."""
    found = _own(cells, position, lines)
    # a sum with a zero would lose the sign of another zero
    bits = _BITS_OF[found.itemsize] if found.is_floating_point() else found.dtype
    return blocking.all_reduce(found.view(bits), lines.group).view(found.dtype)


def _sortable(cells: Tensor) -> tuple[Tensor, int]:
    """Return signed integers that sort as the cells do, equal ones equal, NaN last, and how many bits they need.

    Not collective. They lie in int32 or int64, which torch can shift.
    """
    if cells.is_floating_point():
        keys = to_keys(cells + 0, "max")  # zeros of both signs are equal
    else:
        keys = cells.short() - 128 if cells.dtype == torch.uint8 else cells
    return keys.to(torch.int64 if keys.itemsize == 8 else torch.int32), 8 * cells.itemsize


def ordered_count(cells: Tensor, lines: Lines) -> Tensor:
    """Return how many cells of every line are no NaN. Collective over the ranks that hold other cells of them."""
    if not cells.is_floating_point():
        return torch.full((cells.shape[0],), math.prod(lines.extents), device=cells.device)
    return blocking.all_reduce((cells == cells).sum(1), lines.group)


def selected(cells: Tensor, wanted: Tensor, lines: Lines) -> Tensor:
    """Return where the cells lie that come ``wanted`` in the order of their lines: from 0, NaN last, ties in place.

    Collective over the ranks that hold other cells of the lines.

    Parameters
    ----------
    cells
        This rank's part, a line a row.
    wanted
        As many numbers for every line, the same on these ranks.
    """

    def run(cells: Tensor, wanted: Tensor) -> Tensor:
        return _selected(cells, wanted, lines)

    if traced.recording is not None:
        given = [cells, wanted]
        return traced.recording.call("selection", run, given, wanted.shape, dtype=torch.int64, device=cells.device)
    return run(cells, wanted)


def _selected(cells: Tensor, wanted: Tensor, lines: Lines) -> Tensor:
    n_lines, each = wanted.shape
    n_wanted, n = n_lines * each, cells.shape[1]
    if not n_wanted:
        return wanted
    # wanted cells that agree so far are one class, which has the number of the first of them; lines to begin with
    rank = wanted.reshape(-1).clone()
    of = torch.arange(n_lines, device=cells.device).repeat_interleave(each) * each
    keys, bits = _sortable(cells)
    keys = keys ^ (-1 << (bits - 1))  # as without a sign, digit by digit
    own = of[::each, None].to(keys.dtype)
    at: Tensor | None = None
    for by_position in (False, True):
        if by_position:
            assert at is not None
            keys, bits = lines.position(at % max(n, 1)), math.prod(lines.extents).bit_length()
        for shift in reversed(range(0, bits, _BITS)):
            code = (((keys >> shift) & (BUCKETS - 1)) + own * BUCKETS).reshape(-1)
            counts = blocking.all_reduce(_counted(code, n_wanted * BUCKETS), lines.group)
            counts = counts.view(n_wanted, BUCKETS)[of]
            upto = counts.cumsum(1)
            digit = (upto <= rank[:, None]).sum(1, keepdim=True)
            rank = rank - (upto - counts).gather(1, digit)[:, 0]
            found = of * BUCKETS + digit[:, 0]
            of = torch.searchsorted(found.sort().values, found)
            classes = torch.full((n_wanted * BUCKETS,), -1, device=cells.device)
            classes[found] = of
            # of a plan, which has no values, all cells go on
            stay = code if keys.is_meta else (classes >= 0)[code].nonzero()[:, 0]
            at = stay if at is None else at[stay]
            keys, own = keys.reshape(-1)[stay], classes[code[stay]]
            # all ranks see the same counts
            if not keys.is_meta and int(counts.gather(1, digit).max()) == 1:
                return _told(at, own, of, n, lines).view(wanted.shape)
    assert at is not None
    return _told(at, own, of, n, lines).view(wanted.shape)


def _counted(code: Tensor, n: int) -> Tensor:
    # torch has no counts without values
    return code.new_zeros(n, dtype=torch.int64) if code.is_meta else torch.bincount(code, minlength=n)


def _told(at: Tensor, own: Tensor, of: Tensor, n: int, lines: Lines) -> Tensor:
    """Return on all ranks the position of the one cell of each class, which one of them has. Collective."""
    positions = torch.zeros_like(of)
    positions[own] = lines.position(at % max(n, 1))
    return blocking.all_reduce(positions, lines.group)[of]


def smallest(cells: Tensor, k: int, lines: Lines, largest: bool) -> Tensor:
    """Return where the ``k`` smallest or largest cells of every line lie, in order; a line has so many.

    Collective over the ranks that hold other cells of the lines: the best of two ranks meet, and of two pairs, and so
    on, so that no rank ever has more than twice as many as are wanted.
    """

    def run(cells: Tensor) -> Tensor:
        values, index = cells.topk(min(k, cells.shape[1]), 1, largest)
        keys = _sortable(values)[0].long()
        best = torch.stack([~keys if largest else keys, lines.position(index)])
        # what fills a short block comes last, whatever its key
        best = torch.cat([best, best.new_full((2, best.shape[1], k - best.shape[2]), _NOWHERE)], -1)

        def joined(low: Tensor, high: Tensor) -> Tensor:
            both = torch.cat([low, high], -1)
            order = both[0].sort(dim=-1, stable=True).indices
            filled = (both[1] == _NOWHERE).gather(-1, order)
            order = order.gather(-1, filled.sort(dim=-1, stable=True).indices)[:, :k]
            return both.gather(-1, order.expand(2, -1, -1))

        return blocking.all_reduce_by(joined, best, lines.group, "the best of two ranks")[1]

    if traced.recording is not None:
        shape = (cells.shape[0], k)
        return traced.recording.call("topk", run, [cells], shape, dtype=torch.int64, device=cells.device)
    return run(cells)
