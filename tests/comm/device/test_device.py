"""The device path over an emulated device: the same values as on the host, and no buffer used out of order."""

import itertools

import pytest
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard.comm import mesh as mesh_module
from mpishard.comm.collective import blocking, nonblocking
from mpishard.comm.device import staging
from mpishard.comm.transport import device_message
from mpishard.comm.transport.device import Device
from mpishard.layout import layout_of
from tests.compare import compare, mesh_shapes
from tests.emulated import OutOfOrder, emulated

WORLD = MPI.COMM_WORLD
ROUTES = list(itertools.product((True, False), (True, False)))


@pytest.fixture(params=ROUTES, ids=lambda p: f"{'aware' if p[0] else 'staged'}-{'kernel' if p[1] else 'torch'}")
def device(request, monkeypatch):
    """The emulated device, which makes meshes whose messages take one of the routes."""
    aware, kernel = request.param
    monkeypatch.setattr(mesh_module.aware, "agreed", lambda comm, device: aware)
    made = []
    with emulated(kernel=kernel) as driver:

        def mesh(shape, periodic=False):
            made.append(ms.init_mesh(shape, periodic=periodic))
            return made[-1]

        driver.mesh = mesh
        yield driver
        for own in made:
            own.free()
        assert not driver.lent
        assert driver.allocated == 0


def values(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_halo_exchange_and_its_adjoint(device, mode):
    full = values(2, 9, 7)
    for shape in mesh_shapes(2):
        mesh = device.mesh(shape)
        placements = (ms.Shard(1), ms.Shard(2))[: len(shape)]
        widths = {1: (2, 1), 2: (1, 3)} if len(shape) == 2 else {1: (2, 1)}
        x = ms.distribute_tensor(full, mesh, placements).requires_grad_()
        padded = ms.halo_exchange(x, widths, mode=mode)
        (grad,) = torch.autograd.grad(padded, x, padded.detach())
        whole = full.clone().requires_grad_()
        wide = whole[None]
        for d, (lo, hi) in widths.items():
            pad = [0, 0] * 2
            pad[2 * (2 - d) : 2 * (2 - d) + 2] = [lo, hi]
            if mode == "zeros":
                wide = torch.nn.functional.pad(wide, pad)
            else:
                wide = torch.nn.functional.pad(wide, pad, mode=mode)
        wide = wide[0]

        def block(t, coords, x=x, widths=widths):
            index = [slice(None)] * 3
            for m, (d, (lo, hi)) in enumerate(widths.items()):
                start = sum(x.sharding.sizes[d][: coords[m]])
                index[d] = slice(start, start + x.sharding.sizes[d][coords[m]] + lo + hi)
            return t[tuple(index)]

        torch.testing.assert_close(padded.detach(), block(wide, mesh.coords).detach(), rtol=0, atol=0)
        every = [block(wide, coords) for coords in itertools.product(*map(range, mesh.shape))]
        (expected,) = torch.autograd.grad(every, whole, [t.detach() for t in every])
        torch.testing.assert_close(grad.full_tensor(), expected, rtol=1e-12, atol=1e-12)


def reached(n, lo, hi, mode):
    """Indices of the cells [lo, hi) of a dim of ``n``, -1 for none."""
    cells = torch.arange(lo, hi)
    if mode == "circular":
        return cells % n
    if mode == "replicate":
        return cells.clamp(0, n - 1)
    return torch.where((cells >= 0) & (cells < n), cells, torch.tensor(-1))


@pytest.mark.parametrize("mode", ["zeros", "replicate", "circular"])
def test_halos_of_several_dims_travel_at_once(device, mode):
    """Blocks of any size, some of them narrower than the halo or empty: every cell comes from its owner."""
    full = values(9, 2, 7)
    for shape in mesh_shapes(2)[1:]:
        mesh = device.mesh(shape)
        sizes = {0: [9, *[0] * (shape[0] - 1)], 2: [7 - 2 * (shape[1] - 1), *[2] * (shape[1] - 1)]}
        if shape[0] > 1:
            sizes[0][:2] = [6, 3]
        for widths in ({0: (1, 2), 2: (2, 1)}, {0: (4, 4), 2: (3, 0)}):
            x = ms.distribute_tensor(full, mesh, (ms.Shard(0), ms.Shard(2)), sizes=sizes)
            device.launches = device.waits = 0
            padded = ms.halo_exchange(x, widths, mode=mode)
            assert device.launches <= 2
            expected = full
            for m, (d, (lo, hi)) in enumerate(widths.items()):
                start = sum(sizes[d][: mesh.coords[m]])
                cells = reached(full.shape[d], start - lo, start + sizes[d][mesh.coords[m]] + hi, mode)
                expected = torch.cat((expected, torch.zeros_like(expected.narrow(d, 0, 1))), d).index_select(
                    d, torch.where(cells < 0, torch.tensor(full.shape[d]), cells)
                )
            assert torch.equal(padded, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16])
def test_exchanges_of_every_item_size(device, dtype):
    mesh = device.mesh((WORLD.size,), periodic=True)
    full = values(3, 8, 5, dtype=dtype)
    x = ms.distribute_tensor(full, mesh, (ms.Shard(1),))
    padded = ms.halo_exchange(x, {1: (1, 1)}, mode="circular")
    start = sum(x.sharding.sizes[1][: mesh.rank])
    rows = [i % 8 for i in range(start - 1, start + x.sharding.sizes[1][mesh.rank] + 1)]
    assert torch.equal(padded, full[:, rows])


def test_operations_equal_torch(device):
    weights = [values(3, 2, 3, 3).requires_grad_(), values(3).requires_grad_()]
    norm = torch.nn.GroupNorm(1, 3).double()
    for shape in mesh_shapes(2):
        mesh = device.mesh(shape)
        placements = (ms.Shard(2), ms.Shard(3))[: len(shape)]

        def f(x, mesh=mesh):
            y = torch.nn.functional.conv2d(x, *weights, stride=2, padding=1)
            y = torch.nn.functional.max_pool2d(norm(y), 3, 1, 1)
            return torch.nn.functional.pad(y, (1, 2, 0, 1), mode="circular").flip(2)

        compare(f, [(values(1, 2, 13, 11), mesh, placements, None)], weights)


def test_redistribution(device):
    full = values(6, 7, 5)
    for shape in mesh_shapes(2):
        mesh = device.mesh(shape)
        options = list(itertools.product((ms.Shard(0), ms.Shard(1), ms.Replicate()), repeat=len(shape)))
        for source, target in itertools.islice(itertools.permutations(options, 2), 0, None, 5):
            x = ms.distribute_tensor(full, mesh, source).requires_grad_()
            y = x.redistribute(placements=target)
            assert y.sharding == layout_of(mesh.shape, target, full.shape)
            assert torch.equal(y.detach().full_tensor(), full)
            (grad,) = torch.autograd.grad(y, x, y.detach())
            assert torch.equal(grad.full_tensor(), full)


@pytest.mark.parametrize("nbytes", [1, 40, 1 << 20])
def test_messages_in_pieces(device, monkeypatch, nbytes):
    monkeypatch.setattr(staging, "PIECE_NBYTES", nbytes)
    monkeypatch.setattr(device_message.buffer, "MESSAGE_NBYTES", max(nbytes, 16))
    mesh = device.mesh((WORLD.size,), periodic=True)
    full = values(8, 6)
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0),))
    start = sum(x.sharding.sizes[0][: mesh.rank])
    rows = [i % 8 for i in range(start - 2, start + x.sharding.sizes[0][mesh.rank] + 2)]
    for _ in range(3):
        assert torch.equal(ms.halo_exchange(x, {0: (2, 2)}, mode="circular"), full[rows])


@pytest.mark.parametrize("order", ["C", "F"])
def test_halo_exchanger_in_place(device, order):
    for shape, periodic in itertools.product(mesh_shapes(3), (False, True)):
        mesh = device.mesh(shape, periodic)
        widths = [(2, 1), (1, 1), (0, 2)][: len(shape)]
        own = [slice(lo, lo + 5) for lo, _ in widths]
        extents = [5 + lo + hi for lo, hi in widths]
        extra = () if len(shape) == 3 else (3,)
        h = ms.HaloExchanger(
            mesh, (*extents, *extra), [*widths, *([0] * len(extra))], (torch.float64, torch.int16), order=order
        )
        fields, expected = [], []
        for k, dtype in enumerate((torch.float64, torch.int16)):
            full = (torch.arange(5 ** len(shape) * WORLD.size * 3).reshape(*(5 * n for n in shape), -1) + k).to(dtype)
            full = full[..., : extra[0] if extra else 1]
            full = full if extra else full[..., 0]
            index = []
            for d, (lo, hi) in enumerate(widths):
                cells = torch.arange(5 * mesh.coords[d] - lo, 5 * mesh.coords[d] + 5 + hi)
                index.append((cells, (cells >= 0) & (cells < 5 * shape[d]) | torch.tensor(periodic)))
            want = full
            inside = torch.ones((), dtype=torch.bool)
            for d, (cells, there) in enumerate(index):
                want = want.index_select(d, cells % (5 * shape[d]))
                inside = inside[..., None] & there
            for _ in extra:
                inside = inside[..., None].expand(*inside.shape, extra[0])
            field = torch.full(tuple(want.shape), -99, dtype=dtype)
            field = field.t().contiguous().t() if order == "F" and field.ndim == 2 else field
            field[tuple(own)] = want[tuple(own)]
            fields.append(field)
            expected.append(torch.where(inside, want, torch.tensor(-99, dtype=dtype)))
        h(*fields)
        for field, want in zip(fields, expected, strict=True):
            assert torch.equal(field, want)
        before = [f.clone() for f in fields]
        for f in fields:
            f[tuple(own)] += 1
        h.start(*fields)
        while not h.poke():
            pass
        h.finish()
        for field, want in zip(fields, before, strict=True):
            assert torch.equal(field, torch.where(want == -99, want, want + 1))
        h.free()


def test_exchanges_on_alternating_streams(device):
    """One plan serves every stream: its buffers are handed from one to the next in order."""
    mesh = device.mesh((WORLD.size,), periodic=True)
    x = ms.distribute_tensor(values(12, 4), mesh, (ms.Shard(0),))
    wide = x
    for k in range(12):
        before, stream = device.stream, k % 3
        with device.on_stream(stream):
            device.follow(before if k % 3 == 0 else (k - 1) % 3)
            padded = ms.halo_exchange(wide, {0: (1, 1)}, mode="circular")
            local = padded[:-2] + padded[2:]
        wide = ms.ShardTensor.from_local(local, mesh, (ms.Shard(0),), sharding_shapes={0: x.sharding.sizes[0]})
    expected = values(12, 4)
    for _ in range(12):
        expected = expected.roll(1, 0) + expected.roll(-1, 0)
    torch.testing.assert_close(wide.full_tensor(), expected)


def test_one_launch_packs_and_one_unpacks(device):
    for shape in mesh_shapes(3):
        mesh = device.mesh(shape, periodic=True)
        h = ms.HaloExchanger(mesh, (6, 5, 4), 1, torch.float32, dims=dict(enumerate(range(len(shape)))))
        fields = [torch.zeros(h.shape) for _ in range(3)]
        h(*fields)
        device.launches = 0
        h(*fields)
        # and as many for what a rank has from itself
        kinds = (mesh.size > 1) + (1 in shape)
        assert device.launches == (2 * kinds if device.has_kernel else 0)
        device.wait_all()  # before the fields' memory goes


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("aware", [True, False])
def test_a_missing_wait_is_found(aware, monkeypatch):
    """The emulation is no rubber stamp: without the wait before the send, it says so."""
    monkeypatch.setattr(mesh_module.aware, "agreed", lambda comm, device: aware)
    with emulated(kernel=True) as driver:
        mesh = ms.init_mesh((WORLD.size,), periodic=True)
        x = ms.distribute_tensor(values(8, 4), mesh, (ms.Shard(0),))
        ms.halo_exchange(x, {0: (1, 1)}, mode="circular").sum()  # torch's next operation runs what is queued
        wait, driver.wait = driver.wait, lambda event: None
        with pytest.raises(OutOfOrder):
            ms.halo_exchange(x, {0: (1, 1)}, mode="circular")
        driver.wait = wait
        driver.wait_all()
        driver.lent.clear()
        mesh.free()


@pytest.mark.ranks(2, 3, 4)
def test_a_graph_cannot_capture_communication(device):
    mesh = device.mesh((WORLD.size,), periodic=True)
    h = ms.HaloExchanger(mesh, (6, 4), ((1, 1), 0), torch.float64)
    field, x, y = values(6, 4), ms.distribute_tensor(values(8, 4), mesh, (ms.Shard(0),)), values(WORLD.size)
    weight = values(2, 4, 3)
    calls = [
        lambda: h(field),
        lambda: ms.halo_exchange(x, {0: (1, 1)}, mode="circular"),
        lambda: x.redistribute(placements=(ms.Shard(1),)),
        lambda: ms.shift(y, mesh, 0, 1),
        lambda: nonblocking.iall_reduce(y, mesh.group((0,)), deterministic=True),
        lambda: nonblocking.iall_reduce(y, mesh.group((0,))),
        *(lambda call=call: call(y, mesh) for call in (ms.all_reduce, ms.all_gather, ms.broadcast, ms.reduce_scatter)),
        lambda: ms.all_to_all(y, mesh, split_dim=0, concat_dim=0),
        x.full_tensor,
        lambda: x.sum().full_tensor(),
        lambda: torch.roll(x, 1, 0),
        lambda: torch.nn.functional.conv1d(x.unsqueeze(0).transpose(1, 2), weight, padding=1),
    ]
    planned = [call() for call in calls[:2]]
    device.wait_all()
    assert planned[1].shape[0] > 2
    device.capturing = True
    for call in calls:
        with pytest.raises(ms.UnsupportedOperationError, match="CUDA graph"):
            call()
    device.capturing = False


def test_freed_memory_is_used_again_in_order(device):
    mesh = device.mesh((WORLD.size,))
    group = mesh.group((0,))._replace(rank=0, size=1)
    x = values(40)
    for _ in range(3):
        for stream in (0, 1):
            with device.on_stream(stream):
                y = torch.empty_like(x)
                Device(group, device).post([(0, x)], [(0, y)], "probe", 1).wait()
                memory = device.allocate(320)
                memory.tensor.view(torch.float64).copy_(y)
                memory.free(device.mark())
                assert torch.equal(y, x)
    taken = [device.allocate(320) for _ in range(2)]
    assert taken[0].address != taken[1].address
    late = taken[0]
    device.upload(late.tensor, torch.zeros(320, dtype=torch.uint8))
    with pytest.raises(OutOfOrder):
        late.free()
    device.wait_all()
    taken[1].free()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("wait", ["the last download", "every download"])
def test_a_missing_wait_of_a_collective_is_found(wait, monkeypatch):
    monkeypatch.setattr(staging, "PIECE_NBYTES", 16)
    monkeypatch.setattr(staging, "LEAST_NBYTES", 1)
    with emulated(kernel=True) as driver:
        every, waits = driver.wait, []

        def forgetful(event):
            waits.append(event)
            if wait == "the last download" and len(waits) < 4:
                every(event)

        driver.wait = forgetful
        with pytest.raises(OutOfOrder):
            blocking.all_reduce(values(8), blocking.world())
        driver.wait = every
        driver.wait_all()
        driver.lent.clear()
