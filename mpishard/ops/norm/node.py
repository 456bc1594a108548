"""Normalisation of a block by statistics of the global tensor: one small exchange per pass.

Every one of them is seen as rows: a block of shape (N, C, L), statistics shared by sets of rows. Forward keeps what
torch's own group_norm keeps: the input, mean and 1/std.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from mpishard.autograd.bucket import run_deferred
from mpishard.autograd.linear import again, differentiated_again, in_transform, node_of
from mpishard.autograd.redistribute import sum_partial
from mpishard.autograd.use import use
from mpishard.comm import traced
from mpishard.comm.collective import blocking
from mpishard.comm.collective.nonblocking import iall_reduce
from mpishard.comm.mesh import CartMesh, Group
from mpishard.ops.norm.channels_last import (
    are_columns,
    column_dots,
    column_moments,
    column_pieces,
    column_sums,
    columns_combined,
    columns_scaled,
    in_columns,
)
from mpishard.ops.rule.moments import (
    are_few,
    centred_moments,
    chan,
    dots,
    global_moments,
    is_summed_in_place,
    row_moments,
    row_sums,
)
from mpishard.ops.rule.reduction import HALVES

_torch_backward = torch.ops.aten.native_batch_norm_backward.default


class Rows(NamedTuple):
    """How a block is seen by one normalisation.

    Attributes
    ----------
    n, c, groups
        Samples, channels and groups of channels of this rank's block; ``groups`` 0: one statistic per channel,
        over all samples.
    count
        Global number of cells per statistic.
    own
        Cells of this rank per statistic.
    over
        Mesh dims whose ranks share statistics.
    used
        Mesh dims over which the weights are used.
    """

    n: int
    c: int
    groups: int
    count: int
    own: int
    over: tuple[int, ...]
    used: tuple[int, ...]

    @property
    def is_per_channel(self) -> bool:
        """Whether no statistic is shared by channels."""
        return self.groups in (0, self.c)

    @property
    def has_samples(self) -> bool:
        """Whether several samples have statistics of their own."""
        return self.n > 1 and self.groups > 0

    def shared(self, rows: Tensor) -> Tensor:
        """Sum per-row numbers (..., n, c) over the rows that share a statistic."""
        if not self.groups:
            return rows.sum(-2)
        if self.groups == self.c:
            return rows.flatten(-2)
        return rows.unflatten(-1, (self.groups, self.c // self.groups)).sum(-1).flatten(-2)

    def spread(self, stats: Tensor) -> Tensor:
        """Give every row (n, c) the number of its statistic."""
        return self.apart(stats).view(self.n if self.groups else 1, self.c).expand(self.n, -1)

    def apart(self, stats: Tensor) -> Tensor:
        """Give every row the number of its statistic: (..., statistics) to (..., rows). Samples have their own."""
        if self.is_per_channel:
            return stats
        return stats.repeat_interleave(self.c // self.groups, -1)

    def beside(self, stats: Tensor) -> Tensor:
        """Give every row the number of its statistic, in operations with numbers of rows, which broadcast."""
        alike = not self.groups or (self.n == 1 and self.groups == self.c)
        return stats if alike else self.spread(stats)


def local_moments(
    x: Tensor, rows: Rows, of: Callable[[Tensor], tuple[Tensor, Tensor]] = row_moments
) -> tuple[Tensor, Tensor]:
    """Return float64 mean and sum of squared deviations of this rank's cells per statistic. Not collective."""
    length = math.prod(x.shape[2:])
    if are_columns(x):
        mean, m2 = column_moments(x)
        if not rows.groups:
            return mean, m2
        cells = mean.new_full((rows.c // rows.groups,), length)
        return chan(mean.view(rows.groups, -1), m2.view(rows.groups, -1), cells)
    if rows.groups:
        return of(x.reshape(rows.n * rows.groups, rows.c // rows.groups * length))
    mean, m2 = of(x.reshape(rows.n * rows.c, length))
    mean, m2 = mean.view(rows.n, rows.c), m2.view(rows.n, rows.c)
    if rows.n == 1:
        return mean[0], m2[0]
    if not mean.numel():
        return mean.new_zeros(rows.c), mean.new_zeros(rows.c)
    centre = mean.mean(0)
    return centre, m2.sum(0) + length * (mean - centre).square().sum(0)


def _statistics(x: Tensor, rows: Rows, mesh: CartMesh) -> tuple[Tensor, Tensor, bool]:
    """Return what `global_moments` does, of a block. Collective over ``rows.over``."""
    sums, of = None, row_moments
    if are_columns(x):
        sums = column_sums(x) if rows.over and rows.is_per_channel else None
    elif rows.over and x.numel() and (rows.groups or rows.n == 1):
        sums, of = row_sums(x.reshape(rows.n * (rows.groups or rows.c), -1)), centred_moments
    return global_moments(lambda: local_moments(x, rows, of), rows.own, rows.count, _group(mesh, rows), sums)


def _centred(x: Tensor, mean: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return a block less a number near its means, with which products would round, and their means then."""
    if x.dtype != torch.float32 or not x.numel() or x.is_meta:
        return x, mean
    near = mean.float()
    per_row = rows.spread(near).reshape(rows.n, rows.c, *[1] * (x.ndim - 2))
    return x - per_row, mean - near


def _scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return x * scale + shift per row, in one pass and in the dtype of ``x``."""
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if are_columns(x):
        return columns_scaled(x, scale, shift)
    rows, n = x.reshape(1, scale.numel(), -1), scale.numel()
    # batch_norm with given statistics is the one vectorised kernel of this form
    y = torch.native_batch_norm(
        rows, scale.reshape(-1), shift.reshape(-1), scale.new_zeros(n), scale.new_ones(n), False, 0.0, 0.0
    )[0]
    # not a view: what a Function returns may be written in place only if it is not one
    return torch.ops.aten._unsafe_view(y, x.shape)


def _standardised(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Rows, eps: float
) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias in one pass; x has cells.

    Mean and variance are one per row, or per channel where samples share them; weight and bias likewise, or one per
    channel.
    """
    wide = torch.float32 if x.dtype in HALVES else x.dtype
    weight, bias = [t if t is None or t.dtype is wide else t.to(wide) for t in (weight, bias)]
    v, count = x, mean.numel()
    if rows.has_samples:
        v = x.view(1, count, -1)
        weight, bias = (t if t is None or t.numel() == count else t.repeat(rows.n) for t in (weight, bias))
    y = torch.native_batch_norm(v, weight, bias, mean.to(wide), var.to(wide), False, 0.0, eps)[0]
    # not a view: what a Function returns may be written in place only if it is not one
    return y if v is x else torch.ops.aten._unsafe_view(y, x.shape)


Told = Callable[[Tensor, Tensor], None]


class Normalise(Function):
    """y = (x - mean) / std * weight + bias with statistics over ranks; weight and bias per channel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: Rows,
        mesh: CartMesh,
        eps: float,
        told: Told | None,
    ) -> Tensor:
        """Return y; tell mean and biased variance. Collective over ``rows.over``, and as ``told`` is."""
        mean, var, large = _statistics(x, rows, mesh)
        ctx.rows, ctx.mesh, ctx.eps = rows, mesh, eps
        ctx.by_row = not large and _is_by_row(x, weight, bias)
        if ctx.by_row:
            ctx.given = rows.apart(mean.to(x.dtype)), rows.apart(var.to(x.dtype))
        if told is not None:
            # not as results, each of which autograd would wrap; and before a checkpoint has made again what it needs
            told(*(ctx.given if ctx.by_row and not rows.groups else (mean, var)))
        if ctx.by_row:
            ctx.save_for_backward(x, weight, bias)
            return _standardised(x, *ctx.given, weight, bias, rows, eps)
        if rows.is_per_channel and not large and x.numel():
            y = _standardised(x, mean, var, weight, bias, rows, eps)
        else:
            rstd = (var + eps).rsqrt()
            near, beside = _centred(x, mean, rows) if large else (x, mean)
            scale, offset = rows.spread(rstd), rows.spread(-beside * rstd)
            if weight is not None:
                w = weight.to(scale.dtype)
                scale, offset = scale * w, offset * w
            if bias is not None:
                offset = offset + bias.to(scale.dtype)
            wide = torch.float32 if x.dtype in HALVES else x.dtype
            y = _scaled(near, scale.to(wide), offset.to(wide))
        ctx.save_for_backward(x, weight, bias, mean, var)
        ctx.large = large
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Sum per statistic over ranks, then one pass over the block. Collective over ``rows.over``."""
        (dy,) = grads
        x, weight, bias, *moments = ctx.saved_tensors
        rows, mesh = ctx.rows, ctx.mesh
        if differentiated_again():
            composed = partial(recorded, rows=rows, mesh=mesh, eps=ctx.eps)
            return *again(composed, (x, weight, bias), ctx.needs_input_grad[:3], dy), None, None, None, None
        if ctx.by_row:
            return *_backward_by_row(ctx, dy, x, weight), None, None, None, None
        mean, var = moments
        if ctx.large:
            x, mean = _centred(x, mean, rows)
        if are_columns(x):
            dy = in_columns(dy)
            both = column_dots(dy, x).view(2, rows.n, rows.c)
        else:
            dy = dy.contiguous()
            each = (rows.n * rows.c, math.prod(x.shape[2:]))
            both = dots(dy.view(each), x.view(each)).view(2, rows.n, rows.c)
        by_one, along = both.unbind()
        rstd = (var + ctx.eps).rsqrt_()
        # of cotangents times x, those times x-hat
        along.addcmul_(rows.beside(mean), by_one, value=-1).mul_(rows.beside(rstd))
        dx = dw = db = None
        sums = pending = None
        if ctx.needs_input_grad[0]:
            sums = rows.shared(both * (1 if weight is None else weight))
            pending = iall_reduce(sums, mesh.group(rows.over)) if rows.over else None
        # while the sums travel: what only the end of the pass asks for, the gradients of weights
        run_deferred(hides_sums=pending is not None)
        if ctx.needs_input_grad[1]:
            dw = _over_samples(along, weight.dtype)
        if ctx.needs_input_grad[2]:
            db = _over_samples(by_one, bias.dtype)
        if sums is not None:
            wide = torch.float32 if x.dtype in HALVES else x.dtype
            # of the cotangent, the means and those times x-hat are taken away
            means = (sums if pending is None else pending.wait()).mul_(rstd * (-1 / rows.count))
            offset, slope = means.unbind()
            offset.addcmul_(slope.mul_(rstd), mean, value=-1)
            offset, slope = means.to(wide).unbind()
            scale = rows.spread(rstd) if weight is None else rows.spread(rstd) * weight
            dx = _combined(dy, x, scale.to(wide), rows.spread(slope), rows.spread(offset))
        return dx, dw, db, None, None, None, None


def _is_by_row(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Tell whether `_backward_by_row` serves: a block with cells whose rows can be the channels of a batch norm."""
    return is_summed_in_place(x) and all(t is None or t.dtype is x.dtype for t in (weight, bias))


def _backward_by_row(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the cotangents of such a block, in few calls of torch. Collective over ``rows.over``."""
    rows, eps, needs, shape = ctx.rows, ctx.eps, ctx.needs_input_grad, x.shape
    mean, var = ctx.given
    few, columns = are_few(x), are_columns(x)
    if columns:
        dy = in_columns(dy)
    elif rows.has_samples:
        dy, x = (t.reshape(1, mean.numel(), -1) for t in (dy, x))
        weight = None if weight is None else weight.repeat(rows.n)
    else:
        dy, x = _with_own_strides(dy.contiguous()), _with_own_strides(x)
    pieces = zip(column_pieces(dy), column_pieces(x)) if columns and not few else ((dy, x),)
    # with given statistics, the gradients of weights are the sums of cotangents, and of those times x-hat
    found = [_torch_backward(*both, weight, mean, var, None, None, False, eps, (few, True, True)) for both in pieces]
    dx, dw, db = found[0] if len(found) == 1 else (None, *(torch.stack(t).sum(0) for t in list(zip(*found))[1:]))
    sums = pending = None
    if needs[0]:
        # as other ranks' blocks have them
        sums = torch.stack((db, dw)).double()
        if weight is not None:
            sums.mul_(weight)
        if not rows.is_per_channel:
            sums = sums.view(2, rows.n * rows.groups, -1).sum(2)
        pending = iall_reduce(sums, ctx.mesh.group(rows.over)) if rows.over else None
    run_deferred(hides_sums=pending is not None)
    if sums is not None:
        rstd = (var + eps).rsqrt_()
        sums = rows.apart(sums if pending is None else pending.wait())
        if few:
            offset, slope = sums.mul_(rstd).to(x.dtype).unbind()
            dx.add_(torch.native_batch_norm(x, slope, offset, mean, var, False, 0.0, eps)[0], alpha=-1 / rows.count)
        else:
            # one array less to write and to read
            offset, slope = sums.mul_(rstd * (-1 / rows.count)).unbind()
            offset.addcmul_(slope.mul_(rstd), mean, value=-1)
            offset, slope = sums.to(x.dtype).unbind()
            dx = torch.native_batch_norm(dy, weight, offset, torch.zeros_like(mean), var, False, 0.0, eps)[0]
            dx.addcmul_(x, slope.view(-1, *[1] * (x.ndim - 2)))
    if rows.has_samples:
        dx = None if dx is None else dx.view(shape)
        dw, db = (_over_samples(t.view(rows.n, rows.c).double(), x.dtype) for t in (dw, db))
    return dx if needs[0] else None, dw if needs[1] else None, db if needs[2] else None


def _with_own_strides(x: Tensor) -> Tensor:
    """Return a contiguous block with the strides of its shape: torch misreads others (docs/upstream.md)."""
    return x if x.stride() == _row_major(x.shape) else x.view(-1).view(x.shape)


@lru_cache(maxsize=1024)
def _row_major(shape: torch.Size) -> tuple[int, ...]:
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]


def _over_samples(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums of rows (n, c) per channel."""
    return rows.sum(0, dtype=dtype) if len(rows) == 1 else rows.sum(0).to(dtype)


def _combined(dy: Tensor, x: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """Return dy * scale + x * slope + offset per row."""
    n = scale.numel()
    if not x.numel():
        return torch.empty_like(x)
    if x.dtype in HALVES:
        out = torch.empty_like(x)
        rows = zip(*(t.view(n, -1) for t in (out, dy, x)), *(t.reshape(-1) for t in (scale, slope, offset)))
        for o, g, v, a, b, c in rows:  # row by row: float32 copies of one row at a time
            o.copy_(torch.addcmul(c, g.float(), a).addcmul_(v.float(), b))
        return out
    if are_columns(x):
        return columns_combined(dy, x, scale, slope, offset)
    return _scaled(dy, scale, offset).addcmul_(x, slope.reshape(*x.shape[:2], *[1] * (x.ndim - 2)))


def _group(mesh: CartMesh, rows: Rows) -> Group | None:
    return mesh.group(rows.over) if rows.over else None


def recorded(x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Rows, mesh: CartMesh, eps: float) -> Tensor:
    """Normalise in operations that autograd records, for gradients of gradients. Collective over ``rows.over``."""
    dims = (2, 3) if rows.groups else (0, 2)
    length = math.prod(x.shape[2:])
    shape = (rows.n, rows.groups, rows.c // rows.groups, length) if rows.groups else (rows.n, rows.c, length)
    v = x.reshape(shape)
    wide = v.float() if v.dtype in HALVES else v

    def mean_of(t: Tensor) -> Tensor:
        return use(sum_partial(t.sum(dims, keepdim=True), mesh, rows.over) / rows.count, mesh, rows.over)

    centred = wide - mean_of(wide)
    y = (centred * (mean_of(centred * centred) + eps).rsqrt()).to(x.dtype).reshape(x.shape)
    per_channel = (1, rows.c, *[1] * (x.ndim - 2))
    if weight is not None:
        y = y * weight.view(per_channel)
    if bias is not None:
        y = y + bias.view(per_channel)
    return y.to(x.dtype)


_node = node_of(Normalise)


def normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: Rows,
    mesh: CartMesh,
    eps: float,
    told: Told | None = None,
) -> Tensor:
    """Return a normalised block; mean and biased variance are told, if wanted.

    Collective over ``rows.over``, and as ``told`` is.
    """
    if traced.recording is not None:
        y, mean, var = fusible(x, weight, bias, rows, mesh, eps)
        if told is not None:
            told(mean, var)
        return y
    if in_transform():
        if told is not None:
            told(*_statistics(x.detach(), rows, mesh)[:2])
        return recorded(x, weight, bias, rows, mesh, eps)
    # here, as what a node keeps must be what it was given: derivatives of gradients go on from there
    x = x if are_columns(x) else x.contiguous()
    return _node(x, weight, bias, rows, mesh, eps, told)  # type: ignore[no-any-return]


class _Fusible(Function):
    """The same as `Normalise`, in operations that a compiler fuses."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Rows, mesh: CartMesh, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, mean and biased variance. Collective over ``rows.over``."""
        v, dims = _in_statistics(x, rows)
        n = math.prod(v.shape[d] for d in dims)
        # about a number near the mean, which is then exact, and no square of a large one is taken
        near = v.sum(dims, keepdim=True) / max(1, n)
        apart = v - near
        beside = apart.sum(dims, keepdim=True) / max(1, n)
        squares = (apart * apart).sum(dims, keepdim=True).double() - n * beside.double().square()
        own = near.double() + beside.double()
        moments = own.view(-1), squares.view(-1)
        mean, var, _ = global_moments(lambda: moments, rows.own, rows.count, _group(mesh, rows))
        rstd = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.rows, ctx.mesh = rows, mesh
        ctx.mark_non_differentiable(mean, var)
        y = _standard(v, mean, rstd, rows).reshape(x.shape)
        if weight is not None:
            y = y * weight.to(y.dtype).view(_per_channel(x))
        if bias is not None:
            y = y + bias.to(y.dtype).view(_per_channel(x))
        return y.to(x.dtype), mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Sum per statistic over ranks. Collective over ``rows.over``."""
        x, weight, bias, mean, rstd = ctx.saved_tensors
        rows, mesh = ctx.rows, ctx.mesh
        v, dims = _in_statistics(x, rows)
        standard = _standard(v, mean, rstd, rows)
        g = grads[0].to(v.dtype)
        over = [d for d in range(x.ndim) if d != 1]
        dx = dw = db = None
        if ctx.needs_input_grad[1]:
            dw = (g * standard.reshape(x.shape)).sum(over).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = g.sum(over).to(bias.dtype)
        if ctx.needs_input_grad[0]:
            if weight is not None:
                g = g * weight.to(g.dtype).view(_per_channel(x))
            g = g.reshape(v.shape)
            sums = torch.stack([t.sum(dims, keepdim=True) for t in (g, g * standard)]).double()
            if rows.over:
                sums = blocking.all_reduce(sums, mesh.group(rows.over))
            by_one, by_x = (sums / max(1, rows.count)).to(v.dtype)
            dx = (g - by_one - standard * by_x) * rstd.to(v.dtype).view(by_one.shape)
            dx = dx.reshape(x.shape).to(x.dtype)
        return dx, dw, db, None, None, None


def _in_statistics(x: Tensor, rows: Rows) -> tuple[Tensor, tuple[int, ...]]:
    """Return a block in the dtype of the computation, by statistics, and the dims over which these are taken."""
    shape = (rows.n, rows.groups, rows.c // rows.groups, -1) if rows.groups else (rows.n, rows.c, -1)
    wide = x.float() if x.dtype in HALVES else x
    shape = (*shape[:-1], math.prod(x.shape[2:]))
    return wide.reshape(shape), (2, 3) if rows.groups else (0, 2)


def _standard(v: Tensor, mean: Tensor, rstd: Tensor, rows: Rows) -> Tensor:
    shape = (rows.n, rows.groups, 1, 1) if rows.groups else (1, rows.c, 1)
    near = mean.to(v.dtype)
    beside = (mean - near).to(v.dtype)
    return (v - near.view(shape) - beside.view(shape)) * rstd.to(v.dtype).view(shape)


def _per_channel(x: Tensor) -> tuple[int, ...]:
    return (1, x.shape[1], *[1] * (x.ndim - 2))


def fusible(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Rows, mesh: CartMesh, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `normalised` does, in operations that a compiler fuses. Collective over ``rows.over``."""
    return _Fusible.apply(x, weight, bias, rows, mesh, eps)  # type: ignore[no-untyped-call,no-any-return]
