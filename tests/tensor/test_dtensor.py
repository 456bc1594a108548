"""Programs written for DTensor and for PhysicsNeMo's ShardTensor: what they call, and what it means here."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor as torchs_distribute_tensor

import mpishard as ms
from mpishard.comm import guard
from mpishard.physicsnemo import scatter_tensor
from tests.compare import WORLD, mesh_of
from tests.release import RELEASE

# as published programs write it, but for one line of its imports: that of physicsnemo.distributed
PROGRAM = """
import torch
from torch.distributed.tensor import Shard, distribute_module
from mpishard.physicsnemo import DistributedManager, ShardTensor, scatter_tensor

DistributedManager.initialize()
dm = DistributedManager()
torch.manual_seed(dm.rank)
image = torch.randn(1, 4, 37, 20, dtype=torch.float64, device=dm.device, requires_grad=True)
conv = torch.nn.Conv2d(4, 4, 3, padding=1).double().to(dm.device)
expected = conv(image)
expected.mean().backward()
expected_grad = image.grad.data.clone()
expected_weight_grad = conv.weight.grad.clone()
conv.zero_grad()

mesh = dm.initialize_mesh(mesh_shape=(-1,), mesh_dim_names=("domain_parallel",))
x = scatter_tensor(image, 0, mesh, (Shard(2),), requires_grad=True)
conv = distribute_module(conv, mesh)
y = conv(x)
y.mean().backward()
full_output, full_grad = y.full_tensor(), x.grad.full_tensor()
weight_grad = conv.weight.grad.full_tensor()
if dm.rank == 0:
    assert torch.allclose(full_output, expected)
    assert torch.allclose(expected_grad, full_grad)
    assert torch.allclose(weight_grad, expected_weight_grad)
placements, local_shape = x.grad._spec.placements, x.grad.to_local().shape
"""


def values(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def line():
    return mesh_of((-1,))


def test_a_program_for_physicsnemo_runs_with_one_changed_line():
    program = types.ModuleType("program")
    exec(PROGRAM, program.__dict__)
    assert program.placements == (ms.Shard(2),)
    assert program.local_shape == program.x._local_tensor.shape
    assert sum(WORLD.allgather(program.local_shape[2])) == 37
    program.DistributedManager.cleanup()
    with pytest.raises(ms.MeshError, match="before it is initialized"):
        program.DistributedManager()


@pytest.mark.parametrize("wrong", [{"global_shape": (5, 3)}, {"global_shape": "ab"}, {"dtype": torch.int8}], ids=str)
def test_what_contradicts_a_scattered_tensor_on_one_rank_raises_on_all(wrong):
    mesh = mesh_of((-1,))
    told = wrong if WORLD.rank == WORLD.size - 1 else {"global_shape": [4, 3]}
    with pytest.raises(ms.LayoutError, match=r"(?s)global_shape and dtype.*shape \(4, 3\), as the tensor on rank 0"):
        scatter_tensor(values(4, 3), 0, mesh, (ms.Shard(0),), **told)
    assert scatter_tensor(values(4, 3), 0, mesh, (ms.Shard(0),), global_shape=[4, 3]).shape == (4, 3)


def test_the_source_of_a_scattered_tensor_is_a_rank_of_the_whole_mesh():
    """Of a sub-mesh, too, as PhysicsNeMo counts: it is not the rank in that."""
    for mesh in (mesh_of((-1, 1)), mesh_of((-1, 2) if WORLD.size % 2 == 0 else (1, -1)), mesh_of((1, -1))):
        for m in range(2):
            part = mesh[m]
            ranks = part.all_ranks.comm.allgather(WORLD.rank)
            for source in {ranks[0], ranks[-1]}:
                x = scatter_tensor(values(4, seed=WORLD.rank), source, part, (ms.Shard(0),))
                assert torch.equal(x.full_tensor(), values(4, seed=source))
            odd = next((r for r in range(WORLD.size) if r not in ranks), WORLD.size)
            wrong = odd if part.rank == part.size - 1 else ranks[0]
            with pytest.raises(ms.LayoutError, match=r"(?s)scatter_tensor: no such source rank.*of the whole mesh"):
                scatter_tensor(values(4), wrong, part, (ms.Shard(0),))


def test_a_program_for_dtensor_runs_with_other_imports():
    mesh = ms.init_device_mesh("cpu", mesh_shape=(WORLD.size,), mesh_dim_names=("d",))
    full = values(7, 6)
    x = ms.distribute_tensor(full, device_mesh=mesh, placements=[ms.Shard(0)])
    y = x.redistribute(mesh, [ms.Shard(1)])
    assert y.device_mesh is mesh
    assert y.placements == (ms.Shard(1),)
    assert torch.equal(y.redistribute(device_mesh=mesh, placements=[ms.Replicate()], async_op=True).to_local(), full)
    assert torch.equal(ms.distribute_tensor(full, mesh).to_local(), full)
    z = ms.zeros(3, 4, device_mesh=mesh)
    assert z.placements == (ms.Replicate(),)
    assert torch.equal((ms.ones(3, 4, device_mesh=mesh, placements=[ms.Shard(0)]) + z).full_tensor(), torch.ones(3, 4))
    make = {"device_mesh": mesh, "placements": [ms.Shard(0)], "layout": torch.strided}
    for t in (ms.zeros(3, 4, **make), ms.full((3, 4), 0.0, **make), ms.rand(3, 4, **make)):
        assert t.placements == (ms.Shard(0),)
    with pytest.raises(ms.LayoutError, match=r"empty: layout= is of another kind"):
        ms.empty(3, 4, device_mesh=mesh, layout=torch.sparse_coo)
    assert torch.equal(ms.scatter_tensor(full, 0, device_mesh=mesh, placements=[ms.Shard(0)]).full_tensor(), full)


def test_a_mesh_answers_as_torchs_does():
    mesh = ms.init_mesh(mesh_shape=(1, -1), mesh_dim_names=("a", "b"))
    assert mesh.device_type == "cpu"
    assert mesh.get_rank() == mesh["b"].get_rank() == WORLD.rank
    assert mesh.get_coordinate() == (0, WORLD.rank)
    assert mesh.get_local_rank("b") == mesh.get_local_rank(1) == mesh["b"].get_local_rank() == WORLD.rank
    assert mesh.get_local_rank(mesh_dim="a") == 0
    with pytest.raises(ms.MeshError, match="which mesh dim is meant"):
        mesh.get_local_rank()
    with pytest.raises(ms.MeshError, match="no such mesh dim"):
        mesh.get_local_rank("c")
    group = mesh.get_group("b")
    try:
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [WORLD.size] * 2
        assert [g.size() for g in mesh.get_all_groups()] == [1, WORLD.size]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"device_type": "tpu"}, "no such device"),
        ({"device_type": "cpu", "backend_override": {"a": "gloo"}}, "a backend is asked for"),
        ({"device_type": "cpu", "mesh_dim_names": ("a", "a")}, "names do not fit"),
    ],
)
def test_meshes_that_are_refused(given, text):
    with pytest.raises(ms.MeshError, match=text):
        ms.init_device_mesh(mesh_shape=(WORLD.size,), **given)


@pytest.mark.ranks(2, 3, 4)
def test_tensors_that_differ_need_a_source(monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", True)
    mesh = ms.init_mesh((-1,))  # of its own: it compares calls as long as it lives
    own = values(5, 3, seed=WORLD.rank)
    with pytest.raises(ms.LayoutError, match=r"the ranks hold different tensors[\s\S]*src_data_rank=0"):
        ms.distribute_tensor(own, mesh, [ms.Shard(0)])
    for src in range(mesh.size):
        x = ms.distribute_tensor(own.requires_grad_(), mesh, [ms.Shard(0)], src_data_rank=src)
        assert x.is_leaf
        assert x.requires_grad
        assert torch.equal(x.full_tensor(), values(5, 3, seed=src))
    with pytest.raises(ms.LayoutError, match="no such source rank"):
        ms.distribute_tensor(own, mesh, [ms.Shard(0)], src_data_rank=mesh.size)


def test_from_local_takes_what_dtensors_takes():
    mesh = line()
    local = torch.full((2 + WORLD.rank, 3), float(WORLD.rank))
    rows = sum(2 + r for r in range(WORLD.size))
    x = ms.ShardTensor.from_local(local, device_mesh=mesh, placements=[ms.Shard(0)], shape=(rows, 3), stride=(3, 1))
    assert x.shape == (rows, 3)
    for wrong in ({"shape": (rows + 1, 3)}, {"stride": (1, rows)}):
        with pytest.raises(ms.LayoutError, match=r"the global (shape|stride) is another"):
            ms.ShardTensor.from_local(local, mesh, [ms.Shard(0)], **wrong)
    assert ms.ShardTensor.from_local(local_tensor=local, mesh=mesh, placements=[ms.Shard(0)]).sharding == x.sharding
    shapes = {0: [torch.Size((2 + r, 3)) for r in range(WORLD.size)]}
    assert ms.ShardTensor.from_local(local, mesh, [ms.Shard(0)], sharding_shapes=shapes).sharding == x.sharding
    own = torch.full((2,), float(WORLD.rank))
    assert ms.ShardTensor.from_local(own, mesh, run_check=True).to_local().tolist() == [0, 0]
    with pytest.raises(ms.MeshError, match="by two names"):
        ms.ShardTensor.from_local(own, mesh=mesh, device_mesh=mesh)
    with pytest.raises(ms.MeshError, match="by two names"):
        ms.ShardTensor.from_local(local=own, local_tensor=own, mesh=mesh)


@pytest.mark.parametrize(("how", "warm"), [("infer", False), ("infer", True), ("chunk", False), ("sizes", False)])
def test_what_one_rank_says_wrong_to_from_local_is_an_error_of_all(how, warm):
    """With sizes told the first call of a layout alone is collective."""
    mesh, n = ms.init_mesh((-1,), ("rows",)), 2 * WORLD.size
    told = {0: (2,) * WORLD.size} if how == "sizes" else how

    def made(**said):
        return ms.ShardTensor.from_local(torch.ones(2, 3), mesh, [ms.Shard(0)], told, **said)

    for bad in ({"shape": (n + 1, 3)}, {"stride": (1, n)}, {"grad_placements": [ms.Shard(1)]}, {"shape": 5}):
        for last in {0, WORLD.size - 1}:
            if warm:
                made()
            with pytest.raises(ms.LayoutError, match="from_local"):
                made(**bad if WORLD.rank == last else {})
    assert made(shape=(n, 3), stride=(3, 1)).sum().item() == 3 * n
    mesh.free()


def test_a_block_of_a_larger_array_stays_in_it():
    """Whatever its sizes were told by: what is written into the tensor later is in the array."""
    for told in ("infer", "chunk", {0: (2,) * WORLD.size}):
        big = torch.ones(2, 6)
        x = ms.ShardTensor.from_local(big[:, 1:-1], line(), [ms.Shard(0)], told)
        x.contiguous()
        x.reshape(-1)
        x.mul_(2)
        assert big.sum() == 4 + 16
        x.view(-1).mul_(2)
        assert big.sum() == 4 + 32


def test_grad_placements_of_from_local():
    mesh = line()
    weight = values(4)
    for given, expected in ((None, weight), ([ms.Replicate()], weight), ([ms.Partial()], weight * (WORLD.rank == 0))):
        local = torch.ones(4, dtype=torch.float64, requires_grad=True)
        x = ms.ShardTensor.from_local(local, mesh, [ms.Replicate()], grad_placements=given)
        (x * weight).sum().backward()
        assert torch.equal(local.grad, expected)
    with pytest.raises(ms.LayoutError, match="grad_placements do not fit"):
        ms.ShardTensor.from_local(local, mesh, [ms.Replicate()], grad_placements=[ms.Shard(0)])


def test_redistributions_that_are_refused():
    mesh = line()
    x = ms.distribute_tensor(values(4, 3), mesh, [ms.Shard(0)])
    other = ms.init_mesh((-1,), ("other",))
    for args in ((), (mesh,), (other, [ms.Replicate()])):
        with pytest.raises(ms.LayoutError, match="redistribute: where to"):
            x.redistribute(*args)
    with pytest.raises(ms.LayoutError, match="forward_dtype"):
        x.redistribute(mesh, [ms.Replicate()], forward_dtype=torch.bfloat16)


def test_specification():
    mesh = line()
    sizes = [3 + r for r in range(WORLD.size)]
    x = ms.distribute_tensor(values(2, sum(sizes)), mesh, [ms.Shard(1)], sizes={1: sizes})
    spec = x._spec
    assert (spec.mesh, spec.placements) == (mesh, (ms.Shard(1),))
    assert spec.tensor_meta == (x.shape, x.stride(), torch.float64)
    assert spec.local_shape == x.to_local().shape == (2, sizes[WORLD.rank])
    assert spec.sharding_shapes() == {0: tuple(torch.Size((2, n)) for n in sizes)}
    assert x.offsets() == (sum(sizes[: WORLD.rank]),)
    assert x.offsets(0) == sum(sizes[: WORLD.rank])


@pytest.mark.ranks(4)
def test_offsets_where_two_mesh_dims_shard_one_dim():
    x = ms.distribute_tensor(values(9), mesh_of((2, 2)), [ms.Shard(0), ms.Shard(0)])
    with pytest.raises(ms.MeshError, match="several mesh dims shard one tensor dim"):
        x.offsets()


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(WORLD.rank)
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 4)
        self.double()

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def test_partition_input_and_output_functions():
    """Tensor parallelism as DTensor's programs write it: columns of one layer, rows of the next."""
    mesh = line()

    def partition(name, module, mesh):
        cut = {"a": {"weight": 0, "bias": 0}, "b": {"weight": 1}}.get(name, {})
        for key, dim in cut.items():
            whole = getattr(module, key)
            module.register_parameter(key, nn.Parameter(ms.distribute_tensor(whole.data, mesh, [ms.Shard(dim)])))

    def shard(module, inputs, mesh):
        assert isinstance(module, Perceptron)
        return tuple(ms.distribute_tensor(x, mesh) for x in inputs)

    one = ms.distribute_module(Perceptron(), mesh)
    model = ms.distribute_module(Perceptron(), mesh, partition, shard, lambda _m, y, _mesh: y.full_tensor())
    x = values(5, 6)
    y, expected = model(x), one(x)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert isinstance(model.a.weight.grad, ms.ShardTensor)
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        got = p.grad.full_tensor() if isinstance(p, ms.ShardTensor) else p.grad
        torch.testing.assert_close(got, q.grad)


def test_importing_the_names_of_physicsnemo_leaves_torchs_meshes_alone():
    import mpishard.physicsnemo  # noqa: F401

    assert "torch.distributed.tensor" in sys.modules
    api = torch.distributed.tensor
    ms.process_group(line())
    try:
        theirs = torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD.size,))
        x = api.distribute_tensor(values(4 * WORLD.size), theirs, [api.Shard(0)])
        assert type(x) is api.DTensor
        assert type(api.distribute_tensor(values(4), line(), [api.Shard(0)])) is ms.ShardTensor
        # by a name from before
        assert type(torchs_distribute_tensor(values(4), line(), [api.Shard(0)])) is ms.ShardTensor
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, d: x + d,
        lambda x, d: d * x,
        lambda x, d: x.add_(d),
        lambda x, d: torch.cat([x, d]),
        nn.functional.linear,
        lambda x, d: torch.add(x, 1, out=d),
        lambda x, d: x.requires_grad_().mul(2).backward(d),
        lambda x, d: x.__setitem__(0, d[0]),
    ],
    ids=["add", "radd", "add_", "cat", "linear", "out", "backward", "setitem"],
)
def test_a_dtensor_among_the_operands_is_named(call):
    mesh = ms.init_mesh((-1,), ("d",))
    group = ms.process_group(mesh)
    try:
        torchs = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
        full = values(6, 6)
        x = ms.distribute_tensor(full, mesh, [ms.Shard(1)])
        d = torchs_distribute_tensor(full, torchs, [torch.distributed.tensor.Shard(0)])
        with pytest.raises(ms.UnsupportedOperationError, match="a ShardTensor meets a DTensor"):
            call(x, d)
        assert torch.equal(x.full_tensor(), full)
        # of one cell, torch takes a block for a DTensor
        one = ms.ones(mesh.size, mesh=mesh, placements=[ms.Shard(0)])
        for y in (one, one.sum()) if RELEASE >= (2, 13) else ():  # torch 2.8 has no cell of one
            with pytest.raises(ms.UnsupportedOperationError, match="a ShardTensor meets a DTensor"):
                y + d[0, 0]
    finally:
        dist.destroy_process_group()
