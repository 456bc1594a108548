"""Convolutions that read the halo in the tensor's own storage: exact, in place, and without a copy of the block."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import mpishard as ms
from mpishard.comm import guard
from mpishard.comm.exchange.window import WindowOp
from tests.compare import mesh_of, mesh_shapes
from tests.insitu.hosts import WORLD, Host, cut

SIZE = WORLD.size
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
EXTENTS = (17, 13, 9)


def field(grid, widths, *, empty=False, order="C", periodic=False):
    """A host whose ghost cells are not numbers, its simulation, and its field."""
    ndim = len(grid)
    host = Host(grid, [cut(n, p, empty=empty) for n, p in zip(EXTENTS, grid)], widths, [periodic] * ndim)
    array = host.array(order)
    owned = array[host.interior].copy()
    array[...] = np.nan
    array[host.interior] = owned
    sim = ms.insitu.adopt(host.cart, host.shape, widths)
    return host, array, sim, sim.field("u", array)


def check(u, host, kernel, **options):
    """Assert that a convolution of the field is torch's of the whole domain, with its gradients."""
    ndim = len(host.shape)
    weight = torch.randn(3, 1, *kernel, dtype=torch.float64)
    results = []
    for x, w in (
        (torch.from_numpy(host.whole).clone(), weight.clone()),
        (u.tensor.detach(), weight.clone()),
    ):
        x.requires_grad_()
        w.requires_grad_()
        y = CONV[ndim](x[None, None], w, torch.arange(3.0, dtype=torch.float64), **options)
        assert y.requires_grad
        scale = torch.arange(float(y.numel()), dtype=torch.float64).reshape(y.shape).sin()
        if isinstance(y, ms.ShardTensor):
            sizes = {d: s for d, s in enumerate(y.sharding.sizes) if s is not None}
            (y * ms.distribute_tensor(scale, y.mesh, y.placements, sizes=sizes)).sum().backward()
            results.append([y.detach().full_tensor(), x.grad.full_tensor(), w.grad])
        else:
            (y * scale).sum().backward()
            results.append([y.detach(), x.grad, w.grad])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-9)


GRIDS = mesh_shapes(3)
GEOMETRIES = [
    ((3, 3, 3), {"padding": 1}),
    ((3, 1, 2), {}),
    ((5, 3, 3), {"padding": (2, 1, 1)}),
    ((3, 3, 3), {"padding": 1, "stride": 2}),
    ((3, 3, 3), {"padding": 2, "dilation": 2}),
    ((4, 2, 3), {"padding": "same"}),
    ((3, 3, 3), {"padding": 2}),
]


@pytest.fixture(autouse=True)
def _same_weights_on_all_ranks():
    torch.manual_seed(1)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("kernel", "options"), GEOMETRIES, ids=str)
def test_equals_torch(grid, kernel, options, monkeypatch):
    ndim = len(grid)
    options = {k: v[:ndim] if isinstance(v, tuple) else v for k, v in options.items()}
    for widths, empty, order in (
        ([(2, 2)] * ndim, False, "C"),
        ([(1, 3)] * ndim, False, "F"),
        ([(1, 1)] * ndim, True, "C"),
    ):
        host, array, sim, u = field(grid, widths, empty=empty, order=order)
        check(u, host, kernel[:ndim], **options)
        # what lies beyond the domain is the host's
        outside = host.exchanged(np.zeros_like(array) + np.nan)
        assert (np.isnan(array) | (array == outside)).all()
        sim.release()
        host.free()


def test_views_keep_the_halo():
    grid = (SIZE, 1)
    host, array, sim, u = field(grid, [(1, 1)] * 2)
    levels = np.stack([array, 2 * array, 3 * array], 2)
    v = sim.field("v", levels, dims=(0, 1, None))
    weight = torch.randn(1, 1, 3, 3, dtype=torch.float64)
    whole = torch.from_numpy(host.whole)
    views = {
        "unsqueeze": (lambda x: x.unsqueeze(0).unsqueeze(0), 1),
        "view": (lambda x: x.view(1, 1, *x.shape), 1),
        "reshape": (lambda x: x.reshape(1, 1, *x.shape), 1),
        "transpose": (lambda x: x.T[None, None].mT, 1),
    }
    for name, (view, scale) in views.items():
        x = view(u.tensor)
        assert x._halo is u.tensor._halo, name
        torch.testing.assert_close(
            F.conv2d(x, weight, padding=1).full_tensor(), F.conv2d(scale * whole[None, None], weight, padding=1)
        )
    for k, x in enumerate((v.tensor[:, :, 0], v.tensor.select(2, 1), v.tensor.unbind(2)[2])):
        torch.testing.assert_close(
            F.conv2d(x[None, None], weight, padding=1).full_tensor(),
            F.conv2d((k + 1) * whole[None, None], weight, padding=1),
        )
    # channels are levels
    deep = torch.randn(2, 3, 3, 3, dtype=torch.float64)
    channels = torch.stack([whole, 2 * whole, 3 * whole])[None]
    torch.testing.assert_close(
        F.conv2d(v.tensor.permute(2, 0, 1)[None], deep, padding=1).full_tensor(), F.conv2d(channels, deep, padding=1)
    )
    # what is no longer the memory is fetched
    for changed in (u.tensor[2:], u.tensor[:, ::2], u.tensor.clone(), u.tensor.contiguous(), u.tensor.float()):
        w = weight.to(changed.dtype)
        expected = F.conv2d(changed.full_tensor()[None, None], w, padding=1)
        torch.testing.assert_close(F.conv2d(changed[None, None], w, padding=1).full_tensor(), expected)
    sim.release()
    host.free()


class Allocated(TorchDispatchMode):
    """Bytes of the storages that operations make, convolutions' results aside."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.convolution.default and isinstance(out, torch.Tensor):
            inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            if out.untyped_storage().data_ptr() not in inputs:
                self.nbytes += out.nbytes
        return out


@pytest.mark.parametrize(("side", "dtype"), [(24, "float64"), (400, "float32"), (400, "float64")])
def test_strips_travel_and_no_block_is_copied(side, dtype, monkeypatch):
    n = side * SIZE
    host = Host((SIZE, 1), [(side,) * SIZE, (side,)], [(1, 1)] * 2, dtype=dtype)
    sim = ms.insitu.adopt(host.cart, host.shape, 1)
    u = sim.field("u", host.array())
    weight = torch.randn(2, 1, 3, 3, dtype=getattr(torch, dtype))
    expected = F.conv2d(torch.from_numpy(host.whole)[None, None], weight, padding=1)
    F.conv2d(u.tensor[None, None], weight, padding=1)  # plans
    if SIZE > 1:
        monkeypatch.setattr(WindowOp, "__call__", None)
    at = host.coords[0]
    neighbours = (at > 0) + (at < SIZE - 1)
    x = u.tensor[None, None]
    with ms.comm_counter() as counter, Allocated() as allocated:
        y = F.conv2d(x, weight, padding=1)
    assert n == y.shape[2]
    if SIZE == 1 and (side, dtype) == (400, "float64"):
        # tile after tile: the result is made of theirs, and those at the ends are padded
        assert allocated.nbytes <= y.to_local().nbytes + x.to_local().nbytes // 3
    else:
        assert allocated.nbytes == 0
    # a row each way, without the ghost cells beyond the domain
    assert counter.nbytes == neighbours * side * x.itemsize
    torch.testing.assert_close(y.full_tensor(), expected)
    u.exchange()
    with ms.comm_counter() as counter:
        torch.testing.assert_close(F.conv2d(u.tensor[None, None], weight, padding=1).to_local(), y.to_local())
    assert counter.messages == 0
    sim.release()
    host.free()


def test_what_makes_a_halo_stale():
    host, array, sim, u = field((SIZE, 1), [(1, 1)] * 2)
    weight = torch.randn(1, 1, 3, 3, dtype=torch.float64)

    def compare():
        expected = F.conv2d(u.tensor.full_tensor()[None, None], weight, padding=1)
        torch.testing.assert_close(F.conv2d(u.tensor[None, None], weight, padding=1).full_tensor(), expected)

    u.exchange()
    compare()
    u.tensor.mul_(2)
    compare()
    u.exchange()
    array[host.interior] += 1  # the solver, which says nothing
    compare()
    u.exchange()
    if WORLD.rank == 0:
        u.tensor.to_local().add_(1)  # one rank alone
    compare()
    u.exchange()
    array[host.interior][:1] = 5
    u.touch()
    assert not u.halo_valid
    compare()
    u.rebind(array.copy())
    assert not u.halo_valid
    compare()
    u.halo_valid = True
    assert u.halo_valid
    sim.release()
    host.free()


def test_changed_between_forward_and_backward():
    host, array, sim, u = field((SIZE, 1), [(1, 1)] * 2)
    weight = torch.randn(1, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    hook = sim.hook(lambda x: None, ["u"])

    def conv(x):
        return F.conv2d(x[None, None], weight, padding=1)

    def pointwise(x):
        return x * weight[0, 0, 0, 0]

    def solve():
        array[host.interior] += 1

    def nudge():
        if WORLD.rank == 0:
            array[host.interior].flat[7] += 1

    for change in (u.touch, u.exchange, hook, lambda: u.tensor.add_(1), solve, nudge):
        for model in (conv, pointwise):
            loss = model(u.tensor).square().sum()
            change()
            if change is nudge and (model is pointwise or SIZE == 1):
                continue  # of few cells, only a convolution's with a halo are all looked at
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    # a forward without a backward, and then the solver: no reason to raise
    conv(u.tensor)
    solve()
    conv(u.tensor).square().sum().backward()
    sim.release()
    host.free()


@pytest.mark.parametrize("beside", ["trains", "infers", "log", "log of one cell", "rebound"])
def test_another_field_that_the_solver_writes_between_steps_ends_no_training(beside):
    host, array, sim, u = field((SIZE, 1), [(1, 1)] * 2)
    other = host.array()
    v = sim.field("v", other)

    def trainer():
        net = torch.nn.Conv2d(1, 1, 3, padding=1).double()

        def learn(x):
            net.zero_grad()
            net(x[None, None]).square().mean().backward()

        return learn

    train = sim.hook(trainer(), ["u"], grad=True)
    second = sim.hook(trainer() if beside == "trains" else lambda x: None, ["v"], grad=beside == "trains")
    kept = []
    for _ in range(3):
        array[host.interior] += 1
        if beside == "log of one cell":
            # what one rank alone finds, in a field that all have read
            if WORLD.rank == 0:
                other[host.interior].flat[0] += 1
        else:
            other[host.interior] += 1
        train()
        if beside in ("trains", "infers"):
            second()
        else:
            v.tensor.mean().full_tensor()
        if beside == "rebound":
            # the array before is looked at on, and written
            kept.append(v.tensor)
            v.rebind(other.copy())
            kept[-1].mean().full_tensor()
    # what did change is found all the same
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = (v.tensor * weight).square().sum() + (u.tensor * weight).sum()
    if WORLD.rank == 0:
        v.array.numpy()[host.interior] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    sim.release()
    host.free()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "complex64"])
def test_cells_that_are_no_numbers_are_not_written_cells(dtype):
    """A land mask, in dtypes that numpy has and has not."""
    dtype = getattr(torch, dtype)
    cells = torch.arange(60.0).reshape(10, 6)
    cells[1, :2] = float("nan")
    array = cells.to(dtype)
    sim = ms.insitu.adopt(WORLD, (8 * SIZE, 6), [(1, 1), 0], ("x", "y"), grid=(SIZE, 1))
    u = sim.field("u", array)
    x = u.tensor
    assert not u._halo.written()
    u.exchange()
    assert u.halo_valid
    y = ms.ones(SIZE, mesh=sim.mesh, placements=(ms.Shard(0), ms.Replicate()), requires_grad=True)
    before = x.block._version
    (y * 2).sum().backward()
    assert x.block._version == before
    # what is written is found: a NaN where there was none, and a number where there was one
    for value in (float("nan"), 1.0):
        u.exchange()
        _ = u.tensor
        # as a solver, past torch's count
        torch.from_dlpack(array.view(torch.int8)).copy_(torch.full_like(array, value).view(torch.int8))
        assert u._halo.written()
        assert not u.halo_valid
        u.touch()
    sim.release()


def test_what_one_rank_alone_looks_at_or_keeps():
    """Whether ranks ask each other at the beginning of a backward does not depend on it."""
    host, array, sim, u = field((SIZE, 1), [(1, 1)] * 2)
    y = ms.ones(SIZE, mesh=sim.mesh, placements=(ms.Shard(0), ms.Replicate()), requires_grad=True)
    if WORLD.rank == 0:
        print(u.tensor.shape)
    (y * 2).sum().backward()
    old = u.tensor if WORLD.rank == 0 else None
    u.rebind(array.copy())
    (y * 2).sum().backward()
    del old
    sim.release()
    host.free()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("periodic", [False, True])
def test_own_tensors_with_room(periodic, debug, monkeypatch):
    """A time loop of convolutions in place of a tensor that mpishard allocates."""
    monkeypatch.setattr(guard, "DEBUG", debug)
    for shape in mesh_shapes(2):
        mesh = mesh_of(shape, periodic)
        placements = [ms.Shard(2 + m) for m in range(len(shape))]
        torch.manual_seed(0)
        whole = torch.rand(1, 1, 12, 10, dtype=torch.float64)
        weight = torch.full((1, 1, 3, 3), 0.1, dtype=torch.float64)
        x = ms.zeros(1, 1, 12, 10, mesh=mesh, placements=placements, dtype=torch.float64, ghost=1)
        x.copy_(ms.distribute_tensor(whole, mesh, placements))
        data = x.to_local().data_ptr()
        for _ in range(3):
            x.copy_(F.conv2d(x, weight, padding=1))
            whole = F.conv2d(whole, weight, padding=1)
        torch.testing.assert_close(x.full_tensor(), whole)
        assert x.to_local().data_ptr() == data
        assert x._halo is not None


@pytest.mark.parametrize("periodic", [False, True])
def test_slices_that_are_cut_as_another_tensor_with_room(periodic):
    """A plan that was made for a tensor with its halo beside it is none for every other of the same layout."""
    mesh, n = mesh_of((SIZE,), (periodic,)), 4 * SIZE
    weight = torch.rand(1, 1, 3, 3)
    calls = (
        lambda x: F.conv2d(x[None, None], weight, padding=1),
        lambda x: F.max_pool2d(x[None, None], 3, 1, 1),
        lambda x: F.pad(x[None, None], (1, 1, 1, 1), mode="circular"),
    )
    for own in (n, n + 1):
        x = ms.zeros(own, 6, mesh=mesh, placements=[ms.Shard(0)], ghost=1).copy_(torch.rand(own, 6))
        for view in (lambda x: x[::2], lambda x: x[1:], lambda x: x[:-1], lambda x: x[1::2]):
            y = view(x)
            other = ms.zeros(*y.shape, mesh=mesh, placements=[ms.Shard(0)], sizes={0: y.sharding.sizes[0]}, ghost=1)
            for call in calls:
                call(other)
                torch.testing.assert_close(call(y).full_tensor(), call(y.full_tensor()))


def test_room_that_does_not_fit():
    mesh = mesh_of((SIZE,))
    for ghost in (-1, {0: 1}, {1: "wide"}, {5: 1}):
        with pytest.raises(ms.LayoutError, match="zeros"):
            ms.zeros(2, 8, mesh=mesh, placements=[ms.Shard(1)], ghost=ghost)


@pytest.mark.parametrize("declared", [False, True])
def test_a_hook_refreshes_once(declared):
    host, array, sim, u = field((SIZE, 1), [(1, 1)] * 2)
    weight = torch.randn(1, 1, 3, 3, dtype=torch.float64)
    out = []

    def model(x):
        out[:] = [F.conv2d(x[None, None], weight, padding=1) for _ in range(2)]

    hook = sim.hook(model, ["u"])
    for _ in range(2):
        array[host.interior] += 1
        if declared:
            array[...] = host.exchanged(array)
            host.whole += 1
            array[...] = host.exchanged(array)
            u.halo_valid = True
        with ms.comm_counter() as counter:
            hook()
        at = host.coords[0]
        assert counter.messages == (0 if declared else (at > 0) + (at < SIZE - 1))
        expected = F.conv2d(u.tensor.full_tensor()[None, None], weight, padding=1)
        for y in out:
            torch.testing.assert_close(y.full_tensor(), expected)
    sim.release()
    host.free()


def test_every_pair_of_widths_and_kernels():
    """Too narrow, wide enough on some ranks only, or just enough: the same result."""
    for (lo, hi), kernel in itertools.product(itertools.product(range(3), repeat=2), (2, 3, 5)):
        at = WORLD.rank
        for widths in ([(lo, hi)], [(lo if at > 0 else 0, hi if at < SIZE - 1 else 0)]):
            host, _, sim, u = field((SIZE,), widths)
            check(u, host, (kernel,), padding=kernel // 2)
            sim.release()
            host.free()


POOLS = [
    ("max_pool", {"kernel_size": 3, "stride": 1, "padding": 1}),
    ("max_pool", {"kernel_size": 3, "stride": 2}),
    ("avg_pool", {"kernel_size": 3, "stride": 1, "padding": 1}),
    ("avg_pool", {"kernel_size": 2, "stride": 2}),
]


def compare(function, host, x):
    """Assert that a function of the whole domain is the same of the field, with its gradient."""
    whole = torch.from_numpy(host.whole).clone().requires_grad_()
    x = x.detach().requires_grad_()
    expected, got = function(whole), function(x)
    scale = torch.arange(float(expected.numel()), dtype=torch.float64).reshape(expected.shape).sin()
    (expected * scale).sum().backward()
    sizes = {d: s for d, s in enumerate(got.sharding.sizes) if s is not None}
    (got * ms.distribute_tensor(scale, got.mesh, got.placements, sizes=sizes)).sum().backward()
    torch.testing.assert_close(got.detach().full_tensor(), expected.detach(), rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("grid", mesh_shapes(2), ids=str)
@pytest.mark.parametrize("periodic", [False, True])
def test_pools_and_circular_padding_equal_torch(grid, periodic):
    ndim = len(grid)
    weight = torch.randn(2, 1, *(3,) * ndim, dtype=torch.float64)
    for widths, empty, order in (
        ([(2, 2)] * ndim, False, "C"),
        ([(1, 3)] * ndim, False, "F"),
        ([(1, 1)] * ndim, True, "C"),
        ([(0, 1)] * ndim, False, "C"),
    ):
        host, _, sim, u = field(grid, widths, empty=empty, order=order, periodic=periodic)
        for name, options in POOLS:
            func = getattr(F, f"{name}{ndim}d")
            compare(lambda x, f=func, o=options: f(x[None, None], **o), host, u.tensor)
        for pads in ((1, 1) * ndim, (2, 0) * ndim, (0, 1) + (0, 0) * (ndim - 1), (0, 0) * (ndim - 1) + (1, 2)):

            def around(x, pads=pads):
                return CONV[ndim](F.pad(x[None, None], pads, mode="circular"), weight)

            compare(around, host, u.tensor)
            # padded again, written to, and the field as it was

            def twice(x, pads=pads):
                return F.pad(F.pad(x[None, None], pads, mode="circular"), pads, mode="circular")

            compare(twice, host, u.tensor)
        before = u.tensor.full_tensor()
        y = F.pad(u.tensor[None, None], (1, 1) * ndim, mode="circular").mul_(2)
        expected = CONV[ndim](F.pad(before[None, None], (1, 1) * ndim, mode="circular"), 2 * weight)
        torch.testing.assert_close(CONV[ndim](y, weight).full_tensor(), expected)
        torch.testing.assert_close(u.tensor.full_tensor(), before, rtol=0, atol=0)
        sim.release()
        host.free()


def test_first_windows_use_the_ghost_cells(monkeypatch):
    """What a host has exchanged is not sent again, nor fetched: by a pool, nor by circular padding and what follows."""
    host = Host((SIZE, 1), [(6,) * SIZE, (8,)], [(2, 2)] * 2, [True, True])
    array = host.array()
    array[...] = host.exchanged(array)
    sim = ms.insitu.adopt(host.cart, host.shape, 2)
    u = sim.field("u", array, writable=False)
    weight = torch.randn(1, 1, 3, 3, dtype=torch.float64)
    models = {
        "pool": lambda x: F.max_pool2d(x[None, None], 3, 1, 1),
        "circular": lambda x: F.conv2d(F.pad(x[None, None], (1, 1, 1, 1), mode="circular"), weight),
    }
    for model in models.values():
        u.halo_valid = True
        model(u.tensor)  # plans
    if SIZE > 1:
        monkeypatch.setattr(WindowOp, "__call__", None)
    for name, model in models.items():
        u.halo_valid = True
        with ms.comm_counter() as counter:
            y = model(u.tensor)
        assert counter.messages == 0, name
        torch.testing.assert_close(y.full_tensor(), model(torch.from_numpy(host.whole)), msg=name)
    sim.release()
    host.free()
