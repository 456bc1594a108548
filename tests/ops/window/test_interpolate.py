"""F.interpolate against torch on the whole tensor."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from mpishard.ops.window.taps import Along
from tests.compare import compare, drawn_sizes, layouts, mesh_of, mesh_shapes, skew
from tests.ops.windows import check, field, refused_alike
from tests.release import RELEASE

ANTIALIASED = ["bicubic", *(["lanczos"] if RELEASE >= (2, 13) else [])]

SHAPES = {1: (2, 3, 11), 2: (1, 3, 9, 7), 3: (1, 2, 7, 5, 4)}
MODES = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}


def full_of(ndim, dtype=torch.float64):
    return torch.randn(SHAPES[ndim], dtype=dtype, generator=torch.Generator().manual_seed(ndim))


def cases(ndim):
    """How to interpolate: sizes and factors up and down, whole and fractional."""
    target = tuple(n * 2 - 1 for n in SHAPES[ndim][2:])
    yield {"size": target}
    yield {"size": tuple(max(1, n // 2) for n in target)}
    yield {"scale_factor": 2}
    yield {"scale_factor": 1.7}
    yield {"scale_factor": 0.6}
    yield {"scale_factor": 1.7, "recompute_scale_factor": True}
    yield {"scale_factor": tuple(1.5 if i else 1.0 for i in range(ndim))}


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_every_mode_equals_torch(ndim):
    full = full_of(ndim)
    every = list(itertools.product(cases(ndim), ("nearest", "nearest-exact", *MODES[ndim])))
    where = list(layouts(full.shape, range(2, 2 + ndim)))
    step = 3 * ndim
    for i, (how, mode) in enumerate(every):
        for mesh, placements, sizes in where[i % step :: step]:
            for align in (None,) if mode.startswith("nearest") else (False, True):
                compare(
                    lambda x: F.interpolate(x, **how, mode=mode, align_corners=align),
                    [(full, mesh, placements, sizes)],
                    what=f"{how} {mode} {align} {placements} {sizes}",
                )


def ratios():
    for n, corners in itertools.product((2, 3, 4, 5, 6), (False, True)):
        yield n, {"scale_factor": 1.5, "align_corners": corners}
        yield n, {"size": 2 * n - 1, "align_corners": corners}
        yield n, {"size": max(1, n - 1), "align_corners": corners}


@pytest.mark.parametrize("mode", ["linear", "bicubic"])
def test_cells_whose_weight_is_zero(mode):
    """An output cell on a cell reads that one alone, the next one cells before it: the ranks' messages still pair."""
    for n, how in ratios():
        full = torch.arange(3.0 * n).reshape(1, 3, n).sin() if mode == "linear" else torch.eye(n)[None, None] + 1
        expected = F.interpolate(full, mode=mode, **how)
        for mesh, placements, sizes in layouts(full.shape, (2,)):
            x = ms.distribute_tensor(full, mesh, placements, sizes=sizes)
            got = F.interpolate(x, mode=mode, **how).full_tensor()
            torch.testing.assert_close(got, expected, msg=lambda m: f"{n} {how} {sizes}: {m}")


@pytest.mark.parametrize(("mode", "dims"), [("bilinear", 2), ("bicubic", 2), ("trilinear", 3)])
def test_no_number_reaches_cells_that_do_not_read_it(mode, dims):
    """As of a field with NaN on land: dims that are cut are weighted apart from the others."""
    full = torch.ones(1, 2, 12, *(3,) * (dims - 1), dtype=torch.float64)
    full[0, 0, 4] = torch.nan
    full[0, 1, 0] = torch.inf
    for how in ({"size": (7, *(3,) * (dims - 1))}, {"scale_factor": (1.5, *(2.0,) * (dims - 1))}):
        expected = F.interpolate(full, mode=mode, **how)
        for mesh, placements, sizes in layouts(full.shape, (2, 3)):
            x = ms.distribute_tensor(full, mesh, placements, sizes=sizes)
            got = F.interpolate(x, mode=mode, **how).full_tensor()
            assert not (got.isnan() & expected.isfinite()).any(), f"{how} {placements} {sizes}"


def test_area_is_adaptive_pooling():
    full = full_of(2)
    for mesh, placements, sizes in layouts(full.shape, (2, 3)):
        compare(lambda x: F.interpolate(x, size=(4, 5), mode="area"), [(full, mesh, placements, sizes)])


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_float32_coordinates_are_those_of_torch(mode):
    """A long dim: coordinates computed per block would drift."""
    mesh = mesh_of((-1,))
    full = torch.randn(1, 1, 1531, 3, generator=torch.Generator().manual_seed(4))
    compare(
        lambda x: F.interpolate(x, scale_factor=(1.37, 1.0), mode=mode),
        [(full, mesh, (ms.Shard(2),), {2: skew(1531, mesh.size)})],
        rtol=1e-5,
        # torch's own backward rounds coordinates differently from its forward, of bicubic and in builds with CUDA also
        # of bilinear: an ulp of 1531
        atol=1e-5 if mode == "nearest" else 3e-4,
    )


def drawn(rng):
    """A tensor and how to interpolate it: also by scales that leave an extent, or double it, though they are others."""
    ndim = rng.randint(1, 3)
    spatial = [rng.randint(1, (300, 80, 14)[ndim - 1]) for _ in range(ndim)]
    modes = ["nearest", "nearest-exact", ("linear", "bilinear", "trilinear")[ndim - 1]]
    how = {"mode": rng.choice([*modes, *(ANTIALIASED if ndim == 2 else [])])}
    if how["mode"] == "lanczos" or (how["mode"] in ("bilinear", "bicubic") and rng.random() < 0.5):
        how["antialias"] = True
    if how["mode"] in (*MODES[ndim], "bicubic") and rng.random() < 0.3:
        how["align_corners"] = True
    if rng.random() < 0.4:
        how["size"] = tuple(rng.choice([max(1, int(n * rng.uniform(0.3, 3))), n, 2 * n]) for n in spatial)
    else:
        how["scale_factor"] = tuple(rng.choice([rng.uniform(0.4, 3), 1.5, 1.01, 2.02, 3, 1.0]) for _ in spatial)
    dtype = rng.choice([torch.float32, torch.float64])
    return torch.randn(1, rng.randint(1, 5), *spatial, dtype=dtype, generator=torch.Generator().manual_seed(1)), how


def test_what_is_drawn(request):
    seen = 0
    for i in range(60):
        rng = random.Random(request.config.option.seed * 1000 + i)
        full, how = drawn(rng)
        try:
            shape = F.interpolate(full, **how).shape
        except RuntimeError:
            continue  # no cell comes out
        if how.get("antialias") and shape[-1] == 1:
            continue  # of other weights in torch: docs/upstream.md
        mesh, placements, sizes = mesh_of(rng.choice(mesh_shapes(2))), [], {}
        free = list(range(1, full.ndim))
        for count in mesh.shape:
            dim = free.pop(rng.randrange(len(free)))
            placements.append(ms.Shard(dim))
            sizes[dim] = drawn_sizes(rng, full.shape[dim], count)
        x = ms.distribute_tensor(full, mesh, placements, sizes=sizes)
        got, want = F.interpolate(x, **how).full_tensor(), F.interpolate(full, **how)
        close = {"rtol": 1e-12, "atol": 1e-12} if full.dtype == torch.float64 else {"rtol": 1e-5, "atol": 2e-5}
        torch.testing.assert_close(got, want, **close, msg=lambda m, i=i, how=how: f"draw {i}, {how}: {m}")
        seen += 1
    assert seen > 20


LONG = [
    *({"mode": m, "align_corners": c} for m, c in itertools.product(("linear", "bicubic"), (False, True))),
    *({"mode": m, "antialias": True} for m in ("bilinear", *ANTIALIASED)),
    *({"mode": m} for m in ("nearest", "nearest-exact")),
]


@pytest.mark.parametrize("how", LONG, ids=str)
@pytest.mark.parametrize("scale", [1.37, 2 / 3])
def test_places_among_half_a_million_cells(how, scale):
    """In float32 they are rounded to a sixteenth of a cell and more: as torch rounds them."""
    n, mode = 500_001, how["mode"]
    full = torch.randn(1, 1, n, generator=torch.Generator().manual_seed(5))
    alone = mode in ("linear", "nearest", "nearest-exact")
    scales = (scale,) if alone else (scale, 2.0)
    want = F.interpolate(full if alone else full[..., None], scale_factor=scales, **how).flatten(2)[0, 0]
    want = want if alone else want[::2]
    corners = how.get("align_corners", False)
    along = Along(n, len(want), scale, mode, corners=corners, antialias=how.get("antialias", False), dtype=np.float32)
    for a in (0, 123_456, len(want) - 700):
        index, weight = along.taps(a, a + 700)
        got = full[0, 0][index] if weight is None else full[0, 0][index] * weight
        torch.testing.assert_close(got.sum(0), want[a : a + 700], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["nearest", "bicubic"])
def test_what_a_block_reads_is_found_without_the_rest_of_the_dim(mode):
    n = 1 << 23
    tracemalloc.start()
    try:
        along = Along(n, n // 2 * 3, None, mode)
        index, _ = along.taps(n, n + 3)
        first = along.first_beyond([0, 1, n // 3, n])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    assert (index[len(index) // 2] - torch.tensor([n, n + 1, n + 2]) * 2 // 3).abs().max() <= 1
    assert np.abs(np.array(first) - np.array([0, 1, n // 3, n]) * 1.5).max() <= 2


def test_second_derivatives():
    mesh = mesh_of((-1,))
    compare(
        lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear").sin(),
        [(full_of(2), mesh, (ms.Shard(2),), None)],
        second=True,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype):
    mesh = mesh_of((-1,))
    full = full_of(2, torch.float32).to(dtype)
    compare(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        [(full, mesh, (ms.Shard(2),), None)],
        rtol=2e-2,
        atol=2e-2,
    )


def test_upsample_modules():
    mesh = mesh_of((-1,))
    compare(torch.nn.Upsample(scale_factor=3, mode="bilinear"), [(full_of(2), mesh, (ms.Shard(3),), None)])


def test_errors_are_torch_errors():
    mesh = mesh_of((-1,))
    x = ms.distribute_tensor(full_of(2), mesh, (ms.Shard(2),))
    for mode in ("nearest", "area"):
        with pytest.raises(ValueError, match="align_corners"):
            F.interpolate(x, size=(4, 4), mode=mode, align_corners=True)
    for how in ({"size": (4, 0)}, {"size": 4, "scale_factor": 2}, {"scale_factor": 1e-3}, {"size": (4,)}, {},
                {"size": 4, "mode": "linear"}, {"size": 4, "recompute_scale_factor": True}):  # fmt: skip
        refused_alike(lambda x, how=how: F.interpolate(x, **how), full_of(2))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiasing(mode):
    full = full_of(2)
    for mesh, placements, sizes in layouts(full.shape, (2, 3)):
        # torch asks for its truth alone
        for flag in (True, [2]):
            case = [(full, mesh, placements, sizes)]
            compare(lambda x, flag=flag: F.interpolate(x, size=(4, 5), mode=mode, antialias=flag), case)


AA = torch.ops.aten._upsample_bilinear2d_aa
BELOW = {
    "aa": lambda x: torch._C._nn._upsample_bilinear2d_aa(x, (4, 5), False),
    "aa of scales": lambda x: torch._C._nn._upsample_bicubic2d_aa(x, None, False, (0.5, 0.75)),
    "aten aa": lambda x: AA(x, [4, 5], True),
    "aten scales": lambda x: AA(x, [4, 5], align_corners=False, scales_h=0.5, scales_w=0.75),
    "bilinear": lambda x: torch._C._nn.upsample_bilinear2d(x, (12, 5), True),
    "nearest": lambda x: torch._C._nn.upsample_nearest2d(x, None, (1.5, 2.0)),
    "aten exact": lambda x: torch.ops.aten._upsample_nearest_exact2d(x, [12, 5]),
}


@pytest.mark.parametrize("name", BELOW)
def test_functions_below_interpolate(name):
    full = full_of(2)
    for mesh, placements, sizes in list(layouts(full.shape, (1, 2, 3)))[::2]:
        compare(BELOW[name], [(full, mesh, placements, sizes)], what=f"{name} {placements} {sizes}")


@pytest.mark.parametrize(("mode", "ndim"), [("linear", 1), ("bilinear", 2), ("trilinear", 3), ("bicubic", 2)])
@pytest.mark.parametrize("corners", [False, True])
def test_infinite_cells_stay_infinite(mode, ndim, corners):
    full = field(1, 2, *(6, 5, 4)[:ndim])
    full.view(-1)[2 * full.numel() // 3 + 1] = torch.inf
    for factor in (1.5, 2.5):
        check(
            lambda x, s=factor: F.interpolate(x, scale_factor=s, mode=mode, align_corners=corners),
            full,
            range(2, full.ndim),
            3,
        )
