"""Normalisation of shards against that of whole tensors: values, all gradients, running statistics, memory."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpishard as ms
from mpishard.ops.norm import channels_last
from mpishard.ops.rule import moments
from tests.compare import WORLD, compare, gathered, layouts, mesh_of, shard, skew
from tests.ops.windows import field
from tests.release import RELEASE


def values(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def leaf(*shape: int) -> torch.Tensor:
    return values(*shape).requires_grad_()


W, B = leaf(6), leaf(6)
LAST_W, LAST_B = leaf(9, 5), leaf(9, 5)
PARAMS = [W, B, LAST_W, LAST_B]

NORMS = {
    "group": lambda x: F.group_norm(x, 3, W, B),
    "group 1": lambda x: F.group_norm(x, 1, None, None, 1e-3),
    "group all": lambda x: F.group_norm(x, 6, weight=W),
    "instance": lambda x: F.instance_norm(x, None, None, W, B),
    "batch": lambda x: F.batch_norm(x, None, None, W, B, training=True),
    "batch eval": lambda x: F.batch_norm(x, W.detach(), B.detach().abs(), W, B, training=False),
    "batch plain": lambda x: F.batch_norm(x, None, None, training=True),
    "layer": lambda x: F.layer_norm(x, (9, 5), LAST_W, LAST_B),
    "layer last": lambda x: F.layer_norm(x, (5,)),
    "rms": lambda x: F.rms_norm(x, (9, 5), LAST_W),
    "rms last": lambda x: F.rms_norm(x, (5,), None, 1e-3),
    "response": lambda x: F.local_response_norm(x, 3),
    "normalize": lambda x: F.normalize(x, dim=(2, 3)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    x = values(4, 6, 9, 5)
    for i, (mesh, placements, sizes) in enumerate(layouts(x.shape, (2, 0, 3), 2)):
        if i % 3 == 0 or sizes:
            used = [p for p in PARAMS if p.shape == (6,)] if "rms" not in name and "layer" not in name else PARAMS[2:]
            compare(
                NORMS[name],
                [(x, mesh, placements, sizes)],
                used,
                second=i % 2 == 0 and name != "response",
                what=f"{name} {placements} {sizes}",
            )


@pytest.mark.parametrize("few", [0, 130])
@pytest.mark.parametrize("name", ["group", "group 1", "group all", "instance", "batch", "batch plain"])
def test_ways_of_blocks_with_few_and_many_cells_meet(name, few, monkeypatch):
    monkeypatch.setattr(moments, "_FEW", few)
    for samples in (1, 3):
        x = values(samples, 6, 9, 5)
        for mesh, placements, sizes in layouts(x.shape, (2, 0), 1):
            compare(NORMS[name], [(x, mesh, placements, sizes)], [W, B], what=f"{name} {placements} {sizes}")


@pytest.mark.parametrize("name", ["group all", "instance", "batch", "batch eval", "response"])
def test_sharded_channels(name):
    x = values(4, 6, 9, 5)
    for mesh, placements, sizes in layouts(x.shape, (1,), 1):
        compare(NORMS[name], [(x, mesh, placements, sizes)], [W, B], what=f"{name} {placements} {sizes}")


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("shape", [(1, 9, 5, 6), (1, 4, 9, 5, 6), (1, 4, 5, 70), (1, 60, 150, 6)], ids=str)
def test_channels_last(shape, in_pieces, monkeypatch):
    if in_pieces:
        # also where there are few cells
        monkeypatch.setattr(moments, "_FEW", 0)
        monkeypatch.setattr(channels_last, "AT_ONCE", math.prod(shape) // 5)
    scale, shift = leaf(shape[-1]), leaf(shape[-1])
    for norm in (
        lambda x: F.group_norm(x, 2, scale, shift),
        lambda x: F.group_norm(x, 1, scale, shift),
        lambda x: F.batch_norm(x, None, None, scale, shift, True),
    ):
        for mesh, placements, sizes in layouts(shape, (1, 2), 2):
            compare(
                lambda x, norm=norm: norm(x.movedim(-1, 1)),
                [(values(*shape), mesh, placements, sizes)],
                [scale, shift],
                second=math.prod(shape) < 2000,
                what=f"{shape} {placements} {sizes}",
            )
        y = norm(shard(values(*shape), mesh_of((WORLD.size,)), [ms.Shard(1)]).movedim(-1, 1)).to_local()
        if y.numel():
            assert y.movedim(1, -1).is_contiguous()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("track", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_running_statistics(track):
    module = track(6, track_running_stats=True, affine=True).double()
    one, two = mesh_of((WORLD.size,)), mesh_of((2, WORLD.size // 2))
    cases = [(one, [ms.Shard(2)]), (one, [ms.Shard(0)]), (one, [ms.Shard(1)]), (two, [ms.Shard(1), ms.Shard(1)])]
    for mesh, placements in cases:
        here, there = copy.deepcopy(module), copy.deepcopy(module)
        for step in range(3):
            x = values(4, 6, 9, 5) * (step + 1) + step
            torch.testing.assert_close(gathered(there(shard(x, mesh, placements))), here(x), rtol=1e-10, atol=1e-11)
        for e, g in zip(here.buffers(), there.buffers()):
            torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-11)
        every = WORLD.allgather(there.running_mean.tolist())
        assert all(row == every[0] for row in every)
        here.eval(), there.eval()
        torch.testing.assert_close(gathered(there(shard(x, mesh, placements))), here(x), rtol=1e-10, atol=1e-11)


WITH_PARAMETERS = {
    "batch": lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True, 0.3),
    "batch eval": lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b),
    "instance": lambda x, w, b, m, v: F.instance_norm(x, m, v, w, b, True, 0.3),
    "instance eval": lambda x, w, b, m, v: F.instance_norm(x, m, v, w, b, False),
    "group": lambda x, w, b, m, v: F.group_norm(x, 3, w, b),
    "layer": lambda x, w, b, m, v: F.layer_norm(x.movedim(1, -1), (6,), w, b),
    "rms": lambda x, w, b, m, v: F.rms_norm(x.movedim(1, -1), (6,), w) + b,
    "native batch": lambda x, w, b, m, v: torch.native_batch_norm(x, w, b, m, v, True, 0.3, 1e-5),
    "native batch eval": lambda x, w, b, m, v: torch.native_batch_norm(x, w, b, m, v, False, 0.3, 1e-5),
    "legit": lambda x, w, b, m, v: torch.ops.aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.3, 1e-5),
    "update": lambda x, w, b, m, v: torch.ops.aten._batch_norm_with_update(x, w, b, m, v, 0.3, 1e-5),
    "native group": lambda x, w, b, m, v: torch.native_group_norm(x, w, b, 4, 6, 9, 3, 1e-5),
    "native layer": lambda x, w, b, m, v: torch.native_layer_norm(x.movedim(1, -1), (6,), w, b, 1e-5),
}


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_parameters_and_running_statistics_that_are_sharded(name):
    def f(x, w, b, m, v):
        m, v = m.clone(), v.clone()
        y = WITH_PARAMETERS[name](x, w, b, m, v)
        return y, m, v

    whole = [values(4, 6, 9), W.detach(), B.detach(), values(6), values(6).abs() + 0.5]
    own = list(layouts((6,), (0,), 1))[::2]
    for i, (mesh, placements, sizes) in enumerate(layouts((4, 6, 9), (0, 1, 2), 1)):
        other = (mesh, *own[i % len(own)][1:])
        plain = (mesh, None, None)
        for x, parts in (((mesh, placements, sizes), other), (plain, other)):
            operands = [(whole[0], *x), *((t, *parts) for t in whole[1:])]
            compare(f, operands, differentiable=[True] * 3 + [False] * 2, what=f"{name} {placements} {sizes} {parts}")


@pytest.mark.parametrize("has_gradient", [(0, 1, 0), (0, 0, 1), (0, 1, 1), (0, 0, 0)])
def test_statistics_of_a_group_norm_have_a_gradient_where_any_operand_has(has_gradient):
    def f(x, w, b):
        return torch.native_group_norm(x, w, b, 4, 6, 9, 3, 1e-5)

    whole = [values(4, 6, 9), W.detach(), B.detach()]
    own = list(layouts((6,), (0,), 1))[::2]
    for i, (mesh, placements, sizes) in enumerate(layouts((4, 6, 9), (0, 1, 2), 1)):
        for part in ((None, None), own[i % len(own)][1:]):
            operands = [(whole[0], mesh, placements, sizes), *((t, mesh, *part) for t in whole[1:])]
            compare(f, operands, differentiable=[bool(d) for d in has_gradient], what=f"{placements} {sizes} {part}")


def test_running_statistics_where_a_rank_has_no_samples():
    def f(x):
        mean, var = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
        return F.instance_norm(x, mean, var, W, B, momentum=0.3), mean, var

    for mesh, placements, sizes in layouts((4, 6, 9), (0, 1), 2):
        compare(f, [(values(4, 6, 9), mesh, placements, sizes)], [W, B], what=f"{placements} {sizes}")


def as_tokens(x):
    """One sample with channels last, and the batch stride that flatten(2).transpose(1, 2) leaves."""
    return x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).unflatten(2, x.shape[2:])


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("norm", [
    lambda: nn.BatchNorm2d(3, dtype=torch.float64), lambda: nn.BatchNorm2d(3, momentum=None, dtype=torch.float64),
    lambda: nn.InstanceNorm2d(3, track_running_stats=True, dtype=torch.float64),
])  # fmt: skip
@pytest.mark.parametrize("last", [True, False])
def test_running_statistics_in_a_checkpoint(norm, last, again):
    """What is made again moves them again, or not, as in torch."""
    conv = nn.Conv2d(3, 3, 3, padding=1, dtype=torch.float64)
    plain = nn.Sequential(conv, norm()) if last else nn.Sequential(norm(), conv)
    mesh = mesh_of((WORLD.size,))
    ours = ms.distribute_module(copy.deepcopy(plain), mesh)
    for _ in range(2):
        checkpoint(plain, values(2, 3, 6, 5).requires_grad_(), use_reentrant=again).sum().backward()
        x = shard(values(2, 3, 6, 5), mesh, (ms.Shard(2),), None, True)
        checkpoint(ours, x, use_reentrant=again).sum().backward()
    torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 6, 7), (1, 4, 3, 2, 5)])
def test_batch_norm_of_one_sample_takes_any_strides(shape, training):
    mesh, per_channel = mesh_of((WORLD.size,)), (1, 4, *[1] * (len(shape) - 2))
    x, mean, var = field(*shape), field(4), field(4).square() + 0.5
    last = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    formats = (torch.clone, lambda t: t.contiguous(memory_format=last), as_tokens)
    weight, bias, cotangent = (field(*s).requires_grad_() for s in ((4,), (4,), shape))
    # torch's own batch_norm is wrong here: it is told by hand
    whole, cells = x.clone().requires_grad_(), [d for d in range(x.ndim) if d != 1]
    centre = whole.mean(cells) if training else mean
    spread = whole.var(cells, unbiased=False) if training else var
    y = (whole - centre.view(per_channel)) / (spread.view(per_channel) + 1e-5).sqrt()
    y = y * weight.view(per_channel) + bias.view(per_channel)
    wanted = torch.autograd.grad(y, [whole, weight, bias], cotangent.detach())
    for of_x in formats:
        for of_g in formats:
            z = ms.ShardTensor.from_local(of_x(shard(x, mesh, ms.Shard(2)).to_local()), mesh, (ms.Shard(2),))
            z.requires_grad_()
            y = F.batch_norm(z, mean.clone(), var.clone(), weight, bias, training)
            g = ms.ShardTensor.from_local(
                of_g(shard(cotangent.detach(), mesh, ms.Shard(2)).to_local()), mesh, (ms.Shard(2),)
            )
            for got, want in zip(torch.autograd.grad(y, [z, weight, bias], g), wanted):
                torch.testing.assert_close(gathered(got), want)


@pytest.mark.parametrize("samples", [1, 2 * WORLD.size, WORLD.size])
@pytest.mark.parametrize("norm", [F.instance_norm, lambda x: F.group_norm(x, 4)])
def test_cotangents_of_samples_may_have_any_strides(samples, norm):
    mesh, t = mesh_of((WORLD.size,)), field(4)
    x = field(samples, 4, 6, 7).requires_grad_()
    # torch's own instance_norm is wrong for one sample: it is told by hand
    centred = x - x.mean((2, 3), keepdim=True)
    y = centred / (centred.square().mean((2, 3), keepdim=True) + 1e-5).sqrt()
    (want,) = torch.autograd.grad((y.movedim(1, -1) * t).square().sum(), x)
    for dim in (0, 2):
        z = shard(x.detach(), mesh, ms.Shard(dim)).requires_grad_()
        (norm(z).movedim(1, -1).contiguous() * t).square().sum().backward()
        torch.testing.assert_close(gathered(z.grad), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_statistics(dtype):
    x = (values(2, 4, 40, 30) * 3 + 20).to(dtype)
    w, b = values(4).to(dtype), values(4).to(dtype)
    mesh = mesh_of((WORLD.size,))
    leaves = [x.clone().requires_grad_(), shard(x, mesh, [ms.Shard(2)], requires_grad=True)]
    exact = F.group_norm(x.double(), 2, w.double(), b.double())
    scale = 4e-6 if dtype == torch.float32 else 2e-2
    outs = [F.group_norm(t, 2, w, b) for t in leaves]
    assert outs[1].dtype == dtype
    torch.testing.assert_close(gathered(outs[1]).double(), exact, rtol=scale, atol=scale)
    for out in outs:
        (out * out * out).sum().backward()
    torch.testing.assert_close(gathered(leaves[1].grad), leaves[0].grad, rtol=40 * scale, atol=40 * scale)


def test_large_offset_does_not_cancel():
    x = (values(1, 2, 6000, 6) * 1e-2 + 1e3).float()
    s = shard(x, mesh_of((WORLD.size,)), [ms.Shard(2)])
    exact = F.group_norm(x.double(), 1)
    torch.testing.assert_close(gathered(F.group_norm(s, 1)).double(), exact, rtol=0, atol=2e-2)


@pytest.mark.parametrize("cells", [70_000, 300])
def test_rows_longer_and_shorter_than_a_block(cells):
    x = values(2, 4, cells, 1, dtype=torch.float32)
    mesh = mesh_of((WORLD.size,))
    s = shard(x, mesh, [ms.Shard(2)], requires_grad=True)
    t = x.double().requires_grad_()
    for u in (s, t):
        (F.group_norm(u, 2) ** 3).sum().backward()
    torch.testing.assert_close(gathered(s.grad).double(), t.grad, rtol=1e-3, atol=1e-4)


def test_saves_the_input_and_little_else():
    x = shard(values(1, 8, 64, 64), mesh_of((WORLD.size,)), [ms.Shard(2)], requires_grad=True)
    saved = []

    def pack(t):
        saved.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        F.group_norm(x, 2, values(8).requires_grad_(), values(8).requires_grad_())
    assert sum(saved) <= x.to_local().numel() + 8 * 8


@pytest.mark.ranks(2, 4)
def test_one_exchange_forward_and_one_for_the_input_gradient():
    x = shard(values(1, 8, 16, 6), mesh_of((WORLD.size,)), [ms.Shard(2)], requires_grad=True)
    with ms.comm_counter() as count:
        y = F.group_norm(x, 2)
    assert count.calls == 1
    with ms.comm_counter() as count:
        torch.autograd.grad(y, x, torch.ones_like(y))
    assert count.calls == 1


def test_forward_mode():
    x, v = values(2, 4, 9), values(2, 4, 9).flip(0)
    mesh = mesh_of((WORLD.size,))
    out = []
    for t, u in ((x, v), (shard(x, mesh, [ms.Shard(2)]), shard(v, mesh, [ms.Shard(2)]))):
        local, tangent = (t.to_local(), u.to_local()) if isinstance(t, ms.ShardTensor) else (t, u)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(local, tangent)
            if isinstance(t, ms.ShardTensor):
                sizes = {m: t.sharding.sizes[p.dim] for m, p in enumerate(t.placements)}
                dual = ms.ShardTensor.from_local(dual, mesh, t.placements, sizes)
            y = F.group_norm(dual, 2)
            d = torch.autograd.forward_ad.unpack_dual(y.to_local() if isinstance(y, ms.ShardTensor) else y).tangent
            out.append(ms.ShardTensor.from_local(d.contiguous(), mesh, [ms.Shard(2)]).full_tensor() if out else d)
    torch.testing.assert_close(out[1], out[0])


@pytest.mark.parametrize("op", ["group", "layer", "batch"])
def test_autocast_gives_torch_dtype(op):
    x = values(2, 4, 16, dtype=torch.bfloat16)
    calls = {
        "group": lambda t: F.group_norm(t, 2),
        "layer": lambda t: F.layer_norm(t, (16,)),
        "batch": lambda t: F.batch_norm(t, None, None, training=True),
    }
    with torch.autocast("cpu", torch.bfloat16):
        expected = calls[op](x)
        got = calls[op](shard(x, mesh_of((WORLD.size,)), [ms.Shard(2)]))
    assert got.dtype == expected.dtype


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_one_dim_in_autocast(norm, dtype):
    x = values(16).mul(4).to(dtype)
    own = shard(x, mesh_of((WORLD.size,)), [ms.Shard(0)])
    with torch.autocast("cpu", torch.bfloat16):
        if dtype is torch.int64:
            with pytest.raises(RuntimeError):
                norm(own, (16,))
            return
        torch.testing.assert_close(gathered(norm(own, (16,))), norm(x, (16,)))


def test_errors_as_torch():
    mesh = mesh_of((WORLD.size,))
    x = shard(values(1, 6, 1), mesh, [ms.Shard(2)])
    with pytest.raises(ValueError, match="more than 1 value"):
        F.batch_norm(x, None, None, training=True)
    with pytest.raises(RuntimeError, match="divisible"):
        F.group_norm(x, 4)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.layer_norm(x, (5,))


OFFSET = {
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "instance": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "group": lambda x, w, b: F.group_norm(x, 2, w, b),
    "layer": lambda x, w, b: F.layer_norm(x, (8, 6)),
    "var": lambda x, w, b: x.var((2, 3), keepdim=True) + x.std((1, 2, 3), keepdim=True),
}


@pytest.mark.parametrize("op", OFFSET)
@pytest.mark.parametrize("last", [False, True])
def test_offset_of_10000_deviations_in_float32(op, last):
    def f(x, w, b):
        return OFFSET[op](x.movedim(-1, 1) if last else x, w, b)

    x = (values(1, 8, 6, 4) if last else values(1, 4, 8, 6)) + 1e4
    # float32 holds the mean of none of these better than to a thousandth of the deviation
    exact = [x.float().double().requires_grad_(), *(values(4).requires_grad_() for _ in range(2))]
    y = f(*exact)
    cotangent = values(*y.shape)
    expected = torch.autograd.grad(y, exact, cotangent, allow_unused=True)
    for mesh, placements, sizes in layouts(x.shape, (1, 2) if last else (2, 3), 2):
        if not any(p.is_shard() and mesh.shape[m] > 1 for m, p in enumerate(placements)):
            continue  # torch's own kernels
        leaves = [t.detach().float().requires_grad_() for t in exact]
        leaves[0] = shard(leaves[0], mesh, placements, sizes, True)
        out = f(*leaves)
        torch.testing.assert_close(gathered(out).double(), y.detach(), rtol=1e-5, atol=1e-5)
        got = torch.autograd.grad((out * cotangent.float()).sum(), leaves, allow_unused=True)
        for e, g in zip(expected, got):
            if e is not None:
                torch.testing.assert_close(gathered(g).double(), e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w, b: F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double(), w, b),
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        lambda x, w, b: F.group_norm(x, 2, w, b),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_second_gradients_with_empty_blocks(f, turned):
    """Of a linear function of the result: every rank's depend on weight and input, whose cells may lie in any order."""
    mesh, x = mesh_of((WORLD.size,)), field(2, 4, 6, 5)
    w, b = (field(4) + k for k in range(2))
    for dim in range(4):
        sizes = {dim: skew(x.shape[dim], WORLD.size)}
        operands = [(x, mesh, (ms.Shard(dim),), sizes), (w, None, None, None), (b, None, None, None)]
        compare(
            (lambda x, w, b: f(x.movedim(2, 3), w, b)) if turned else f,
            operands,
            second=True,
            rtol=1e-8,
            atol=1e-9,
            what=f"{dim} {sizes}",
        )


def test_first_gradients_that_keep_a_graph_where_a_weight_depends_on_the_input():
    mesh, x = mesh_of((WORLD.size,)), field(2, 4, 6, 5)
    for dim in (2, 3):
        compare(
            lambda x: F.group_norm(
                x, 2, x.sum((0, 2, 3)).full_tensor() if isinstance(x, ms.ShardTensor) else x.sum((0, 2, 3))
            ),
            [(x, mesh, (ms.Shard(dim),), None)],
            second=True,
            rtol=1e-8,
            atol=1e-9,
        )


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_extents_of_none(dim):
    """Of channels, of samples, or of what is normalised."""
    mesh = mesh_of((WORLD.size,))
    for shape in ((4, 0, 5), (0, 4, 5), (4, 3, 0)):
        x = torch.ones(shape).double()
        try:
            F.group_norm(x, 1)
        except RuntimeError as e:
            assert RELEASE >= (2, 14)
            with pytest.raises(RuntimeError, match=str(e)):
                F.group_norm(ms.distribute_tensor(x, mesh, [ms.Shard(dim)]), 1)
        else:
            compare(lambda x: F.group_norm(x, 1), [(x, mesh, (ms.Shard(dim),), None)], what=f"{shape}")
        for f in (
            lambda x: F.layer_norm(x, x.shape[1:], torch.ones(x.shape[1:]).double()),
            lambda x: F.layer_norm(x, x.shape[2:]),
            lambda x: F.rms_norm(x, x.shape[1:]),
        ):
            compare(f, [(x, mesh, (ms.Shard(dim),), None)], what=f"{shape}")


@pytest.mark.parametrize("argument", ["weight", "bias", "running_mean"])
@pytest.mark.parametrize("function", [F.batch_norm, F.instance_norm, F.group_norm])
def test_numbers_of_channels_that_are_no_vector_are_refused_on_every_rank(function, argument):
    # a block without cells reaches none of the kernels that refuse them
    full, mesh = field(2, 3, 4), mesh_of((WORLD.size,))
    given = {argument: torch.ones(3, 1, dtype=torch.float64)}
    if function is F.group_norm:
        if argument == "running_mean":
            return
        given["num_groups"] = 1
    else:
        running = {
            "running_mean": torch.zeros(3, dtype=torch.float64),
            "running_var": torch.ones(3, dtype=torch.float64),
        }
        given = {**running, **given, ("training" if function is F.batch_norm else "use_input_stats"): True}
    for sizes in (None, {2: skew(4, WORLD.size)}):
        with pytest.raises(RuntimeError, match=r"vector|TensorAccessor|dimensions"):
            function(shard(full, mesh, (ms.Shard(2),), sizes), **given)


@pytest.mark.parametrize("shape", [(1,), (6,), (1, 6), (4, 6, 1)])
def test_numbers_of_another_shape_than_what_is_normalised_are_refused(shape):
    # where the dims are cut, they are multiplied afterwards, and would broadcast
    full, weight = field(2, 4, 6), torch.ones(shape, dtype=torch.float64)
    for x in (full, shard(full, mesh_of((WORLD.size,)), (ms.Shard(1),))):
        with pytest.raises(RuntimeError, match="same shape as normalized_shape"):
            F.layer_norm(x, (4, 6), weight)
        with pytest.raises(RuntimeError, match="same shape as normalized_shape"):
            F.layer_norm(x, (4, 6), None, weight)
        with pytest.raises(RuntimeError, match="same shape as normalized_shape"):
            F.rms_norm(x, (4, 6), weight)


def test_running_statistics_where_channels_are_cut_and_blocks_take_different_kernels():
    """Of no cells, or of channels far from zero, statistics are found in another dtype than of others."""
    full, mesh = field(2, 8, 6).float(), mesh_of((WORLD.size,))
    full[:, -1] += 1e5
    for sizes in (None, {1: skew(8, WORLD.size)}):
        x = shard(full, mesh, (ms.Shard(1),), sizes)
        found, expected = ([torch.zeros(8), torch.ones(8)] for _ in range(2))
        y = F.batch_norm(x, *found, training=True)
        torch.testing.assert_close(gathered(y)[:, :-1], F.batch_norm(full, *expected, training=True)[:, :-1])
        torch.testing.assert_close([t[:-1] for t in found], [t[:-1] for t in expected])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("other", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_numbers_of_another_dtype_are_taken_where_torch_takes_them(dtype, other):
    full, numbers, mesh = field(2, 4, 6).to(dtype), torch.ones(4, dtype=other), mesh_of((WORLD.size,))
    running = torch.ones(4, dtype=other)
    functions = [
        lambda x: F.batch_norm(x, None, None, numbers, None, True),
        lambda x: F.batch_norm(x, None, None, None, numbers, True),
        lambda x: F.batch_norm(x, running.clone(), running.clone(), None, None, True),
        lambda x: F.instance_norm(x, None, None, numbers),
        lambda x: F.group_norm(x, 2, numbers),
        lambda x: F.layer_norm(x.mT, (4,), numbers),
        lambda x: F.layer_norm(x.mT, (4,), None, numbers),
    ]

    def taken(f, x):
        try:
            return f(x).dtype
        except RuntimeError:
            return None

    for f in functions:
        expected = taken(f, full)
        for dim in range(3):
            assert taken(f, shard(full, mesh, (ms.Shard(dim),), {dim: skew(full.shape[dim], WORLD.size)})) == expected
