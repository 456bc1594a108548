"""Every primitive on GPU memory: bit for bit what the same calls give on the host."""

import itertools

import pytest
import torch
from mpi4py import MPI

import mpishard as ms
from tests.compare import gathered, mesh_shapes
from tests.gpu.conftest import REHEARSAL

WORLD = MPI.COMM_WORLD
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int32, torch.bool]


def values(*shape, dtype=torch.float64, seed=5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 8
    return x > 0 if dtype == torch.bool else x.to(dtype)


def same(on_device, on_host, device):
    assert on_device.device.type == device.type
    assert torch.equal(on_device.cpu(), on_host), f"{(on_device.cpu() != on_host).sum()} cells differ"


@pytest.fixture
def both(make_mesh):
    """The mesh of a shape on the GPU, and its like on the host."""
    hosts = []

    def make(shape, periodic=False):
        hosts.append(ms.init_mesh(shape, periodic=periodic, device="cpu"))
        return make_mesh(shape, periodic), hosts[-1]

    yield make
    for mesh in hosts:
        mesh.free()


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_halo_exchange_and_its_adjoint(device, both, mode):
    full = values(2, 3, 17, 12)
    if not REHEARSAL:
        full = full.round()  # a GPU sums in an order of its own, and whole numbers exactly
    for shape in mesh_shapes(2):
        widths = {2: (2, 1), 3: (0, 3)} if len(shape) == 2 else {2: (2, 1)}
        results = []
        for mesh in both(shape):
            x = ms.distribute_tensor(full.to(mesh.device), mesh, (ms.Shard(2), ms.Shard(3))[: len(shape)])
            x.requires_grad_()
            padded = ms.halo_exchange(x, widths, mode=mode)
            (grad,) = torch.autograd.grad(padded, x, padded.detach() * 2)
            results.append((padded.detach(), grad.to_local()))
        for got, expected in zip(*results, strict=True):
            same(got, expected, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_redistribution(device, both, dtype):
    full = values(12, 10, 7, dtype=dtype)
    for shape in mesh_shapes(2):
        gpu, _ = both(shape)
        options = list(itertools.product((ms.Shard(0), ms.Shard(1), ms.Replicate()), repeat=len(shape)))
        for source, target in itertools.islice(itertools.permutations(options, 2), 0, None, 7):
            y = ms.distribute_tensor(full.to(device), gpu, source).redistribute(placements=target)
            same(y.full_tensor(), full, device)


# of most dtypes more than one piece (mpishard/comm/device/staging.py), and what is much for a GPU
MANY = 3_000_001 if torch.cuda.is_available() else 600_001


@pytest.mark.parametrize("n", [1, 1000, MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.complex64], ids=str)
def test_collectives(device, both, dtype, n):
    gpu, host = both((WORLD.size,))
    # whole numbers: their sums are exact in any order
    x = values(n, dtype=torch.float64, seed=WORLD.rank).round().clamp(-9, 9).to(dtype)
    for call in (
        ms.all_reduce,
        ms.all_gather,
        lambda t, m: ms.broadcast(t, m, root=WORLD.size - 1),
        ms.reduce_scatter,
        lambda t, m: ms.all_to_all(t, m, split_dim=0, concat_dim=0),
        lambda t, m: ms.shift(t, m, 0, 1),
    ):
        same(call(x.to(device), gpu), call(x, host), device)
    if not dtype.is_complex:
        same(ms.all_reduce(x.to(device), gpu, op="max"), ms.all_reduce(x, host, op="max"), device)


@pytest.mark.parametrize("order", ["C", "F"])
def test_halo_exchanger(device, both, order):
    for shape, periodic in itertools.product(mesh_shapes(3), (False, True)):
        gpu, host = both(shape, periodic)
        widths = [(2, 1), (1, 1), (0, 2)][: len(shape)]
        extents = [6 + lo + hi for lo, hi in widths] + [5] * (3 - len(shape))
        widths += [(0, 0)] * (3 - len(shape))
        dtypes = (torch.float32, torch.int16, torch.complex128)
        exchangers = [ms.HaloExchanger(m, extents, widths, dtypes, order=order) for m in (gpu, host)]
        fields = [values(*extents, seed=WORLD.rank + k).to(d) for k, d in enumerate(dtypes)]
        if order == "F":
            fields = [f.permute(2, 1, 0).contiguous().permute(2, 1, 0) for f in fields]
        on_gpu = [f.to(device) for f in fields]
        for _ in range(2):
            exchangers[0](*on_gpu)
            exchangers[1](*fields)
            for got, expected in zip(on_gpu, fields, strict=True):
                same(got, expected, device)
        exchangers[0].start(*on_gpu)
        exchangers[0].poke()
        exchangers[0].finish()
        exchangers[1](*fields)
        for got, expected in zip(on_gpu, fields, strict=True):
            same(got, expected, device)


def test_arrays_of_cupy(make_mesh):
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    mesh = make_mesh((WORLD.size,), True)
    with cupy.cuda.Device(mesh.device.index):
        u = cupy.full((6, 4), mesh.rank, dtype=cupy.float32)
        ms.HaloExchanger(mesh, u.shape, ((1, 1), 0), "float32")(u)
        assert float(u[0, 0]) == (mesh.rank - 1) % mesh.size
        assert float(u[-1, -1]) == (mesh.rank + 1) % mesh.size
        x = ms.ShardTensor.from_local(u, mesh, (ms.Shard(0),))
        assert x.to_local().data_ptr() == u.data.ptr
        assert cupy.from_dlpack(x.to_local()).data.ptr == u.data.ptr


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_cannot_capture_an_exchange(make_mesh):
    mesh = make_mesh((WORLD.size,), True)
    x = ms.distribute_tensor(values(8, 4).cuda(), mesh, (ms.Shard(0),))
    ms.halo_exchange(x, {0: (1, 1)}, mode="circular")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ms.UnsupportedOperationError, match="CUDA graph"), torch.cuda.graph(graph):
        ms.halo_exchange(x, {0: (1, 1)}, mode="circular")
    WORLD.Barrier()


@pytest.mark.ranks(1)
def test_a_graph_captures_a_step_of_one_rank(make_mesh):
    mesh = make_mesh((1,), True)
    torch.manual_seed(0)
    model = ms.distribute_module(
        torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), torch.nn.GroupNorm(2, 4), torch.nn.GELU()
        ).to(mesh.device),
        mesh,
    )
    x = ms.distribute_tensor(values(1, 2, 12, 8).float().cuda(), mesh, (ms.Shard(2),))

    def step():
        for p in model.parameters():
            p.grad = None
        loss = (model(x) ** 2).mean()
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    grads = [p.grad for p in model.parameters()]
    x.to_local().mul_(2)
    graph.replay()
    replayed = [gathered(t).clone() for t in (captured, *grads)]
    expected = [gathered(t) for t in (step(), *(p.grad for p in model.parameters()))]
    assert replayed[0].item() == pytest.approx(expected[0].item(), rel=1e-6)
    torch.testing.assert_close(replayed[1:], expected[1:])


def test_memory_comes_back(make_mesh):
    def rounds():
        mesh = make_mesh((WORLD.size,), True)
        x = ms.distribute_tensor(values(64, 256, 64).cuda(), mesh, (ms.Shard(0),))
        ms.halo_exchange(x, {0: (2, 2)}, mode="circular")
        x.redistribute(placements=(ms.Shard(1),))
        del x
        mesh.free()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        WORLD.Barrier()
        return torch.cuda.mem_get_info()[0]

    for _ in range(3):
        rounds()  # contexts, kernels, IPC handles of the MPI library
    before, count = rounds(), 40
    WORLD.Barrier()
    after = [rounds() for _ in range(count)][-1]
    WORLD.Barrier()
    # drivers take and give back a few MiB at a time; the smallest buffer that each round could lose has a quarter
    assert before - after < count << 18
