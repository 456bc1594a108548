from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import threading
import time
import warnings
from collections import Counter
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import mpishard as ms
from mpishard.errors import FileError, MpishardError
from mpishard.io.checkpoint import background, checksum, restore
from mpishard.io.checkpoint import folder as folders
from mpishard.io.checkpoint.snapshot import Snapshot
from mpishard.io.checkpoint.stages import Stages
from mpishard.io.file import lock
from mpishard.layout import layout_of
from tests.compare import layouts, mesh_of, mesh_shapes

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
REAL = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*REAL, torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64]
ASYNCHRONOUS = pytest.mark.parametrize("asynchronous", [False, True], ids=["now", "background"])


@pytest.fixture
def folder(tmp_path):
    """One folder for all ranks: tmp_path is each rank's own."""
    return type(tmp_path)(WORLD.bcast(os.fspath(tmp_path)))


@pytest.fixture
def mesh():
    return mesh_of(mesh_shapes(2)[-1])


def listed(folder):
    return sorted(name for name in os.listdir(folder) if name != ".lock")


def same_on_all(error):
    texts = WORLD.allgather(str(error.value))
    assert len(set(texts)) == 1, texts


def values(shape, dtype=torch.float32, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul_(40)
    if dtype.is_complex:
        return torch.complex(x, -x).to(dtype)
    return x > 0 if dtype == torch.bool else x.to(torch.int64).to(dtype) if not dtype.is_floating_point else x.to(dtype)


def on(mesh, x, *dims, sizes=None):
    placements = [ms.Shard(d) for d in dims] + [ms.Replicate()] * mesh.ndim
    return ms.distribute_tensor(x, mesh, placements[: mesh.ndim], sizes=sizes)


def on_root(f):
    """Run ``f`` on rank 0; every rank goes on afterwards."""
    WORLD.Barrier()
    if WORLD.rank == 0:
        f()
    WORLD.Barrier()


class Program:
    """A training program on a mesh, with everything that a checkpoint must hold."""

    def __init__(self, mesh, dims=(2, 3), sizes=None):
        torch.manual_seed(5 if mesh.rank == 0 else 50 + mesh.rank)
        self.x = on(mesh, values((1, 1, 13, 11)) / 40, *dims, sizes=sizes)
        self.model = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.SiLU(), nn.Dropout(0.2), nn.Conv2d(3, 1, 1)
        )
        self.model = ms.distribute_module(self.model, mesh)
        self.state = on(mesh, values((1, 1, 13, 11), seed=2) / 40, *dims, sizes=sizes).requires_grad_()
        self.optimizer = torch.optim.AdamW([{"params": self.model.parameters()}, {"params": [self.state], "lr": 0.03}])
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3])
        self.mesh = mesh

    def steps(self, n):
        losses = []
        for _ in range(n):
            self.optimizer.zero_grad()
            loss = (self.model(self.x) + self.state).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(float(loss))
        return losses

    def save(self, folder, step, **options):
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return ms.io.save_checkpoint(folder, step, tensors={"state": self.state}, mesh=self.mesh, **parts, **options)

    def load(self, folder, **options):
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        found = ms.io.load_checkpoint(folder, tensors={"state": self.state}, mesh=self.mesh, **parts, **options)
        with torch.no_grad():
            self.state.copy_(found.tensors["state"])
        return found


# -- training goes on


@ASYNCHRONOUS
def test_training_resumed_is_training_not_interrupted(mesh, folder, asynchronous):
    program = Program(mesh)
    program.steps(2)
    saving = program.save(folder, 2, asynchronous=asynchronous)
    expected = program.steps(3)
    assert saving.wait() == folder / "step_0000000002"
    again = Program(mesh)
    assert again.load(folder).step == 2
    assert again.steps(3) == expected
    for p, q in zip(again.model.state_dict().values(), program.model.state_dict().values(), strict=True):
        assert torch.equal(p, q)
    assert again.scheduler.state_dict() == program.scheduler.state_dict()
    assert torch.equal(again.state.to_local(), program.state.to_local())


@pytest.mark.parametrize("dims", [None, 0])
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_training_resumed_by_a_fused_optimizer_of_parameters_in_another_order(folder, name, dims):
    there, mesh = {"memory_format": torch.channels_last}, mesh_of((SIZE,))
    x = on(mesh, values((2, 3, 9, 6)) / 40, 2)

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 2, 3))
        model = ms.distribute_module(model, mesh, shard_parameters=dims).to(**there)
        options = {"momentum": 0.9} if name == "SGD" else {}
        return model, getattr(torch.optim, name)(model.parameters(), lr=1e-2, fused=True, **options)

    def steps(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    model, optimizer = made()
    steps(model, optimizer)
    ms.io.save_checkpoint(folder, 2, model=model, optimizer=optimizer, mesh=mesh)
    steps(model, optimizer)
    again = made()
    ms.io.load_checkpoint(folder, model=again[0], optimizer=again[1], mesh=mesh)
    steps(*again)
    for p, q in zip(again[0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_training_resumed_on_another_mesh(folder):
    """The same state, bit for bit; sums over other blocks differ in the last bits."""
    shapes = mesh_shapes(2)
    program = Program(mesh_of(shapes[0]), dims=(3,))
    program.steps(2)
    program.save(folder, 2)
    expected = program.steps(2)
    for shape in shapes:
        again = Program(mesh_of(shape), dims=(2, 3))
        again.load(folder)
        np.testing.assert_allclose(again.steps(2), expected, rtol=2e-5)


# -- every layout to every other


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(mesh, folder, dtype):
    full = values((5, 6, 3), dtype)
    saved = {"x": on(mesh, full, 0, 2), "plain": full, "none": full[:0], "one": full[0, 0, 0]}
    ms.io.save_checkpoint(folder, 0, tensors=saved)
    spec = {"x": (mesh, on(mesh, full, 1, 0).placements), "plain": None, "none": None, "one": None}
    found = ms.io.load_checkpoint(folder, tensors=spec).tensors
    assert torch.equal(found["x"].full_tensor(), full)
    for name in ("plain", "none", "one"):
        assert found[name].dtype == dtype
        assert torch.equal(found[name], saved[name])


@ASYNCHRONOUS
def test_every_layout_onto_every_other(folder, asynchronous):
    full = values((4, 5, 3))
    cases = list(layouts(full.shape, (0, 2)))[:: 3 if SIZE > 1 else 1]
    for step, (mesh, placements, sizes) in enumerate(cases):
        x = ms.distribute_tensor(full, mesh, placements, sizes=sizes)
        ms.io.save_checkpoint(folder, step, tensors={"x": x}, rng=False, keep=2, asynchronous=asynchronous).wait()
        for other, target, _ in cases[:: 2 if SIZE > 1 else 1]:
            back = ms.io.load_checkpoint(folder, tensors={"x": (other, target)}, rng=False).tensors["x"]
            assert back.placements == ms.distribute_tensor(full, other, target).placements
            assert torch.equal(back.full_tensor(), full)
        as_saved = ms.io.load_checkpoint(folder, mesh=mesh, rng=False).tensors["x"]
        assert as_saved.placements == x.placements
        like = ms.io.load_checkpoint(folder, tensors={"x": x}, rng=False).tensors["x"]
        assert like.sharding is x.sharding
        one_dim = ms.io.load_checkpoint(folder, mesh=mesh_of((SIZE,)), placements=(ms.Shard(1),), rng=False)
        assert torch.equal(one_dim.tensors["x"].full_tensor(), full)
        # on a mesh of other dims without a word: along the dims that it was sharded along, and no block is the whole
        others = {1: (SIZE,), 2: (1, SIZE), 3: (1, 1, SIZE)}
        for ndim in {1, 2, 3} - {mesh.ndim}:
            again = ms.io.load_checkpoint(folder, mesh=mesh_of(others[ndim]), rng=False).tensors["x"]
            was = {p.dim for p in x.placements if p.is_shard()}
            now = {p.dim for p in again.placements if p.is_shard()}
            assert now == was if ndim >= len(was) else now < was
            assert len(now) == min(ndim, len(was))
            assert torch.equal(again.full_tensor(), full)


@ASYNCHRONOUS
def test_partial_views_and_large_blocks(mesh, folder, asynchronous):
    part = torch.full((3, 2), 2.0) if mesh.coords[-1] == 0 else torch.zeros(3, 2)
    partial = ms.ShardTensor.from_local(part, mesh, [ms.Replicate()] * (mesh.ndim - 1) + [ms.Partial()])
    full = values((70, 60, 50))
    wide = on(mesh, full, 0).transpose(0, 2)
    tensors = {"partial": partial, "wide": wide, "plain": full.mT, "conj": values((4, 3), torch.complex64).conj()}
    saving = ms.io.save_checkpoint(folder, 0, tensors=tensors, asynchronous=asynchronous)
    with torch.no_grad():
        full.zero_()  # the copy is what is saved
    saving.wait()
    found = ms.io.load_checkpoint(folder, mesh=mesh).tensors
    assert torch.equal(found["partial"].full_tensor(), torch.full((3, 2), 2.0))
    assert torch.equal(found["wide"].full_tensor(), values((70, 60, 50)).transpose(0, 2))
    if asynchronous:
        assert torch.equal(found["plain"], values((70, 60, 50)).mT)
    assert torch.equal(found["conj"], values((4, 3), torch.complex64).conj())


def test_random_numbers_go_on(folder):
    a, b = mesh_of(mesh_shapes(2)[0]), mesh_of(mesh_shapes(2)[-1])
    torch.manual_seed(3 + WORLD.rank)
    ms.io.save_checkpoint(folder, 0, mesh=a)
    drawn = ms.rand(7, 5, mesh=a, placements=[ms.Shard(0)] * a.ndim).full_tensor()
    own = torch.rand(3)
    ms.io.load_checkpoint(folder, mesh=b)
    again = ms.rand(7, 5, mesh=b, placements=[ms.Shard(1)] * b.ndim).full_tensor()
    assert torch.equal(again, drawn)
    assert torch.equal(torch.rand(3), own)
    before = torch.get_rng_state()
    ms.io.load_checkpoint(folder, mesh=b, rng=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_anything_but_pickle(mesh, folder):
    extra = {
        "floats": [1.5, float("inf"), -0.0, 0.1],
        "nan": float("nan"),
        "pair": (1, "two", None, True, 3 + 4j, b"\x00\xff"),
        3: {"x": {1, 2}, "$tensor": "trap", "a/b": torch.arange(3), "a": {"b": torch.ones(())}},
        "": {".": torch.zeros(2), "..": torch.ones(2), "%": torch.ones(1)},
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "number": np.float32(0.1),
        "dtype": torch.bfloat16,
        "milestones": Counter({3: 2}),
        "shape": torch.Size([2, 3]),
    }
    ms.io.save_checkpoint(folder, 0, extra=extra, mesh=mesh)
    back = ms.io.load_checkpoint(folder, mesh=mesh).extra
    assert list(back) == list(extra)
    assert np.isnan(back.pop("nan"))
    assert np.array_equal(back.pop("array"), extra["array"])
    assert back.pop("number") == float(extra["number"])
    assert torch.equal(back[3].pop("a/b"), torch.arange(3))
    assert torch.equal(back[3]["a"].pop("b"), torch.ones(()))
    assert back[3] == {"x": {1, 2}, "$tensor": "trap", "a": {}}
    assert torch.equal(back.pop("")[".."], torch.ones(2))
    assert {k: back[k] for k in ("floats", "pair", "dtype", "milestones", "shape")} == {
        k: extra[k] for k in ("floats", "pair", "dtype", "milestones", "shape")
    }
    assert str(back["floats"][2]) == "-0.0"

    class Own:
        pass

    for thing in (Own(), lambda: 0, {"a": [Own]}, torch.eye(3).to_sparse()):
        with pytest.raises(MpishardError, match="extra") as e:
            ms.io.save_checkpoint(folder, 1, extra=thing, mesh=mesh)
        same_on_all(e)
    assert listed(folder) == ["latest", "step_0000000000"]


NAMES = [
    "$rho",
    "$",
    "$dict",
    "$tensor",
    0,
    -1,
    True,
    None,
    1.5,
    b"x",
    (1, "a"),
    frozenset({2}),
    "a/b",
    "\ud800",
    "%D800",
]


@pytest.mark.parametrize("seed", range(4))
def test_any_names_are_found_again(mesh, folder, seed):
    """Names that JSON lacks, or that look like its own: all of them, some of them, and those of a model's parts."""
    draw = random.Random(seed)
    names = [*draw.sample(NAMES, 5), "u"]
    tensors = {name: on(mesh, values((6,), seed=i), 0) for i, name in enumerate(names)}
    ms.io.save_checkpoint(folder, 1, tensors=tensors, mesh=mesh, asynchronous=bool(seed % 2))

    def same(found, wanted):
        assert list(found) == wanted
        assert all(torch.equal(found[name].full_tensor(), tensors[name].full_tensor()) for name in wanted)

    same(ms.io.load_checkpoint(folder, mesh=mesh).tensors, names)
    some = draw.sample(names, 3)
    like = {name: draw.choice([tensors[name], (ms.Shard(0),) + (ms.Replicate(),) * (mesh.ndim - 1)]) for name in some}
    same(ms.io.load_checkpoint(folder, tensors=like, mesh=mesh).tensors, some)
    with pytest.raises(FileError, match=r"does not have tensors\['none'\](.|\n)*some of tensors, rng, ") as e:
        ms.io.load_checkpoint(folder, tensors={"u": None, "none": None}, mesh=mesh)
    same_on_all(e)


class Parts(nn.Module):
    """A model whose parts have names of their own kind."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, 2))


def test_a_model_with_any_names(mesh, folder):
    saved, other = Parts("$a", "$dict", "b"), Parts("$a", "$dict", "b")
    optimizers = [torch.optim.Adam([{"params": m.parameters(), 3: "own"}]) for m in (saved, other)]
    for p in saved.parameters():
        p.grad = torch.ones_like(p)
    optimizers[0].step()
    ms.io.save_checkpoint(folder, 1, model=saved, optimizer=optimizers[0], mesh=mesh)
    ms.io.load_checkpoint(folder, model=other, optimizer=optimizers[1], mesh=mesh)
    for name, p in other.state_dict().items():
        assert torch.equal(p, saved.state_dict()[name])
    assert optimizers[1].param_groups[0][3] == "own"
    assert len(optimizers[1].state) == 6
    with pytest.raises(ms.LayoutError, match=r"not in the file: \['\$c\.weight', '\$c\.bias'\]") as e:
        ms.io.load_checkpoint(folder, model=Parts("$a", "$dict", "$c"), mesh=mesh)
    same_on_all(e)


def test_counts_sets_and_enumerations(mesh, folder):
    """What a scheduler or a program may hold, and JSON does not."""
    extra = {
        "counter": Counter({3: np.int64(2), "a": 0.5, None: float("inf")}),
        "sets": {frozenset({1, (2, frozenset({"x"}))}): {frozenset(), frozenset({b"y"})}},
        "enumerations": [enum.IntEnum("E", {"A": 3}).A, enum.Enum("E", {"A": np.int64(4)}, type=int).A],
        "long": 10**4299,
        "half": ["\ud800", {"\udc00": torch.ones(2), "%DC00": torch.zeros(2)}],
    }
    ms.io.save_checkpoint(folder, 1, extra=extra, mesh=mesh)
    back = ms.io.load_checkpoint(folder, mesh=mesh).extra
    assert torch.equal(back["half"][1].pop("\udc00"), torch.ones(2))
    assert torch.equal(back["half"][1].pop("%DC00"), torch.zeros(2))
    extra["half"][1].clear()
    assert back == extra


@ASYNCHRONOUS
def test_numbers_that_json_has_no_text_for(mesh, folder, asynchronous):
    """Python writes no integer of more digits: all ranks know before anything is written."""
    for extra in (
        {"x": 10**5000},
        [-(10**4300)],
        {10**5000: 1},
        {(1, 10**5000): 1},
        Counter({"a": 10**5000}),
        {"x": Counter({"a": object()})},
    ):
        with pytest.raises(MpishardError, match=r"save_checkpoint: extra.* (is too long|cannot be stored)") as e:
            ms.io.save_checkpoint(folder, 1, extra=extra, mesh=mesh, asynchronous=asynchronous)
        same_on_all(e)
    for step in (10**5000, 1 << 63):
        with pytest.raises(MpishardError, match="step or keep") as e:
            ms.io.save_checkpoint(folder, step, mesh=mesh, asynchronous=asynchronous)
        same_on_all(e)
    assert not listed(folder)


@ASYNCHRONOUS
@pytest.mark.parametrize("where", ["begin", "write_state", "commit", "read_state", "sizes"])
@pytest.mark.parametrize("kind", [ValueError, AttributeError, MemoryError])
def test_whatever_one_rank_raises_all_raise(mesh, folder, monkeypatch, asynchronous, where, kind):
    def fail(*_, **__):
        raise kind("of rank 0")

    ms.io.save_checkpoint(folder, 1, mesh=mesh)
    monkeypatch.setattr(folders, where, fail)  # only rank 0 calls it
    with pytest.raises(FileError, match="of rank 0") as e:
        ms.io.save_checkpoint(folder, 2, mesh=mesh, asynchronous=asynchronous).wait()
    same_on_all(e)
    monkeypatch.undo()
    assert listed(folder) == ["latest", "step_0000000001"] or where == "begin"
    assert ms.io.load_checkpoint(folder, mesh=mesh).step == 1


@pytest.mark.parametrize("kind", [ValueError, AttributeError, MemoryError, FileError])
def test_whatever_one_rank_raises_in_loading_all_raise(mesh, folder, monkeypatch, kind):
    def fail(*_, **__):
        raise kind("of rank 0")

    ms.io.save_checkpoint(folder, 1, mesh=mesh)
    for module, name in ((folders, "look"), (restore, "read_state")):
        monkeypatch.setattr(module, name, fail)  # only rank 0 calls it
        with pytest.raises(MpishardError if SIZE > 1 else (MpishardError, kind), match="of rank 0"):
            ms.io.load_checkpoint(folder, mesh=mesh)
        monkeypatch.undo()


# -- what is kept


@ASYNCHRONOUS
def test_keep_and_latest(mesh, folder, asynchronous):
    def names():
        WORLD.Barrier()
        return listed(folder)

    def save(step, keep=2):
        path = ms.io.save_checkpoint(
            folder, step, extra=step, mesh=mesh, keep=keep, rng=False, asynchronous=asynchronous
        ).wait()
        assert ms.io.load_checkpoint(folder, mesh=mesh).path == path
        return path.name

    for step in (1, 5, 9):
        assert save(step) == f"step_{step:010d}"
    assert names() == ["latest", "step_0000000005", "step_0000000009"]
    assert ms.io.load_checkpoint(folder, mesh=mesh, step=5).extra == 5
    # back to an earlier step: the newest in time is the latest
    assert save(6) == "step_0000000006"
    assert names() == ["latest", "step_0000000006", "step_0000000009"]
    # the same step again: never a moment without it
    assert save(6) == "step_0000000006-2"
    assert save(6) == "step_0000000006-3"
    assert names() == ["latest", "step_0000000006-3", "step_0000000009"]
    save(10, keep=None)
    assert len(names()) == 4
    save(11, keep=1)
    assert names() == ["latest", "step_0000000011"]
    on_root(lambda: os.unlink(folder / "latest"))
    assert ms.io.load_checkpoint(folder, mesh=mesh).step == 11
    with pytest.raises(FileError, match=r"give one of \[11\]") as e:
        ms.io.load_checkpoint(folder, mesh=mesh, step=5)
    same_on_all(e)


def test_what_others_keep_beside_stays(mesh, folder):
    """Names that look alike: of another program's folders none goes, and none is taken for a checkpoint."""
    theirs = ("step_100", "step_7-1", ".step_sizes", "step_000000009")
    for name in theirs if WORLD.rank == 0 else ():
        (folder / name).mkdir()
        (folder / name / "model.pt").write_bytes(b"precious")
    WORLD.barrier()
    for step in range(4):
        ms.io.save_checkpoint(folder, step, mesh=mesh, keep=2)
    assert ms.io.load_checkpoint(folder, mesh=mesh).step == 3
    assert all((folder / name / "model.pt").read_bytes() == b"precious" for name in theirs)
    WORLD.barrier()
    if WORLD.rank == 0:
        (folder / "latest").unlink()
    WORLD.barrier()
    assert ms.io.load_checkpoint(folder, mesh=mesh).step == 3


def test_what_a_killed_job_left_goes(mesh, folder):
    def leave():
        (folder / ".step_0000000004.partial").mkdir()
        (folder / ".step_0000000004.partial" / "tensors.h5").write_bytes(b"half")
        (folder / ".step_0000000003.old").mkdir()
        (folder / ".latest.123").write_text("step")

    on_root(leave)
    with pytest.raises(FileError, match="no complete checkpoint") as e:
        ms.io.load_checkpoint(folder, mesh=mesh)
    same_on_all(e)
    ms.io.save_checkpoint(folder, 4, mesh=mesh)
    assert listed(folder) == ["latest", "step_0000000004"]


def test_what_cannot_be_removed_ends_no_save(mesh, folder, monkeypatch):
    """As on NFS, where a folder stays as long as somebody reads a file of it."""
    remove = folders._remove

    def stuck(path):
        if path.name.endswith(".old"):
            raise OSError("busy")
        remove(path)

    monkeypatch.setattr(folders, "_remove", stuck)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in (1, 2, 3):
            ms.io.save_checkpoint(folder, step, extra=step, mesh=mesh, keep=1)
    assert mesh.rank or any("busy" in str(w.message) for w in told)
    assert ms.io.load_checkpoint(folder, mesh=mesh).extra == 3
    monkeypatch.setattr(folders, "_remove", remove)
    ms.io.save_checkpoint(folder, 4, mesh=mesh, keep=1)
    assert listed(folder) == ["latest", "step_0000000004"]


def spoil(checkpoint, name="tensors.h5"):
    on_root(lambda: os.truncate(checkpoint / name, (checkpoint / name).stat().st_size - 10))


def test_what_is_damaged_does_not_count(mesh, folder):
    """The last one that is whole stays, however many there are that are not."""
    for step in (1, 2, 3, 4):
        ms.io.save_checkpoint(folder, step, extra=step, mesh=mesh, keep=9)
    spoil(folder / "step_0000000002")
    spoil(folder / "step_0000000003", "state.json")
    on_root((folder / "step_0000000009").mkdir)
    ms.io.save_checkpoint(folder, 4, extra=4, mesh=mesh, keep=1)
    # one is kept: the one that was just saved
    assert listed(folder) == ["latest", "step_0000000004-2"]
    for step in (5, 6, 7):
        ms.io.save_checkpoint(folder, step, extra=step, mesh=mesh, keep=9)
    spoil(folder / "step_0000000006")
    spoil(folder / "step_0000000007", "state.json")
    on_root((folder / "step_0000000009").mkdir)
    ms.io.save_checkpoint(folder, 8, extra=8, mesh=mesh, keep=2)
    assert listed(folder) == ["latest", *(f"step_{step:010d}" for step in (5, 6, 7, 8))]
    spoil(folder / "step_0000000008")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ms.io.load_checkpoint(folder, mesh=mesh, fallback=True).step == 5


def test_warnings_that_are_errors_come_on_every_rank(mesh, folder, monkeypatch):
    two(folder, mesh)
    spoil(folder / "step_0000000002")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for harm in (None, "x"):
            if harm is not None:
                on_root(lambda: (folder / "latest").write_text("x"))
            kind = RuntimeWarning if SIZE == 1 else MpishardError
            with pytest.raises(kind, match="fallback: step_000000000") as e:
                ms.io.load_checkpoint(folder, mesh=mesh, fallback=True)
            same_on_all(e)

        def stuck(path):
            raise OSError("busy")

        monkeypatch.setattr(folders, "_remove", stuck)
        with pytest.raises(FileError, match="could not be removed") as e:
            ms.io.save_checkpoint(folder, 3, extra=3, mesh=mesh, keep=1)
        same_on_all(e)
    assert ms.io.load_checkpoint(folder, mesh=mesh).extra == 3


def test_what_latest_says_is_checked(mesh, folder):
    for step in (8, 9, 5):
        ms.io.save_checkpoint(folder, step, mesh=mesh)
    latest = folder / "latest"
    told = latest.read_text()
    assert told.splitlines()[0] == "step_0000000005"
    assert ms.io.load_checkpoint(folder, mesh=mesh).step == 5
    lines = told.splitlines(keepends=True)
    harms = [told.replace("5", "4"), told.replace("9", "8"), "", "\n", "x" * 100, lines[0], "".join(lines[1:])]
    harms += ["".join(reversed(lines)), lines[1] + lines[0] + "".join(lines[2:]), told + "x", "\ud800", "9" * 10_000]
    harms += ["step_0000000007\n", "".join(lines[:-1]).replace("9", "7")]
    for harm in harms:
        on_root(lambda harm=harm: latest.write_text(harm, errors="surrogateescape" if harm < "x" else "replace"))
        if harm in ("", lines[0]):
            # as one of a version without a checksum
            assert ms.io.load_checkpoint(folder, mesh=mesh).step == (9 if harm == "" else 5)
            continue
        with pytest.raises(FileError, match=r"latest[\s\S]*fallback=True") as e:
            ms.io.load_checkpoint(folder, mesh=mesh)
        same_on_all(e)
        assert os.fspath(folder) in str(e.value)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert ms.io.load_checkpoint(folder, mesh=mesh, fallback=True).step == 9
        assert ["of the highest step" in str(w.message) for w in seen] == [True] * (WORLD.rank == 0)
        assert ms.io.load_checkpoint(folder, mesh=mesh, step=5).step == 5
    # another save mends it
    ms.io.save_checkpoint(folder, 6, mesh=mesh, keep=9)
    assert ms.io.load_checkpoint(folder, mesh=mesh).step == 6
    on_root(lambda: shutil.rmtree(folder / "step_0000000006"))
    with pytest.warns(RuntimeWarning, match="step_0000000006") if WORLD.rank == 0 else contextlib.nullcontext():
        assert ms.io.load_checkpoint(folder, mesh=mesh).step == 9


# -- several jobs


class OtherJob:
    """A process on rank 0 that holds a folder, as another job's first rank does."""

    def __init__(self, folder):
        self.pid = 0
        if WORLD.rank == 0:
            ready, told = os.pipe()
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    lock.hold(folder)
                    os.write(told, b"held")
                    time.sleep(60)
                except FileError as e:
                    os.write(told, str(e).encode())
                finally:
                    os._exit(0)
            self.told = os.read(ready, 10_000).decode()
            os.close(ready)
            os.close(told)
        WORLD.Barrier()

    def end(self):
        if WORLD.rank == 0:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        WORLD.Barrier()


@ASYNCHRONOUS
def test_two_jobs_and_one_folder(mesh, folder, asynchronous, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    path = ms.io.save_checkpoint(folder, 1, extra=1, mesh=mesh, keep=1, asynchronous=asynchronous).wait()
    # who comes second is told who was first
    second = OtherJob(folder)
    if WORLD.rank == 0:
        for text in ("another job saves into", f"process '{os.getpid()}'", socket.gethostname(), "SLURM_JOB_ID=4711"):
            assert text in second.told, second.told
    second.end()
    assert ms.io.save_checkpoint(folder, 2, mesh=mesh, keep=1, asynchronous=asynchronous).wait() != path
    # and every rank of it
    on_root((folder / "other").mkdir)
    first = OtherJob(folder / "other")
    for _ in range(2):
        with pytest.raises(FileError, match=r"another job saves into[\s\S]*is held by process") as e:
            ms.io.save_checkpoint(folder / "other", 1, mesh=mesh, asynchronous=asynchronous)
        same_on_all(e)
        assert f"'{WORLD.bcast(first.pid)}'" in str(e.value)
    first.end()
    assert ms.io.save_checkpoint(folder / "other", 1, mesh=mesh, asynchronous=asynchronous).wait()
    assert listed(folder / "other") == ["latest", "step_0000000001"]


@pytest.mark.ranks(1)
def test_whose_folder_it_is_without_locks(mesh, folder, monkeypatch):
    """By what the lock says: a process that lives, or one of another machine, not long ago."""

    def none(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", none)

    def save():
        lock._forget()
        return ms.io.save_checkpoint(folder, 1, mesh=mesh)

    def told(**other):
        (folder / ".lock").write_text(json.dumps({**lock._me(), **other}))

    save()
    assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()
    for other in ({"pid": os.getppid(), "started": lock._started(os.getppid())}, {"host": "elsewhere", "job": "A=1"}):
        told(**other)
        with pytest.raises(FileError, match="another job saves into"):
            save()
    long_ago = time.time() - 3600
    os.utime(folder / ".lock", (long_ago, long_ago))
    save()
    # gone; another process with its number; this job, queued again; no note
    for other in (
        {"pid": 1 << 30},
        {"pid": os.getppid(), "started": "1"},
        {"host": "elsewhere", "job": "SLURM_JOB_ID=1"},
    ):
        monkeypatch.setenv("SLURM_JOB_ID", "1")
        told(**other)
        save()
    (folder / ".lock").write_text("[" * 5000)
    save()


def test_a_lock_is_no_way_to_other_files(mesh, folder):
    """Neither through a link nor by a second name."""
    mine = folder / "mine"
    on_root(lambda: mine.write_bytes(b"precious"))
    for make in (os.symlink, os.link):
        on_root(lambda make=make: ((folder / "c").mkdir(), make(mine, folder / "c" / ".lock")))
        with pytest.raises(FileError, match="cannot write a checkpoint") as e:
            ms.io.save_checkpoint(folder / "c", 1, mesh=mesh)
        same_on_all(e)
        assert mine.read_bytes() == b"precious"
        on_root(lambda: shutil.rmtree(folder / "c"))


# -- what must be noticed


def two(folder, mesh, **options):
    for step in (1, 2):
        tensors = {"x": on(mesh, values((40, 50)) + step, 0, 1), "plain": values((6, 7)) + step}
        ms.io.save_checkpoint(folder, step, tensors=tensors, extra=step, mesh=mesh, **options).wait()
    return folder / "step_0000000002"


def flip(path, needle=None, at=None):
    """Change one bit of a file, after where ``needle`` is."""
    raw = bytearray(path.read_bytes())
    at = raw.index(needle) + 1 if at is None else at
    raw[at] ^= 4
    path.write_bytes(raw)


def falls_back(folder, mesh):
    """The one before is loaded, rank 0 says so, and the error is the same on every rank."""
    with pytest.raises(FileError) as e:
        ms.io.load_checkpoint(folder, mesh=mesh)
    same_on_all(e)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = ms.io.load_checkpoint(folder, mesh=mesh, fallback=True)
    assert (found.step, found.extra) == (1, 1)
    assert torch.equal(found.tensors["x"].full_tensor(), values((40, 50)) + 1)
    assert len(found.skipped) == 1
    assert ["step_0000000001 instead" in str(t.message) for t in told] == [True] * (WORLD.rank == 0)
    return str(e.value)


@ASYNCHRONOUS
def test_a_flipped_bit_is_found_and_named(mesh, folder, asynchronous):
    latest = two(folder, mesh, asynchronous=asynchronous)
    whole = values((40, 50)) + 2
    part = on(mesh, whole, 0, 1)
    last = WORLD.allgather(part.to_local().contiguous().numpy().tobytes())[-1]
    file = latest / ("parts/0.h5" if asynchronous else "tensors.h5")
    on_root(lambda: flip(file, needle=last[-4:] if asynchronous else whole[-1, -1].numpy().tobytes()))
    text = falls_back(folder, mesh)
    assert "'tensors/x' is not what was written: tile 0 of 1, cells (0, 0) to (39, 49)" in text
    assert ms.io.load_checkpoint(folder, mesh=mesh, tensors={"plain": None}).step == 2


def test_a_flipped_bit_of_a_plain_tensor_is_found(mesh, folder):
    latest = two(folder, mesh)
    on_root(lambda: flip(latest / "tensors.h5", needle=(values((6, 7)) + 2)[3].numpy().tobytes()))
    assert "'tensors/plain' is not what was written: tile 0 of 1" in falls_back(folder, mesh)


def test_a_flipped_bit_of_the_rest_is_found(mesh, folder):
    latest = two(folder, mesh)
    on_root(lambda: flip(latest / "state.json", needle=b'"extra": '))
    falls_back(folder, mesh)


@pytest.mark.parametrize("file", ["tensors.h5", "state.json"])
@pytest.mark.parametrize("harm", ["truncated", "empty", "missing", "other"])
def test_damaged_files(mesh, folder, file, harm):
    path = two(folder, mesh) / file
    harms = {
        "truncated": lambda: os.truncate(path, path.stat().st_size - 100),
        "empty": lambda: os.truncate(path, 0),
        "missing": lambda: os.unlink(path),
        "other": lambda: path.write_bytes(b"not what it was" * 100),
    }
    on_root(harms[harm])
    falls_back(folder, mesh)


def test_a_part_that_is_missing(mesh, folder):
    path = two(folder, mesh, asynchronous=True)
    on_root(lambda: os.unlink(path / "parts" / "0.h5"))
    assert "parts/0.h5" in falls_back(folder, mesh)


def test_nothing_is_changed_where_loading_fails(mesh, folder):
    program = Program(mesh)
    program.steps(1)
    program.save(folder, 1)
    # the scheduler is read last
    on_root(lambda: flip(folder / "step_0000000001" / "tensors.h5", needle=program_bytes(program)))
    other = Program(mesh)
    other.steps(2)
    before = [p.clone() for p in other.model.state_dict().values()]
    with pytest.raises(FileError, match="is not what was written") as e:
        other.load(folder)
    same_on_all(e)
    assert all(torch.equal(p, q) for p, q in zip(other.model.state_dict().values(), before, strict=True))


def program_bytes(program):
    moments = program.optimizer.state_dict()["state"][0]["exp_avg"]
    return moments.numpy().tobytes()[:16]


def test_a_file_from_the_future(mesh, folder):
    latest = two(folder, mesh)

    def age():
        state = json.loads((latest / "state.json").read_text())
        (latest / "state.json").write_text(json.dumps({**state, "version": 99}))

    on_root(age)
    text = falls_back(folder, mesh)
    assert "written by a newer mpishard" in text
    assert "version 99" in text


class Trap:
    """What a pickle would run."""

    def __reduce__(self):
        return (os.mkdir, ("trapped",))


def test_a_file_cannot_run_code(mesh, folder, monkeypatch):
    latest = two(folder, mesh)
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(pickle, "Unpickler", None)
    monkeypatch.setattr(torch, "load", None)

    def trap(state, tensors=None):
        def write():
            folders.write_state(latest, {**json.loads(original), **state})
            for name, array in (tensors or {}).items():
                with h5py.File(latest / "tensors.h5", "r+") as f:
                    del f[name]
                    f.create_dataset(name, data=array, dtype=array.dtype)

        on_root(write)

    original = (latest / "state.json").read_text()
    original = json.dumps({k: v for k, v in json.loads(original).items() if k not in ("format", "version", "checksum")})
    for evil in ({"$pickle": "gAR="}, {"$dtype": "load"}, {"$tensor": "../../x"}, {"$bytes": 3}, {"$dict": [[[], 1]]}):
        trap({"state": {"extra": evil, "tensors": {}}})
        with pytest.raises(FileError, match="damaged") as e:
            ms.io.load_checkpoint(folder, mesh=mesh)
        same_on_all(e)
    raw = pickle.dumps(Trap())
    trap({}, {"tensors/plain": np.array(raw.hex().encode())})
    with pytest.raises(FileError, match="tensors/plain") as e:
        ms.io.load_checkpoint(folder, mesh=mesh)
    same_on_all(e)
    assert not os.path.exists("trapped")


# -- wrong use


def test_what_does_not_fit(mesh, folder):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = on(mesh, values((4, 6)), 0, 1)
    ms.io.save_checkpoint(folder, 0, model=model, optimizer=optimizer, tensors={"x": x})
    other = torch.optim.SGD([*nn.Linear(3, 2).parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    layout_errors = [
        ({"model": nn.Linear(3, 3)}, "has another shape"),
        ({"model": nn.Sequential(nn.Linear(3, 2))}, r"\['0.weight', '0.bias'\]"),
        ({"model": model, "optimizer": other}, "another optimizer"),
        ({"tensors": {"x": (mesh, [ms.Shard(5)] * mesh.ndim)}}, "dim"),
        ({"tensors": {"x": (mesh, [ms.Partial()] * mesh.ndim)}}, "Partial"),
    ]
    for options, text in layout_errors:
        with pytest.raises(ms.LayoutError, match=text) as e:
            ms.io.load_checkpoint(folder, mesh=mesh, fallback=True, **options)
        same_on_all(e)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for options, text in (({"scheduler": scheduler}, "scheduler"), ({"tensors": {"y": None}}, r"tensors\['y'\]")):
        with pytest.raises(FileError, match=text) as e:
            ms.io.load_checkpoint(folder, mesh=mesh, **options)
        same_on_all(e)
    with pytest.raises(FileError, match="no such folder") as e:
        ms.io.load_checkpoint(folder / "none", mesh=mesh)
    same_on_all(e)
    with pytest.raises(ms.MeshError, match="mesh="):
        ms.io.save_checkpoint(folder, 0, model=model)
    with pytest.raises(ms.MeshError, match="mesh="):
        ms.io.load_checkpoint(folder, model=model)
    another = ms.init_mesh(mesh.shape)
    asked = {"x": (another, [ms.Replicate()] * mesh.ndim)}
    for options in ({"mesh": mesh, "tensors": asked}, {"mesh": mesh, "tensors": {**asked, "y": x}}):
        with pytest.raises(ms.MeshError, match="one mesh") as e:
            ms.io.load_checkpoint(folder, **options)
        same_on_all(e)
    with pytest.raises(ms.MeshError, match="one mesh"):
        ms.io.load_checkpoint(folder, tensors={**asked, "y": (mesh, asked["x"][1])})
    with pytest.raises(ms.MeshError, match="one mesh"):
        ms.io.load_checkpoint(folder, tensors={"x": asked["x"], "y": x})
    assert ms.io.load_checkpoint(folder, tensors=asked).tensors["x"].mesh is another
    another.free()
    for step, keep in ((-1, 3), (1.5, 3), (0, 0), (0, 1.5)):
        with pytest.raises(MpishardError, match="integer"):
            ms.io.save_checkpoint(folder, step, keep=keep, mesh=mesh)
    with pytest.raises(MpishardError, match="leave backend out"):
        ms.io.save_checkpoint(folder, 0, mesh=mesh, asynchronous=True, backend="root")
    assert ms.io.load_checkpoint(folder, model=nn.Sequential(model), strict=False, mesh=mesh).step == 0


@pytest.mark.ranks(2, 3, 4)
def test_ranks_that_save_different_things(mesh, folder):
    with pytest.raises(ms.DesyncError) as e:
        ms.io.save_checkpoint(folder, WORLD.rank, mesh=mesh)
    same_on_all(e)
    with pytest.raises(ms.DesyncError) as e:
        ms.io.save_checkpoint(folder, 0, mesh=mesh, tensors={"a": torch.zeros(2 + WORLD.rank)})
    same_on_all(e)
    assert not listed(folder)


@pytest.mark.ranks(2, 3, 4)
def test_ranks_that_ask_for_different_things(mesh, folder):
    """Folders, steps and options: the error comes before anything is waited for."""
    x = on(mesh, values((4, 6)), 0)
    ms.io.save_checkpoint(folder, 1, tensors={"x": x}, mesh=mesh, asynchronous=True)
    odd = WORLD.rank == SIZE - 1
    for options in (
        {"path": folder / "other"},
        {"step": -1},
        {"keep": 2},
        {"rng": False},
        {"asynchronous": True},
        {"extra": object()},
        {"backend": "root"},
        {"mesh": mesh, "tensors": {"x": x.redistribute(placements=[ms.Replicate()] * mesh.ndim)}},
    ):
        asked = {"path": folder, "step": 2, "tensors": {"x": x}, "mesh": mesh, **(options if odd else {})}
        with pytest.raises(MpishardError) as e:
            ms.io.save_checkpoint(**asked)
        same_on_all(e)
    for options in (
        {"path": folder / "other"},
        {"step": 2},
        {"fallback": True},
        {"rng": False},
        {"strict": False},
        {"model": nn.Linear(1, 1)},
        {"tensors": {"x": None}},
        {"placements": (ms.Shard(1),) * mesh.ndim},
    ):
        with pytest.raises(ms.DesyncError) as e:
            ms.io.load_checkpoint(**{"path": folder, "mesh": mesh, **(options if odd else {})})
        same_on_all(e)
    turned = x.redistribute(placements=(ms.Shard(1),) * mesh.ndim)
    with pytest.raises(ms.DesyncError, match=r"load_checkpoint .*Layout") as e:  # no file is open yet
        ms.io.load_checkpoint(folder, tensors={"x": turned if odd else x}, mesh=mesh)
    same_on_all(e)
    assert ms.io.load_checkpoint(folder, mesh=mesh).step == 1


@pytest.mark.ranks(2, 3, 4)
def test_ranks_with_models_and_optimizers_of_their_own(mesh, folder):
    """What does not fit on one rank was found there alone, between what all do together."""
    odd = WORLD.rank == SIZE - 1
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ms.DesyncError) as e:  # one without tensors
        ms.io.save_checkpoint(folder, 1, model=model, optimizer=None if odd else optimizer, mesh=mesh)
    same_on_all(e)
    ms.io.save_checkpoint(folder, 1, model=model, optimizer=optimizer, mesh=mesh)
    for options in (
        {"model": nn.Linear(4, 2)},
        {"model": nn.Linear(3, 2, bias=False)},
        {"optimizer": torch.optim.SGD([model.weight], lr=0.1)},
        {"optimizer": torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)},
    ):
        asked = {"model": model, "optimizer": optimizer} | (options if odd else {})
        with pytest.raises(ms.DesyncError) as e:
            ms.io.load_checkpoint(folder, mesh=mesh, **asked)
        same_on_all(e)

    class Picky(nn.Linear):
        def load_state_dict(self, *args, **kwargs):
            if odd:
                raise ValueError("only here")
            return super().load_state_dict(*args, **kwargs)

    with pytest.raises(MpishardError, match="only here") as e:
        ms.io.load_checkpoint(folder, model=Picky(3, 2), mesh=mesh)
    same_on_all(e)
    assert ms.io.load_checkpoint(folder, model=model, optimizer=optimizer, mesh=mesh).step == 1


def test_layouts_that_are_none(mesh, folder):
    """They were told as damage of the checkpoint, so that all of them were skipped."""
    x = on(mesh, values((4, 6)), 0)
    ms.io.save_checkpoint(folder, 1, tensors={"x": x})
    placements = (ms.Replicate(),) * mesh.ndim
    for like in ((mesh,), (mesh, placements, 1), [mesh, placements], (placements, mesh), mesh, torch.zeros(4, 6)):
        with pytest.raises(ms.LayoutError, match=r"tensors\['x'\] names no layout") as e:
            ms.io.load_checkpoint(folder, tensors={"x": like}, mesh=mesh, fallback=True)
        same_on_all(e)


@ASYNCHRONOUS
@pytest.mark.parametrize("path", ["/proc/checkpoints", "/dev/null/checkpoints"])
def test_a_folder_that_cannot_be_made(mesh, path, asynchronous):
    with pytest.raises(FileError, match="cannot write a checkpoint") as e:
        ms.io.save_checkpoint(path, 0, mesh=mesh, asynchronous=asynchronous).wait()
    same_on_all(e)
    with pytest.raises(FileError, match="nothing to load") as e:
        ms.io.load_checkpoint(path, mesh=mesh)
    same_on_all(e)


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_current_folder_that_is_gone(mesh, folder, monkeypatch, everywhere):
    """All ranks hear of it, also where it is gone on one node alone."""
    here = folder / f"here-{mesh.rank}"
    here.mkdir()
    monkeypatch.chdir(here)
    if everywhere or mesh.rank == 0:
        here.rmdir()
    x = on(mesh, values((4, 4)), 0)
    for call in (
        lambda: ms.io.save_checkpoint("checkpoints", 0, mesh=mesh),
        lambda: ms.io.load_checkpoint("checkpoints", mesh=mesh),
        lambda: ms.io.write("a.h5", {"x": x}),
        lambda: ms.io.read("a.h5", "x", mesh, x.placements),
        lambda: ms.io.export_safetensors("a.safetensors", {"x": x}),
    ):
        with pytest.raises(MpishardError):
            call()
        WORLD.Barrier()


@ASYNCHRONOUS
@pytest.mark.parametrize("who", ["first", "last"])
def test_files_that_may_not_grow(mesh, folder, asynchronous, who):
    """As a full disk, on one rank: it alone writes, or each writes its own."""
    backend = None if asynchronous else "root"
    two(folder, mesh)
    x = on(mesh, values((300, 400)), 0, 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if WORLD.rank == (0 if who == "first" else SIZE - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        if who == "first" or asynchronous:
            with pytest.raises(FileError, match=r"cannot write|damaged") as e:
                ms.io.save_checkpoint(folder, 3, tensors={"x": x}, asynchronous=asynchronous, backend=backend).wait()
            same_on_all(e)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert ms.io.load_checkpoint(folder, mesh=mesh).step == 2
    WORLD.Barrier()
    assert listed(folder) == ["latest", "step_0000000001", "step_0000000002"]
    ms.io.save_checkpoint(folder, 3, tensors={"x": x}, asynchronous=asynchronous)
    assert torch.equal(ms.io.load_checkpoint(folder, mesh=mesh).tensors["x"].to_local(), x.to_local())


def test_numbers_of_numpy_and_keys_that_look_alike(mesh, folder):
    extra = {
        "big": np.arange(3, dtype=">f8"),
        "scalars": [np.array(2, ">i4"), np.float16(1.5), np.uint64(2**64 - 1), np.str_("a")],
        "keys": {1: torch.ones(2), "1": {"x": torch.zeros(2)}, "1~": [torch.full((2,), 2.0)], 2: np.ones(1), "2": 3},
    }
    ms.io.save_checkpoint(folder, 1, extra=extra, mesh=mesh)
    found = ms.io.load_checkpoint(folder, mesh=mesh).extra
    assert found["big"].tolist() == [0.0, 1.0, 2.0]
    assert found["scalars"] == [2, 1.5, 2**64 - 1, "a"]
    assert repr(found["keys"]) == repr(extra["keys"])
    for odd in (np.longdouble(1.5), np.zeros(2, np.longdouble), np.clongdouble(1), np.datetime64(1, "ns")):
        with pytest.raises(MpishardError, match=r"extra/v (has a dtype that torch lacks|cannot be stored)") as e:
            ms.io.save_checkpoint(folder, 2, extra={"v": odd if WORLD.rank == SIZE - 1 else 1}, mesh=mesh)
        same_on_all(e)
    assert ms.io.load_checkpoint(folder, mesh=mesh).step == 1


@ASYNCHRONOUS
def test_a_folder_is_known_by_its_links_too(mesh, folder, asynchronous, monkeypatch):
    link = folder / "link"
    on_root(lambda: ((folder / "real").mkdir(), link.symlink_to(folder / "real")))
    go = threading.Event()
    write_part = background._write_part
    monkeypatch.setattr(background, "_write_part", lambda *given: (go.wait(10), write_part(*given)))
    x = on(mesh, values((300, 400)), 0, 1)
    first = ms.io.save_checkpoint(folder / "real" / "in", 1, tensors={"x": x}, mesh=mesh, asynchronous=True)
    if WORLD.rank == 0:
        # were it not known: what is being written is no remnant
        begun = folders.begin(link / "in", 2, Stages(mesh))
        assert (folder / "real" / "in" / first._partial.name).is_dir()
        folders.discard(link / "in" / begun)
    go.set()
    second = ms.io.save_checkpoint(link / "in", 2, tensors={"x": x}, mesh=mesh, asynchronous=asynchronous)
    assert ms.io.load_checkpoint(folder / "real" / "in", mesh=mesh).step == 2
    assert [saving.wait().name for saving in (first, second)] == ["step_0000000001", "step_0000000002"]
    assert listed(folder / "real" / "in") == ["latest", "step_0000000001", "step_0000000002"]


def test_an_asynchronous_failure_is_told_at_the_next_save(mesh, folder, monkeypatch):
    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("mpishard.io.checkpoint.background._write_part", fail)
    saving = ms.io.save_checkpoint(folder, 0, mesh=mesh, asynchronous=True)
    with pytest.raises(FileError, match="No space left") as e:
        ms.io.save_checkpoint(folder, 1, mesh=mesh)
    same_on_all(e)
    for _ in range(2):  # whoever asks then is told, too
        with pytest.raises(FileError, match="No space left") as e:
            saving.wait()
        same_on_all(e)
    monkeypatch.undo()
    ms.io.save_checkpoint(folder, 1, mesh=mesh)
    assert listed(folder) == ["latest", "step_0000000001"]


def test_no_room_for_the_copies_of_one_rank(mesh, folder, monkeypatch):
    def full(*_):
        raise MemoryError("no room")

    x = on(mesh, values((30, 40)), 0, 1)
    ms.io.save_checkpoint(folder, 1, tensors={"x": x}, mesh=mesh)
    with monkeypatch.context() as patch:
        if WORLD.rank == WORLD.size - 1:
            patch.setattr("mpishard.io.checkpoint.background.dense", full)
        with pytest.raises(FileError, match="no room") as e:
            ms.io.save_checkpoint(folder, 2, tensors={"x": x}, mesh=mesh, asynchronous=True)
    same_on_all(e)
    assert listed(folder) == ["latest", "step_0000000001"]
    ms.io.save_checkpoint(folder, 2, tensors={"x": x}, mesh=mesh, asynchronous=True).wait()
    assert ms.io.load_checkpoint(folder, mesh=mesh).step == 2


class Weights:
    """What has a state dict, and is no module."""

    def __init__(self):
        self.state = {"w": torch.ones(3)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_a_model_that_is_no_module(mesh, folder):
    ms.io.save_checkpoint(folder, 1, model=Weights(), mesh=mesh)
    other = Weights()
    other.state["w"] = torch.zeros(3)
    ms.io.load_checkpoint(folder, model=other, mesh=mesh)
    assert torch.equal(other.state["w"], torch.ones(3))


def test_a_rank_that_writes_shows_that_it_is_there(mesh, folder, monkeypatch):
    monkeypatch.setattr(background, "_SIGN_S", -1.0)
    monkeypatch.setattr(background, "_TURN_S", -1.0)
    shares = Snapshot.shares

    def watched(self, pause):
        sign = self.own / background._sign(WORLD.rank)
        sign.touch()
        os.utime(sign, (0, 0))
        pause()
        assert sign.stat().st_mtime > 0
        return shares(self, pause)

    monkeypatch.setattr(Snapshot, "shares", watched)
    ms.io.save_checkpoint(folder, 3, tensors={"x": on(mesh, values((30, 40)), 0)}, mesh=mesh, asynchronous=True).wait()
    assert ms.io.load_checkpoint(folder, mesh=mesh).step == 3


def test_a_rank_is_waited_for_as_long_as_it_shows_that_it_is_there(tmp_path, monkeypatch):
    """Whatever the machine's load: with a clock that the test turns."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(background, "time", clock)
    monkeypatch.setattr(background, "guard", SimpleNamespace(TIMEOUT_S=10.0))
    note, sign = (tmp_path / name(1) for name in (background._note, background._sign))
    note.parent.mkdir(parents=True)

    def told(turns, signs):
        """Tell whether the other one, which signs until then, is waited for."""

        def turn(_):
            clock.now += 4.0
            if clock.now > signs:
                return next(turns)
            sign.touch()
            os.utime(sign, (clock.now, clock.now))
            return False

        clock.now = 0.0
        waiting = SimpleNamespace(_abandoned=SimpleNamespace(wait=turn))
        return background.Saving._awaited(waiting, tmp_path, 1, SimpleNamespace(sign=lambda: None))

    assert not told(iter([False, True]), 100.0)
    with pytest.raises(FileError, match="rank 1 has written nothing for a long time"):
        told(itertools.repeat(False), 100.0)
    assert clock.now == 112.0
    with pytest.raises(FileError, match="rank 1 has written nothing for a long time"):
        told(itertools.repeat(False), 0.0)
    assert told((note.touch() or False for _ in range(1)), 50.0)
    assert clock.now == 52.0


# -- checksums


@pytest.mark.parametrize("run", [1, 12, 10**6])
def test_checksums_do_not_depend_on_the_mesh(monkeypatch, run):
    monkeypatch.setattr(checksum, "TILE", 16)
    monkeypatch.setattr(checksum, "_RUN", run)
    checksum._keys.cache_clear()
    try:
        for dtype in (torch.float32, torch.complex128, torch.bool):
            full = values((4, 5, 7), dtype)
            whole = layout_of((1,), (ms.Replicate(),), full.shape)
            expected = checksum.tile_sums(full, whole, (0,))
            for mesh, placements, sizes in list(layouts(full.shape, (0, 2))):
                x = ms.distribute_tensor(full, mesh, placements, sizes=sizes)
                mine = checksum.tile_sums(x.to_local(), x.sharding, mesh.coords)
                held = any(c for c, p in zip(mesh.coords, x.placements) if not p.is_shard())
                total = torch.zeros_like(expected)
                WORLD.Allreduce((mine * (not held)).numpy(), total.numpy())
                assert torch.equal(total, expected)
            text = checksum.to_text(expected)
            assert checksum.wrong_tile(expected, text, full.shape, dtype) is None
            for cell in ((0, 0, 0), (2, 3, 4), (3, 4, 6)):
                other = full.clone()
                other[cell] = ~other[cell] if dtype == torch.bool else other[cell] + 1
                wrong = checksum.wrong_tile(checksum.tile_sums(other, whole, (0,)), text, full.shape, dtype)
                at = int(np.ravel_multi_index(cell, full.shape)) * (4 if dtype == torch.complex128 else 1)
                assert wrong.startswith(f"tile {at // 16} of {len(expected)}, cells ")
    finally:
        checksum._keys.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16], ids=str)
def test_two_wrong_signs_do_not_hide_each_other(dtype):
    full = values((40,), dtype)
    layout = layout_of((1,), (ms.Replicate(),), full.shape)
    other = full.clone()
    raw = other.numpy().view(np.uint8) if dtype != torch.bfloat16 else other.view(torch.int16).numpy().view(np.uint8)
    raw[[dtype.itemsize * 3 - 1, dtype.itemsize * 17 - 1]] ^= 0x80
    assert not torch.equal(checksum.tile_sums(full, layout, (0,)), checksum.tile_sums(other, layout, (0,)))
