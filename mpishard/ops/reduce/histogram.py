"""Counts and distinct values: found locally, then joined; their results are whole on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.graph import underivable
from mpishard.comm.collective import blocking
from mpishard.ops.rule.dim import gathered, plain, require_dtype, strict_int, whole_along, without
from mpishard.ops.rule.whole import whole
from mpishard.tensor.operand import broadcast_of, fitted, mesh_of, moved, on_mesh, replicated_layout, resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _whole(x: ShardTensor, local: Tensor) -> ShardTensor:
    return wrap(local, replicated_layout(x.mesh, local.shape), x.mesh)


def _over(x: ShardTensor) -> tuple[int, ...]:
    return tuple(m for m in x.sharding.sharded_mesh_dims if x.mesh.shape[m] > 1)


def _summed(x: ShardTensor, local: Tensor) -> ShardTensor:
    """Return the sum over the ranks that hold other cells of ``x``. Collective."""
    over = _over(x)
    return _whole(x, blocking.all_reduce(local, x.mesh.group(over)) if over else local)


def _range(x: ShardTensor) -> tuple[Any, Any]:
    return tuple(t.block.item() for t in torch.aminmax(x)) if x.numel() else (0, 0)


def _weighed(x: ShardTensor, weights: Any) -> tuple[ShardTensor, Tensor]:
    """Return cells and a block with a weight for each, cut as either is. Collective where both are, and differ."""
    _, layout = broadcast_of([x, weights])
    return moved(x, layout), fitted(weights, x.mesh, layout)


def _counted(x: Tensor) -> Any:
    # without bounds: torch looks for them by a kernel of fewer dtypes
    return torch.histogram(x, 1)


@implements(torch.histc, torch.Tensor.histc, sharded="reduction")
def histc(input: ShardTensor, bins: int = 100, min: Any = 0, max: Any = 0) -> ShardTensor:
    """Count cells in bins of equal width. Collective: small all-reduces; the cells stay."""
    x = resolved(input).detach()
    if min == max:
        min, max = _range(x)
        if min == max:
            min, max = min - 1, max + 1
    return _summed(x, torch.histc(x.block, bins, min, max))


@implements(torch.histogram, torch.Tensor.histogram, sharded="reduction")
def histogram(
    input: ShardTensor, bins: Any = 100, *, range: Any = None, weight: Any = None, density: bool = False
) -> Any:
    """Count (or weigh) cells in bins. Collective: small all-reduces; the cells stay."""
    own = on_mesh(input, mesh_of((input, bins, weight)))
    if range is None and not isinstance(bins, Tensor):
        require_dtype(own, _counted)
    if weight is not None:
        if tuple(weight.shape) != tuple(own.shape):
            # torch compares the numbers of cells alone
            nothing = torch.zeros((), device="cpu")
            torch.histogram(nothing.expand(own.shape), 1, weight=nothing.expand(weight.shape))
            weight = weight.reshape(own.shape)
        own, weight = _weighed(own, resolved(weight))
    x = own.detach()
    operands = [own.block]
    options: dict[str, Any] = {}
    if weight is not None:
        operands.append(weight)
        options["weight"] = weight.detach()
    if isinstance(bins, Tensor):
        bins = plain(bins)
        operands.append(bins)
        bins = bins.detach()
    else:
        options["range"] = (_range(x) if x.numel() else (0, 1)) if range is None else range
    counts, edges = torch.histogram(x.block, bins, **options)
    total = _summed(x, counts).block
    if density:
        total = total / total.sum() / edges.diff()
    found = (_whole(x, underivable("aten::histogram", t, operands)) for t in (total, edges))
    return torch.return_types.histogram(tuple(found))


@implements(torch.bincount, torch.Tensor.bincount, sharded="reduction")
def bincount(input: ShardTensor, weights: Any = None, minlength: int = 0) -> ShardTensor:
    """Count (or weigh) every value of a vector of integers. Collective: small all-reduces; the cells stay."""
    x, minlength = on_mesh(input, mesh_of((input, weights))), strict_int(minlength)
    require_dtype(x, torch.bincount)
    lo, hi = _range(x)
    if x.ndim != 1 or lo < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if minlength < 0:
        raise RuntimeError("minlength should be >= 0")
    if weights is None:
        count = torch.bincount(x.block, minlength=max(minlength, hi + 1 if x.numel() else 0))
        return _summed(x, count)
    if tuple(weights.shape) != tuple(x.shape):
        raise RuntimeError("weights should be 1-d and have the same length as input")
    own = resolved(weights)
    x, cells = _weighed(x, own.detach())
    n = max(minlength, hi + 1 if x.numel() else 0)
    result = torch.bincount(x.block.new_zeros(1), cells.new_zeros(1)).dtype
    sums = _summed(x, torch.bincount(x.block, cells, n).to(result))
    return _whole(x, underivable("aten::bincount", sums.block, [own.block if isinstance(own, ShardTensor) else own]))


def _joined(x: ShardTensor, local: Tensor) -> Tensor:
    """Return what the ranks hold along dim 0, one after the other. Collective over the ranks with other cells."""
    over = _over(x)
    if not over:
        return local
    group = x.mesh.group(over)
    counts = blocking.gather_counts("distinct values", local.shape[0], group, x.shape)
    return blocking.all_gather(local.contiguous(), group, 0, tuple(counts.tolist()))


def unique(
    input: ShardTensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: Any = None
) -> Any:
    """Return the distinct values, sorted. Collective: each rank's distinct values travel, not the cells.

    With ``dim``, the tensor is gathered. The inverse is sharded as the tensor is. Every NaN is a value of its own, as
    torch has it; they are numbered by rank.
    """
    torch.unique(
        torch.empty(0, device="cpu"), sorted=sorted, return_inverse=return_inverse, return_counts=return_counts
    )  # its word
    given = resolved(input)
    x = given.detach()
    if dim is not None:
        return _unique_slices(torch.unique, given, dim, return_inverse, return_counts, sorted=sorted)
    own, counts = torch.unique(x.block, return_counts=True)
    every = _joined(x, own)
    values, place = torch.unique(every, return_inverse=True)
    found: list[Any] = [_whole(x, underivable("unique", values, [given.block]))]
    if return_inverse:
        found.append(wrap(_positions(x, values), x.sharding, x.mesh))
    if return_counts:
        total = torch.zeros(values.shape, dtype=counts.dtype, device=counts.device)
        found.append(_whole(x, total.index_add(0, place, _joined(x, counts))))
    return tuple(found) if len(found) > 1 else found[0]


def _positions(x: ShardTensor, values: Tensor) -> Tensor:
    """Return where each cell is among the sorted distinct values. Collective where there are NaN."""
    cells = x.block.contiguous()
    if values.dtype == torch.bool:
        values, cells = values.to(torch.uint8), cells.to(torch.uint8)
    # NaN come last, and no search finds its way among them
    count = values.numel() - int(values.isnan().sum())
    found = torch.searchsorted(values[:count], cells)
    if count == values.numel():
        return found
    odd = cells.isnan()
    own, over = int(odd.sum()), _over(x)
    before = 0
    if over:
        group = x.mesh.group(over)
        before = int(blocking.gather_counts("NaN", own, group, x.shape)[: group.rank].sum())
    found[odd] = count + before + torch.arange(own, device=found.device)
    return found


def _unique_slices(func: Any, x: ShardTensor, dim: Any, inverse: bool, counts: bool, **options: Any) -> Any:
    found = whole(lambda t: func(t, return_inverse=inverse, return_counts=counts, dim=dim, **options), (x,))
    if inverse and dim is None:
        values, places, *rest = found
        return values, moved(places, x.sharding), *rest
    return found


def unique_consecutive(
    input: ShardTensor, return_inverse: bool = False, return_counts: bool = False, dim: Any = None
) -> Any:
    """Return the values without repetitions of neighbours. Collective: the tensor is gathered."""
    return _unique_slices(torch.unique_consecutive, resolved(input), dim, return_inverse, return_counts)


implements(*spellings("unique"), sharded="gathers")(unique)
implements(*spellings("unique_consecutive"), sharded="gathers")(unique_consecutive)


@implements(torch.histogramdd, sharded="gathers")
def histogramdd(input: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    """Count (or weigh) points in boxes. Collective: small all-reduces; the points stay, their coordinates are gathered.

    The counts are whole on every rank.
    """
    if input.ndim < 2:
        raise RuntimeError("torch.histogramdd: input tensor should have at least 2 dimensions")
    edges = [gathered(b) for b in bins] if isinstance(bins, (tuple, list)) else bins
    own = on_mesh(input, mesh_of((input, weight, *(edges if isinstance(edges, list) else ()))))
    if range is None and not (isinstance(edges, list) and isinstance(edges[0], Tensor)):
        require_dtype(own, _counted)
    operands: list[Any] = [own.block]
    x = whole_along(own.detach(), (own.ndim - 1,))
    if isinstance(edges, list):
        edges = [b.block if isinstance(b, ShardTensor) else b for b in edges]
    options: dict[str, Any] = {}
    if weight is not None:
        if tuple(weight.shape) != tuple(x.shape[:-1]):
            nothing = torch.zeros((), device="cpu")
            torch.histogramdd(nothing.expand(x.shape), edges, weight=nothing.expand(weight.shape))
        weight = resolved(weight)
        operands.append(weight.block if isinstance(weight, ShardTensor) else weight)
        points = without(x.sharding, (x.ndim - 1,))
        options["weight"] = fitted(weight.detach(), x.mesh, points)
    if not (isinstance(edges, list) and isinstance(edges[0], Tensor)):
        options["range"] = _ranges(x) if range is None else range
    counts, found = torch.histogramdd(x.block, edges, **options)
    total = _summed(x, counts).block
    if density:
        total = total / total.sum()
        for d, own in enumerate(found):
            total = total / own.diff().view(-1, *[1] * (total.ndim - 1 - d))
    name = "aten::_histogramdd_bin_edges"
    found = tuple(_whole(x, underivable(name, t, operands)) for t in found)
    return torch.return_types.histogramdd((_whole(x, underivable(name, total, operands)), found))


def _ranges(x: ShardTensor) -> list[float]:
    """Return the least and the greatest coordinate along every axis of points."""
    if not x.numel():
        return [0.0, 1.0] * x.shape[-1]
    lead = tuple(range(x.ndim - 1))
    low, high = (t.block.tolist() for t in (x.amin(lead), x.amax(lead)))
    return [float(v) for pair in zip(low, high) for v in pair]
