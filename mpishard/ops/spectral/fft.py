"""Discrete Fourier transforms: each dim is transformed while it is whole; sharded dims swap places with others.

Dims that are whole are transformed first, all together. Then another dim is cut in place of a sharded one, by one
exchange, and the result stays so: an inverse transform starts there and ends where the first began. It is brought back
to the placements of the argument only where it would be cut less evenly. See `mpishard.layout.plan_route`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.linear import LocalMap, Step, apply, in_transform, pair
from mpishard.autograd.redistribute import transfer_step
from mpishard.comm import traced
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout, Trip, layout_of, plan_route
from mpishard.ops.rule.dim import frozen, normal_dim, on_domain
from mpishard.ops.spectral.pencils import Turn, joined
from mpishard.tensor.notice import notice_gather
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap

Transform = Callable[..., Tensor]


class Family(NamedTuple):
    """The transforms of one kind, of any number of dims.

    Attributes
    ----------
    one, whole
        Torch's functions that transform one dim and several.
    others
        The family of the dims but the last, which this one halves or doubles; None where it does neither.
    halves, doubles
        Whether the last dim goes from real to half of a Hermitian result, which comes first; or back, which comes
        last.
    """

    one: Transform
    whole: Transform
    others: Family | None = None
    halves: bool = False
    doubles: bool = False


_FFT = torch.fft
_FORTH = Family(_FFT.fft, _FFT.fftn)
_BACK = Family(_FFT.ifft, _FFT.ifftn)
_FAMILIES = {
    "fft": _FORTH,
    "ifft": _BACK,
    "rfft": Family(_FFT.rfft, _FFT.rfftn, _FORTH, halves=True),
    "ihfft": Family(_FFT.ihfft, _FFT.ihfftn, _BACK, halves=True),
    "irfft": Family(_FFT.irfft, _FFT.irfftn, _BACK, doubles=True),
    "hfft": Family(_FFT.hfft, _FFT.hfftn, _FORTH, doubles=True),
}
_INVERSE = {_FFT.fft: _BACK, _FFT.ifft: _FORTH, _FFT.rfft: _FAMILIES["irfft"], _FFT.ihfft: _FAMILIES["hfft"]}
# the adjoint has the factor of the transform, which torch puts into the other direction of the same name
_ADJOINT_NORM = {None: "forward", "backward": "forward", "forward": "backward"}


class Pass(NamedTuple):
    """Transforms of dims that are whole in a layout: how a block gets there, what to do with it, and what comes out.

    ``shape`` is that of this rank's block of ``after``. ``gathers`` says that no other dim could be cut in that layout.
    """

    arrive: Step | None
    before: Layout
    run: LocalMap
    after: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    gathers: bool


class FourierPlan(NamedTuple):
    """The passes one after the other, how the last block becomes that of the result, and the layout of this.

    ``joined`` is the same in fewer nodes, which leave out zeros: see `mpishard.ops.spectral.pencils`. None where there
    is no such way.
    """

    passes: tuple[Pass, ...]
    leave: Step | None
    out: Layout
    joined: tuple[Pass | Step, ...] | None


def _dims(ndim: int, extents: Any, dims: Any) -> tuple[int, ...]:
    """Return the dims to transform, from the front."""
    if dims is not None:
        return tuple(normal_dim(d, ndim) for d in frozen(dims, 1))
    return tuple(range(ndim) if extents is None else range(ndim - len(extents), ndim))


def _transformed(name: str, func: Transform, x: ShardTensor, extents: Any, dims: Any, norm: Any) -> ShardTensor:
    """Transform ``x``. Collective where a dim to transform is sharded."""
    x = resolved(x)
    mesh = x.mesh
    wanted = None if extents is None else tuple(map(operator.index, frozen(extents, 1)))
    # of more extents than dims, torch has a word
    order = None if dims is None and wanted is not None and len(wanted) > x.ndim else _dims(x.ndim, wanted, dims)
    key = (name, x.sharding, x.dtype, wanted, order, norm, torch.get_default_dtype())
    plan = mesh.plans.get(key)
    if plan is None:
        plan = mesh.plan(key, lambda: _plan(name, func, x, (extents, dims, norm), wanted, order))
    local, layout = x.block, x.sharding
    if plan.joined is not None and traced.recording is None and not in_transform():
        for part in plan.joined:
            local = apply(part, local) if isinstance(part, Step) else _run(part, local)
        return wrap(local, plan.out, mesh)
    for step in plan.passes:
        if step.gathers:
            notice_gather(mesh, layout, step.before, local.itemsize)
        if step.arrive is not None:
            local = apply(step.arrive, local)
        local, layout = _run(step, local), step.after
    return wrap(local if plan.leave is None else apply(plan.leave, local), plan.out, mesh)


def _run(step: Pass, local: Tensor) -> Tensor:
    """Return the transform of a block that has arrived."""
    # torch conjugates some lazily, and refuses to view such a one as real: on ranks with cells alone
    return _of_no_cells(local, step.shape, step.dtype) if 0 in step.shape else step.run(local).resolve_conj()


def _of_no_cells(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the transform of an empty block, which torch refuses (docs/upstream.md)."""
    # a copy as of others: what is written into it is not written into the operand
    return (x.to(dtype) if dtype.is_complex else x.to(dtype.to_complex()).real).reshape(shape).clone()


def _plan(
    name: str, func: Transform, x: ShardTensor, given: tuple[Any, Any, Any], wanted: Any, order: Any
) -> FourierPlan:
    """Plan a transform: in which layouts its dims are whole, and what torch transforms in each.

    The sum is separable: dims are transformed one after the other, each along whole lines::

        X[k0, k1] = sum_n0 w0^(k0 n0) (sum_n1 w1^(k1 n1) x[n0, n1]),    w = exp(-2 pi i / N), inverse: conj(w)

    So dims that are whole go first, all in one call of torch; then a sharded one becomes whole, as another is cut in
    its place, by one exchange among the ranks along that mesh dim (a transpose). `plan_route` finds the cheapest way::

        two ranks, Shard(0)        Shard(1)             Shard(0)
        0 0 0 0                    0 0 1 1              0 0 0 0
        0 0 0 0    transform   ->  0 0 1 1  transform   0 0 0 0
        1 1 1 1    dim 1 (rows)    0 0 1 1  dim 0   ->  1 1 1 1
        1 1 1 1                    0 0 1 1  (columns)   1 1 1 1

    Order matters where a result is real, or half of a Hermitian one, ``X[N - k] = conj(X[k])``, of which
    ``N // 2 + 1`` cells are kept. `rfft` and `ihfft` halve the last dim named: that one goes first, from real cells,
    and the others, complex, as `fft` or `ifft`. `irfft` and `hfft` are their inverses: it goes last.

    A dim is cut, or filled up with zeros, to its length in ``wanted`` as it is transformed (of `irfft`: the length
    of the real result). ``norm`` is a factor per dim, so each pass has that of its own dims. Shape, dtype and errors
    are those of torch's function on a tensor without data.
    """
    layout = x.sharding
    if x.dtype in (torch.float16, torch.bfloat16, torch.complex32):
        # refused on some devices only; an empty block would not meet the error
        torch.fft.ifft(x.block.new_zeros(2))
    # errors, shape and dtype are torch's own
    family = _FAMILIES[name.rstrip("2n")]
    result = on_domain(func, x, *_in_order(family, given, wanted, order))
    shape = tuple(result.shape)
    lengths = {d: shape[d] for d in order}
    if family.halves:
        length = -1 if wanted is None else wanted[-1]
        lengths[order[-1]] = layout.shape[order[-1]] if length == -1 else length
    sizes = [s if n == m else None for s, n, m in zip(layout.sizes, shape, layout.shape)]
    target = layout_of(layout.mesh_shape, layout.placements, shape, sizes)
    trip = Trip(
        layout,
        target,
        order,
        order[-1] if family.halves else None,
        order[-1] if family.doubles else None,
        returns=False,
    )
    passes, ways, turns = [], [], []
    legs = plan_route(trip)
    # torch transforms what is innermost in memory, and copies what is not: blocks arrive so, and cotangents too
    now, inner, is_complex = layout, (), x.is_complex()

    def way(to: Layout, dims: tuple[int, ...]) -> Step | None:
        ways.append((now, to, _inner(dims, x.ndim), _inner(inner, x.ndim)))
        return None if now == to else transfer_step(x.mesh, *ways[-1])

    for leg in legs:
        if order and not leg.dims:
            continue
        last = bool(order) and order[-1] in leg.dims
        dtype = result.dtype if result.is_complex() or (last and family.doubles) else result.dtype.to_complex()
        kind = family if last else family.others or family
        extents, norm = tuple(lengths[d] for d in leg.dims), given[2]
        run = _torch(kind, extents, leg.dims, norm)
        lengths_before = tuple(layout.shape[d] for d in leg.dims)
        if kind.halves:
            run = _halving(run, kind, lengths_before, extents, leg.dims, norm)
        turn = None
        if is_complex and not kind.halves and not kind.doubles:
            adjoint = _adjoint(kind, lengths_before, extents, leg.dims, norm)
            turn = Turn(run, adjoint, *(t.local_shape(x.mesh.coords) for t in (leg.before, leg.after)))
        turns.append(turn)
        is_complex = True
        passes.append(
            Pass(
                way(leg.before, leg.dims),
                leg.before,
                run,
                leg.after,
                leg.after.local_shape(x.mesh.coords),
                dtype,
                len(leg.before.sharded_mesh_dims) < len(layout.sharded_mesh_dims),
            )
        )
        now, inner = leg.after, leg.dims
    leave = way(legs[-1].after, ())
    fewer = _joined(x.mesh, x.dtype, tuple(passes), ways, turns, family.halves)
    return FourierPlan(tuple(passes), leave, legs[-1].after, fewer)


def _joined(
    mesh: CartMesh,
    given: torch.dtype,
    passes: tuple[Pass, ...],
    ways: Sequence[tuple[Any, ...]],
    turns: Sequence[Turn | None],
    halves: bool,
) -> tuple[Pass | Step, ...] | None:
    """Return transforms and transfers in fewer nodes; None where a transfer cannot leave out zeros.

    A transfer is joined by the transform before it, whose zeros are in what is given, and the last by that after it
    too; in a transform to half a result by those after, whose zeros are in cotangents.
    """
    parts: list[Pass | Step] = []
    moves = [i for i, (now, to, *_) in enumerate(ways) if now != to]
    if not moves or any(step.gathers for step in passes):
        return None
    for i, way in enumerate(ways):
        before = after = None
        if i in moves:
            before = turns[i - 1] if i and not halves else None
            after = turns[i] if i < len(passes) and (halves or i == moves[-1]) else None
            if before is not None:
                parts.pop()
            step = joined(mesh, *way, passes[i - 1].dtype if i else given, (before, after))
            if step is None:
                return None
            parts.append(step)
        if i < len(passes) and after is None:
            parts.append(passes[i])
    return tuple(parts)


def _inner(dims: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Return dims to transform that are not innermost anyway, in the order in which they lie in memory."""
    dims = tuple(sorted(dims))
    return () if dims == tuple(range(ndim - len(dims), ndim)) else dims


def _in_order(family: Family, given: tuple[Any, Any, Any], wanted: Any, order: Any) -> tuple[Any, Any, Any]:
    """Return arguments of the same result, and errors, whose dims count up where their order is free.

    Of others torch 2.8 does not know the shape (docs/upstream.md).
    """
    if not order or isinstance(given[1], int) or len(order) != len(wanted or order):
        return given
    free = len(order) - (family.halves or family.doubles)
    places = [*sorted(range(free), key=order.__getitem__), *range(free, len(order))]
    return (wanted and tuple(wanted[i] for i in places), tuple(order[i] for i in places), given[2])


def _torch(kind: Family, extents: tuple[int, ...], dims: tuple[int, ...], norm: str | None) -> LocalMap:
    """Return torch's transform of dims."""
    if len(dims) == 1:
        # of one real dim, torch's function of one dim computes half of what that of several does
        return lambda x: kind.one(x, extents[0], dims[0], norm)
    return lambda x: kind.whole(x, extents, dims, norm)


def _halving(
    forward: LocalMap,
    kind: Family,
    given: tuple[int, ...],
    extents: tuple[int, ...],
    dims: tuple[int, ...],
    norm: str | None,
) -> LocalMap:
    """Return ``forward``, from real cells to half of a Hermitian result, with a cheaper backward than torch's.

    ``X = F x`` keeps ``N // 2 + 1`` cells, and the cotangent of x is ``Re(F^H G)``. A transform back to real cells
    computes that; it counts each cell but the first and, of an even length, the last twice, so those are halved
    before. Torch fills up ``G`` with zeros and transforms all of it, from complex to complex: ten times the work.
    """
    back = _torch(_INVERSE[kind.one], extents, dims, _ADJOINT_NORM.get(norm, norm))
    single = [0] if extents[-1] % 2 else [0, extents[-1] // 2]

    def adjoint(g: Tensor) -> Tensor:
        # one pass over real and imaginary parts; a compiler's tensors are of its own kind, so nothing is kept
        parts = torch.view_as_real(g.resolve_conj())
        weights = parts.new_full((extents[-1] // 2 + 1, *[1] * (g.ndim - 1 - dims[-1]), 2), 0.5)
        for k in single:
            weights[k] = 1
        halves = torch.view_as_complex(parts * weights)
        return _cut_back(back(halves), dims, given, extents)

    op = pair(forward, adjoint)
    return lambda x: forward(x) if in_transform() else apply(op, x)


def _adjoint(
    kind: Family, given: tuple[int, ...], extents: tuple[int, ...], dims: tuple[int, ...], norm: str | None
) -> LocalMap:
    """Return the adjoint of a transform from complex cells to complex ones."""
    back = _torch(_INVERSE[kind.one], extents, dims, _ADJOINT_NORM.get(norm, norm))
    return lambda g: _cut_back(back(g), dims, given, extents)


def _cut_back(x: Tensor, dims: tuple[int, ...], given: tuple[int, ...], extents: tuple[int, ...]) -> Tensor:
    """Return the cotangent of what a transform cut off, or filled up with zeros, to its extents."""
    for dim, own, length in zip(dims, given, extents):
        x = x.narrow(dim, 0, min(own, length))
        if own > length:
            x = torch.cat([x, x.new_zeros([*x.shape[:dim], own - length, *x.shape[dim + 1 :]])], dim)
    return x


def _rule_1d(name: str) -> Any:
    func = getattr(torch.fft, name)

    def rule(input: ShardTensor, n: Any = None, dim: int = -1, norm: Any = None) -> ShardTensor:
        return _transformed(name, func, input, n, dim, norm)

    return rule


def _rule_nd(name: str, default: tuple[int, ...] | None) -> Any:
    func = getattr(torch.fft, name)

    def rule(input: ShardTensor, s: Any = None, dim: Any = default, norm: Any = None) -> ShardTensor:
        return _transformed(name, func, input, s, dim, norm)

    return rule


for _name in _FAMILIES:
    implements(getattr(torch.fft, _name), sharded="moves")(_rule_1d(_name))
    implements(getattr(torch.fft, f"{_name}2"), sharded="moves")(_rule_nd(f"{_name}2", (-2, -1)))
    implements(getattr(torch.fft, f"{_name}n"), sharded="moves")(_rule_nd(f"{_name}n", None))


def _shift_rule(sign: int) -> Any:
    def rule(input: ShardTensor, dim: int | Sequence[int] | None = None) -> ShardTensor:
        dims = range(input.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
        own = [normal_dim(d, input.ndim) for d in dims]
        return torch.roll(input, [sign * (input.shape[d] // 2) for d in own], own)

    return rule


implements(torch.fft.fftshift, sharded="moves")(_shift_rule(1))
implements(torch.fft.ifftshift, sharded="moves")(_shift_rule(-1))
