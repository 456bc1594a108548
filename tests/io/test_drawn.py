"""Files of strangers drawn at random: what they hold, where they lie, and who reads them.

Each comes to the right values or to one error of the library's own on every rank; what lies outside of the stranger's
folder is neither read (its cells are above all others) nor changed, and nothing is run.

``MPISHARD_VARIANTS=300`` draws so many of each kind, in place of the few of every day; ``MPISHARD_SEED`` others.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import mpishard as ms
from mpishard.io.checkpoint import folder as folders
from mpishard.io.file import journal as journals
from mpishard.io.file import lock
from tests.io.files import WORLD, on_root, outcome, sharded, values
from tests.io.harm import SEED, VARIANTS

FULL = values((4, 6)) + 1
SECRET = 7000
HALVES = (ms.Shard(0), ms.Shard(1))
WHOLE = (ms.Replicate(), ms.Replicate())


class Place:
    """The stranger's folder, and one beside it that is not to be read or changed."""

    def __init__(self, folder: Path) -> None:
        self.own, self.out = folder / "in", folder / "out"
        on_root(self._make)
        self.before = self.told()

    def _make(self) -> None:
        self.out.mkdir()
        with h5py.File(self.out / "a.h5", "w") as f:
            f["x"] = f["g/x"] = FULL.numpy() + SECRET
        (self.out / "raw").write_bytes((FULL.numpy() + SECRET).tobytes())
        (self.out / "folder").mkdir()
        (self.out / "folder" / "words").write_text("kept")

    def told(self) -> dict[Path, object]:
        """All that the user has: names, and what they hold."""
        found = sorted(self.out.rglob("*"))
        return {p: p.read_bytes() if p.is_file() else None for p in found}

    def fresh(self, make) -> None:
        """Let the stranger fill the folder anew."""

        def again() -> None:
            shutil.rmtree(self.own, ignore_errors=True)
            self.own.mkdir()
            make()

        on_root(again)
        self.before = self.told() if WORLD.rank == 0 else {}

    def check(self, what: str) -> None:
        """Nothing of the user's is another than before. Collective."""
        same = WORLD.bcast(self.told() == self.before if WORLD.rank == 0 else None)
        assert same, f"{what}: a file of the user's has changed"


@pytest.fixture
def place(folder):
    return Place(folder)


def drawn(test: str):
    """Give each variant's number, and its draw: the same on every rank and in every run."""
    for i in range(VARIANTS):
        yield f"variant {i} of {test}", random.Random(f"{test} {SEED} {i}")


# -- what a name of a file leads to


def make_names(draw: random.Random, place: Place) -> dict[str, tuple]:
    """What each name of two files is, drawn."""
    names = [f"n{i}" for i in range(6)]
    each: dict[str, tuple] = {"n0": ("cells",)}
    for name in names[1:]:
        target = draw.choice(names)
        kind = draw.choice("cells soft soft hard external virtual virtual raw missing group".split())
        if kind == "soft":
            form = draw.choice(["/{}", "{}", "./{}", "/g/../{}", "//{}", "g/{}", "{}/{}"])
            each[name] = (kind, form.replace("{}", target))
        elif kind in ("external", "virtual"):
            near = ["b.h5", "link.h5", "pipe.h5", "a.h5", "./a.h5", "loop.h5", "none.h5", "."]
            far = ["../out/a.h5", os.fspath(place.out / "a.h5"), "away/a.h5", "link.h5", "/dev/zero", "../in/b.h5"]
            count = 1 if kind == "external" else draw.choice((1, 1, 2))
            each[name] = (
                kind,
                *((draw.choice(near + far), draw.choice([target, "x", "/x", "n0"])) for _ in range(count)),
            )
        elif kind == "raw":
            at = ["../out/raw", os.fspath(place.out / "raw"), "pipe.h5", "/dev/zero", "near", "link.h5"]
            each[name] = (kind, draw.choice(at))
        elif kind == "hard":
            each[name] = (kind, draw.choice(list(each)))
        else:
            each[name] = (kind,)
    return each


def write_names(at: Path, each: dict[str, tuple]) -> None:
    with h5py.File(at, "w", libver="latest") as f:
        for name, (kind, *to) in each.items():
            if kind == "cells":
                f[name] = FULL.numpy()
            elif kind == "soft":
                f[name] = h5py.SoftLink(to[0])
            elif kind == "hard" and isinstance(f.get(to[0], getlink=True), h5py.HardLink):
                f.id.links.create_hard(name.encode(), f.id, to[0].encode())
            elif kind == "external":
                f[name] = h5py.ExternalLink(*to[0])
            elif kind == "virtual":
                layout = h5py.VirtualLayout((4, 6), "f4")
                for k, (file, source) in enumerate(to):
                    rows = slice(2 * k, 4 if k + 1 == len(to) else 2)
                    layout[rows] = h5py.VirtualSource(file or ".", source, shape=(4, 6), dtype="f4")[rows]
                f.create_virtual_dataset(name, layout)
            elif kind == "raw":
                f.create_dataset(name, (4, 6), "f4", external=[(to[0], 0, 96)])
            elif kind == "group":
                f.create_group(name)
                f[name]["round"] = f[name]
                f[name][name] = h5py.SoftLink(f"/{name}/{name}")


def make_beside(place: Place) -> None:
    """What lies beside the stranger's files, and leads away."""
    os.symlink(place.out / "a.h5", place.own / "link.h5")
    os.symlink(place.out, place.own / "away")
    os.symlink("loop.h5", place.own / "loop.h5")
    os.mkfifo(place.own / "pipe.h5")
    (place.own / "near").write_bytes(FULL.numpy().tobytes())


def whole(x):
    """The plain tensor; one with a halo is plain, of each rank's own."""
    return x.full_tensor() if isinstance(x, ms.ShardTensor) else x


def test_names(place, mesh):
    """Links, virtual sources and raw cells, of each other."""
    calls = {
        "read": lambda at, name: ms.io.read(at, name, mesh, HALVES),
        "decoded": lambda at, name: ms.io.read(at, name, mesh, HALVES, decode=True),
        "rows": lambda at, name: ms.io.read(at, name, mesh, HALVES, select=(slice(0, 2), slice(0, 6))),
        "halo": lambda at, name: ms.io.read(at, name, mesh, HALVES, halo={0: (1, 1)}, mode="zeros"),
        "sample": lambda at, name: ms.io.Dataset(at, name, mesh, WHOLE[:1] * 2)[-1],
        "trusted": lambda at, name: ms.io.read(at, name, mesh, HALVES, external=True),
    }
    for what, draw in drawn("names"):
        both = [make_names(draw, place), make_names(draw, place)]

        def make(both=both):
            make_beside(place)
            for file, each in zip(("a.h5", "b.h5"), both):
                write_names(place.own / file, each)

        place.fresh(make)
        for _ in range(4):
            how, name = draw.choice(list(calls)), draw.choice([*both[0], "n0/..", "link.h5", "/n1", "n2/n0"])
            got, _ = outcome(lambda how=how, name=name: whole(calls[how](place.own / "a.h5", name)))
            told = f"{what}: {how} {name} of {both}"
            if got is not None and how != "trusted":
                # rows of the file are rows of what it is made of, whatever leads to them
                like = {"rows": FULL[:2], "halo": got, "sample": FULL[-1]}.get(how, FULL)
                assert torch.equal(got, like), told
                assert (got < SECRET).all(), told
            place.check(told)
        assert torch.equal(ms.io.read(place.own / "a.h5", "n0", mesh, HALVES).full_tensor(), FULL), what


# -- shapes, types and attributes

DTYPES = ("f4", "f8", "i1", "u2", "u8", "f2", "c8", "?", "S5", "V7", "(3,)f4", "M8[s]")
EXTENTS = (0, 1, 3, 4, 6, 100, 1 << 40, 1 << 59, 1 << 62)


def write_odd(at: Path, draw: random.Random) -> None:
    """A dataset of drawn extents, dtype, chunks and attributes."""
    shape = tuple(draw.choice(EXTENTS) for _ in range(draw.randint(0, 3)))
    kinds = [
        *DTYPES,
        h5py.string_dtype(),
        h5py.vlen_dtype("f4"),
        h5py.ref_dtype,
        h5py.enum_dtype({"a": 1}),
        np.longdouble,
    ]
    dtype = draw.choice(kinds)
    options = {}
    if shape and all(shape) and draw.random() < 0.5:
        options["chunks"] = tuple(min(n, draw.choice((1, 2, 1 << 15))) for n in shape)
        options["compression"] = draw.choice([None, "gzip", "lzf"])
    attrs = {
        "scale_factor": [0.0, np.nan, "two", np.zeros(3), h5py.Empty("f4"), 2.0, 1j, b"\xff"],
        "add_offset": [1, np.inf, np.zeros((0, 2)), "one"],
        "_FillValue": [np.float32(0), "none", np.zeros(4), 1 << 62],
        "missing_value": [np.arange(5.0), True, "x" * 60_000],
        "valid_range": [np.zeros(1), np.array([3.0, 1.0]), "all"],
        "DIMENSION_LIST": [3, "x"],
    }
    with h5py.File(at, "w", libver="latest") as f:
        f["words"] = np.arange(3)
        try:
            x = f.create_dataset("x", shape, dtype, **options)
        except (TypeError, ValueError, OSError, MemoryError, OverflowError):
            x = f.create_dataset("x", (4, 6), "f4")
        for name in draw.sample(list(attrs), 2):
            x.attrs[name] = draw.choice(attrs[name])


def test_shapes_and_types(place, mesh):
    for what, draw in drawn("shapes"):
        at = place.own / "a.h5"
        seed = draw.random()
        place.fresh(lambda seed=seed: write_odd(at, random.Random(seed)))
        select = draw.choice([None, (slice(0, 2),), (slice(1, 4), slice(0, 1 << 40, 1 << 39)), (slice(3, 9, 4), 0)])
        decode, external = draw.random() < 0.5, draw.random() < 0.3
        placements = draw.choice([HALVES, WHOLE, (ms.Shard(1), ms.Shard(0))])

        def read(select=select, decode=decode, external=external, placements=placements):
            x = ms.io.read(at, "x", mesh, placements, select=select, decode=decode, external=external)
            return x.full_tensor() if x.numel() < 1 << 20 else x

        index = draw.choice((0, -1))

        def sample(decode=decode, index=index):
            with ms.io.Dataset(at, "x", mesh, WHOLE, decode=decode) as ds:
                return ds[index] if len(ds) else None

        outcome(read)
        outcome(sample)
        place.check(what)


# -- journals


def test_journals(place, mesh):
    """Only a regular file of one's own is put back, by a regular journal, when it is asked for."""
    before, other = b"b" * 100, b"o" * 50

    def forged(draw: random.Random, regions) -> bytes:
        head = {"size": draw.choice((100, 100, 40, 10**9)), "regions": regions, "digest": ""}
        digest = journals._digest_of(head)
        body = b"".join(b"J" * min(n, 1000) for _, n in regions)
        digest.update(body)
        head["digest"] = digest.hexdigest()
        return journals._WHOLE + json.dumps(head).encode() + b"\n" + body

    for what, draw in drawn("journals"):
        file = draw.choice(("own", "own", "link", "hard", "far link", "missing"))
        kind = draw.choice(("whole", "whole", "whole", "link", "hard", "pipe", "folder", "loop"))
        regions = [[draw.choice((0, 10, 90, 1 << 40)), draw.choice((1, 10, 20))] for _ in range(draw.randint(1, 2))]
        raw = forged(draw, regions)
        at = place.own / "a.h5"

        def make(file=file, kind=kind, raw=raw):
            (place.out / "a.h5").write_bytes(before)
            (place.out / "journal").write_bytes(raw)
            (place.own / "other.h5").write_bytes(other)
            journal = journals.journal_of(at)
            if file == "own":
                at.write_bytes(before)
            elif file == "link":
                os.symlink(place.out / "a.h5", at)
                (place.out / ".a.h5.undo").write_bytes(raw)
            elif file == "far link":
                os.symlink(place.own / "away" / "a.h5", at)
                os.symlink(place.out, place.own / "away")
            elif file == "hard":
                os.link(place.out / "a.h5", at)
            if kind == "whole":
                journal.write_bytes(raw)
            elif kind == "link":
                os.symlink(place.out / "journal", journal)
            elif kind == "hard":
                os.link(place.out / "journal", journal)
            elif kind == "pipe":
                os.mkfifo(journal)
            elif kind == "folder":
                journal.mkdir()
            else:
                os.symlink(journal.name, journal)

        place.fresh(make)
        told = f"{what}: {file} file, {kind} journal, {regions}"
        for call in (
            lambda: ms.io.read(at, "x", mesh, HALVES),
            lambda: ms.io.Dataset(at, "x", mesh, WHOLE),
            lambda: ms.io.heal(at) if WORLD.rank == 0 else None,
            lambda: ms.io.write(at, {"x": sharded(FULL, mesh)}, append="time"),
        ):
            try:
                outcome(call)
            except AssertionError:
                assert "heal" in call.__code__.co_names, told  # of one rank
            place.check(told)
        on_root(lambda: [(place.out / name).unlink(missing_ok=True) for name in (".a.h5.undo", "journal")])


# -- checkpoints


def nodes(value, at=()):
    """Give where each part of a tree of JSON is."""
    yield at
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from nodes(part, (*at, key))


def forge(state, draw: random.Random) -> str:
    """Replace, remove or double a drawn part of a checkpoint's state."""
    deep: list = []
    for _ in range(draw.choice((10, 300))):
        deep = [deep]
    odd = [None, True, -1, 1 << 70, 1.5, "", "x\0y", "../../out/a.h5", [], {}, deep, [1 << 40] * 3, "float32"]
    odd += [{"$tensor": "model/weight"}, {"$tensor": "/x"}, {"$tuple": 3}, {"$set": [[]]}, {"$none": 1}, {"$": []}]
    at = draw.choice([at for at in nodes(state) if at])
    holder = state
    for key in at[:-1]:
        holder = holder[key]
    how = draw.choice(("set", "set", "set", "remove", "name"))
    if how == "set":
        holder[at[-1]] = draw.choice(odd)
    elif how == "remove":
        del holder[at[-1]]
    elif isinstance(holder, dict):
        holder[draw.choice(("", "../x", "weight", "$tensor", "step", "x\0y"))] = holder.pop(at[-1])
    return f"{how} {at}"


def test_checkpoints(place, mesh):
    """What is forged changes nothing, or is loaded as it is on all ranks."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    good = place.own.parent / "good"
    for step in (1, 2):
        nn.init.constant_(model.weight, step)
        tensors = {"x": sharded(FULL + step, mesh)}
        parts = {
            "model": model,
            "optimizer": optimizer,
            "tensors": tensors,
            "extra": {"n": [step, (1, 2)]},
            "mesh": mesh,
        }
        ms.io.save_checkpoint(good, step, backend="root", **parts)
    WORLD.Barrier()
    latest = "step_0000000002"

    def spoil(draw: random.Random) -> None:
        shutil.copytree(good, place.own, dirs_exist_ok=True)
        (place.own / ".lock").unlink()
        step, kind = place.own / latest, draw.choice(("state", "state", "state", "cells", "place", "place", "beside"))
        if kind == "state":
            state = json.loads((step / "state.json").read_text())
            for key in ("format", "version", "checksum"):
                state.pop(key)
            forge(state, draw)
            folders.write_state(step, state)
        elif kind == "cells":
            with h5py.File(step / "tensors.h5", "r+") as f:
                names = []
                f.visititems(lambda name, node: names.append(name) if isinstance(node, h5py.Dataset) else None)
                name = draw.choice(sorted(names))
                shape, dtype = f[name].shape, f[name].dtype
                del f[name]
                how = draw.choice(("external", "soft", "raw", "virtual", "large", "other", "group"))
                if how == "external":
                    f[name] = h5py.ExternalLink("../../out/a.h5", "x")
                elif how == "soft":
                    f[name] = h5py.SoftLink("/" + name)
                elif how == "raw":
                    f.create_dataset(
                        name, shape, dtype, external=[(os.fspath(place.out / "raw"), 0, h5py.h5f.UNLIMITED)]
                    )
                elif how == "virtual":
                    layout = h5py.VirtualLayout(shape, dtype)
                    layout[...] = h5py.VirtualSource("../../out/a.h5", "x", shape=shape, dtype=dtype)
                    f.create_virtual_dataset(name, layout)
                elif how == "large":
                    f.create_dataset(name, (1 << 30, 1 << 30), dtype, chunks=(1, 1 << 10))
                elif how == "other":
                    f.create_dataset(name, shape, "i8")
                else:
                    f.create_group(name)
        else:
            at = step / draw.choice(("state.json", "tensors.h5")) if kind == "place" else place.own / "latest"
            if kind == "beside" and draw.random() < 0.5:
                at = place.own / draw.choice((".lock", ".step_x", "step_0000000003", "step_0000000001-2", ".latest.x"))
            if at.is_dir():
                shutil.rmtree(at)
            at.unlink(missing_ok=True)
            how = draw.choice(("pipe", "zero", "loop", "folder", "far", "far file", "none", "hard"))
            if how == "pipe":
                os.mkfifo(at)
            elif how == "folder":
                at.mkdir()
            elif how == "hard":
                os.link(place.out / "raw", at)
            elif how != "none":
                to = {"zero": "/dev/zero", "loop": at.name, "far": place.out / "folder", "far file": place.out / "raw"}
                os.symlink(to[how], at)

    for what, draw in drawn("checkpoints"):
        seed = draw.random()
        place.fresh(lambda seed=seed: spoil(random.Random(seed)))
        what += f", {seed}"
        for options in ({}, {"fallback": True}, {"step": 2}):
            nn.init.constant_(model.weight, 7)
            generator, momentum = torch.get_rng_state(), repr(optimizer.state_dict())
            found, error = outcome(
                lambda options=options: ms.io.load_checkpoint(
                    place.own, model=model, optimizer=optimizer, mesh=mesh, **options
                )
            )
            if error is not None:
                assert (model.weight == 7).all(), what
                assert torch.equal(torch.get_rng_state(), generator), what
                assert repr(optimizer.state_dict()) == momentum, what
            else:
                assert model.weight.max() < 7, what
                assert all((x.full_tensor() < SECRET).all() for x in found.tensors.values() if hasattr(x, "mesh")), what
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            place.check(what)
        kept = draw.choice((1, 2, None))
        outcome(lambda kept=kept: ms.io.save_checkpoint(place.own, 4, model=model, keep=kept, mesh=mesh).path)
        place.check(what)
        lock._forget()  # as the end of the process does


# -- checkpoints of others


class Call:
    """What a pickle calls when it is loaded."""

    def __init__(self, *call) -> None:
        self.call = call

    def __reduce__(self):
        return self.call


def test_imports(place, mesh):
    """Lists of contents that are forged, and cells that lie elsewhere or are none."""
    good = place.own.parent / "good"

    def make() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"x": FULL, "y": FULL[0]}, checkpoint_id=os.fspath(good), no_dist=True)

    on_root(make)

    def spoil(draw: random.Random) -> None:
        shutil.copytree(good, place.own, dirs_exist_ok=True)
        trap = Call(os.mkdir, (os.fspath(place.out / "trapped"),))
        listed, cells = place.own / ".metadata", place.own / "__0_0.distcp"
        metadata = pickle.loads(listed.read_bytes())
        _, info = draw.choice(sorted(metadata.storage_data.items(), key=lambda pair: pair[0].fqn))
        entry = metadata.state_dict_metadata[draw.choice("xy")]
        number = draw.choice((-1, 0, 1, 3, 1 << 40, 1 << 70, 1.5, "4", None, trap))
        away = draw.choice(
            ("../out/raw", os.fspath(place.out / "raw"), "/dev/zero", "..", "", ".metadata", "none", trap)
        )
        kind = draw.choice(
            "path offset length sizes offsets size dtype chunks trap bomb deep protocol cells place".split()
        )
        if kind == "path":
            info.relative_path = away
        elif kind in ("offset", "length"):
            setattr(info, kind, number)
        elif kind in ("sizes", "offsets"):
            object.__setattr__(entry.chunks[0], kind, torch.Size([2, 3]) if draw.random() < 0.5 else (number,) * 2)
        elif kind == "size":
            entry.size = draw.choice((torch.Size([1 << 30, 1 << 30]), (4, 6), [4, 6], trap, torch.Size([6, 4])))
        elif kind == "dtype":
            entry.properties.dtype = draw.choice((torch.float64, torch.int32, "float32", torch.quint8, trap))
        elif kind == "chunks":
            entry.chunks = draw.choice(([], entry.chunks * 2, None, trap, [entry.chunks[0], trap]))
        elif kind == "trap":
            metadata.planner_data = trap
        elif kind in ("bomb", "deep"):
            whole = ()
            for _ in range(40 if kind == "bomb" else 400):
                whole = (whole, whole) if kind == "bomb" else (whole,)
            metadata.planner_data = whole
        elif kind == "cells":
            raw = draw.choice((pickle.dumps(trap), b"PK\x03\x04" + bytes(60), b"", cells.read_bytes()[:300]))
            if draw.random() < 0.5:
                torch.save(trap, cells)
            else:
                cells.write_bytes(raw)
        if kind not in ("cells", "place"):
            # what can be written at all: no deeper than pickle's own recursion
            listed.write_bytes(pickle.dumps(metadata, draw.randint(0, 5)))
        if kind == "place":
            at = draw.choice((listed, cells))
            at.unlink()
            how = draw.choice(("pipe", "zero", "far", "folder", "none"))
            if how == "pipe":
                os.mkfifo(at)
            elif how == "folder":
                at.mkdir()
            elif how != "none":
                os.symlink("/dev/zero" if how == "zero" else place.out / "raw", at)

    like = {"x": sharded(torch.zeros(4, 6), mesh), "y": torch.zeros(6)}
    for what, draw in drawn("imports"):
        seed = draw.random()
        place.fresh(lambda seed=seed: spoil(random.Random(seed)))
        found, _ = outcome(lambda: ms.io.import_dcp(place.own, like))
        if found is not None:
            assert torch.equal(found["x"].full_tensor(), FULL), (what, seed)
            assert torch.equal(found["y"], FULL[0]), (what, seed)
        place.check(f"{what}, {seed}")
