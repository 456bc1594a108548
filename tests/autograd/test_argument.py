"""Arguments that are not what a call works on: an error of the package, on every rank, whatever was given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpishard as ms

# tensors that are no cells at strides with values in them, and what makes them that
ODD = {
    "quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "dequantize"),
    "by channel": (
        lambda x: torch.quantize_per_channel(x, torch.ones(len(x)), torch.zeros(len(x)), 0, torch.quint8),
        "dequantize",
    ),
    "sparse": (torch.Tensor.to_sparse, "to_dense"),
    "rows": (torch.Tensor.to_sparse_csr, "to_dense"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), "unbind"),
    "jagged": (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "unbind"),
    "meta": (lambda x: x.to("meta"), "to_empty|move them"),
    "masked": (lambda x: torch.masked.masked_tensor(x, x > 2), "give the plain tensors"),
}
if torch.backends.mkldnn.is_available():
    ODD["mkldnn"] = (torch.Tensor.to_mkldnn, "to_dense")
ODD_WARNS = pytest.mark.filterwarnings("ignore:.*(Sparse CSR|quantize|nested tensors|MaskedTensors)")
WRONG = [None, 3, "text", [1, 2], {1: 2}, object(), torch.ones(2), np.ones(3), MPI.COMM_WORLD, torch.nn.Linear(1, 1)]
NO_MESH = {
    "distribute_tensor": lambda mesh: ms.distribute_tensor(torch.ones(4), mesh, (ms.Shard(0),)),
    "distribute_module": lambda mesh: ms.distribute_module(torch.nn.Linear(2, 2), mesh),
    "scatter_tensor": lambda mesh: ms.scatter_tensor(torch.ones(4), 0, mesh, (ms.Shard(0),)),
    "from_local": lambda mesh: ms.ShardTensor.from_local(torch.ones(4), mesh, (ms.Shard(0),)),
    "zeros": lambda mesh: ms.zeros(4, mesh=mesh, placements=(ms.Shard(0),)),
    "all_reduce": lambda mesh: ms.all_reduce(torch.ones(4), mesh),
    "all_gather": lambda mesh: ms.all_gather(torch.ones(4), mesh),
    "broadcast": lambda mesh: ms.broadcast(torch.ones(4), mesh),
    "reduce_scatter": lambda mesh: ms.reduce_scatter(torch.ones(4), mesh),
    "shift": lambda mesh: ms.shift(torch.ones(4), mesh, "x", 1),
    "send_recv": lambda mesh: ms.send_recv(torch.ones(4), mesh, dest=0, source=0),
    "read": lambda mesh: ms.io.read("none.h5", "u", mesh, (ms.Shard(0),)),
    "HaloExchanger": lambda mesh: ms.HaloExchanger(mesh, (4,), 1, torch.float32),
    "Pipeline": lambda mesh: ms.Pipeline([torch.nn.Linear(2, 2)], mesh, 0),
    "choose_backend": lambda mesh: ms.io.choose_backend(mesh, 1),
    "Dataset": lambda mesh: ms.io.Dataset("none.h5", "u", mesh, (ms.Shard(0),)),
}


@pytest.mark.parametrize("name", NO_MESH)
def test_no_mesh(name):
    for wrong in WRONG:
        with pytest.raises(ms.MeshError, match=f"{name}: mesh= (.|\n)* {type(wrong).__name__}\n"):
            NO_MESH[name](wrong)


def test_no_communicator():
    for wrong in WRONG:
        if wrong is not None and not isinstance(wrong, MPI.Comm):
            with pytest.raises(ms.MeshError, match=type(wrong).__name__):
                ms.init_mesh((-1,), ("x",), comm=wrong)


def test_other_arguments(tmp_path):
    mesh = ms.init_mesh((-1,), ("x",))
    x = ms.distribute_tensor(torch.ones(4 * mesh.size), mesh, (ms.Shard(0),))
    model = torch.nn.Linear(1, 1)
    calls = {
        "widths": lambda wrong: ms.halo_exchange(x, wrong),
        "x": lambda wrong: ms.halo_exchange(wrong, {0: 1}),
        "sizes": lambda wrong: ms.distribute_tensor(torch.ones(4), mesh, (ms.Shard(0),), sizes=wrong),
        "module": lambda wrong: ms.distribute_module(wrong, mesh),
        "module of parameter_memory": ms.parameter_memory,
        "key": lambda wrong: ms.neighborhood_attention(x, wrong, x, 3),
        "tensors": lambda wrong: ms.io.write(tmp_path / "a.h5", wrong),
        "attrs": lambda wrong: ms.io.write(tmp_path / "a.h5", {"u": x}, attrs=wrong),
        "scales": lambda wrong: ms.io.write(tmp_path / "a.h5", {"u": x}, scales=wrong),
        "model": lambda wrong: ms.io.save_checkpoint(tmp_path, 1, model=wrong, mesh=mesh),
        "optimizer": lambda wrong: ms.io.save_checkpoint(tmp_path, 1, model=model, optimizer=wrong, mesh=mesh),
        "scheduler": lambda wrong: ms.io.load_checkpoint(tmp_path, model=model, scheduler=wrong, mesh=mesh),
    }
    for argument, call in calls.items():
        for wrong in ("text", [1, 2], object(), 3):
            with pytest.raises(ms.LayoutError, match=f"{argument.partition(' ')[0]}= is of another kind"):
                call(wrong)
    assert not list(tmp_path.iterdir())
    mesh.free()


# the collectives on plain tensors: a call of each with right arguments, and what its others may not be
COLLECTIVES = {
    "all_reduce": (ms.all_reduce, {}, {"mesh_dim": (1.5, {1: 2}, {3})}),
    "all_gather": (
        ms.all_gather,
        {},
        {"dim": (0.5, "x", None), "sizes": (3, 1.5, "texts", [0.5], [None], [torch.tensor(0.5)]), "mesh_dim": (0.5,)},
    ),
    "reduce_scatter": (ms.reduce_scatter, {}, {"dim": (0.5, "x", None), "sizes": (3, "texts", [None], [0.5])}),
    "all_to_all": (
        ms.all_to_all,
        {"split_dim": 0, "concat_dim": 1},
        {
            "split_dim": (0.5, None),
            "concat_dim": (0.5, "x"),
            "split_sizes": (3, "texts", [None], [0.5]),
            "concat_sizes": (3, "texts", [None]),
        },
    ),
    "broadcast": (ms.broadcast, {}, {"root": (0.5, "x", None, -1, 99)}),
    "shift": (
        ms.shift,
        {"mesh_dim": "x", "displacement": 1},
        {"displacement": (1.5, "x", None), "mesh_dim": (0.5, "z")},
    ),
    "send_recv": (ms.send_recv, {"dest": None, "source": None}, {"dest": (0.5, "x"), "source": (0.5, [1])}),
}


@ODD_WARNS
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_arguments_of_collectives(name, warm):
    """The same wrong one on every rank raises the same there: before anything is sent, as the next call shows."""
    call, right, wrong = COLLECTIVES[name]
    mesh = ms.init_mesh((-1,), ("x",))
    x = torch.ones(mesh.size, mesh.size)
    if warm:
        call(x, mesh, **right)
    texts = []
    for argument, values in wrong.items():
        for value in values:
            # one for each rank
            value = value * mesh.size if isinstance(value, list) else value
            with pytest.raises((ms.LayoutError, ms.MeshError), match=r"\n  fix: ") as info:
                call(x, mesh, **{**right, argument: value})
            texts.append(f"{type(info.value).__name__}: {info.value}")
    for kind, (make, fix) in ODD.items():
        if kind == "meta" and mesh.size == 1:  # nothing travels
            continue
        with pytest.raises(ms.MpishardError, match=rf"\n  fix: .*({fix})") as info:
            call(make(x), mesh, **right)
        texts.append(f"{type(info.value).__name__}: {info.value}")
    said = mesh.comm.allgather(texts)
    assert said == said[:1] * mesh.size
    call(x, mesh, **right)
    mesh.free()


# those that keep, cut or send a tensor: each must say so of what it cannot
TAKERS = {
    "from_local": lambda mesh, at, x: ms.ShardTensor.from_local(x, mesh, (ms.Shard(0),)),
    "distribute_tensor": lambda mesh, at, x: ms.distribute_tensor(x, mesh, (ms.Shard(0),)),
    "of one rank": lambda mesh, at, x: ms.distribute_tensor(x, mesh, (ms.Shard(0),), src_data_rank=0),
    "scatter_tensor": lambda mesh, at, x: ms.scatter_tensor(x, 0, mesh, (ms.Shard(0),)),
    "extra": lambda mesh, at, x: ms.io.save_checkpoint(at, 1, extra={"x": x}, mesh=mesh),
    "tensors": lambda mesh, at, x: ms.io.save_checkpoint(at, 1, tensors={"x": x}, mesh=mesh, asynchronous=True),
    "export_safetensors": lambda mesh, at, x: ms.io.export_safetensors(at / "a", {"x": x}, mesh=mesh),
    "import_dcp": lambda mesh, at, x: ms.io.import_dcp(at, {"x": x}, mesh=mesh),
    "distribute_module": lambda mesh, at, x: ms.distribute_module(Keeper(x), mesh),
}


@ODD_WARNS
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", TAKERS)
def test_tensors_that_are_no_cells_at_strides(tmp_path, name, kind):
    mesh = ms.init_mesh((-1,), ("x",))
    make, fix = ODD[kind]
    folder = mesh.comm.bcast(tmp_path)
    # of a model on meta torch says so itself
    error = Exception if (name, kind) == ("distribute_module", "meta") else ms.MpishardError
    with pytest.raises(error, match=fix) as info:
        TAKERS[name](mesh, folder, make(torch.arange(1.0, 4 * mesh.size + 1).reshape(2 * mesh.size, 2)))
    said = mesh.comm.allgather(str(info.value))
    assert said == said[:1] * mesh.size
    assert not list(folder.iterdir())
    assert ms.all_reduce(torch.ones(()), mesh) == mesh.size
    mesh.free()


@pytest.mark.skipif(not hasattr(torch, "int4"), reason="torch has no integers of parts of a byte")
def test_integers_of_parts_of_a_byte():
    """Torch has no kernel that would copy them."""
    mesh = ms.init_mesh((-1,), ("x",))
    x = torch.empty(2 * mesh.size, dtype=torch.int4)
    for call in (
        lambda: ms.broadcast(x, mesh),
        lambda: ms.all_gather(x, mesh),
        lambda: ms.scatter_tensor(x, 0, mesh, (ms.Shard(0),)),
        lambda: ms.distribute_tensor(x, mesh, (ms.Shard(0),)),
        lambda: ms.distribute_module(Keeper(x), mesh),
    ):
        with pytest.raises(ms.UnsupportedOperationError, match=r"int4(.|\n)*view\(torch.uint8\)"):
            call()
    assert torch.equal(
        ms.broadcast(x.view(torch.uint8), mesh).view(torch.int4).view(torch.uint8),
        ms.broadcast(x.view(torch.uint8), mesh),
    )
    mesh.free()


def test_one_rank_alone_is_wrong(tmp_path):
    mesh = ms.init_mesh((-1,), ("x",))
    x = ms.distribute_tensor(torch.ones(4 * mesh.size), mesh, (ms.Shard(0),))
    odd = mesh.rank == mesh.size - 1
    with pytest.raises(ms.LayoutError, match="model="):
        ms.io.save_checkpoint(tmp_path, 1, model=3 if odd else torch.nn.Linear(1, 1), mesh=mesh)
    with pytest.raises(ms.LayoutError, match="optimizer="):
        ms.io.load_checkpoint(tmp_path, optimizer="adam" if odd else None, mesh=mesh)
    for i, mode in enumerate(([], {}, torch.ones(2), 3)):
        with pytest.raises(ms.LayoutError, match="halo_exchange: mode="):
            ms.halo_exchange(x, {0: (1, i)}, mode=mode if odd else "zeros")
    for op in ([], {}, 3, None):
        with pytest.raises(ms.LayoutError, match="all_reduce: op="):
            ms.all_reduce(torch.ones(7), mesh, "x", op=op if odd else "sum")
    with pytest.raises(ms.LayoutError, match="attrs="):
        ms.io.write(tmp_path / "a.h5", {"u": x}, attrs=[1] if odd else None)
    with pytest.raises(ms.MeshError, match="'v' lives on no mesh"):
        ms.io.write(tmp_path / "a.h5", {"u": x, "v": torch.ones(2) if odd else x})
    wrong_of_write = (
        {"path": 5},
        {"compression": {"u": object()}},
        {"variable_attrs": {"u": 3}},
        {"scales": {1: 2}, "dims": 5},
    )
    for wrong in wrong_of_write:
        right = {"path": tmp_path / "a.h5", "tensors": {"u": x}}
        with pytest.raises(ms.MpishardError):
            ms.io.write(**{**right, **wrong} if odd else right)
    ms.io.write(path := mesh.comm.bcast(tmp_path) / "a.h5", {"u": x})
    for wrong in (
        {"path": 5},
        {"name": 5},
        {"placements": 5},
        {"backend": [1]},
        {"sizes": 5},
        {"select": "x"},
        {"halo": 5},
    ):
        right = {"path": path, "name": "u", "mesh": mesh, "placements": (ms.Shard(0),)}
        with pytest.raises(ms.MpishardError):
            ms.io.read(**{**right, **wrong} if odd else right)
    data = ms.distribute_tensor(torch.ones(3, 4 * mesh.size), mesh, (ms.Shard(1),))
    ms.io.write(path, {"u": data})
    edges = torch.zeros(2, 3 * mesh.size, dtype=torch.int64)
    edges = ms.distribute_tensor(edges, mesh, (ms.Shard(1),))
    points = ms.distribute_tensor(torch.rand(4 * mesh.size, 3), mesh, (ms.Shard(0),))
    calls = [
        (
            ms.io.Dataset,
            {"path": path, "name": "u", "mesh": mesh, "placements": (ms.Shard(0),)},
            [{"path": 5}, {"name": 5}, {"placements": 5}, {"device": "abacus"}, {"sizes": 5}, {"multiple": "x"}],
        ),
        (
            ms.io.export_safetensors,
            {"path": path.with_suffix(".st"), "model": {"u": points}, "mesh": mesh},
            [
                {"path": 5},
                {"metadata": 5},
                {"metadata": {"a": 5}},
                {"model": {"u": 5}},
                {"model": 5},
                {"model": Broken()},
            ],
        ),
        (
            ms.io.save_checkpoint,
            {"path": path.parent / "c", "step": 1, "tensors": {"u": points}, "mesh": mesh},
            [
                {"path": 5},
                {"step": "x"},
                {"tensors": {"u": 5}},
                {"tensors": 5},
                {"model": Broken()},
            ],
        ),
        (
            ms.io.load_checkpoint,
            {"path": path.parent / "c", "mesh": mesh},
            [
                {"path": 5},
                {"step": "x"},
                {"placements": 5},
                {"tensors": 5},
                {"model": Broken()},
            ],
        ),
        (ms.graph.halo, {"edge_index": edges, "nodes": points}, [{"edge_index": 5}, {"edge_index": edges.double()}]),
        (
            ms.points.knn,
            {"points": points, "queries": points, "k": 2},
            [{"k": "x"}, {"k": 1 << 40}, {"points": points[:, :2]}],
        ),
        (
            ms.points.radius,
            {"points": points, "queries": points, "radius": 0.1},
            [{"radius": "x"}, {"max_points": "x"}, {"radius": None}],
        ),
    ]
    if mesh.size == 1:  # nobody else is right, and Python's and torch's own errors are raised as they are
        calls = []
    for call, right, wrongs in calls:
        for wrong in wrongs:
            with pytest.raises(ms.MpishardError):
                call(**{**right, **wrong} if odd else right)
    mesh.free()


class Keeper(torch.nn.Linear):
    """A model that has a tensor of another kind."""

    def __init__(self, x):
        super().__init__(2, 2)
        self.register_buffer("x", x)


class Broken(torch.nn.Linear):
    """A model whose state cannot be had."""

    def __init__(self):
        super().__init__(1, 1)

    def state_dict(self, *args, **kwargs):
        raise RuntimeError("on this rank")
