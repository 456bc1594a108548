"""Halo exchange: every mode, width and mesh against numpy.pad of the whole, and its adjoint and derivatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.autograd import window
from mpishard.autograd.linear import apply
from mpishard.comm.exchange import window as fetch
from mpishard.layout import bounds, layout_of
from mpishard.testing import check_gradient, check_jvp, check_second_gradient, dot_test
from tests.compare import mesh_of, mesh_shapes, skew

MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
SHAPE = (2, 7, 6, 5)


def block(full, layout, mesh):
    return full[tuple(slice(lo, hi) for lo, hi in layout.box(mesh.coords))].clone()


def cases(skewed=False):
    for mesh_shape in mesh_shapes(3):
        placements = [ms.Shard(1 + m) for m in range(len(mesh_shape))]
        sizes = None
        if skewed:
            sizes = {1 + m: skew(SHAPE[1 + m], n) for m, n in enumerate(mesh_shape) if n > 1}
        yield mesh_shape, layout_of(mesh_shape, placements, SHAPE, sizes)


def expected_of(full, layout, coords, widths, mode):
    """The window of one rank, cut from the padded whole."""
    pads = [widths.get(d, (0, 0)) for d in range(full.ndim)]
    padded = np.pad(full.numpy(), pads, mode=MODES[mode])
    box = layout.box(coords)
    return padded[tuple(slice(lo, hi + sum(w)) for (lo, hi), w in zip(box, pads))]


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "widths", [{1: (1, 1)}, {1: (2, 0), 2: (0, 3)}, {1: (1, 2), 2: (2, 1), 3: (1, 1)}, {2: (4, 4)}]
)
def test_every_mode_equals_the_padded_whole(mode, widths, skewed):
    full = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for mesh_shape, layout in cases(skewed):
        mesh = mesh_of(mesh_shape)
        x = ms.ShardTensor.from_local(block(full, layout, mesh), mesh, layout.placements)
        got = ms.halo_exchange(x, widths, mode=mode)
        np.testing.assert_array_equal(got.numpy(), expected_of(full, layout, mesh.coords, widths, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("widths", [{1: (2, 0), 2: (0, 3)}, {1: (1, 2), 2: (2, 1), 3: (1, 1)}])
def test_at_once_and_dim_by_dim_are_one_map(mode, widths, monkeypatch):
    full = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for mesh_shape, layout in cases(skewed=True):
        mesh, ways = mesh_of(mesh_shape), []
        for cells in (0, full.numel()):
            monkeypatch.setattr(window, "SMALL_CELLS", cells)
            key = ("both ways", layout, mode, tuple(widths.items()), cells)
            ways.append(mesh.plan(key, lambda: window._halo_op(mesh, layout, full.dtype, widths, mode)))
        x = block(full, layout, mesh)
        generator = torch.Generator().manual_seed(3 + mesh.rank)
        g = torch.randn(ways[0].out_shape, dtype=full.dtype, generator=generator)
        found, calls = [], []
        for way in ways:
            with ms.comm_counter() as count:
                found.append((way(x), way.adjoint(g)))
            calls.append(count.calls)
        torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)
        torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-13, atol=1e-13)
        assert calls[1] <= 2 + (calls[0] - 2) * (len(mesh_shape) == 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("widths", [{1: (1, 1)}, {1: (0, 2)}, {2: (3, 1)}, {1: (2, 0), 2: (0, 3)}])
def test_few_cells_and_many_are_one_map(mode, widths, monkeypatch):
    full = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    monkeypatch.setattr(window, "SMALL_CELLS", 0)
    for skewed in (False, True):
        for mesh_shape, layout in cases(skewed):
            mesh, found = mesh_of(mesh_shape), []
            for few in (0, full.nbytes):
                monkeypatch.setattr(fetch, "FEW_BYTES", few * 100)
                key = ("few or many", layout, mode, tuple(widths.items()), few)
                op = mesh.plan(key, lambda: window._halo_op(mesh, layout, full.dtype, widths, mode))
                x = block(full, layout, mesh)
                got = op(x)
                torch.testing.assert_close(op.joined(x, op.halo_of(got)), got, rtol=0, atol=0)
                found.append(got)
            np.testing.assert_array_equal(found[0].numpy(), expected_of(full, layout, mesh.coords, widths, mode))
            torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_periodic_mesh_wraps_whatever_the_mode():
    full = torch.arange(2.0 * 7 * 6 * 5).reshape(SHAPE)
    for mesh_shape, layout in cases():
        mesh = mesh_of(mesh_shape, True)
        x = ms.ShardTensor.from_local(block(full, layout, mesh), mesh, layout.placements)
        dims = [d for d in (1, 2) if d in layout.shard_dims]
        widths = dict.fromkeys(dims, (2, 1))
        for mode in (None, "zeros", "replicate"):
            got = ms.halo_exchange(x, widths, mode=mode)
            np.testing.assert_array_equal(got.numpy(), expected_of(full, layout, mesh.coords, widths, "circular"))


def test_a_halo_may_wrap_more_than_once():
    mesh = mesh_of((-1,), True)
    n = mesh.size + 1
    full = torch.arange(float(n))
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0),))
    got = ms.halo_exchange(x, {0: (2 * n + 1, 3 * n)})
    lo = x.sharding.offset(mesh.coords)[0] - 2 * n - 1
    np.testing.assert_array_equal(got.numpy(), [(lo + i) % n for i in range(len(got))])


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.int64, torch.bool]
)
def test_every_dtype_travels(dtype):
    mesh = mesh_of((-1,))
    full = (torch.arange(4 * mesh.size + 1) % 2).to(dtype)
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0),))
    got = ms.halo_exchange(x, {0: 1}, mode="zeros")
    padded = torch.cat((torch.zeros(1, dtype=dtype), full, torch.zeros(1, dtype=dtype)))
    lo, hi = x.sharding.box(mesh.coords)[0]
    assert got.dtype == dtype
    assert torch.equal(got, padded[lo : hi + 2])


def linear_cases():
    for periodic in (False, True):
        for mesh_shape, layout in cases(skewed=not periodic):
            yield mesh_of(mesh_shape, periodic), layout
    for mesh_shape, layout in cases():
        yield mesh_of(mesh_shape), layout


@pytest.mark.parametrize("mode", MODES)
def test_the_adjoint_accumulates_halos(mode):
    widths = {1: (2, 3), 2: (1, 2), 3: (1, 0)}
    for mesh, layout in linear_cases():
        local = torch.randn(layout.local_shape(mesh.coords), dtype=torch.float64)
        result = dot_test(lambda x: window.halo_exchange(x, mesh, layout, widths, mode), local, mesh=mesh, rtol=1e-13)
        assert result, repr(result)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
def test_derivatives_of_every_order(mode):
    mesh = mesh_of((-1,), mode == "circular")
    layout = layout_of(mesh.shape, (ms.Shard(0),), (2 * mesh.size + 1, 2))
    x = torch.randn(layout.local_shape(mesh.coords), dtype=torch.float64)

    def f(t):
        return window.halo_exchange(t, mesh, layout, {0: (2, 1)}, mode).sin()

    check_gradient(f, x, mesh=mesh)
    check_second_gradient(f, x, mesh=mesh)
    check_jvp(f, x, mesh=mesh)


def test_a_window_can_reverse_stride_and_repeat_cells():
    """What flip, slices with steps and replicate padding are made of."""
    mesh = mesh_of((-1,))
    n = 3 * mesh.size + 1
    full = torch.randn(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    layout = layout_of(mesh.shape, (ms.Shard(0),), (n, 2))
    local = block(full, layout, mesh)
    from mpishard.layout import Run

    b = bounds(layout.sizes[0])
    flipped = window.Wanted(
        0,
        tuple((Run(0, hi - lo, n - 1 - lo, -1),) if hi > lo else () for lo, hi in zip(b[:-1], b[1:])),
        tuple(layout.sizes[0]),
    )
    stride = window.Wanted(
        0, ((Run(0, (n + 2) // 3, 0, 3), Run((n + 2) // 3, 2, n - 1, 0)),) * mesh.size, ((n + 2) // 3 + 2,) * mesh.size
    )
    lo, hi = layout.box(mesh.coords)[0]
    for wanted, expected in (
        (flipped, full.flip(0)[lo:hi]),
        (stride, torch.cat((full[::3], full[-1:], full[-1:]))),
    ):
        op = mesh.plan(wanted, lambda wanted=wanted: window.window_op(mesh, layout, torch.float64, [wanted]))
        assert torch.equal(op(local), expected)
        assert dot_test(lambda t, op=op: apply(op, t), local, mesh=mesh, rtol=1e-13)


def test_a_filled_window_is_affine():
    """The value beyond the domain takes no part in derivatives."""
    mesh = mesh_of((-1,))
    layout = layout_of(mesh.shape, (ms.Shard(0),), (2 * mesh.size,))
    wanted = window.intervals_wanted(
        2 * mesh.size,
        0,
        [(lo - 1, hi + 1) for lo, hi in zip(bounds(layout.sizes[0])[:-1], bounds(layout.sizes[0])[1:])],
    )
    op = mesh.plan("window", lambda: window.window_op(mesh, layout, torch.float64, [wanted], value=-7.0))
    x = torch.randn(2, dtype=torch.float64)
    y = op(x)
    assert (y[0] == -7.0) == (mesh.rank == 0)
    assert (y[-1] == -7.0) == (mesh.rank == mesh.size - 1)
    check_jvp(lambda t: apply(op, t), x, mesh=mesh)


@pytest.mark.ranks(2, 3, 4)
def test_only_strips_travel():
    mesh = mesh_of((-1,))
    x = ms.distribute_tensor(torch.zeros(3, 4 * mesh.size, 5), mesh, (ms.Shard(1),))
    with ms.comm_counter() as count:
        ms.halo_exchange(x, {1: (2, 1)}, mode="zeros")
    lower, upper = mesh.rank > 0, mesh.rank < mesh.size - 1
    assert count.messages == lower + upper
    assert count.nbytes == 4 * 3 * 5 * (1 * lower + 2 * upper)


def test_widths_of_any_integers():
    mesh = mesh_of((-1,))
    x = ms.distribute_tensor(torch.arange(8.0).view(2, 4), mesh, (ms.Shard(1),))
    expected = ms.halo_exchange(x, {1: (1, 1)})
    for width in (1, np.int64(1), [1, 1], np.array([1, 1])):
        assert torch.equal(ms.halo_exchange(x, {-1: width}), expected)


def test_wrong_widths_and_modes_raise():
    mesh = mesh_of((-1,))
    x = ms.distribute_tensor(torch.zeros(3, 4 * mesh.size), mesh, (ms.Shard(1),))
    ring = ms.distribute_tensor(torch.zeros(3, 4 * mesh.size), mesh_of((-1,), True), (ms.Shard(1),))
    for widths, mode, text in (
        ({1: (4 * mesh.size + 1, 0)}, None, "wider than the global extent"),
        ({1: (4 * mesh.size, 0)}, "reflect", "wider than the global extent"),
        ({1: (-1, 0)}, "zeros", "negative"),
        ({2: (1, 0)}, "zeros", "no such dim"),
        ({1: 1, -1: 2}, "zeros", "named twice"),
        ({1: 1.5}, "zeros", "not a width"),
        ({1: True}, "zeros", "not a width"),
        ({1: (0, True)}, "zeros", "not a width"),
        ({1: (1, 1, 1)}, "zeros", "not a width"),
        ({1: (1, 0)}, "mirror", "unknown padding mode"),
        ({1: (1, 0)}, "", "unknown padding mode"),
    ):
        with pytest.raises(ms.LayoutError, match=text):
            ms.halo_exchange(x, widths, mode=mode)
        if "mode" in text:
            with pytest.raises(ms.LayoutError, match=text):
                ms.halo_exchange(ring, widths, mode=mode)


def test_wrong_widths_raise_where_right_ones_are_kept():
    mesh = mesh_of((-1,))
    x = ms.distribute_tensor(torch.arange(8.0).view(2, 4), mesh, (ms.Shard(1),))
    expected = ms.halo_exchange(x, {1: (1, 1)})
    for widths in ({3: 1}, {5: (1, 1)}, {1.0: 1}, {1: 1.0}, {1: (1, 1.0)}, {1: 1, -1: 1}, [1], None):
        with pytest.raises(ms.LayoutError):
            ms.halo_exchange(x, widths)
    assert torch.equal(ms.halo_exchange(x, {1: (n for n in (1, 1))}), expected)
