"""Redistribution between any two placements: values, and gradients by the placement rule."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

import mpishard as ms
from mpishard.autograd import redistribute as autograd
from mpishard.autograd.linear import apply
from mpishard.comm import guard
from mpishard.comm.collective import transfer
from mpishard.comm.transport import host
from mpishard.layout import layout_of
from mpishard.testing import dot_test
from tests.compare import WORLD, mesh_of, mesh_shapes

SHAPE = (5, 6, 3)
KINDS = (ms.Shard(0), ms.Shard(1), ms.Replicate(), ms.Partial())


def pairs(mesh_ndim):
    every = list(itertools.product(KINDS, repeat=mesh_ndim))
    both = list(itertools.product(every, every))
    return both if mesh_ndim == 1 else both[::5]


def held(full, layout, mesh):
    """What a rank holds of ``full``; of a Partial, shares that add up to it."""
    block = full[tuple(slice(lo, hi) for lo, hi in layout.box(mesh.coords))]
    for m in layout.partial_dims:
        block = block * (2.0 * (mesh.coords[m] + 1) / (mesh.shape[m] * (mesh.shape[m] + 1)))
    return block.clone()


def test_every_pair_of_placements_keeps_the_value():
    full = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    whole = [ms.Replicate()]
    for mesh_shape in mesh_shapes(2):
        mesh = mesh_of(mesh_shape)
        everywhere = layout_of(mesh.shape, whole * mesh.ndim, SHAPE)
        for before, after in pairs(mesh.ndim):
            source, target = layout_of(mesh.shape, before, SHAPE), layout_of(mesh.shape, after, SHAPE)
            local = autograd.redistribute(held(full, source, mesh), mesh, source, target)
            assert tuple(local.shape) == target.local_shape(mesh.coords), (before, after)
            back = autograd.redistribute(local, mesh, target, everywhere)
            torch.testing.assert_close(back, full, rtol=1e-12, atol=1e-12, msg=f"{before} -> {after}")


def test_gradients_follow_the_placement_rule():
    """d/dx of <w, x> is w, in the layout of x, whatever the way in between."""
    generator = torch.Generator().manual_seed(6)
    full = torch.randn(SHAPE, dtype=torch.float64, generator=generator)
    w = torch.randn(SHAPE, dtype=torch.float64, generator=generator)
    for mesh_shape in mesh_shapes(2):
        mesh = mesh_of(mesh_shape)
        for before, after in pairs(mesh.ndim):
            if ms.Partial() in before:
                continue
            x = ms.distribute_tensor(full, mesh, before).requires_grad_()
            y = x.redistribute(after)
            loss = (y.full_tensor() * w).sum()
            loss.backward()
            torch.testing.assert_close(x.grad.full_tensor(), w, rtol=1e-12, atol=1e-12, msg=f"{before} -> {after}")
            assert x.grad.placements == x.placements


def test_partial_gets_the_cotangent_of_the_sum():
    mesh = mesh_of((-1,))
    layout = layout_of(mesh.shape, (ms.Partial(),), (4,))
    for target in (ms.Replicate(), ms.Shard(0)):
        local = torch.full((4,), float(mesh.rank), requires_grad=True)
        y = autograd.redistribute(local, mesh, layout, layout_of(mesh.shape, (target,), (4,)))
        weights = torch.arange(4.0)
        start, stop = layout_of(mesh.shape, (target,), (4,)).box(mesh.coords)[0]
        (g,) = torch.autograd.grad(y, local, weights[start:stop])
        assert torch.equal(g, weights)


def test_each_step_is_the_adjoint_of_its_adjoint():
    """Where no cell is replicated, the placement rule is the plain adjoint."""
    generator = torch.Generator().manual_seed(7)
    for mesh_shape in mesh_shapes(2):
        mesh = mesh_of(mesh_shape)
        sharded = [ms.Shard(0), ms.Shard(1), ms.Shard(2)]
        for before, after in itertools.product(itertools.product(sharded, repeat=mesh.ndim), repeat=2):
            source, target = layout_of(mesh.shape, before, SHAPE), layout_of(mesh.shape, after, SHAPE)
            x = torch.randn(source.local_shape(mesh.coords), dtype=torch.float64, generator=generator)
            result = dot_test(
                lambda t, s=source, g=target: autograd.redistribute(t, mesh, s, g) * 1, x, mesh=mesh, rtol=1e-13
            )
            assert result, f"{before} -> {after}: {result!r}"


def test_second_derivatives_and_forward_mode():
    mesh = mesh_of((-1,))
    full = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    for before, after in itertools.product((ms.Shard(0), ms.Shard(1), ms.Replicate()), repeat=2):
        x = ms.distribute_tensor(full, mesh, (before,)).requires_grad_()
        y = x.redistribute((after,))
        (g,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), x)
        torch.testing.assert_close(h.full_tensor(), 36 * full**3, rtol=1e-10, atol=1e-10, msg=f"{before} -> {after}")
        with torch.autograd.forward_ad.dual_level():
            layouts = [layout_of(mesh.shape, (p,), SHAPE) for p in (before, after)]
            block = held(full, layouts[0], mesh)
            dual = torch.autograd.forward_ad.make_dual(block, 2 * block)
            out = torch.autograd.forward_ad.unpack_dual(autograd.redistribute(dual, mesh, *layouts))
            torch.testing.assert_close(out.tangent, 2 * out.primal)


def test_use_sums_over_ranks():
    mesh = mesh_of((-1,))
    step = autograd.use_step(mesh, (0,))
    w = torch.ones(3, requires_grad=True)
    (g,) = torch.autograd.grad(apply(step, w), w, torch.full((3,), float(mesh.rank + 1)))
    assert torch.equal(g, torch.full((3,), mesh.size * (mesh.size + 1) / 2))


@pytest.mark.ranks(2, 3, 4)
def test_what_travels():
    mesh = mesh_of((-1,))
    n = 4 * mesh.size
    x = ms.distribute_tensor(torch.zeros(n, n), mesh, (ms.Shard(0),))
    with ms.comm_counter() as count:
        x.redistribute((ms.Shard(1),))
    assert count.messages == mesh.size - 1
    assert count.nbytes == 4 * 4 * 4 * (mesh.size - 1)
    whole = ms.distribute_tensor(torch.zeros(n, n), mesh, (ms.Replicate(),))
    with ms.comm_counter() as count:
        whole.redistribute((ms.Shard(1),))
    assert count.messages == 0


def total(y):
    return y.sum().full_tensor() if isinstance(y, ms.ShardTensor) else y.sum()


def gradient_of_jvp(x, w):
    return torch.func.grad(
        lambda w: torch.func.jvp(lambda w: total((x * (w * w)) ** 2), (w,), (torch.ones_like(w),))[1]
    )(w)


def gradient_in_a_gradient(x, w):
    def inner(w):
        # w * w is the outer transform's
        return torch.func.grad(lambda z: (total(x * (w * w) + w[0] * w[1]) * z).sum())(torch.ones_like(w)).sum()

    return torch.func.grad(inner)(w)


def transposed_jvp(x, w):
    v = w.clone().requires_grad_()
    with torch.autograd.forward_ad.dual_level():
        y = total((x * torch.autograd.forward_ad.make_dual(w, v)) ** 2)
        return torch.autograd.grad(torch.autograd.forward_ad.unpack_dual(y).tangent, v)[0]


@pytest.mark.parametrize("f", [gradient_of_jvp, gradient_in_a_gradient, transposed_jvp])
def test_use_sums_what_no_requires_grad_tells_of(f):
    mesh = mesh_of((-1,))
    full, w = torch.arange(12.0, dtype=torch.float64).view(4, 3) / 5, torch.tensor([1.0, 2.0, 3.0]).double()
    torch.testing.assert_close(f(ms.distribute_tensor(full, mesh, (ms.Shard(0),)), w), f(full, w))


@pytest.mark.ranks(2, 3)
def test_a_transfer_lays_out_what_arrives_as_it_is_asked_to():
    mesh, shape = mesh_of((WORLD.size,)), (4, 2, 9, 10)
    full = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    source, target = (layout_of(mesh.shape, (ms.Shard(d),), shape) for d in (2, 3))
    step = autograd.transfer_step(mesh, source, target, inner=(2,), inner_back=(1, 2))
    x = held(full, source, mesh).requires_grad_()
    y = apply(step, x)
    assert torch.equal(y, held(full, target, mesh))
    assert y.permute(0, 1, 3, 2).is_contiguous()
    (g,) = torch.autograd.grad(y, x, 2 * y.detach())
    assert torch.equal(g, 2 * x.detach())
    assert g.permute(0, 3, 1, 2).is_contiguous()


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.cat([x, x]),
        lambda x: torch.roll(x, 1, 0),
        lambda x: x.redistribute(placements=(ms.Shard(1),)),
        lambda x: x.reshape(-1),
        lambda x: x.sort(0)[0],
        lambda x: torch.nn.functional.pad(x, (1, 1, 2, 2)),
        lambda x: x.cumsum(0),
    ],
)
def test_zeros_that_own_no_memory_travel(f):
    """Of ``sgn`` torch's gradient is such, and so are its views, whose addresses are not zero."""
    x = ms.distribute_tensor(torch.linspace(-1, 1, 40).reshape(8, 5), mesh_of((-1,)), (ms.Shard(0),)).requires_grad_()
    torch.sgn(f(x)).sum().backward()
    assert not x.grad.full_tensor().any()


@pytest.mark.parametrize(("ndim", "dtype"), [(65, torch.float32), (64, torch.complex64), (66, torch.complex128)])
def test_replicas_of_more_dims_than_torch_sums_over_are_compared(ndim, dtype, monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", True)
    x = ms.distribute_tensor(torch.ones((1,) * ndim, dtype=dtype), ms.init_mesh((-1,)), [ms.Replicate()])
    assert x.shape == (1,) * ndim


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(("module", "name"), [(host, "room_for"), (transfer, "_move")], ids=["copies", "own"])
def test_memory_that_ends_inside_leaves_nothing_under_way(monkeypatch, module, name):
    """What was to be received stayed behind in memory that was freed, and took the next call's messages."""
    mesh = ms.init_mesh((-1,), ("x",))
    full = torch.arange(7.0 * 9).view(7, 9)
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0),))
    for turned in (False, True):
        given = x.t().contiguous().t() if turned else x
        with monkeypatch.context() as patch:
            patch.setattr(module, name, mock.Mock(side_effect=MemoryError("no more")))
            with pytest.raises(MemoryError, match="no more"):
                given.redistribute(placements=(ms.Shard(1),))
        for factor in (2, 3):
            y = (given * factor).redistribute(placements=(ms.Shard(1),))
            assert torch.equal(y.full_tensor(), factor * full)
