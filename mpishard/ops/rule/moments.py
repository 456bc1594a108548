"""Means, squared deviations and dot products of the rows of a block, and their combination over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mpishard.autograd.linear import in_transform
from mpishard.comm import traced
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import Group

BLOCK = 1 << 15  # cells of a row that are summed about one number
AT_ONCE = 1 << 18  # cells that are read twice from cache; of all rows, one call of torch each
_FEW = 1 << 14  # cells for which the calls cost more than the arithmetic
_FEW_STATISTICS = 64  # that Python compares in less time than torch's calls take
_OFFSET = 16.0  # a mean of so many standard deviations: its rounding in float32 would be seen
_SQUARED = 1 << 12  # cells whose squares are summed in the dtype of the block
_SMALL = 2.0  # a mean of so many standard deviations at most: the sum of squares rounds no more than theirs

_torch_backward = torch.ops.aten.native_batch_norm_backward.default


def are_few(v: Tensor) -> bool:
    """Tell whether a block has cells, and so few that calls of torch cost more than their arithmetic."""
    return 0 < v.numel() <= _FEW and v.is_cpu and traced.recording is None


def row_sums(v: Tensor) -> Tensor | None:
    """Return the sums of each row and of its squares, in float64, below each other. Not collective.

    Of few cells: large means show in the variance, and `global_moments` sums again. Of many, None where a mean is not
    small (or the device's kernels serve better): then `row_moments` has no difference of large numbers.
    """
    if are_few(v):
        own = v.double()
        return torch.stack((own.sum(1), torch.linalg.vecdot(own, own)))
    if not is_summed_in_place(v):
        return None
    return if_small(torch.stack((v.sum(1, dtype=v.dtype).double(), _squares(v))), v.shape[1])


def if_small(sums: Tensor, count: int) -> Tensor | None:
    """Return such sums of ``count`` cells each; None where a mean is not small. Not collective."""
    mean, var = sums.div(count).unbind()
    # of many rows, one look at the worst of them
    return None if _any_over(_SMALL, mean, var.addcmul(mean, mean, value=-1)) else sums


def _squares(v: Tensor) -> Tensor:
    """Return the sum of squares of each row, in float64: no copy, and half the time of products."""
    n = v.shape[1]
    cut = n - n % _SQUARED
    norms = [torch.linalg.vector_norm(v[:, cut:], dim=1, keepdim=True)] if cut < n else []
    if cut:
        norms.append(torch.linalg.vector_norm(v[:, :cut].unflatten(1, (-1, _SQUARED)), dim=2))
    roots = (torch.cat(norms, 1) if len(norms) > 1 else norms[0]).double()
    return torch.linalg.vecdot(roots, roots)


def is_summed_in_place(v: Tensor) -> bool:
    """Tell whether sums over a block need no copy of it in another dtype: on a CPU, where it has cells."""
    return v.is_cpu and v.dtype in (torch.float32, torch.float64) and bool(v.numel()) and traced.recording is None


def row_moments(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations of each row, in float64. Not collective.

    By the sums of values and squares, where the means are small and there are many cells, else `centred_moments`.
    """
    if not v.numel() or are_few(v) or (sums := row_sums(v)) is None:
        return centred_moments(v)
    total, squares = sums.unbind()
    mean = total / v.shape[1]
    return mean, squares.addcmul_(mean, total, value=-1)


def centred_moments(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `row_moments` does, without differences of large numbers. Not collective.

    Two passes per block, blocks combined by Chan's formula. As many blocks at a time as fit the cache: no temporary of
    full size, and several times faster than ``torch.var_mean`` on a CPU.
    """
    rows, n = v.shape if v.numel() else (v.shape[0], 0)
    if n == 0:
        zeros = torch.zeros(rows, dtype=torch.float64, device=v.device)
        return zeros, zeros.clone()
    if are_few(v):
        # a copy costs less than to look at the means, and torch.var_mean more than both passes
        own = v.double()
        mean = own.mean(1)
        own = own - mean.unsqueeze(1)
        return mean, torch.linalg.vecdot(own, own)
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    if not v.is_cpu or traced.recording is not None:
        own = v.to(wide)
        var, mean = torch.var_mean(own, 1, correction=0)
        exact = mean.double()
        # a compiler sees no values, and fuses it
        if wide == torch.float32 and (traced.recording is not None or any_large(mean, var)):
            exact += (own - mean.unsqueeze(1)).mean(1)
        return exact, var.double() * n
    blocks, rest = divmod(n, BLOCK)
    if blocks:
        means, squares = _moments(v[:, : n - rest].unflatten(1, (blocks, BLOCK)), wide)
        if rest:
            last = _moments(v[:, None, n - rest :], wide)
            means, squares = (torch.cat(both, 1) for both in zip((means, squares), last))
    else:
        means, squares = _moments(v.unsqueeze(1), wide)
    cells = torch.full((means.shape[1],), min(n, BLOCK), dtype=torch.float64, device="cpu")
    if blocks and rest:
        cells[-1] = rest
    exact = means.double()
    if wide == torch.float32:
        for row, i in is_large(means, squares / cells.float()).nonzero().tolist():
            exact[row, i] += (v[row, i * BLOCK : (i + 1) * BLOCK].to(wide) - means[row, i]).mean()
    if means.shape[1] == 1:
        return exact[:, 0], squares[:, 0].double()
    return chan(exact, squares.double(), cells)


def _moments(v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations of the cells (rows, blocks, cells) of each block."""
    found = []
    for piece in _pieces(v):
        own = piece.to(dtype)
        mean = own.mean(-1, keepdim=True)
        found.append((mean.flatten(), (own - mean).square_().sum(-1).flatten()))
    means, squares = (torch.cat(t).view(v.shape[:2]) for t in zip(*found))
    return means, squares


def _pieces(v: Tensor) -> Iterator[Tensor]:
    """Yield a tensor (rows, blocks, cells) in pieces of `AT_ONCE` cells at most, in order."""
    _, blocks, cells = v.shape
    rows = AT_ONCE // (blocks * cells)
    for piece in v.split(max(1, rows)):
        yield from (piece,) if rows else piece.split(AT_ONCE // cells, 1)


def is_large(mean: Tensor, var: Tensor) -> Tensor:
    """Tell which means are so large that float32 would round them by a visible part of the deviation."""
    return torch.addcmul(var, mean, mean, value=-1 / (_OFFSET * _OFFSET)).lt(0)


def any_large(mean: Tensor, var: Tensor) -> bool:
    """Tell whether any mean `is_large`; of tensors without values, none is known to be."""
    if traced.recording is not None or mean.is_meta:
        return False
    return _any_over(_OFFSET, mean, var)


def _any_over(limit: float, mean: Tensor, var: Tensor) -> bool:
    """Tell whether any mean is of more than so many standard deviations."""
    least = 1 / (limit * limit)
    # torch 2.8 has no values of tensors in a transform for Python
    if mean.is_cpu and mean.ndim == 1 and mean.shape[0] <= _FEW_STATISTICS and not in_transform():
        return True in [v - m * m * least < 0 for m, v in zip(mean.tolist(), var.tolist())]
    return bool(torch.addcmul(var, mean, mean, value=-least).lt(0).any())


def chan(means: Tensor, squares: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Combine along the last dim the moments of ``cells`` values each. Not collective."""
    total = cells.sum()
    # relative to one of them: the weighted mean of large numbers would round
    shift = means[..., :1]
    mean = shift[..., 0] + ((means - shift) * cells).sum(-1) / total.clamp(min=1)
    return mean, squares.sum(-1) + ((means - mean.unsqueeze(-1)).square() * cells).sum(-1)


def global_moments(
    local: Callable[[], tuple[Tensor, Tensor]], own: int, count: int, group: Group | None, sums: Tensor | None = None
) -> tuple[Tensor, Tensor, bool]:
    """Return mean and biased variance over ranks, in float64, and whether a mean `is_large`. Collective over the group.

    One reduction. Where a mean is many deviations, the sums of squares would round: then they are summed again about
    the means, which all ranks know by now.

    Parameters
    ----------
    local
        Gives this rank's mean and squared deviations, as `row_moments`.
    own
        Cells of this rank behind each.
    count
        Those of all ranks of the group.
    group
        Ranks that share the statistics; None: this one alone.
    sums
        This rank's `row_sums`, where they are faster.
    """
    if not count or group is None or traced.recording is not None:
        mean, m2 = local()
        if not count:
            return mean, m2 * torch.nan, False
        if group is None:
            return mean, m2 / count, any_large(mean, m2 / count)
        # what a compiler reads may not depend on values: always in two steps
        centre = blocking.all_reduce(mean * (own / count), group)
        return centre, blocking.all_reduce(m2 + own * (mean - centre).square(), group) / count, True
    moments = None
    if sums is None:
        moments = local()
        sums = _sums(*moments, own)
    centre, var = _summed(sums, count, group)
    if not any_large(centre, var):
        return centre, var, False
    mean, m2 = moments or local()
    beside, var = _summed(_sums(mean - centre, m2, own), count, group)
    return centre + beside, var, True


def _sums(mean: Tensor, m2: Tensor, own: int) -> Tensor:
    """Return `row_sums` of rows with these moments."""
    return torch.stack((mean * own, torch.addcmul(m2, mean, mean, value=own)))


def _summed(sums: Tensor, count: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over ranks, by the sums of values and of squares. Collective over the group."""
    centre, squares = blocking.all_reduce(sums, group, in_place=True).mul_(1 / count).unbind()
    return centre, squares.addcmul_(centre, centre, value=-1)


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of ``a`` and of ``a * b`` along each row, in float64, below each other. Not collective."""
    if not a.numel():
        return torch.zeros((2, a.shape[0]), dtype=torch.float64, device=a.device)
    if a.dtype is b.dtype and is_summed_in_place(a):
        # of a norm by given statistics, 0 and 1, the gradients of weights: row after row both sums, from the cache
        rows = a.shape[0]
        zeros, ones = a.new_zeros(rows), a.new_ones(rows)
        both = _torch_backward(
            a.unsqueeze(0), b.unsqueeze(0), None, zeros, ones, None, None, False, 0.0, (False, True, True)
        )
        return torch.stack((both[2], both[1])).double()
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    sums = torch.sum(a, 1, dtype=wide)
    if a.is_cpu and a.shape[1] >= BLOCK:
        # row by row: copies of one row at a time
        products = torch.stack([torch.dot(p.to(wide), q.to(wide)) for p, q in zip(a, b)])
    elif a.is_cpu and traced.recording is None:
        per = max(1, AT_ONCE // a.shape[1])
        products = torch.cat([torch.linalg.vecdot(p.to(wide), q.to(wide)) for p, q in zip(a.split(per), b.split(per))])
    else:
        products = torch.linalg.vecdot(a.to(wide), b.to(wide))
    return torch.stack((sums, products)).double()
