"""Mistakes of the caller: one text, on every rank, before any exchange could hang."""

from __future__ import annotations

import json

import pytest

MESH = "mesh = ms.init_mesh((-1,), ('x',))\n"
TENSOR = MESH + "x = ms.distribute_tensor(torch.ones(6, 4), mesh, (ms.Shard(0),))\n"

# what the program does; texts of the error, in its values
EVERYWHERE = {
    "mesh that does not divide the ranks": (
        "ms.init_mesh((3, -1), ('y', 'x'))",
        ["MeshError: init_mesh: the mesh shape does not fit", "got:      (3, -1)"],
    ),
    "placement of a dim that is not there": (
        MESH + "ms.distribute_tensor(torch.ones(4, 4), mesh, (ms.Shard(2),))",
        ["LayoutError: placements do not fit the tensor", "got:      Shard(2) for a tensor of 2 dims"],
    ),
    "too many placements": (
        MESH + "ms.distribute_tensor(torch.ones(4, 4), mesh, (ms.Shard(0), ms.Replicate()))",
        ["LayoutError: placements do not fit the mesh", "got:      2: (Shard(dim=0), Replicate())"],
    ),
    "local shapes that disagree": (
        MESH + "ms.ShardTensor.from_local(torch.ones(4, 3 + rank), mesh, (ms.Shard(0),))",
        ["LayoutError: from_local: the block of rank 1 does not fit", "got:      shape (4, 4)"],
    ),
    "local dtypes that disagree": (
        MESH + "ms.ShardTensor.from_local(torch.ones(4).to([torch.float32, torch.float64][rank]), mesh, ms.Shard(0))",
        ["LayoutError: from_local: the block of rank 1 does not fit", "got:      1 dims of torch.float64"],
    ),
    "dtype that has no sum": (
        MESH + "ms.all_reduce(torch.ones(4).to(torch.float8_e4m3fn), mesh)",
        ["UnsupportedDtypeError: no reduction", "got:      'sum' of torch.float8_e4m3fn"],
    ),
    "dtype that an exchanger does not know": (
        MESH + "ms.HaloExchanger(mesh, (6,), 1, object)",
        ["UnsupportedDtypeError", "got:      <class 'object'>"],
    ),
    "halo wider than the tensor": (
        TENSOR + "ms.halo_exchange(x, {0: (7, 0)})",
        ["LayoutError: halo_exchange", "fix:"],
    ),
    "mesh used after free": (
        TENSOR + "mesh.free()\nms.halo_exchange(x, {0: 1})",
        ["MeshError: mesh used after free()", "freed)"],
    ),
    "two meshes in one operation": (
        TENSOR + "other = ms.init_mesh((-1,), ('x',))\n"
        "y = ms.distribute_tensor(torch.ones(6, 4), other, (ms.Shard(0),))\nx + y",
        ["MeshError: operands live on different meshes", "make every tensor of an operation on the same CartMesh"],
    ),
    "different shapes on different ranks": (
        MESH + "ms.distribute_tensor(torch.ones(6, 4 + rank), mesh, (ms.Shard(0),))",
        ["DesyncError: ranks made different calls", "(6, 5)"],
    ),
    "sizes that one rank alone gives": (
        MESH + "ms.all_gather(torch.ones(2), mesh, sizes=(2, 2) if rank else None)",
        ["DesyncError: ranks made different calls", "asks for extents"],
    ),
    "sizes that one rank alone gives, of an all-to-all": (
        MESH + "sizes = (2, 2) if rank else None\n"
        "ms.all_to_all(torch.ones(2, 2), mesh, split_dim=1, concat_dim=0, concat_sizes=sizes)",
        ["DesyncError: ranks made different calls", "asks for extents"],
    ),
    "cotangents that ranks mean differently": (
        TENSOR + "x.requires_grad_().full_tensor(grad_placements=[ms.Partial() if rank else ms.Replicate()])",
        ["DesyncError: ranks made different calls", "Partial"],
    ),
    "cotangents that one rank alone says": (
        TENSOR + "x.full_tensor()\nx.requires_grad_().full_tensor(grad_placements=[ms.Partial()] if rank else None)",
        ["DesyncError: ranks made different calls", "Partial"],
    ),
    "no tensor beside the source": (
        MESH + "ms.distribute_tensor(None if rank else torch.ones(4), mesh, ms.Shard(0), src_data_rank=0)",
        ["UnsupportedOperationError: distribute_tensor: no block that torch can share", "raised on: rank 1 of 2"],
    ),
    "another shape than that of the source": (
        MESH + "ms.distribute_tensor(torch.ones(4 + rank), mesh, ms.Shard(0), src_data_rank=0)",
        ["DesyncError: ranks made different calls", "(5,)"],
    ),
    "another dtype than that of the source": (
        MESH + "dtype = [torch.float32, torch.int64][rank]\n"
        "ms.distribute_tensor(torch.ones(4, dtype=dtype), mesh, ms.Shard(0), src_data_rank=0)",
        ["DesyncError: ranks made different calls", "torch.int64"],
    ),
    "source that is no integer": (
        MESH + "ms.scatter_tensor(torch.ones(4), 0.0, mesh, (ms.Shard(0),))",
        ["LayoutError: scatter_tensor: src= is of another kind", "got:      0.0"],
    ),
    "switch of another kind on one rank": (
        MESH + "x = torch.ones(2)\nms.all_reduce(x, mesh)\nms.all_reduce(x, mesh, replicated=[] if rank else True)",
        ["LayoutError: all_reduce: replicated= is of another kind", "raised on: rank 1 of 2"],
    ),
    "switch of another kind, of a broadcast, on one rank": (
        MESH + "ms.broadcast(torch.ones(2), mesh, deterministic='no' if rank else None)",
        ["LayoutError: broadcast: deterministic= is of another kind", "raised on: rank 1 of 2"],
    ),
    "placements in a list of lists": (
        MESH + "ms.ShardTensor.from_local(torch.ones(2), mesh, [[ms.Shard(0)]])",
        ["LayoutError: unknown placement"],
    ),
    "placements in a list of lists on one rank": (
        MESH + "ms.ShardTensor.from_local(torch.ones(2), mesh, [[ms.Shard(0)] if rank else ms.Shard(0)])",
        ["LayoutError: from_local:"],
    ),
    "sizes of another kind on one rank": (
        MESH + "ms.scatter_tensor(torch.ones(4), 0, mesh, (ms.Shard(0),), sizes=5 if rank else None)",
        ["LayoutError: sizes of blocks: sizes= is of another kind", "raised on: rank 1 of 2"],
    ),
    "sizes of another kind, of a factory, on one rank": (
        MESH + "ms.zeros(8, mesh=mesh, placements=ms.Shard(0), sizes=5 if rank else None)",
        ["LayoutError: sizes of blocks: sizes= is of another kind", "raised on: rank 1 of 2"],
    ),
    "sizes that are no sequences, on one rank": (
        MESH + "ms.distribute_tensor(torch.ones(8), mesh, ms.Shard(0), sizes={0: 5} if rank else None)",
        ["LayoutError: sizes of blocks: sizes= is of another kind", "raised on: rank 1 of 2"],
    ),
    "dims of another kind, of an exchanger, on one rank": (
        MESH + "ms.HaloExchanger(mesh, (4,), 1, 'f8', dims=5 if rank else None)",
        ["LayoutError: HaloExchanger: dims do not fit the array or the mesh", "raised on: rank 1 of 2"],
    ),
    "no module on one rank": (
        MESH + "ms.distribute_module(5 if rank else torch.nn.Linear(2, 2), mesh)",
        ["LayoutError: distribute_module: module= is of another kind", "raised on: rank 1 of 2"],
    ),
    "no dtype on one rank": (
        MESH + "dtype = 'half' if rank else torch.float16\n"
        "ms.distribute_module(torch.nn.Linear(2, 2), mesh, shard_parameters='x', gather_dtype=dtype)",
        ["LayoutError: distribute_module: gather_dtype", "raised on: rank 1 of 2"],
    ),
    "partition_fn that raises on one rank": (
        MESH + "ms.distribute_module(torch.nn.Linear(2, 2), mesh, lambda *_: 1 / (1 - rank))",
        ["MpishardError: ZeroDivisionError", "raised on: rank 1 of 2"],
    ),
    "stage whose making fails on one rank": (
        MESH + "ms.Pipeline([lambda: torch.nn.Linear(2, 2), lambda: 1 / 0], mesh, 'x')",
        ["MpishardError: ZeroDivisionError", "raised on: rank 1 of 2"],
    ),
    "stages of another kind on one rank": (
        MESH + "ms.Pipeline(5 if rank else [torch.nn.Linear(2, 2)] * 2, mesh, 'x')",
        ["LayoutError: Pipeline: stages= is of another kind", "raised on: rank 1 of 2"],
    ),
    "stage that is no module": (
        MESH + "ms.Pipeline([lambda: 5] * 2, mesh, 'x')",
        ["LayoutError: Pipeline: stages= is of another kind"],
    ),
    "no tensor beside the first rank": (
        MESH + "ms.distribute_tensor(None if rank else torch.ones(4), mesh, ms.Shard(0))",
        ["UnsupportedOperationError: distribute_tensor: no block that torch can share", "raised on: rank 1 of 2"],
    ),
    "sizes of blocks that nobody understands, on one rank": (
        MESH + "ms.ShardTensor.from_local(torch.ones(4), mesh, ms.Shard(0), 'guess' if rank else 'infer')",
        ["LayoutError: from_local: unknown sharding_shapes", "raised on: rank 1 of 2"],
    ),
    "device of one rank, by DTensor's call": (
        "ms.init_device_mesh('gpu' if rank else 'cpu', (2,))",
        ["MeshError: init_device_mesh: no such device", "raised on: rank 1 of 2"],
    ),
    "layout of cells on one rank": (
        MESH + "ms.zeros(8, mesh=mesh, layout=torch.sparse_coo if rank else torch.strided)",
        ["LayoutError: zeros: layout= is of another kind", "raised on: rank 1 of 2"],
    ),
    "no generator on one rank": (
        MESH + "ms.rand(8, mesh=mesh, generator=5 if rank else None)",
        ["LayoutError: rand: generator= is of another kind", "raised on: rank 1 of 2"],
    ),
    "no model to compare, on one rank": (
        MESH + "ms.compare_module(5 if rank else torch.nn.ReLU(), torch.ones(4), mesh=mesh, placements=[ms.Shard(0)])",
        ["LayoutError: compare_module: module= is of another kind", "raised on: rank 1 of 2"],
    ),
    "positions of another shape on one rank": (
        TENSOR + "v = x[:, 0]\nms.graph.partition(v if rank else x)",
        ["LayoutError: graph.partition: positions of another kind", "raised on: rank 1 of 2"],
    ),
    "positions and edges on one rank": (
        TENSOR + "ms.graph.partition(x, nodes=x if rank else None)",
        ["LayoutError: graph.partition: it takes positions, or edges and nodes", "raised on: rank 1 of 2"],
    ),
    "no order of nodes on one rank": (
        TENSOR + "order = ms.arange(6, mesh=mesh, placements=ms.Shard(0))\n"
        "ms.graph.renumber(torch.tensor([[0], [1]]), x if rank else order)",
        ["LayoutError: graph.renumber: no order of nodes", "raised on: rank 1 of 2"],
    ),
    "error that one rank finds": (
        MESH + "ms.scatter_tensor(torch.ones(4) if rank == 0 else None, 1, mesh, (ms.Shard(0),))",
        ["LayoutError: scatter_tensor: nothing to scatter", "raised on: rank 1 of 2"],
    ),
    "operation without a rule": (
        TENSOR + "torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)",
        ["NoShardingRule: no sharding rule for torch.quantize_per_tensor", "(1) register a rule"],
    ),
}

# One job for all of them: an error that every rank catches leaves the job as it was.
CATCH = r"""
import json
for case, body in json.loads(os.environ["CASES"]).items():
    try:
        exec(body)
    except ms.MpishardError as e:
        texts = world.gather(f"{type(e).__name__}: {e}")
    else:
        texts = world.gather("no error")
    if rank == 0:
        # notes are words
        note(json.dumps([case, texts], separators=(",", ":")).replace(" ", "\\u0020"))
"""


def test_errors_of_every_rank(job):
    cases = json.dumps({case: body for case, (body, _) in EVERYWHERE.items()})
    outcome = job(2, CATCH, CASES=cases)
    assert outcome.status == 0, outcome.output
    told = dict(json.loads(words) for (words,) in outcome.notes)
    assert told.keys() == EVERYWHERE.keys()
    for case, (_, expected) in EVERYWHERE.items():
        assert len(told[case]) == 2
        for text in told[case]:
            assert all(part in text for part in expected), (case, told[case])


@pytest.mark.parametrize("case", ["too many placements", "operation without a rule"])
def test_error_that_nobody_catches(job, case):
    """Agreed on by the ranks, or found by each on its own."""
    body, texts = EVERYWHERE[case]
    outcome = job(2, body)
    outcome.failed_with(*texts)
    if case == "too many placements":
        # every rank has it, one prints it
        assert outcome.output.count("Traceback (most recent call last)") == 1
    assert "uncaught exception" in outcome.output


def test_error_can_be_caught_on_every_rank(job):
    body = """
errors = []
for shape in ((3, -1), (2, 2), (0,)):
    try:
        ms.init_mesh(shape)
    except ms.MeshError as e:
        errors.append(str(e))
texts = world.gather(errors)
mesh = ms.init_mesh((-1,))
together = mesh.comm.allreduce(1)
if rank == 0:
    print(len(texts[0]), all(t == texts[0] for t in texts), together)
"""
    outcome = job(2, body)
    assert outcome.status == 0, outcome.output
    assert outcome.output == "3 True 2\n"


def test_one_traceback_a_node(job):
    """All ranks fail alike, without having agreed on it: one of them says so."""
    outcome = job(3, "world.Barrier()\nraise ValueError('everywhere')")
    assert outcome.status != 0
    assert outcome.output.count("Traceback (most recent call last)") == 1
    assert outcome.output.count("ValueError: everywhere") == 1


BOUND_BEFORE = """
import torch

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2

doubled = Doubled.apply
import mpishard as ms

mesh = ms.init_mesh((-1,), ("x",))
assert doubled(torch.ones(3, requires_grad=True)).requires_grad
x = ms.ones(3, mesh=mesh, placements=(ms.Shard(0),), requires_grad=True)
doubled(x).sum().backward()
assert x.grad.full_tensor().tolist() == [2, 2, 2]
print("RIGHT")
"""


def test_a_function_of_autograd_that_was_bound_before_the_import(launch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(BOUND_BEFORE)
    done = launch(1, program)
    assert "RIGHT" in done.stdout
    assert done.returncode == 0
