"""Forward mode on ShardTensors: tangents equal those of the whole tensor, in any layout, and under reverse mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import mpishard as ms
from mpishard.ops.window import conv
from tests.compare import WORLD, gathered, layouts, mesh_of, shard

SHAPE = (1, 4, 11, 6)


def values(seed):
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X, T, W = values(1), values(2), torch.linspace(-1, 1, 216, dtype=torch.float64).view(6, 4, 3, 3)

FUNCTIONS = {
    "pointwise": lambda x: torch.tanh(x) * x,
    "conv2d": lambda x: F.conv2d(x, W, padding=1),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, W.movedim(0, 1), stride=2),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "mean": lambda x: x.square().mean((0, 2)),
    "group_norm and softmax": lambda x: F.group_norm(x, 2).softmax(2),
    "fft": lambda x: torch.fft.rfft(x, dim=2).abs(),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "matmul": lambda x: x.flatten(2).transpose(1, 2) @ W.flatten(1)[:4, :3],
    "redistribute": lambda x: x.redistribute(placements=[ms.Shard(1)] * x.mesh.ndim) ** 2 if is_sharded(x) else x**2,
}


def is_sharded(x):
    return isinstance(x, ms.ShardTensor)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tangent_is_that_of_the_whole_tensor(name):
    f = FUNCTIONS[name]
    with forward_ad.dual_level():
        expected = forward_ad.unpack_dual(f(forward_ad.make_dual(X, T)))
    for mesh, placements, sizes in list(layouts(SHAPE, (2, 3)))[::3]:
        x, t = (shard(v, mesh, placements, sizes) for v in (X, T))
        elsewhere = shard(T, mesh, (ms.Replicate(),) * mesh.ndim)
        for tangent in (t, T, elsewhere):
            with forward_ad.dual_level():
                got = forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent)))
            assert got.tangent.placements == got.primal.placements
            for ours, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(gathered(ours), theirs, msg=lambda m: f"{placements} {sizes}: {m}")


def test_reverse_over_forward():
    """The product of a Hessian and a vector, in both modes together."""
    mesh = mesh_of((WORLD.size,))
    x, t = shard(X, mesh, [ms.Shard(2)], requires_grad=True), shard(T, mesh, [ms.Shard(2)])
    with forward_ad.dual_level():
        slope = forward_ad.unpack_dual(F.conv2d(forward_ad.make_dual(x, t), W).pow(3).sum()).tangent
        (got,) = torch.autograd.grad(slope, x)
    _, expected = torch.autograd.functional.hvp(lambda x: F.conv2d(x, W).pow(3).sum(), X, T)
    torch.testing.assert_close(gathered(got), expected)


BACKWARD = {
    **{name: FUNCTIONS[name] for name in ("pointwise", "conv2d", "conv_transpose2d", "max_pool2d", "interpolate")},
    "layer_norm": lambda x: F.layer_norm(x, (4, 11, 6)),
    "instance_norm": F.instance_norm,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("cells", [0, 1 << 17])
@pytest.mark.parametrize("name", BACKWARD)
def test_forward_over_reverse(name, cells, monkeypatch):
    """The cotangent is dual, of a graph that was made before."""
    monkeypatch.setattr(conv, "LARGE_CELLS", cells)
    mesh = ms.init_mesh((WORLD.size,))
    out = []
    for x in (X.clone().requires_grad_(), shard(X, mesh, [ms.Shard(2)], requires_grad=True)):
        y = BACKWARD[name](x)
        with forward_ad.dual_level():
            g = forward_ad.make_dual(torch.cos(y.detach()), torch.sin(y.detach()))
            out.append(forward_ad.unpack_dual(torch.autograd.grad(y, x, g)[0]))
    for ours, theirs in zip(out[1], out[0], strict=True):
        torch.testing.assert_close(gathered(ours), theirs)
    mesh.free()


def test_a_partial_tangent_is_summed():
    mesh = mesh_of((WORLD.size,))
    x = shard(X, mesh, [ms.Replicate()])
    part = ms.ShardTensor.from_local(T * (mesh.rank + 1), mesh, [ms.Partial()])
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(forward_ad.make_dual(x, part) * 2).tangent
    torch.testing.assert_close(gathered(tangent), T * mesh.size * (mesh.size + 1))


def test_a_tensor_without_a_tangent():
    x = shard(X, mesh_of((WORLD.size,)), [ms.Shard(2)])
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(x)
    assert tangent is None
    torch.testing.assert_close(gathered(primal), X)


def test_a_tangent_of_another_shape():
    x = shard(X, mesh_of((WORLD.size,)), [ms.Shard(2)])
    with forward_ad.dual_level(), pytest.raises(ms.LayoutError, match="another shape"):
        forward_ad.make_dual(x, T[..., :5])


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(f)(x),
        lambda f, x: torch.func.vjp(f, x)[1](torch.ones((), dtype=x.dtype)),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.vmap(f)(x),
    ],
)
def test_function_transforms_are_refused(transform):
    x = shard(X, mesh_of((WORLD.size,)), [ms.Shard(2)])
    with pytest.raises((ms.UnsupportedOperationError, ms.NoShardingRule), match=r"(?s)torch\.func.*torch\.autograd"):
        transform(lambda x: (x * x).sum(), x)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.amax(0),
        lambda x: x.max(),
        lambda x: x.min(0).values,
        lambda x: torch.aminmax(x, dim=0).min,
        lambda x: (x > 3).amax(0),
        lambda x: torch.bincount(x[:, 0]),
        lambda x: F.one_hot(x, 7),
        torch.unique,
        lambda x: x.cumsum(0),
    ],
)
def test_integers_in_a_level(f):
    """What has no derivative is computed as outside."""
    x = torch.arange(26).reshape(13, 2) % 7
    expected = f(x)
    for mesh, placements, sizes in list(layouts(x.shape, (0, 1)))[::3]:
        with forward_ad.dual_level():
            got = f(shard(x, mesh, placements, sizes))
        torch.testing.assert_close(gathered(got), expected)
