"""One plan for all spellings of a call: keys hold what is meant, not what was written."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mpi4py.MPI import COMM_WORLD as WORLD

import mpishard as ms
from mpishard.layout import Shard, layout_of
from mpishard.ops.rule.reduction import reduced
from tests.compare import mesh_of, shard

W2, W1 = torch.ones(4, 3, 3, 3), torch.ones(4, 3, 3)
Spelling = Callable[[torch.Tensor], torch.Tensor]


def indices(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x, 2, return_indices=True)[1]


SPELLINGS: dict[str, tuple[Spelling, ...]] = {
    "conv2d padding": (
        lambda x: F.conv2d(x, W2, padding=1),
        lambda x: F.conv2d(x, W2, None, 1, (1, 1)),
        lambda x: F.conv2d(x, W2, padding=[1, 1], stride=[1, 1], dilation=(1,)),
        lambda x: F.conv2d(x, W2, padding=torch.Size((1, 1)), dilation=1),
    ),
    "conv2d valid": (
        lambda x: F.conv2d(x, W2, padding="valid"),
        lambda x: F.conv2d(x, W2),
        lambda x: F.conv2d(x, W2, padding=[0, 0]),
    ),
    "conv2d stride": (lambda x: F.conv2d(x, W2, stride=2), lambda x: F.conv2d(x, W2, stride=(2, 2))),
    "conv_transpose2d": (
        lambda x: F.conv_transpose2d(x, W2.transpose(0, 1), stride=2, padding=1, output_padding=1),
        lambda x: F.conv_transpose2d(x, W2.transpose(0, 1), stride=(2, 2), padding=[1, 1], output_padding=(1, 1)),
    ),
    "max_pool2d": (
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.max_pool2d(x, (2, 2), 2),
        lambda x: F.max_pool2d(x, [2, 2], [2, 2], (0, 0), [1, 1]),
        lambda x: F.max_pool2d(x, 2, ()),
    ),
    "avg_pool2d": (
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, [2, 2], (2, 2), 0),
        lambda x: F.avg_pool2d(x, (2, 2), padding=[0, 0]),
    ),
    "max_unpool2d": (
        lambda x: F.max_unpool2d(F.max_pool2d(x, 2), indices(x), 2),
        lambda x: F.max_unpool2d(F.max_pool2d(x, 2), indices(x), (2, 2), [2, 2], (0, 0)),
    ),
    "adaptive_avg_pool2d": (
        lambda x: F.adaptive_avg_pool2d(x, 6),
        lambda x: F.adaptive_avg_pool2d(x, (6, 6)),
        lambda x: F.adaptive_avg_pool2d(x, [6, None]),
    ),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 4), lambda x: F.adaptive_max_pool2d(x, [4, 4])),
    "interpolate size": (
        lambda x: F.interpolate(x, 24),
        lambda x: F.interpolate(x, (24, 24)),
        lambda x: F.interpolate(x, [24, 24]),
    ),
    "interpolate scale": (
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: F.interpolate(x, scale_factor=2.0, recompute_scale_factor=False),
        lambda x: F.interpolate(x, scale_factor=[2, 2.0]),
    ),
    "F.unfold": (lambda x: F.unfold(x, 3, padding=1), lambda x: F.unfold(x, (3, 3), 1, [1, 1], (1, 1))),
    "F.fold": (
        lambda x: F.fold(F.unfold(x, 2), (12, 6), 2),
        lambda x: F.fold(F.unfold(x, 2), [12, 6], (2, 2), 1, [0, 0], (1, 1)),
    ),
    "Tensor.unfold": (lambda x: x.unfold(2, 3, 1), lambda x: x.unfold(-2, 3, 1)),
    "pad": (
        lambda x: F.pad(x, (0, 0, 1, 1)),
        lambda x: F.pad(x, [0, 0, 1, 1], value=0),
        lambda x: F.pad(x, (0, 0, 1, 1), "constant", 0.0),
    ),
    "roll": (lambda x: x.roll(1, 2), lambda x: x.roll([1], [-2]), lambda x: x.roll((13,), (2,))),
    "flip": (lambda x: x.flip(2), lambda x: x.flip(-2), lambda x: x.flip([2])),
    "fft": (lambda x: torch.fft.fft(x, dim=2), lambda x: torch.fft.fft(x, None, -2)),
    "fft2": (
        torch.fft.fft2,
        lambda x: torch.fft.fft2(x, dim=[2, 3]),
        lambda x: torch.fft.fft2(x, dim=(-2, 3)),
    ),
    "fftn": (torch.fft.fftn, lambda x: torch.fft.fftn(x, dim=(0, 1, -2, -1))),
    "rfftn with extents": (lambda x: torch.fft.rfftn(x, (12, 6)), lambda x: torch.fft.rfftn(x, [12, 6], [-2, -1])),
    "diff": (lambda x: torch.diff(x, dim=2), lambda x: torch.diff(x, dim=-2)),
    "gradient": (lambda x: torch.gradient(x, dim=2)[0], lambda x: torch.gradient(x, dim=(-2,))[0]),
    "neighborhood_attention": (
        lambda x: ms.neighborhood_attention(*[x.permute(0, 2, 3, 1).unsqueeze(3)] * 3, kernel_size=3),
        lambda x: ms.neighborhood_attention(
            *[x.permute(0, 2, 3, 1).unsqueeze(3)] * 3, kernel_size=[3, 3], dilation=(1, 1)
        ),
    ),
    "halo_exchange": (
        lambda x: ms.halo_exchange(x, {2: 1}),
        lambda x: ms.halo_exchange(x, {-2: (1, 1)}),
        lambda x: ms.halo_exchange(x, {2: [1, 1]}),
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_share_a_plan(name: str) -> None:
    x = shard(torch.randn(2, 3, 12, 6), mesh_of((WORLD.size,)), (ms.Shard(2),))
    x.mesh.plans.clear()
    first, *others = SPELLINGS[name]
    y = first(x)
    plans = dict(x.mesh.plans)
    assert plans or WORLD.size == 1  # nothing travels from one rank
    for other in others:
        z = other(x)
        assert set(x.mesh.plans) == set(plans)
        for a, b in ((y.block, z.block),) if isinstance(y, ms.ShardTensor) else ((y, z),):
            torch.testing.assert_close(a, b)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(torch.signbit(a), torch.signbit(b)) and torch.allclose(a, b, equal_nan=True)


def test_a_number_of_a_key_is_its_bits() -> None:
    full = torch.randn(8, 4)
    x = shard(full, mesh_of((WORLD.size,)), (ms.Shard(0),))
    x.mesh.plans.clear()
    values = 0.0, -0.0, float("nan"), 2.0, torch.tensor(3.0)
    for value in (*values, 0, 2, float("nan"), torch.tensor(3.0), -0.0, 3):
        y = F.pad(x, (0, 0, 1, 1), value=value)
        assert same_bits(y.full_tensor(), F.pad(full, (0, 0, 1, 1), value=value))
    assert sum("pad" in key for key in x.mesh.plans) == len(values)
    w = x + 1j
    for fill in (1 + 0j, complex(1, -0.0), complex(float("nan"), -0.0)):
        z = torch.constant_pad_nd(w, (0, 0, 1, 1), fill)
        expected = torch.constant_pad_nd(full + 1j, (0, 0, 1, 1), fill)
        assert same_bits(torch.view_as_real(z.full_tensor()), torch.view_as_real(expected))


def test_a_scale_that_is_nan_has_one_plan() -> None:
    x = shard(torch.randn(1, 2, 8, 4), mesh_of((WORLD.size,)), (ms.Shard(2),))
    x.mesh.plans.clear()
    counts = set()
    for _ in range(3):
        F.scaled_dot_product_attention(x, x, x, scale=float("nan"))
        counts.add(len(x.mesh.plans))
    assert len(counts) == 1


def test_spellings_of_reduced_dims_share_a_plan() -> None:
    layout = layout_of((2,), (Shard(1),), (4, 6, 5))
    assert reduced(layout, -2) is reduced(layout, 1) is reduced(layout, (1,)) is reduced(layout, [-2])
    assert reduced(layout, None) is reduced(layout, ()) is reduced(layout, (2, -3, 1))


def test_dims_that_are_no_integers_find_no_plan() -> None:
    x = shard(torch.randn(2, 3, 12, 6), mesh_of((WORLD.size,)), (ms.Shard(2),))
    calls: tuple[Callable[[float], object], ...] = (
        lambda d: x.roll(1, d),
        lambda d: x.roll((d,), (2,)),
        x.flip,
        lambda d: torch.diff(x, dim=d),
        x.cumsum,
        x.sum,
        x.amax,
        lambda d: x.transpose(d, 0),
        lambda d: x.narrow(d, 0, 1),
        lambda d: torch.fft.fft(x, dim=d),
        lambda d: x.unfold(d, 2, 1),
        lambda d: x.mean((d, 3)),
        x.logsumexp,
        x.squeeze,
        lambda d: F.pad(x, (0, 0, d, 1)),
        lambda d: F.adaptive_avg_pool2d(x, d),
        lambda d: F.interpolate(x, d),
        lambda d: F.interpolate(x, (d, 3)),
        lambda d: ms.halo_exchange(x, {d: 1}),
    )
    for call in calls:
        call(2)
        with pytest.raises((TypeError, ms.LayoutError)):
            call(2.0)
