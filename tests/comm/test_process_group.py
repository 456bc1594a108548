"""torch.distributed over MPI: torch's own collectives and wrappers, and what they compute."""

from __future__ import annotations

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import mpishard as ms
from mpishard.comm import guard
from mpishard.comm.torch_distributed import process_group
from mpishard.comm.torch_distributed.call import Calls
from tests.compare import assert_loads

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
# their names from torch 2.13 on, and before
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]


@pytest.fixture
def world():
    yield ms.process_group(WORLD)
    dist.destroy_process_group()


def field(rank, *shape, dtype=torch.float32):
    values = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(rank + 1))
    return values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def fields(*shape, dtype=torch.float32):
    return torch.stack([field(r, *shape, dtype=dtype) for r in range(SIZE)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives(world, dtype):
    x, every = field(RANK, 3, 4, dtype=dtype), fields(3, 4, dtype=dtype)

    total = x.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, every.sum(0).to(dtype))

    joined = torch.empty(3 * SIZE, 4, dtype=dtype)
    all_gather_single(joined, x)
    assert torch.equal(joined, every.flatten(0, 1))
    parts = [torch.empty_like(x) for _ in range(SIZE)]
    dist.all_gather(parts, x.t().contiguous().t())
    assert torch.equal(torch.stack(parts), every)

    mine = torch.empty(2, dtype=dtype)
    whole = fields(2 * SIZE, dtype=dtype)
    reduce_scatter_single(mine, whole[RANK].clone())
    torch.testing.assert_close(mine, whole.sum(0).to(dtype)[2 * RANK : 2 * RANK + 2])

    y = x.clone()
    dist.broadcast(y, SIZE - 1)
    assert torch.equal(y, every[-1])
    y = x.clone()
    dist.reduce(y, SIZE - 1)
    torch.testing.assert_close(y, every.sum(0).to(dtype) if RANK == SIZE - 1 else x)

    parts = [torch.empty_like(x) for _ in range(SIZE)] if RANK == 0 else None
    dist.gather(x, parts)
    assert RANK or torch.equal(torch.stack(parts), every)
    y = torch.empty_like(x)
    dist.scatter(y, list(every.unbind()) if RANK == 0 else None)
    assert torch.equal(y, x)

    # r + 1 rows to rank r
    rows = [r + 1 for r in range(SIZE)]
    sent = fields(sum(rows), 2, dtype=dtype)
    y = torch.empty(SIZE * (RANK + 1), 2, dtype=dtype)
    dist.all_to_all_single(y, sent[RANK].clone(), [RANK + 1] * SIZE, rows)
    assert torch.equal(y, torch.cat([s.split(rows)[RANK] for s in sent]))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.PRODUCT, lambda t: t.prod(0)),
        (dist.ReduceOp.MIN, lambda t: t.amin(0)),
        (dist.ReduceOp.MAX, lambda t: t.amax(0)),
        (dist.ReduceOp.AVG, lambda t: t.double().mean(0).floor().long()),
        (dist.ReduceOp.BAND, lambda t: _folded(torch.bitwise_and, t)),
        (dist.ReduceOp.BOR, lambda t: _folded(torch.bitwise_or, t)),
        (dist.ReduceOp.BXOR, lambda t: _folded(torch.bitwise_xor, t)),
    ],
)
def test_reductions(world, op, expected):
    every = fields(2 * SIZE, dtype=torch.int64)
    x = every[RANK].clone()
    dist.all_reduce(x, op)
    assert torch.equal(x, expected(every))
    mine = torch.empty(2, dtype=torch.int64)
    reduce_scatter_single(mine, every[RANK].clone(), op)
    assert torch.equal(mine, expected(every)[2 * RANK : 2 * RANK + 2])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_means_of_unsigned_numbers(world, dtype):
    x = torch.tensor([7, RANK + 1]).to(dtype)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [7, (SIZE + 1) // 2]


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT])
def test_sums_and_products_of_truths(world, op):
    # the first is true on all ranks, the second on one, the third on none
    truths = torch.tensor([True, RANK == 0, False])
    expected = torch.tensor([True, op == dist.ReduceOp.SUM or SIZE == 1, False])
    dist.all_reduce(x := truths.clone(), op)
    assert torch.equal(x, expected)
    dist.reduce(y := truths.clone(), 0, op)
    assert torch.equal(y, expected if RANK == 0 else truths)
    reduce_scatter_single(mine := torch.empty_like(truths), truths.repeat(SIZE), op)
    assert torch.equal(mine, expected)
    with pytest.raises(ms.UnsupportedDtypeError):
        dist.all_reduce(truths, dist.ReduceOp.AVG)


@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_of_what_each_rank_scales(world, dtype):
    every = fields(2 * SIZE, dtype=dtype)
    own, op = every[RANK], dist._make_nccl_premul_sum(0.25)
    expected = every.double().sum(0).mul(0.25).to(dtype)
    transposed = torch.empty(2 * SIZE, 2, dtype=dtype)[:, 0].copy_(own)
    for x in (own.clone(), transposed):
        dist.all_reduce(x, op)
        assert torch.equal(x, expected)
    work = dist.all_reduce(x := own.clone(), op, async_op=True)
    work.wait()
    assert torch.equal(x, expected)
    dist.all_reduce_coalesced([x := own.clone()], op)
    assert torch.equal(x, expected)
    dist.reduce(x := own.clone(), 0, op)
    assert torch.equal(x, expected if RANK == 0 else own)
    mine, given = torch.empty(2, dtype=dtype), own.clone()
    reduce_scatter_single(mine, given, op)
    assert torch.equal(mine, expected[2 * RANK : 2 * RANK + 2])
    dist.reduce_scatter(mine.zero_(), list(given.chunk(SIZE)), op)
    assert torch.equal(mine, expected[2 * RANK : 2 * RANK + 2])
    assert torch.equal(given, own)
    with pytest.raises(ms.UnsupportedOperationError, match="no reduction 'premul_sum'"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), op)


@pytest.mark.filterwarnings("ignore:.*all_gather_coalesced:FutureWarning")
@pytest.mark.parametrize("count", [1, 2, 3])  # as many as ranks, too
def test_lists_of_tensors_of_every_rank(world, count):
    def of(rank):
        return [torch.full((2,), 10.0 * rank + i) for i in range(count)]

    got = [[torch.zeros(2) for _ in range(count)] for _ in range(SIZE)]
    dist.all_gather_coalesced(got, of(RANK))
    for rank in range(SIZE):
        assert all(map(torch.equal, got[rank], of(rank)))
    with pytest.raises(ms.LayoutError, match="do not fit"):
        dist.all_gather_coalesced(got + got[:1], of(RANK))


def _folded(f, every):
    total = every[0]
    for t in every[1:]:
        total = f(total, t)
    return total


def test_work_that_goes_on(world):
    x, y = torch.ones(1000) * RANK, torch.ones(3)
    first = dist.all_reduce(x, async_op=True)
    second = dist.all_reduce(y, async_op=True)
    second.wait()
    first.wait()
    assert first.is_completed()
    assert torch.equal(x, torch.full((1000,), sum(range(SIZE)) * 1.0))
    assert torch.equal(y, torch.full((3,), SIZE * 1.0))
    (z,) = dist.all_reduce(torch.ones(2), async_op=True).get_future().value()
    assert torch.equal(z, torch.full((2,), SIZE * 1.0))


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_several_calls_at_a_time(world, device, asked):
    x, y, came = torch.ones(2), torch.ones(3), torch.zeros(1)
    coalescing = dist.distributed_c10d._coalescing_manager
    with coalescing(device=device, async_ops=True) as work:
        dist.all_reduce(x)
        dist.all_reduce(y)
    work.wait()
    assert x.tolist() == [SIZE] * 2
    assert y.tolist() == [SIZE] * 3
    with coalescing(device=torch.device("cpu"), async_ops=True) as work:
        dist.isend(torch.full((1,), float(RANK)), (RANK + 1) % SIZE)
        dist.irecv(came, (RANK - 1) % SIZE)
    if asked:
        completed(work.works[0])
    work.wait()
    assert came.item() == (RANK - 1) % SIZE


@pytest.mark.ranks(2, 3, 4)
def test_messages(world):
    to, of = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    got = [torch.empty(5), torch.empty(2, dtype=torch.int64)]
    ops = [dist.P2POp(dist.irecv, t, of, tag=k) for k, t in enumerate(got)]
    ops += [dist.P2POp(dist.isend, t, to, tag=k) for k, t in enumerate([field(RANK, 5), torch.tensor([RANK, 7])])]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(got[0], field(of, 5))
    assert got[1].tolist() == [of, 7]
    if RANK == 0:
        x = torch.empty(1)
        froms = {dist.recv(x) for _ in range(SIZE - 1)}
        assert froms == set(range(1, SIZE))
        request = dist.irecv(torch.empty(3), 1, tag=9)
        dist.barrier()
        with pytest.raises(ms.LayoutError, match=r"12 bytes.*\n.*got: +8 bytes"):
            request.wait()
    else:
        dist.send(torch.ones(1), 0)
        if RANK == 1:
            dist.send(torch.ones(2), 0, tag=9)
        dist.barrier()


def test_objects(world):
    every = [None] * SIZE
    dist.all_gather_object(every, {"rank": RANK})
    assert every == [{"rank": r} for r in range(SIZE)]
    one = ["there"] if RANK == 0 else [None]
    dist.broadcast_object_list(one, 0)
    assert one == ["there"]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(SIZE)] if RANK == 0 else None)
    assert mine == [f"for {RANK}"]


@pytest.mark.ranks(2, 4)
def test_groups_of_a_mesh():
    mesh = ms.init_mesh((2, -1), ("data", "y"))
    try:
        for name in ("data", "y"):
            group = ms.process_group(mesh[name])
            assert group is ms.process_group(mesh[name]) or SIZE == 2
            assert dist.get_world_size(group) == mesh[name].size
            assert dist.get_rank(group) == mesh[name].rank
            x = torch.tensor([mesh.rank + 1])
            dist.all_reduce(x, group=group)
            assert x.item() == ms.all_reduce(torch.tensor([mesh.rank + 1]), mesh[name]).item()
        assert dist.get_world_size() == SIZE
        if SIZE > 2:
            dist.destroy_process_group(ms.process_group(mesh["y"]))
            x = torch.ones(1)
            dist.all_reduce(x, group=ms.process_group(mesh["y"]))
            assert x.item() == SIZE // 2
    finally:
        dist.destroy_process_group()
        mesh.free()


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def test_data_parallel(world):
    x = torch.randn(4 * SIZE, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    plain, own = model(), DistributedDataParallel(model(), process_group=world)
    plain(x).square().mean().backward()
    own(x.chunk(SIZE)[RANK]).square().mean().backward()
    for p, q in zip(plain.parameters(), own.module.parameters()):
        torch.testing.assert_close(q.grad, p.grad)


@pytest.mark.ranks(2, 4)
def test_fully_shard_dtensor_and_checkpoints(world, tmp_path):
    import torch.distributed.checkpoint as dcp

    mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("a", "b"))
    t = torch.arange(64.0).view(8, 8)
    d = distribute_tensor(t, mesh, [Shard(0), Shard(1)])
    assert torch.equal((d @ d.T).full_tensor(), t @ t.T)
    assert torch.equal(d.redistribute(placements=[Replicate(), Shard(0)]).full_tensor(), t)

    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    plain, own = model(), model()
    for layer in (own[0], own[2]):
        fully_shard(layer, mesh=mesh["a"])
    fully_shard(own, mesh=mesh["a"])
    for m, part in ((plain, x), (own, x.chunk(2)[mesh.get_local_rank("a")])):
        optimizer = torch.optim.Adam(m.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            m(part).square().mean().backward()
            optimizer.step()
    state = {name: p.full_tensor() for name, p in own.state_dict().items()}
    for name, p in plain.state_dict().items():
        torch.testing.assert_close(state[name], p)

    folder = WORLD.bcast(str(tmp_path / "checkpoint"))
    dcp.save({"model": own.state_dict()}, checkpoint_id=folder)
    assert_loads(own, folder, state)


@pytest.mark.ranks(4)
def test_fully_shard_around_shards():
    """Parameters over "data", cells over "y": the sums over "y" are ours, those over "data" torch's."""
    mesh = ms.init_mesh((2, 2), ("data", "y"))
    try:
        ms.process_group(mesh)
        devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "y"))
        torch.manual_seed(3)
        plain = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 3, padding=1)).double()
        own = copy.deepcopy(plain)
        for layer in own:
            fully_shard(layer, mesh=devices["data"])
        fully_shard(own, mesh=devices["data"])
        x = torch.randn(4, 2, 9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        plain(x).square().mean().backward()
        part = x.chunk(2)[mesh["data"].rank]
        shards = ms.distribute_tensor(part, mesh["y"], (ms.Shard(2),))
        own(shards).square().mean().backward()
        for p, q in zip(plain.parameters(), own.parameters()):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)
    finally:
        dist.destroy_process_group()
        mesh.free()


def quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*(quantize|nested tensors)")
def test_what_cannot_be():
    with pytest.raises(ms.MeshError, match="process_group: no ranks"):
        ms.process_group("y")
    ms.process_group(WORLD)
    try:
        with pytest.raises(ms.UnsupportedOperationError, match="no reduction 'band'"):
            dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND)
        for make in (torch.Tensor.to_sparse, lambda x: torch.nested.nested_tensor([x]), quantized):
            parts = [make(torch.ones(2)) for _ in range(SIZE)]
            for call in (
                dist.all_reduce,
                lambda x: dist.broadcast(x, 0),
                lambda x, parts=parts: dist.all_gather(parts, x),
                lambda x: dist.reduce(x, 0),
                lambda x: dist.isend(x, RANK),
                lambda x, parts=parts: dist.scatter(x, parts if RANK == 0 else None, 0),
            ):
                with pytest.raises(ms.UnsupportedOperationError, match="works on dense tensors"):
                    call(make(torch.ones(2)))
        if SIZE > 1:
            turned = WORLD.Split(0, -RANK)
            with pytest.raises(ms.MeshError, match="another order"):
                ms.process_group(turned)
            turned.Free()
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks(3, 4)
def test_groups_of_ranks_that_belong_to_different_numbers_of_them(world):
    for ranks in ([0, 2], [0, 1, 2], [1, 2], [0, 2]):
        dist.new_group(ranks)
    own = WORLD.Split(0 if RANK != 1 else MPI.UNDEFINED)
    if RANK != 1:
        x = torch.tensor([RANK])
        dist.all_reduce(x, group=ms.process_group(own))
        assert x.item() == sum(range(SIZE)) - 1
        own.Free()


# one rank has no fewer: an empty list is refused by torch itself
FEWER = SIZE - 1 or 2


@pytest.mark.parametrize(
    "call",
    [
        lambda x: dist.all_gather([torch.zeros(2) for _ in range(SIZE + 1)], x),
        lambda x: dist.reduce_scatter(torch.zeros(2), [x] * (SIZE + 1)),
        lambda x: all_gather_single(torch.zeros(2 * SIZE, dtype=torch.int32), x),
        lambda x: all_gather_single(torch.zeros(2 * SIZE + 1), x),
        lambda x: reduce_scatter_single(torch.zeros(2, dtype=torch.float64), torch.ones(2 * SIZE)),
        lambda x: reduce_scatter_single(torch.zeros(2), torch.ones(2 * SIZE + 1)),
        lambda x: dist.all_gather([torch.zeros(3) for _ in range(SIZE)], x),
        lambda x: dist.all_to_all([torch.zeros(3) for _ in range(SIZE)], [x] * SIZE),
        lambda x: dist.all_to_all([torch.zeros(2) for _ in range(SIZE)], [x if RANK else x.repeat(2)] * SIZE),
        lambda x: dist.all_to_all_single(torch.zeros(SIZE), x.repeat(SIZE)),
        lambda x: dist.gather(x, [torch.zeros(2) for _ in range(FEWER)] if RANK == 0 else None),
        lambda x: dist.gather(x, [torch.zeros(2) for _ in range(SIZE + 1)] if RANK == 0 else None),
        lambda x: dist.gather(x, [torch.zeros(3) for _ in range(SIZE)] if RANK == 0 else None),
        lambda x: dist.scatter(x, [torch.zeros(2) for _ in range(FEWER)] if RANK == 0 else None),
        lambda x: dist.scatter(x, [torch.zeros(2) for _ in range(SIZE + 1)] if RANK == 0 else None),
    ],
)
def test_results_that_do_not_fit(world, call):
    with pytest.raises(ms.LayoutError, match="do not fit"):
        call(torch.ones(2))
    # nothing of it is left for the next one
    parts = [torch.zeros(2) for _ in range(SIZE)]
    dist.all_gather(parts, torch.full((2,), float(RANK)))
    assert [p.tolist() for p in parts] == [[float(r)] * 2 for r in range(SIZE)]
    dist.gather(torch.full((2,), RANK + 0.5), parts if RANK == 0 else None)
    assert RANK or [p.tolist() for p in parts] == [[r + 0.5] * 2 for r in range(SIZE)]


def short_forms(group, x):
    """What groups of torch's own do when they are called by themselves, by tensors, root and operation."""
    last, most = SIZE - 1, dist.ReduceOp.MAX
    every, row, table = [torch.empty(2) for _ in range(SIZE)], torch.empty(2), torch.empty(SIZE)
    mine = [x * (i + 1) for i in range(SIZE)]
    yield group.allreduce(y := x.clone()), y, SUM
    yield group.allreduce([y := x.clone()]), y, SUM
    yield group.allreduce(y := x.clone(), most), y, MOST
    yield group.allreduce([y := x.clone()], op=most, timeout=timedelta(seconds=9)), y, MOST
    yield group.allreduce(tensors=[y := x.clone()], opts=dist.AllreduceOptions()), y, SUM
    yield group.broadcast(y := x.clone(), last), y, MOST
    yield group.broadcast(tensor=(y := x.clone()), root=last), y, MOST
    yield group.reduce(y := x.clone(), last), y, SUM if last == RANK else None
    yield group.reduce(y := x.clone(), root=last, op=most), y, MOST if last == RANK else None
    yield group.allgather(every, x), torch.stack(every), EVERY
    yield group.allgather(input_tensors=[x], output_tensors=[every]), torch.stack(every), EVERY
    yield group.reduce_scatter(row, mine), row, SUM * (RANK + 1)
    yield group.reduce_scatter(output=row, input=mine, op=most), row, MOST * (RANK + 1)
    yield group.gather(every if last == RANK else [], x, last), torch.stack(every), EVERY if last == RANK else None
    yield group.scatter(row, mine if last == RANK else [], root=last), row, MOST * (RANK + 1)
    yield group.alltoall(every, mine), torch.stack(every), EVERY * (RANK + 1)
    ones = [1] * SIZE
    yield group.alltoall_base(table, torch.full((SIZE,), RANK + 1.0), ones, ones, timeout=None), table, EVERY[:, 0]
    split = {"output_split_sizes": [], "input_split_sizes": []}
    yield group.alltoall_base(table, torch.full((SIZE,), RANK + 1.0), **split), table, EVERY[:, 0]
    yield group.barrier(timeout=timedelta(seconds=9)), row, None


EVERY = torch.arange(1.0, SIZE + 1)[:, None].expand(SIZE, 2)
SUM, MOST = EVERY.sum(0), EVERY[-1]


def test_torch_calls_a_group_by_itself_in_a_short_form(world):
    for i, (work, got, expected) in enumerate(short_forms(world, torch.full((2,), RANK + 1.0))):
        work.wait()
        assert expected is None or torch.equal(got, expected), i
    with pytest.raises(TypeError, match="allreduce: takes 1 of tensors, then op, timeout or opts, got 'root'"):
        world.allreduce(torch.ones(1), root=0)
    with pytest.raises(TypeError, match="gather: takes 2 of tensors, then root, timeout or opts, got 1 of tensors"):
        world.gather([torch.ones(1)])


def test_no_rank_waits_for_an_entry_of_another(world):
    store = dist.distributed_c10d._get_default_store()
    store.set(f"mine {RANK}", "value")
    assert store.get(f"mine {RANK}") == b"value"
    assert store.add("count", 2) + store.add("count", 3) == 7
    assert store.compare_set("once", "", "a") == store.compare_set("once", "b", "c") == b"a"
    assert store.check(["count", "once"])
    assert store.delete_key("once")
    with pytest.raises(ms.UnsupportedOperationError, match="store"):
        store.get(f"mine {RANK + 1}")
    with pytest.raises(ms.UnsupportedOperationError, match="store"):
        store.wait([f"mine {RANK + 1}"])


def scattered(x):
    reduce_scatter_single(x.new_empty(4), x.repeat(SIZE))


# bytes that MPI takes for what they are not, in silence
COMPARED = {
    "all_reduce": dist.all_reduce,
    "all_reduce in the background": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "all_reduce max": lambda x: dist.all_reduce(x, dist.ReduceOp.MAX),
    "all_reduce of several": lambda x: dist.all_reduce_coalesced([x, x]),
    "bits": lambda x: dist.all_reduce(x.view(torch.int64) if x.is_floating_point() else x, dist.ReduceOp.BOR),
    "reduce": lambda x: dist.reduce(x, 0),
    "reduce max": lambda x: dist.reduce(x, 0, dist.ReduceOp.MAX),
    "broadcast": lambda x: dist.broadcast(x, SIZE - 1),
    "all_gather": lambda x: dist.all_gather([torch.empty_like(x) for _ in range(SIZE)], x),
    "all_gather of one": lambda x: all_gather_single(x.new_empty(4 * SIZE), x),
    "reduce_scatter of one": scattered,
    "reduce_scatter": lambda x: dist.reduce_scatter(torch.empty_like(x), [x] * SIZE),
    "all_to_all": lambda x: dist.all_to_all([torch.empty_like(x) for _ in range(SIZE)], [x] * SIZE),
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced:FutureWarning")
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", COMPARED)
def test_calls_that_differ_are_named_at_once(world, name, debug, monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", debug)
    call, odd = COMPARED[name], RANK == SIZE - 1
    for dtype in (torch.float32, torch.int32):
        call(torch.ones(4, dtype=dtype))
    with pytest.raises(ms.DesyncError, match="different calls") as e:
        call(torch.ones(4, dtype=torch.int32 if odd else torch.float32))
    assert len(set(WORLD.allgather(str(e.value)))) == 1
    with pytest.raises(ms.DesyncError, match="different calls"):
        dist.barrier() if odd else dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX)
    # nothing of it is left for the next one
    dist.all_reduce(x := torch.ones(4))
    assert torch.equal(x, torch.full((4,), float(SIZE)))


def scattered_from(root, x):
    dist.scatter(torch.empty_like(x), [x] * SIZE if root == RANK else None, src=root)


# what most ranks call, and what the last one does
CROSSED = {
    "roots that take each other for the root": (lambda x: dist.broadcast(x, SIZE - 1), lambda x: dist.broadcast(x, 0)),
    "roots of sums": (lambda x: dist.reduce(x, 0), lambda x: dist.reduce(x, SIZE - 1)),
    "roots of lists": (lambda x: scattered_from(SIZE - 1, x), lambda x: scattered_from(0, x)),
    "kinds": (lambda x: dist.all_reduce(x, dist.ReduceOp.MAX), lambda x: dist.broadcast(x, 0)),
    "sums and maxima": (dist.all_reduce, lambda x: dist.all_reduce(x, dist.ReduceOp.MAX)),
    "sizes of products": (
        lambda x: dist.all_reduce(x, dist.ReduceOp.PRODUCT),
        lambda x: dist.all_reduce(torch.cat([x, x]), dist.ReduceOp.PRODUCT),
    ),
    "sums that nobody waits for": (lambda x: dist.all_reduce(x, async_op=True).wait(), lambda x: dist.barrier()),
    "a sum that others find no longer": (
        lambda x: (dist.all_reduce(x, async_op=True), dist.barrier()),
        lambda x: dist.broadcast(x, 0),
    ),
    "asked for": (lambda x: completed(dist.all_reduce(x, async_op=True)), lambda x: dist.broadcast(x, 0)),
}


def completed(work):
    while not work.is_completed():
        pass


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", CROSSED)
def test_calls_that_would_wait_for_each_other(world, name, debug, monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", debug)
    for count in (4, 1 << 15):
        with pytest.raises(ms.DesyncError, match="different calls"):
            CROSSED[name][RANK == SIZE - 1](torch.ones(count))
        # nothing of it is left for the next one
        work = dist.all_reduce(x := torch.ones(count), async_op=True)
        dist.all_reduce(y := torch.full((count,), 2.0))
        work.wait()
        assert torch.equal(x, torch.full((count,), float(SIZE)))
        assert torch.equal(y, 2 * x)


def loud(call):
    try:
        call()
    except ms.MpishardError as e:
        return str(e)
    return ""


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("first", ["local", "blocking", "background"])
def test_an_error_while_several_sums_are_under_way(world, first, monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", False)  # with it, a start waits for all ranks
    group, text = dist.new_group(), "while sums in the background were under way"
    bad = {
        "local": lambda: dist.all_reduce(torch.eye(3).to_sparse(), group=group),
        "blocking": lambda: dist.all_reduce(torch.ones(9), group=group),
        # of equal bytes: where others meet in the background, Open MPI is of no use any more
        "background": lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32), group=group, async_op=True).wait(),
    }[first]
    if RANK == SIZE - 1:
        said = loud(bad)
    else:
        works = [dist.all_reduce(torch.ones(n), group=group, async_op=True) for n in (4, 1000)]
        said = loud(works[0].wait)
        assert text in loud(lambda: completed(works[1]))
        # what has raised does so again, and is no success
        assert loud(works[0].wait) == said
        assert not any(w.is_success() for w in works)
    assert ("dense" if first == "local" else "different calls") in said
    for call in (lambda: dist.all_reduce(torch.ones(2), group=group), lambda: dist.barrier(group)):
        assert text in loud(call)
    dist.all_reduce(x := torch.ones(3), group=dist.new_group())
    assert torch.equal(x, torch.full((3,), float(SIZE)))


@pytest.mark.parametrize("count", [0, 3, 1 << 15])
@pytest.mark.parametrize("debug", [False, True])
def test_sums_that_are_asked_until_they_are_over(world, count, debug, monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", debug)
    work = dist.all_reduce(x := torch.ones(count), async_op=True)
    end = time.monotonic() + 30
    while not work.is_completed():
        assert time.monotonic() < end
    assert torch.equal(x, torch.full((count,), float(SIZE)))


@pytest.mark.ranks(2, 3)
def test_groups_that_end_before_sums_that_nobody_waits_for(world):
    for k in range(3):
        group = dist.new_group()
        for _ in range(100 * k + 3):
            dist.all_reduce(torch.ones(100), group=group, async_op=True)
        dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.ranks(2)
def test_sums_in_two_threads(world):
    def sums(group):
        for k in range(400):
            works = [dist.all_reduce(torch.full((n,), k + 1.0), group=group, async_op=True) for n in (2000, 3)]
            assert all(w.result()[0][0] == SIZE * (k + 1) for w in works)
        return True

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(sums, dist.new_group())
        sums(None)
        assert other.result()


def started_by_all(x, background):
    dist.all_reduce(x, async_op=background)
    dist.barrier()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("background", [False, True])
def test_what_one_rank_alone_gives_wrongly_raises_on_all(world, background):
    odd = RANK == SIZE - 1
    with pytest.raises(ms.UnsupportedOperationError, match=f"works on dense tensors(.|\n)*raised on: rank {SIZE - 1}"):
        started_by_all(torch.ones(2, device="meta" if odd else "cpu"), background)
    with pytest.raises(ms.LayoutError, match="do not fit"):
        all_gather_single(torch.zeros(2 * SIZE + odd), torch.ones(2))
    with pytest.raises(ms.MpishardError, match="RuntimeError"):
        dist.all_to_all_single(
            torch.zeros(2 * SIZE), torch.ones(2 * SIZE), input_split_sizes=[3] * SIZE if odd else None
        )
    dist.all_reduce(x := torch.ones(4))
    assert torch.equal(x, torch.full((4,), float(SIZE)))


def test_a_rank_that_torch_calls_another():
    """On one rank alone: the others are told, and the communicator goes."""
    wrong = RANK == SIZE - 1
    options = SimpleNamespace(global_ranks_in_group=[], group_rank=RANK + wrong, group_size=SIZE)
    with pytest.raises(ms.MeshError, match="other ranks than MPI's"):
        process_group._create(options, process_group._Over(WORLD))


@pytest.mark.ranks(2, 3, 4)
def test_a_group_whose_call_was_interrupted_is_used_no_more(world, monkeypatch):
    """Ctrl-C that all ranks catch: the next call would have met what this one left under way."""
    group, x = dist.new_group(), torch.ones(3)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Calls, "_started", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dist.broadcast(x, 0, group=group)
    with pytest.raises(ms.DesyncError, match="KeyboardInterrupt inside broadcast"):
        dist.all_reduce(x, group=group)
    dist.all_reduce(x)
    assert x.tolist() == [SIZE] * 3
