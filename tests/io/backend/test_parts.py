"""Datasets in parts: many ranks a file, many files a folder, and what a reader of thousands of parts looks at."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard.errors import FileError
from mpishard.io.checkpoint import background
from mpishard.io.file import parts as parts_module
from mpishard.io.file import trust
from mpishard.io.file.open import check_sources, opened
from mpishard.io.file.parts import Parts, Plan, narrowed, show, show_boxes, tell, writes
from mpishard.layout import Replicate, Shard, layout_of
from tests.io.files import block, on_root, same_on_all, sharded, values

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
SHAPES = [(1, 1, 1), (1, 2, 2), (2, 1, 1), (2, 1, 2), (3, 2, 1)]


@pytest.fixture(params=SHAPES, ids=str)
def few(request, monkeypatch):
    """Ranks a file, files a folder, sources a dataset."""
    per_file, per_folder, sources = request.param
    monkeypatch.setattr(parts_module, "RANKS_PER_FILE", per_file)
    monkeypatch.setattr(parts_module, "FILES_PER_FOLDER", per_folder)
    monkeypatch.setattr(parts_module, "SOURCES", sources)
    monkeypatch.setattr(background, "_FANOUT", 2)
    return request.param


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_files_and_folders(mesh, folder, few, compression):
    per_file, per_folder, _ = few
    full, other = values((6, 7)), values((5, 2), torch.int16)
    tensors = {"a/x": sharded(full, mesh), "y": sharded(other, mesh, sizes={0: (5, *[0] * (mesh.shape[0] - 1))})}
    ms.io.write(folder / "a.h5", tensors, backend="virtual", compression=compression)
    with h5py.File(folder / "a.h5", "r", locking=False) as file:
        assert np.array_equal(file["a/x"][()], full.numpy())
        assert np.array_equal(file["y"][()], other.numpy())
    found = list(folder.glob("a.h5.parts-*/**/*.h5"))
    files = [f for f in found if not f.name.startswith("index")]
    assert len(files) == -(-SIZE // per_file)
    assert len({f.parent for f in files}) == -(-len(files) // per_folder)
    WORLD.Barrier()
    for placements in ((ms.Shard(1), ms.Shard(0)), (ms.Replicate(), ms.Shard(0))):
        x = ms.io.read(folder / "a.h5", "a/x", mesh, placements, select=(slice(1, None, 2), slice(None)))
        assert torch.equal(x.full_tensor(), full[1::2])
    padded = ms.io.read(folder / "a.h5", "y", mesh, (ms.Shard(0), ms.Shard(1)), halo={0: 1}, mode="replicate")
    assert padded.shape[0] >= 2


def test_checkpoints(mesh, folder, few):
    full = values((6, 7))
    tensors = {"x": sharded(full, mesh), "plain": values((100, 200))}
    generator = torch.get_rng_state()
    saving = ms.io.save_checkpoint(folder, 3, tensors=tensors, asynchronous=True)
    path = saving.wait()
    assert not (path / "notes").exists()
    torch.rand(3)
    loaded = ms.io.load_checkpoint(folder, tensors={"x": (mesh, (ms.Shard(1), ms.Shard(0))), "plain": None})
    assert torch.equal(loaded.tensors["x"].full_tensor(), full)
    assert torch.equal(loaded.tensors["plain"], values((100, 200)))
    assert torch.equal(torch.get_rng_state(), generator)
    on_root(lambda: next(iter(path.glob("parts/**/0.h5"))).unlink())
    with pytest.raises(FileError, match=r"0\.h5"):
        ms.io.load_checkpoint(folder, tensors={"x": (mesh, (ms.Shard(1), ms.Shard(0)))})


@pytest.mark.parametrize("same", [True, False])
def test_generators_that_are_all_the_same_are_saved_once(mesh, folder, same):
    torch.manual_seed(5 if same else WORLD.rank)
    state = torch.get_rng_state()
    path = ms.io.save_checkpoint(folder, 1, mesh=mesh).path
    with h5py.File(path / "tensors.h5", "r", locking=False) as file:
        rows = file["rng"]
        assert ("cpu" in rows) == (not same and SIZE > 1) or SIZE == 1
    torch.rand(3)
    ms.io.load_checkpoint(folder, mesh=mesh)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def seed(request):
    return request.config.option.seed


def drawn(rng):
    mesh = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
    placements = [rng.choice([Replicate(), Shard(rng.randrange(len(shape)))]) for _ in mesh]
    probe = layout_of(mesh, placements, shape)
    sizes = {}
    for d, s in enumerate(probe.sizes):
        if s is not None and rng.random() < 0.5:
            borders = sorted(rng.randint(0, shape[d]) for _ in s[1:])
            sizes[d] = [b - a for a, b in itertools.pairwise([0, *borders, shape[d]])]
    return layout_of(mesh, placements, shape, sizes)


def test_blocks_of_a_box_are_all_that_meet_it(seed):
    rng = random.Random(seed)
    for _ in range(200):
        layout = drawn(rng)
        parts = Parts(layout, "p", Plan.of(1))
        box = [tuple(sorted((rng.randrange(n), rng.randrange(n)))) for n in layout.shape]
        box = [(lo, hi + 1) for lo, hi in box]
        expected = []
        for rank, coords in enumerate(itertools.product(*map(range, layout.mesh_shape))):
            own = layout.box(coords)
            meets = all(max(a, lo) < min(b, hi) for (a, b), (lo, hi) in zip(own, box))
            first = not any(c for c, p in zip(coords, layout.placements) if not p.is_shard())
            expected += [(rank, own)] if meets and first else []
        assert sorted(parts.touched(box)) == expected
        grids = [cell for ranges in parts.boxes() for cell in itertools.product(*ranges)]
        assert sorted(grids) == list(itertools.product(*map(range, parts.counts)))


def test_the_files_of_blocks_are_those_of_ranks_that_write(seed, tmp_path):
    rng = random.Random(seed)
    for case in range(100):
        layout = drawn(rng)
        ranks = list(enumerate(itertools.product(*map(range, layout.mesh_shape))))
        plan = Plan(len(ranks), rng.randint(1, 3), rng.randint(1, 3))
        parts = Parts(layout, f"{case}", plan)
        used = sorted({rank // plan.per_file for rank, coords in ranks if writes(layout, coords)})
        for file in used:
            at = tmp_path / parts.path(file * plan.per_file)
            at.parent.mkdir(parents=True, exist_ok=True)
            at.touch()
        absent = plan.absent(tmp_path / parts.folder)
        assert sorted(absent | set(used)) == list(range(-(-len(ranks) // plan.per_file)))
        assert not absent & set(used)
        assert parts.among(absent) is None
        for file in used:
            assert parts.among(absent | {file}) == parts.path(file * plan.per_file)


def test_a_save_looks_for_each_part_once(mesh, folder, few, monkeypatch):
    looked = []
    exists = Path.exists

    def look(path, *args, **options):
        looked.append(path.relative_to(folder) if path.is_relative_to(folder) else path)
        return exists(path, *args, **options)

    monkeypatch.setattr(Path, "exists", look)
    tensors = {name: sharded(values((6, 7)), mesh) for name in "abc"}
    ms.io.save_checkpoint(folder, 3, tensors=tensors, backend="virtual")
    parts = [path for path in looked if path.suffix == ".h5" and "parts" in str(path.parent)]
    assert len(parts) == len(set(parts)) == (-(-SIZE // few[0]) if WORLD.rank == 0 else 0)


@pytest.mark.parametrize("mesh_shape", [(64, 32, 32), (256, 256), (65_536,)], ids=str)
def test_a_reader_of_65536_parts(folder, mesh_shape, monkeypatch):
    shape = (65_536, 1024, 1024)
    layout = layout_of(mesh_shape, [Shard(d) for d in range(len(mesh_shape))], shape)
    plan = Plan.of(layout.mesh_shape[0] * (65_536 // layout.mesh_shape[0]))
    parts = Parts(layout, "a.h5.parts-0", plan)
    assert plan.size == 65_536
    assert all(1 <= len(list(itertools.product(*ranges))) <= 2048 for ranges in parts.boxes())
    assert len(parts.boxes()) <= 128
    at = folder / "a.h5"
    middle = [n // 2 for n in mesh_shape]
    box = layout.box(middle)

    def make():
        (folder / parts.folder).mkdir()
        tell(folder / parts.folder, plan, {"x": parts})
        with h5py.File(at, "w") as file:
            show(file, "x", np.dtype("f4"), parts)
        for rank, cells in parts.touched(box):
            (folder / parts.path(rank)).parent.mkdir(exist_ok=True)
            with h5py.File(folder / parts.path(rank), "a") as file:
                file.create_dataset(f"{rank}/x", [hi - lo for lo, hi in cells], "f4", fillvalue=7)

    on_root(make)
    files = []
    File = h5py.File

    def look(*args, **options):
        files.append(args)
        return File(*args, **options)

    monkeypatch.setattr(h5py, "File", look)
    tracemalloc.start()
    with opened(at) as file:
        dataset = narrowed(file["x"], at, box)
        check_sources(dataset, at, box)
        cell = dataset[tuple(lo for lo, _ in box)]
        assert dataset.file.mode == "r"
        assert dataset.file.driver == "sec2"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert cell == 7
    assert len(files) <= 6
    assert peak < 5 << 20


def test_boxes_of_blocks_are_shown_by_files_of_their_own(folder, seed, monkeypatch):
    monkeypatch.setattr(parts_module, "SOURCES", 4)
    rng = random.Random(seed)

    def make():
        for case in range(10):
            layout = drawn(rng)
            plan = Plan(int(np.prod(layout.mesh_shape)), 2, 3)
            parts = Parts(layout, f"{case}.h5.parts-0", plan)
            full = np.arange(np.prod(layout.shape)).reshape(layout.shape)
            under = folder / parts.folder
            under.mkdir()
            for name in plan.folders():
                (under / name).mkdir()
            for rank, cells in parts.blocks([range(n) for n in parts.counts]):
                with h5py.File(folder / parts.path(rank), "a") as file:
                    file[f"{rank}/x"] = full[tuple(slice(lo, hi) for lo, hi in cells)]
            tell(under, plan, {"x": parts})
            for rank in range(plan.size):
                show_boxes(under, rank, [("x", full.dtype, parts)])
            with h5py.File(folder / f"{case}.h5", "w") as file:
                show(file, "x", full.dtype, parts)
            with h5py.File(folder / f"{case}.h5", "r") as file:
                assert np.array_equal(file["x"][()], full), layout
                box = [(0, n) for n in layout.shape]
                assert np.array_equal(narrowed(file["x"], folder / f"{case}.h5", box)[()], full), layout

    on_root(make)


def held_by(error):
    """What the frames of an error, and of those that led to it, hold."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            yield from trace.tb_frame.f_locals.values()
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


def test_a_layout_that_memory_does_not_hold(mesh, folder, monkeypatch):
    """Lists of nothing take many times the room of their text."""
    ms.io.write(folder / "a.h5", {"x": sharded(values((6, 7)), mesh)}, backend="virtual")
    (at,) = folder.glob("a.h5.parts-*/layout.json")
    on_root(lambda: at.write_text("[" + "[]," * (2 << 20) + "[]]"))
    monkeypatch.setattr(trust, "available_nbytes", lambda: 80 << 20)
    with pytest.raises(FileError, match=r"layout\.json does not fit into memory") as e:
        ms.io.read(folder / "a.h5", "x", mesh, (ms.Shard(0), ms.Shard(1)))
    same_on_all(e)


def test_a_layout_that_lies(mesh, folder):
    full = values((6, 7))
    ms.io.write(folder / "a.h5", {"x": sharded(full, mesh)}, backend="virtual")
    (at,) = folder.glob("a.h5.parts-*/layout.json")
    right = at.read_text()
    lies = [
        "",
        "[]",
        right.replace('"version": 1', '"version": 9'),
        right.replace('"shape": [6, 7]', '"shape": [6, 8]'),
        right.replace('"mesh": [', '"mesh": [1000000000, '),
        right.replace('"ranks_per_file": 64', '"ranks_per_file": 0'),
        right.replace('"dims": [', '"dims": [99, '),
        right.replace('"sizes": {}', '"sizes": {"0": [1, 2]}'),
        "[" * 100_000,
    ]
    for lie in lies:
        on_root(lambda lie=lie: at.write_text(lie))
        with pytest.raises(FileError, match=r"layout\.json") as e:
            ms.io.read(folder / "a.h5", "x", mesh, (ms.Shard(0), ms.Shard(1)))
        # HDF5 ends a process with a segmentation fault that has one at its end
        assert not any(isinstance(held, h5py.h5p.PropDCID) for held in held_by(e.value))
    # as a version before wrote it
    on_root(at.unlink)
    x = ms.io.read(folder / "a.h5", "x", mesh, (ms.Shard(0), ms.Shard(1)))
    assert torch.equal(x.to_local(), block(x, full))
