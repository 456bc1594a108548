"""Normalisation over sharded dims: statistics of the global tensor, one small exchange per pass.

Every one of them is seen as rows: a block of shape (N, C, L), statistics shared by sets of rows. Forward keeps what
torch's own group_norm keeps: the input, mean and 1/std.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function, forward_ad

from mpishard.autograd.bucket import use
from mpishard.autograd.redistribute import sum_partial
from mpishard.comm import collective
from mpishard.comm.mesh import CartMesh, Group
from mpishard.errors import UnsupportedOperationError, described
from mpishard.ops.moments import dots, global_moments, row_moments
from mpishard.ops.reduction import HALVES, counts_over, reduced
from mpishard.tensor.operand import mesh_of, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class Rows(NamedTuple):
    """How a block is seen by one normalisation.

    Attributes
    ----------
    n, c, groups
        Samples, channels and groups of channels of this rank's block; ``groups`` 0: one statistic per channel,
        over all samples.
    count
        Global number of cells per statistic.
    counts
        Cells per statistic on each rank of ``over``.
    over
        Mesh dims whose ranks share statistics.
    used
        Mesh dims over which the weights are used.
    """

    n: int
    c: int
    groups: int
    count: int
    counts: tuple[int, ...]
    over: tuple[int, ...]
    used: tuple[int, ...]

    def shared(self, rows: Tensor) -> Tensor:
        """Sum per-row numbers (n, c) over the rows that share a statistic."""
        return rows.view(self.n, self.groups, -1).sum(2).view(-1) if self.groups else rows.view(self.n, self.c).sum(0)

    def spread(self, stats: Tensor) -> Tensor:
        """Give every row (n, c) the number of its statistic."""
        if self.groups:
            return stats.view(self.n, self.groups, 1).expand(-1, -1, self.c // self.groups).reshape(self.n, self.c)
        return stats.view(1, self.c).expand(self.n, -1)


def local_moments(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return float64 mean and sum of squared deviations of this rank's cells per statistic. Not collective."""
    if rows.groups:
        return row_moments(x.reshape(rows.n * rows.groups, -1))
    mean, m2 = row_moments(x.reshape(rows.n * rows.c, -1))
    mean, m2 = mean.view(rows.n, rows.c), m2.view(rows.n, rows.c)
    if rows.n == 1:
        return mean[0], m2[0]
    if not mean.numel():
        return mean.new_zeros(rows.c), mean.new_zeros(rows.c)
    cells = x.numel() // max(1, mean.numel())
    centre = mean.mean(0)
    return centre, m2.sum(0) + cells * (mean - centre).square().sum(0)


def _scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return x * scale + shift per row, in one pass and in the dtype of ``x``."""
    rows, n = x.reshape(1, scale.numel(), -1), scale.numel()
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    # batch_norm with given statistics is the one vectorised kernel of this form
    y = torch.native_batch_norm(
        rows, scale.reshape(-1), shift.reshape(-1), scale.new_zeros(n), scale.new_ones(n), False, 0.0, 0.0
    )[0]
    # not a view: what a Function returns may be written in place only if it is not one
    return torch.ops.aten._unsafe_view(y, x.shape)


class Normalise(Function):
    """y = (x - mean) / std * weight + bias with statistics over ranks; weight and bias per channel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Rows, mesh: CartMesh, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, mean and biased variance. Collective over ``rows.over``."""
        x = x.contiguous()
        mean, var = global_moments(*local_moments(x, rows), rows.counts, rows.count, _group(mesh, rows))
        rstd = (var + eps).rsqrt()
        scale, offset = rows.spread(rstd), rows.spread(-mean * rstd)
        if weight is not None:
            w = weight.to(scale.dtype)
            scale, offset = scale * w, offset * w
        if bias is not None:
            offset = offset + bias.to(scale.dtype)
        wide = torch.float32 if x.dtype in HALVES else x.dtype
        y = _scaled(x, scale.to(wide), offset.to(wide))
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.rows, ctx.mesh, ctx.eps = rows, mesh, eps
        ctx.mark_non_differentiable(mean, var)
        ctx.set_materialize_grads(False)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Sum per statistic over ranks, then one pass over the block. Collective over ``rows.over``."""
        dy = grads[0]
        x, weight, bias, mean, rstd = ctx.saved_tensors
        rows, mesh = ctx.rows, ctx.mesh
        if dy is None:
            dy = torch.zeros_like(x)
        if torch.is_grad_enabled():
            wanted = [t for t, need in zip((x, weight, bias), ctx.needs_input_grad) if need]
            y = recorded(x, weight, bias, rows, mesh, ctx.eps)
            found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True, materialize_grads=True))
            return *(next(found) if need else None for need in ctx.needs_input_grad[:3]), None, None, None
        dy = dy.contiguous()
        by_one, by_x = (t.view(rows.n, rows.c) for t in dots(dy.view(rows.n * rows.c, -1), x.view(rows.n * rows.c, -1)))
        w = 1.0 if weight is None else weight.to(rstd.dtype)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([rows.shared(by_one * w), rows.shared(by_x * w)])
            if rows.over:
                sums = collective.all_reduce(sums, mesh.group(rows.over))
            along_x = (sums[1] - mean * sums[0]) * rstd / rows.count  # mean of the cotangent times x-hat
            slope = -rstd * rstd * along_x
            offset = -rstd * sums[0] / rows.count - slope * mean
            wide = torch.float32 if x.dtype in HALVES else x.dtype
            scale = (rows.spread(rstd) * w).to(wide)
            dx = _combined(dy, x, scale, rows.spread(slope).to(wide), rows.spread(offset).to(wide))
        if ctx.needs_input_grad[1]:
            dw = ((by_x - rows.spread(mean) * by_one) * rows.spread(rstd)).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = by_one.sum(0).to(bias.dtype)
        return dx, dw, db, None, None, None


def _combined(dy: Tensor, x: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """Return dy * scale + x * slope + offset per row."""
    n = scale.numel()
    if x.dtype in HALVES:
        out = torch.empty_like(x)
        rows = zip(out.view(n, -1), dy.view(n, -1), x.view(n, -1), scale.view(-1), slope.view(-1), offset.view(-1))
        for o, g, v, a, b, c in rows:  # row by row: float32 copies of one row at a time
            o.copy_(torch.addcmul(c, g.float(), a).addcmul_(v.float(), b))
        return out
    out = _scaled(dy, scale, offset)
    out.view(n, -1).addcmul_(x.view(n, -1), slope.reshape(n, 1))
    return out


def _group(mesh: CartMesh, rows: Rows) -> Group | None:
    return mesh.group(rows.over) if rows.over else None


def recorded(x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Rows, mesh: CartMesh, eps: float) -> Tensor:
    """Normalise in operations that autograd records, for gradients of gradients. Collective over ``rows.over``."""
    dims = (2, 3) if rows.groups else (0, 2)
    shape = (rows.n, rows.groups, rows.c // rows.groups, -1) if rows.groups else (rows.n, rows.c, -1)
    if not x.numel():
        shape = (*shape[:-1], 0)
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


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Rows, mesh: CartMesh, eps: float) -> Tensor:
    """Normalise a block. Collective over ``rows.over``."""
    weight = weight if weight is None else use(weight, mesh, rows.used)
    bias = bias if bias is None else use(bias, mesh, rows.used)
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return recorded(x, weight, bias, rows, mesh, eps)
    y: Tensor = Normalise.apply(x, weight, bias, rows, mesh, eps)[0]  # type: ignore[no-untyped-call]
    return y


def _plan_group(x: ShardTensor, groups: int) -> Rows:
    layout, mesh = x._layout, x._mesh
    shape = layout.shape
    if len(shape) < 2 or shape[1] % groups:
        raise RuntimeError(
            f"Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(shape)} and num_groups={groups}"
        )
    per_group = shape[1] // groups
    sizes = layout.sizes[1]
    if sizes is not None and any(s % per_group for s in sizes):
        raise UnsupportedOperationError(
            described(
                "group_norm: input sharded over its channels, across groups",
                expected=f"blocks of whole groups ({per_group} channels each)",
                got=sizes,
                fix="redistribute to a spatial dim, or shard the channels in multiples of a group",
            )
        )
    dims = tuple(range(2, len(shape)))
    over = reduced(layout, dims).over if dims else ()
    local = layout.local_shape(mesh.coords)
    counts = tuple(per_group * c for c in counts_over(mesh, layout, dims, over))
    used = tuple(m for m in layout.sharded_mesh_dims if layout.placements[m].dim != 1)
    return Rows(local[0], local[1], local[1] // per_group, per_group * math.prod(shape[2:]), counts, over, used)


def _per_channel(t: Any, x: ShardTensor) -> Tensor | None:
    """Return this rank's part of a weight or bias; `use` over the other mesh dims is left to the caller."""
    if t is None:
        return None
    layout = x._layout
    if isinstance(t, ShardTensor):
        t = resolved(t)
        if t._layout.is_replicated:
            t = t._local
        else:
            t = t.full_tensor()
    if layout.sizes[1] is None:
        return t
    lo, hi = layout.interval(1, x._mesh.coords)
    dims = layout.shard_dims[1]
    return use(t, x._mesh, dims)[lo:hi]


def autocast_input(x: ShardTensor, probe: Any) -> ShardTensor:
    """Return ``x`` in the dtype that autocast would run the operation in, as ``probe`` of a tiny tensor tells."""
    if not torch.is_autocast_enabled(x._local.device.type):
        return x
    with torch.no_grad():
        dtype = probe(x._local.new_zeros((1, x.shape[1], 2))).dtype
    return x if dtype == x._local.dtype else wrap(x._local.to(dtype), x._layout, x._mesh)


@implements(F.group_norm, torch.group_norm)
def group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> ShardTensor:
    """Normalise over groups of channels and the spatial dims. Collective where a spatial dim is sharded."""
    mesh = mesh_of((input, weight, bias))
    if not isinstance(input, ShardTensor):
        raise _plain_input("group_norm", input)
    x = resolved(input)
    key = ("group_norm", x._layout, num_groups)
    rows = mesh.plans.get(key)
    if rows is None:
        rows = mesh.plans[key] = _plan_group(x, num_groups)
    weight, bias = _per_channel(weight, x), _per_channel(bias, x)
    if not rows.over:
        weight = weight if weight is None else use(weight, mesh, rows.used)
        bias = bias if bias is None else use(bias, mesh, rows.used)
        return wrap(torch.group_norm(x._local, rows.groups, weight, bias, eps), x._layout, mesh)
    x = autocast_input(x, lambda t: torch.group_norm(t, num_groups, weight, bias, eps))
    return wrap(normalised(x._local, weight, bias, rows, mesh, eps), x._layout, mesh)


def _plain_input(name: str, x: Any) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        described(
            f"{name}: a plain input with ShardTensor weights",
            expected="a ShardTensor as input",
            got=type(x).__name__,
            fix="distribute the input, or gather the weights with full_tensor()",
        )
    )
