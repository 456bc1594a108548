"""torch.distributed over MPI: programs of the kinds that torch's own tests have, against one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import mpishard as ms
from mpishard.comm import guard
from tests.compare import assert_loads
from tests.release import RELEASE

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
# their names from torch 2.13 on, and before
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
functional_gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)


@pytest.fixture
def world():
    from torch.distributed.tensor import debug

    # what DTensor remembers of a mesh of an earlier test has the names of groups that are gone
    for name in (
        "_clear_sharding_prop_cache",
        "_clear_fast_path_sharding_prop_cache",
        "_clear_python_sharding_prop_cache",
    ):
        getattr(debug, name, lambda: None)()
    yield ms.process_group(WORLD)
    dist.destroy_process_group()


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def samples():
    return torch.randn(2 * SIZE, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def assert_same_gradients(plain, own, **tolerance):
    for p, q in zip(plain.parameters(), own.parameters()):
        got = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
        torch.testing.assert_close(got, p.grad, **tolerance)


@pytest.mark.parametrize(
    "options", [{}, {"static_graph": True, "bucket_cap_mb": 1e-5}, {"gradient_as_bucket_view": True}]
)
def test_data_parallel_over_passes(world, options):
    x, plain = samples(), net()
    own = DistributedDataParallel(net(), process_group=world, **options)
    for _ in range(3):
        plain(x).square().mean().backward()
        own(x.chunk(SIZE)[RANK]).square().mean().backward()
    assert_same_gradients(plain, own.module)


def test_data_parallel_without_sums_between(world):
    x, plain, own = samples(), net(), DistributedDataParallel(net(), process_group=world)
    with own.no_sync():
        own(x.chunk(SIZE)[RANK]).square().mean().backward()
    own(x.chunk(SIZE)[RANK]).square().mean().backward()
    (2 * plain(x).square().mean()).backward()
    assert_same_gradients(plain, own.module)


class Branches(nn.Module):
    """Of two branches, a call takes one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = (nn.Linear(4, 4).double() for _ in range(2))

    def forward(self, x, first):
        return self.a(x) if first else self.b(x)


@pytest.mark.ranks(2, 3, 4)
def test_data_parallel_with_parameters_that_a_rank_does_not_use(world):
    x, plain = samples(), Branches()
    own = DistributedDataParallel(Branches(), process_group=world, find_unused_parameters=True)
    for r, part in enumerate(x.chunk(SIZE)):
        (plain(part, r == 0).square().mean() / SIZE).backward()
    own(x.chunk(SIZE)[RANK], RANK == 0).square().mean().backward()
    assert_same_gradients(plain, own.module)


def test_data_parallel_of_unlike_lengths(world):
    """Ranks that are through answer the others' sums, which those start without waiting."""
    own = DistributedDataParallel(net(), process_group=world)
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    with own.join():
        for _ in range(RANK + 1):
            optimizer.zero_grad()
            own(torch.ones(2, 4, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
    # a step for each of the longest: of ranks that all have the same sample, the sum is over those that are left
    plain = net()
    steps = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(SIZE):
        steps.zero_grad()
        (plain(torch.ones(2, 4, dtype=torch.float64)).square().mean() * ((SIZE - step) / SIZE)).backward()
        steps.step()
    for p, q in zip(plain.parameters(), own.module.parameters()):
        torch.testing.assert_close(q, p)


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook"])
def test_data_parallel_with_a_hook(world, name):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    x, plain, own = samples(), net(), DistributedDataParallel(net(), process_group=world)
    own.register_comm_hook(world, getattr(default_hooks, name))
    plain(x).square().mean().backward()
    own(x.chunk(SIZE)[RANK]).square().mean().backward()
    assert_same_gradients(plain, own.module, **({"rtol": 1e-2, "atol": 1e-3} if "fp16" in name else {}))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("offload", [False, True])
def test_fully_shard_in_mixed_precision(world, offload):
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    x, plain, own = samples().float(), net().float(), net().float()
    options = {
        "mesh": init_device_mesh("cpu", (SIZE,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
    }
    for layer in (own[0], own[2], own):
        fully_shard(layer, **options)
    plain(x).square().mean().backward()
    own(x.chunk(SIZE)[RANK]).float().square().mean().backward()
    assert_same_gradients(plain, own, rtol=5e-2, atol=2e-2)
    total = nn.utils.clip_grad_norm_(own.parameters(), 1.0).full_tensor()
    torch.testing.assert_close(total, nn.utils.clip_grad_norm_(plain.parameters(), 1.0), rtol=5e-2, atol=0)


def test_fully_shard_with_a_divisor_of_the_callers(world):
    from torch.distributed.fsdp import fully_shard

    x, plain = samples().float(), net().float()
    own = fully_shard(net().float(), mesh=init_device_mesh("cpu", (SIZE,)))
    # its name in torch 2.8 and later, and before
    getattr(own, "set_gradient_divide_factor", getattr(own, "set_reduce_scatter_divide_factor", None))(8.0)
    plain(x).square().sum().div(8).backward()
    own(x.chunk(SIZE)[RANK]).square().sum().backward()
    assert_same_gradients(plain, own)


@pytest.mark.ranks(4)
def test_fully_shard_in_replicas(world):
    from torch.distributed.fsdp import fully_shard

    x, plain, own = samples(), net(), net()
    fully_shard(own, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
    plain(x).square().mean().backward()
    own(x.chunk(SIZE)[RANK]).square().mean().backward()
    assert_same_gradients(plain, own)


def test_checkpoint_in_the_background(world, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    own = fully_shard(net(), mesh=init_device_mesh("cpu", (SIZE,)))
    before = {name: p.full_tensor() for name, p in own.state_dict().items()}
    folder = WORLD.bcast(str(tmp_path / "checkpoint"))
    # a group of its own: its thread's calls are not in the order of ours
    pending = dcp.async_save({"model": own.state_dict()}, checkpoint_id=folder, process_group=dist.new_group())
    x = torch.ones(3)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((3,), SIZE * 1.0))
    pending.result()
    dist.barrier()
    assert_loads(own, folder, before)


def test_tensor_parallel(world):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(1)
    plain = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6 * SIZE), nn.ReLU(), nn.Linear(6 * SIZE, 4)).double()
    own = copy.deepcopy(plain)
    ways = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(own, init_device_mesh("cpu", (SIZE,)), ways)
    x = samples()[None]
    y, z = plain(x), own(x.chunk(SIZE, 1)[RANK])
    torch.testing.assert_close(z, y)
    y.square().mean().backward()
    z.square().mean().backward()
    assert_same_gradients(plain, own)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_pipelining(world, name):
    from torch.distributed import pipelining

    each = 2 if "Interleaved" in name else 1
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(SIZE * each)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    x = samples()
    stages = [
        pipelining.PipelineStage(layers[k], k, len(layers), torch.device("cpu"), group=world)
        for k in range(RANK, len(layers), SIZE)
    ]
    schedule = getattr(pipelining, name)(stages if each > 1 else stages[0], 2 * SIZE, loss_fn=F.mse_loss)
    schedule.step(*[x] * (RANK == 0), **({"target": x} if RANK == SIZE - 1 else {}))
    F.mse_loss(plain(x), x).backward()
    for k in range(RANK, len(layers), SIZE):
        assert_same_gradients(plain[k], layers[k])


def test_coalesced(world):
    sums = [torch.full((3,), RANK + 1.0), torch.full((2, 2), RANK + 2.0)]
    with dist._coalescing_manager(group=world, async_ops=True) as pending:
        for x in sums:
            dist.all_reduce(x)
    pending.wait()
    assert torch.equal(sums[0], torch.full((3,), sum(range(1, SIZE + 1)) * 1.0))
    assert torch.equal(sums[1], torch.full((2, 2), sum(range(2, SIZE + 2)) * 1.0))
    joined = [torch.empty(2 * SIZE), torch.empty(3 * SIZE)]
    with dist._coalescing_manager(group=world):
        for y, n in zip(joined, (2, 3)):
            all_gather_single(y, torch.full((n,), RANK * 1.0))
    for y, n in zip(joined, (2, 3)):
        assert torch.equal(y, torch.arange(SIZE * 1.0).repeat_interleave(n))
    parts = [torch.empty(2), torch.empty(1)]
    with dist._coalescing_manager(group=world):
        for y, n in zip(parts, (2, 1)):
            reduce_scatter_single(y, torch.arange(1.0 * n * SIZE))
    for y, n in zip(parts, (2, 1)):
        assert torch.equal(y, SIZE * torch.arange(1.0 * n * SIZE).chunk(SIZE)[RANK])


def test_groups_of_ranks(world):
    alone = dist.new_group([SIZE - 1])
    if RANK == SIZE - 1:
        assert dist.get_world_size(alone) == 1
        dist.barrier(group=alone)
    parts = [list(range(SIZE))[k::2] for k in range(min(2, SIZE))]
    own, _ = dist.new_subgroups_by_enumeration(parts)
    x = torch.tensor([RANK])
    dist.all_reduce(x, group=own)
    assert x.item() == sum(parts[RANK % 2])
    world.monitored_barrier()
    dist.barrier(async_op=True).wait()


@pytest.mark.ranks(2, 3)
def test_a_sum_is_one_call_whether_ranks_wait_or_not(world):
    x = torch.full((2, 3), RANK + 1.0)
    if RANK == 0:
        x = x.t().contiguous().t()  # nor does it matter how it lies
    work = dist.all_reduce(x, async_op=RANK == 0)
    assert RANK != 0 or work.wait()
    assert torch.equal(x, torch.full((2, 3), sum(range(1, SIZE + 1)) * 1.0))


@pytest.mark.ranks(2, 3)
def test_what_nobody_waits_for_keeps_its_memory(world, monkeypatch):
    """As DDP does in `join()`: a sum is started, its tensor and its handle are dropped."""
    monkeypatch.setattr(guard, "DEBUG", False)  # with it, a start waits for all ranks
    for k in range(5):
        token = torch.zeros(1)
        if RANK == 0:
            dist.all_reduce(torch.full((1000,), k + 1.0), async_op=True)
            # the others have not begun: MPI has still to write
            fresh = [torch.zeros(1000) for _ in range(8)]
            for r in range(1, SIZE):
                dist.send(token, r)
            dist.barrier()
            assert not any(y.any() for y in fresh)
        else:
            dist.recv(token, 0)
            x = torch.full((1000,), k + 1.0)
            dist.all_reduce(x)
            dist.barrier()
            assert torch.equal(x, torch.full((1000,), SIZE * (k + 1.0)))


@pytest.mark.ranks(2, 3)
def test_messages_that_are_asked_whether_they_came(world):
    to, of = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    x = torch.empty(1 << 10)
    works = [dist.isend(torch.full((1 << 10,), RANK * 1.0), to), dist.irecv(x, of)]
    while not all(w.is_completed() for w in works):
        pass
    assert all(w.wait() for w in works)
    assert torch.equal(x, torch.full((1 << 10,), of * 1.0))
    assert works[1]._source_rank() == of


def test_functional_collectives(world):
    every = [torch.arange(4.0 * SIZE).view(2 * SIZE, 2) + r for r in range(SIZE)]
    x, total = every[RANK], sum(every)
    assert torch.equal(functional.all_reduce(x, "sum", world).sin(), total.sin())
    assert torch.equal(functional_gather(x, 0, world) + 0, torch.cat(every))
    assert torch.equal(functional.all_to_all_single(x, None, None, world) + 0, _turned(every))

    def loss(x):
        y = functional.all_reduce(x.sin(), "sum", world)
        return functional_gather(y * 2, 0, world)

    assert torch.equal(torch.compile(loss, backend="aot_eager", fullgraph=True)(x), loss(x))


def _turned(every):
    return torch.cat([t.chunk(SIZE)[RANK] for t in every])


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("world")
@pytest.mark.skipif(RELEASE < (2, 13), reason="torch 2.8 takes it")
def test_a_mesh_of_ours_where_torch_takes_its_own():
    from torch.distributed.tensor import randn

    mesh = ms.init_mesh((-1,), ("data",))
    for call in (lambda: DistributedDataParallel(net(), device_mesh=mesh), lambda: randn(4, device_mesh=mesh)):
        with pytest.raises(ms.MeshError, match="where torch takes its own mesh"):
            call()


def test_whether_all_or_any_of_a_dtensor(world):
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (SIZE,))
    for x in (torch.ones(5, 2).bool(), torch.eye(5, 2).bool(), torch.zeros(5, 2).bool()):
        d = distribute_tensor(x, mesh, [Shard(0)])
        for f in (torch.all, torch.any, lambda t: t.all(0), lambda t: t.any(0)):
            assert torch.equal(f(d).full_tensor(), f(x))


@pytest.mark.filterwarnings("ignore:.*deprecating ShardedTensor:FutureWarning")
def test_a_sharded_tensor_is_gathered(world):
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(SIZE)])
    n = 2 * SIZE - 1  # no rank without rows, of which torch warns
    values = torch.arange(2.0 * n).view(n, 2)
    sharded = sharded_tensor.zeros(spec, n, 2)
    for shard in sharded.local_shards():
        first = shard.metadata.shard_offsets[0]
        shard.tensor.copy_(values[first : first + len(shard.tensor)])
    whole = torch.empty(n, 2) if RANK == 0 else None
    sharded.gather(0, whole)
    if whole is not None:
        assert torch.equal(whole, values)
