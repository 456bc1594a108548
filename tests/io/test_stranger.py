"""Files as a stranger may make them: nothing of ours is read, written or waited for, and no memory taken in vain."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import socket

import h5py
import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.errors import FileError, MpishardError
from mpishard.io.checkpoint import folder as folders
from mpishard.io.foreign.inert_pickle import RefusedError, read
from tests.io.files import WORLD, on_root, outcome, same_on_all, sharded, values

HALVES = (ms.Shard(0), ms.Shard(1))


def refused(mesh, at, name, text, **options):
    for call in (
        lambda: ms.io.read(at, name, mesh, HALVES, **options),
        lambda: ms.io.Dataset(at, name, mesh, (ms.Replicate(),) * 2, **options)[0],
    ):
        with pytest.raises(MpishardError, match=text) as e:
            call()
        same_on_all(e)


# -- datasets that lie elsewhere


def make_elsewhere(folder):
    """Every way in which a dataset of a file can be another file's, or no end."""
    os.mkdir(folder / "in")
    with h5py.File(folder / "mine.h5", "w") as f:
        f["x"] = values((4, 6)).numpy()
    (folder / "raw").write_bytes(values((4, 6)).numpy().tobytes())
    os.symlink(folder / "mine.h5", folder / "in" / "near.h5")
    os.mkfifo(folder / "in" / "pipe.h5")
    # of two signs in a source's name HDF5 makes one: what has both names is harmless, what it opens is not
    os.symlink(folder / "mine.h5", folder / "in" / "true%.h5")
    os.symlink(folder, folder / "in" / "d%")
    os.mkfifo(folder / "in" / "pipe%.h5")
    os.mkdir(folder / "in" / "d%%")
    for decoy in ("true%%.h5", "pipe%%.h5", "d%%/mine.h5"):
        with h5py.File(folder / "in" / decoy, "w") as f:
            f["x"] = values((4, 6)).numpy()

    def virtual(f, name, *sources, shape=(4, 6)):
        layout = h5py.VirtualLayout(shape, "f4")
        for source in sources:
            layout[...] = h5py.VirtualSource(*source, shape=shape)
        f.create_virtual_dataset(name, layout)

    with h5py.File(folder / "in" / "a.h5", "w", libver="latest") as f:
        f["true"] = values((4, 6)).numpy()
        f["link"] = h5py.ExternalLink("../mine.h5", "x")
        f["near"] = h5py.ExternalLink("near.h5", "x")
        f["up"] = h5py.ExternalLink("../mine.h5", "/")
        f["soft"] = h5py.SoftLink("/up/x")
        f["round"] = h5py.SoftLink("/circle")
        f["circle"] = h5py.SoftLink("/round")
        f["good"] = h5py.SoftLink("/group/../true")
        f["g/good"] = h5py.SoftLink("/true")
        f["g/same"] = h5py.SoftLink("good")
        f.create_dataset("raw", (4, 6), "f4", external=[(os.fspath(folder / "raw"), 0, 96)])
        virtual(f, "up_there", ("../mine.h5", "x"))
        virtual(f, "absolute", (os.fspath(folder / "mine.h5"), "x"))
        virtual(f, "linked", ("near.h5", "x"))
        virtual(f, "pipe", ("pipe.h5", "x"))
        virtual(f, "through", (".", "link"))
        virtual(f, "of_raw", (".", "raw"))
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        whole, part = h5py.h5s.create_simple((4, 6), (h5py.h5s.UNLIMITED, 6)), h5py.h5s.create_simple((4, 6))
        whole.select_hyperslab((0, 0), (h5py.h5s.UNLIMITED, 1), (4, 6), (4, 6))
        plist.set_virtual(whole, b"mine%b.h5", b"x", part)
        h5py.h5d.create(f.id, b"pattern", h5py.h5t.IEEE_F32LE, whole, plist)
        f["raw%%"] = f["true"][()]
        f.create_dataset("raw%", (4, 6), "f4", external=[(os.fspath(folder / "raw"), 0, 96)])
        virtual(f, "percent", (".", "raw%%"))
        virtual(f, "percent_file", ("true%%.h5", "x"))
        virtual(f, "percent_pipe", ("pipe%%.h5", "x"))
        virtual(f, "percent_folder", ("d%%/mine.h5", "x"))
        virtual(f, "itself", (".", "itself"))
        virtual(f, "one", (".", "other"))
        virtual(f, "other", (".", "one"))
        virtual(f, "far", ("b.h5", "back"))
        virtual(f, "twice", (".", "once"))
        virtual(f, "once", (".", "true"))
        virtual(f, "deep0", (".", "true"))
        for i in range(40):
            virtual(f, f"deep{i + 1}", (".", f"deep{i}"))
        virtual(f, "many0", (".", "true"))
        for i in range(10):
            virtual(f, f"many{i + 1}", *[(".", f"many{i}")] * 8)
    with h5py.File(folder / "in" / "b.h5", "w", libver="latest") as f:
        virtual(f, "back", ("a.h5", "far"))


def test_datasets_that_lie_elsewhere(mesh, folder):
    on_root(lambda: make_elsewhere(folder))
    at = folder / "in" / "a.h5"
    for name in ("link", "near", "soft", "raw", "up_there", "absolute", "linked", "through", "of_raw"):
        refused(mesh, at, name, r"leads out of its file[\s\S]*external=True")
        if name != "near":
            x = ms.io.read(at, name, mesh, HALVES, external=True)
            assert torch.equal(x.full_tensor(), values((4, 6))), name
    refused(mesh, at, "pattern", "pattern")
    for name in ("percent", "percent_file", "percent_folder"):
        refused(mesh, at, name, r"leads out of its file[\s\S]*external=True")
    refused(mesh, at, "percent_pipe", "a pipe")
    refused(mesh, at, "pipe", "a pipe")
    for options in ({}, {"external": True}):
        for name in ("itself", "one", "other", "far", "deep40"):
            refused(mesh, at, name, "made of itself", **options)
        refused(mesh, at, "many10", "sources, of each other", **options)
    refused(mesh, at, "round", "links")
    refused(mesh, at, "good", "no dataset")
    for name in ("true", "g/good", "/g/same", "once", "twice"):
        assert torch.equal(ms.io.read(at, name, mesh, HALVES).full_tensor(), values((4, 6)))


def test_sources_that_hdf5_passes_over(mesh, folder):
    """The file itself under a name of its own, and one that another holds: its cells or an error, and never zeros."""

    def make():
        with h5py.File(folder / "b.h5", "w") as f:
            f["x"] = values((4, 6)).numpy()
        with h5py.File(folder / "a.h5", "w", libver="latest") as f:
            f["x"] = values((4, 6)).numpy()
            for i, at in enumerate(("a.h5", "./a.h5", os.fspath(folder / "a.h5"), "b.h5")):
                layout = h5py.VirtualLayout((4, 6), "f4")
                layout[...] = h5py.VirtualSource(at, "x", shape=(4, 6))
                f.create_virtual_dataset(f"v{i}", layout)

    on_root(make)
    with open(folder / "b.h5", "rb") as held:
        if WORLD.rank == 0:
            fcntl.flock(held, fcntl.LOCK_EX)
        WORLD.barrier()
        for i in range(4):
            x, error = outcome(lambda i=i: ms.io.read(folder / "a.h5", f"v{i}", mesh, HALVES))
            assert error is not None or torch.equal(x.full_tensor(), values((4, 6))), i
        WORLD.barrier()
    x = ms.io.read(folder / "a.h5", "v3", mesh, HALVES)
    assert torch.equal(x.full_tensor(), values((4, 6)))


# -- files that are none, sizes that are none, types that are none


def test_what_is_no_file(mesh, folder):
    def make():
        os.mkfifo(folder / "pipe")
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(os.fspath(folder / "socket"))
        os.symlink("loop", folder / "loop")
        os.symlink("/dev/zero", folder / "zeros")

    on_root(make)
    odd = ["nul\0", "long" * 2000, ".."]
    files = [os.fspath(folder / name) for name in ("pipe", "socket", "loop", "zeros", *odd)]
    for at in [*files, 7, None]:
        refused(mesh, at, "x", "cannot open|no path")
        calls = [
            lambda at=at: ms.io.import_dcp(at, {"x": torch.zeros(3)}, mesh=mesh),
            lambda at=at: ms.io.load_checkpoint(at, mesh=mesh),
        ]
        if at not in files[2:4]:  # links are replaced
            calls.append(lambda at=at: ms.io.write(at, {"x": sharded(values((4, 4)), mesh)}))
            calls.append(lambda at=at: ms.io.export_safetensors(at, {"x": sharded(values((4, 4)), mesh)}))
        if at != files[-1]:
            calls.append(lambda at=at: ms.io.save_checkpoint(at, 1, mesh=mesh))
        for call in calls:
            with pytest.raises(MpishardError) as e:
                call()
            same_on_all(e)


def test_sizes_that_there_is_no_memory_for(mesh, folder):
    at = folder / "a.h5"

    def make():
        with h5py.File(at, "w", libver="latest") as f:
            f.create_dataset("flat", (1 << 25, 1 << 25), "f8")
            f.create_dataset("cut", (1 << 25, 1 << 25), "f8", chunks=(64, 64), compression="gzip")
            f.create_dataset("long", (1 << 61, 1), "f4", chunks=(1 << 20, 1))
            f.create_dataset("steps", (1 << 55, 2, 2), "f4", chunks=(1, 2, 2), maxshape=(None, 2, 2))
            f.create_dataset("lumps", (1 << 20, 1 << 20), "f4", chunks=(1 << 15, (1 << 15) - 1))
            x = f.create_dataset("marked", (4, 4), "f4")
            x.attrs.create("scale_factor", np.zeros((100, 600)))
            y = f.create_dataset("worded", (4, 4), "f4")
            y.attrs["scale_factor"] = "much"

    on_root(make)
    for name in ("flat", "cut"):
        with pytest.raises(FileError, match="does not fit into memory") as e:
            ms.io.read(at, name, mesh, HALVES)
        same_on_all(e)
        # a part of it is what is stored: nothing
        x = ms.io.read(at, name, mesh, HALVES, select=(slice(7, 12), slice(0, 1 << 24, 1 << 20)))
        assert not x.full_tensor().any()
    refused(mesh, at, "long", "no dataset")
    for name in ("marked", "worded"):
        refused(mesh, at, name, "scale_factor", decode=True)
    ds = ms.io.Dataset(at, "steps", mesh, HALVES)
    assert len(ds) == 1 << 55
    with pytest.raises(FileError, match="does not fit into memory"):
        ds[:]
    with pytest.raises(FileError, match="does not fit into memory"):
        next(iter(ms.io.Loader(ds, shuffle=True)))
    assert not next(iter(ms.io.Loader(ds, batch_size=2))).full_tensor().any()
    ds.close()


def test_types_that_torch_has_not(mesh, folder):
    at = folder / "a.h5"

    def make():
        with h5py.File(at, "w") as f:
            for name, dtype in {
                "record": np.dtype([("a", "f4"), ("b", "i2")]),
                "text": h5py.string_dtype(),
                "short": "S5",
                "ragged": h5py.vlen_dtype("f4"),
                "reference": h5py.ref_dtype,
                "region": h5py.regionref_dtype,
                "opaque": np.dtype("V7"),
                "array": np.dtype("(3,)f4"),
                "wide": np.longdouble,
            }.items():
                f.create_dataset(name, (4, 6), dtype)
            h5py.h5d.create(f.id, b"time", h5py.h5t.UNIX_D32LE, h5py.h5s.create_simple((4, 6)))
            f["none"] = h5py.Empty("f4")
            f["type"] = np.dtype("f4")

    on_root(make)
    for name in ("record", "text", "short", "ragged", "reference", "region", "opaque", "array", "wide", "time"):
        refused(mesh, at, name, "dtype that torch and HDF5 do not share")
    refused(mesh, at, "none", "has no cells")
    for name in ("type", "../a", "x\0y", "", "/", ".", "x" * 100_000, "\udc80", 3, None, b"record"):
        refused(mesh, at, name, "no dataset|cannot read")


def test_names_of_others_in_errors(mesh, folder):
    """Neither a million of them, nor what a terminal would take for a command."""
    at = folder / "a.h5"

    def make():
        with h5py.File(at, "w") as f:
            for i in range(300):
                f.create_dataset(f"{i:03}" + "x" * 300, (1,), "f4")
            f.create_dataset("\x1b[2J", (1,), "f4")

    on_root(make)
    with pytest.raises(FileError, match="and more") as e:
        ms.io.read(at, "none", mesh, HALVES)
    text = same_on_all(e)
    assert len(text) < 10_000
    assert "\x1b" not in text


# -- checkpoints


def forge(checkpoint, original, change):
    """Change the state of a checkpoint, and give it the right checksum again."""
    state = json.loads(original)
    for key in ("format", "version", "checksum"):
        state.pop(key)
    change(state)
    folders.write_state(checkpoint, state)


def test_forged_states_change_nothing(mesh, folder):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "mesh": mesh}
    path = ms.io.save_checkpoint(folder, 1, tensors={"x": sharded(values((4, 6)), mesh)}, extra=[1], **parts).path
    WORLD.Barrier()
    original = (path / "state.json").read_bytes()
    WORLD.Barrier()
    deep = []
    for _ in range(500):
        deep = [deep]
    changes = {
        "rng words": lambda s: s["state"].update(rng={"cpu": "none"}),
        "rng of another": lambda s: s["state"].update(rng={"cpu": {"$tensor": "model/weight"}}),
        "metadata": lambda s: s["state"].update(metadata=[1]),
        "version of a module": lambda s: s["state"].update(metadata={"": 3}),
        "words for weights": lambda s: s["state"]["model"].update(bias="none"),
        "other weights": lambda s: s["state"]["model"].update(bias={"$tensor": "model/weight"}),
        "weights twice": lambda s: s["state"].update(extra={"$tensor": "model/weight"}),
        "no tensor": lambda s: s["state"]["model"].update(bias={"$tensor": "../../x"}),
        "method": lambda s: s["state"]["scheduler"].update(step=3),
        "optimizer of scheduler": lambda s: s["state"]["scheduler"].update(optimizer={}),
        "counter": lambda s: s["state"]["scheduler"].update(last_epoch="7"),
        "groups": lambda s: s["state"]["optimizer"].update(param_groups=[]),
        "state": lambda s: s["state"]["optimizer"].update(state=[1, 2]),
        "group": lambda s: s["state"]["optimizer"]["param_groups"].__setitem__(0, 7),
        "deep": lambda s: s["state"].update(extra=deep),
        "tag": lambda s: s["state"].update(extra={"$set": [[1]]}),
        "number": lambda s: s["state"].update(extra={"$complex": ["a", 1]}),
        "no step": lambda s: s.update(step="one"),
        "list": lambda s: s.update(state=[]),
        "petabytes": lambda s: s["tensors"]["model/weight"].update(shape=[1 << 25, 1 << 25]),
        "shape": lambda s: s["tensors"]["tensors/x"].update(shape=[6, 4]),
        "less": lambda s: s["tensors"]["tensors/x"].update(shape=[-4, -6]),
        "dims": lambda s: s["tensors"]["tensors/x"].update(shape=[24]),
        "type": lambda s: s["tensors"]["tensors/x"].update(dtype="int32"),
        "no type": lambda s: s["tensors"]["tensors/x"].update(dtype="load"),
        "shards": lambda s: s["tensors"]["tensors/x"].update(sharded=[17, "x"]),
        "sums": lambda s: s["tensors"]["tensors/x"].update(checksums="0" * 16),
        "no sums": lambda s: s["tensors"]["tensors/x"].update(checksums=""),
        "no tensors": lambda s: s.update(tensors=None),
    }
    for name, change in changes.items():
        on_root(lambda change=change: forge(path, original, change))
        with torch.no_grad():
            model.weight.fill_(7)
        before = [p.clone() for p in (model.weight, model.bias, torch.get_rng_state())]
        states = repr((optimizer.state_dict(), scheduler.state_dict()))
        with pytest.raises(MpishardError) as e:
            ms.io.load_checkpoint(folder, **parts)
        same_on_all(e)
        assert os.fspath(path) in str(e.value) or "load_checkpoint" in str(e.value), name
        after = (model.weight, model.bias, torch.get_rng_state())
        assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True)), name
        assert repr((optimizer.state_dict(), scheduler.state_dict())) == states, name
    on_root(lambda: (path / "state.json").write_bytes(original))
    assert ms.io.load_checkpoint(folder, **parts).extra == [1]
    assert not (model.weight == 7).any()


def test_checkpoints_that_lead_elsewhere(mesh, folder):
    path = ms.io.save_checkpoint(folder, 1, tensors={"x": values((4, 6))}, mesh=mesh, asynchronous=True).wait()

    def spoilt(name, make):
        kept = folder / "kept"
        on_root(lambda: (os.rename(path / name, kept), make(path / name)))
        with pytest.raises(FileError, match="damaged") as e:
            ms.io.load_checkpoint(folder, mesh=mesh)
        same_on_all(e)
        on_root(lambda: os.replace(kept, path / name))

    for name in ("state.json", "tensors.h5"):
        spoilt(name, os.mkfifo)
        spoilt(name, lambda at: os.symlink("/dev/zero", at))
    on_root(lambda: (os.rename(folder / "latest", folder / "kept"), os.mkfifo(folder / "latest")))
    with pytest.raises(FileError, match="a pipe"):
        ms.io.load_checkpoint(folder, mesh=mesh)
    with pytest.warns(RuntimeWarning, match="a pipe") if WORLD.rank == 0 else contextlib.nullcontext():
        assert ms.io.load_checkpoint(folder, mesh=mesh, fallback=True).step == 1


# -- pickles


class Call:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def bomb(depth):
    """Text of a pickle in which every tuple holds the one before it twice."""
    text = b"(I1\ntp0\n0"
    for i in range(depth):
        text += b"(g%d\ng%d\ntp%d\n0" % (i, i, i + 1)
    return text + b"g%d\n." % depth


def loop():
    whole = []
    whole.append(whole)
    return whole


def test_pickles_do_nothing():
    """Not even to the classes that they may name."""

    def known(name):
        return name in {("torch.distributed.checkpoint.metadata", "Metadata"), ("builtins", "getattr")}

    where = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    for raw, text in (
        (pickle.dumps(Call(os.mkdir, ("trapped",))), "could run code"),
        (b"cos\nsystem\n(S'true'\ntR.", "could run code"),
        (b"(S'true'\nios\nsystem\n.", "instruction INST"),
        (where + b"(N(S'x'\nI1\ndtb.", "changes or calls a Name"),
        (b"(lp0\n(S'x'\nI1\ndb.", "changes or calls a list"),
        (bomb(60), "memo bomb"),
        (pickle.dumps(loop()), "holds itself"),
        (b"\x80\x04Pid\n.", "instruction PERSID"),
    ):
        with pytest.raises(RefusedError, match=text):
            read(raw, known)
    plain = {"a": [1, 2.5, (None, True, "x", b"y")], ("t", 2): {"s"}, "big": 1 << 100}
    for protocol in range(2, 6):
        back = read(pickle.dumps(plain, protocol), known if protocol > 3 else lambda name: True)
        assert back[0] == ("a", [1, 2.5, (None, True, "x", b"y")]) or protocol == 2
        assert back[2] == ("big", 1 << 100)
    assert not os.path.exists("trapped")
