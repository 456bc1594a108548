"""Arguments of another kind: the text says which one, on every rank, and nothing is lost."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.errors import MpishardError
from mpishard.io.backend import choice
from tests.io.files import WORLD, same_on_all, sharded, values

FULL = values((6, 8))


def refused(call, *words):
    with pytest.raises(MpishardError) as e:
        call()
    same_on_all(e)
    for word in ("expected:", "got:", "fix:", *words):
        assert word in str(e.value), e.value
    assert "make the folder" not in str(e.value), e.value
    assert "check that the file is complete" not in str(e.value), e.value


@pytest.mark.parametrize("backend", ["root", "virtual"])
def test_write(mesh, folder, backend):
    path = folder / "a.h5"
    ms.io.write(path, {"a": sharded(FULL, mesh)}, backend=backend)
    for words, options in {
        ("append",): [{"append": value} for value in (True, 3, b"t", ("t",), ["t"])],
        ("chunks", "'a'"): [{"chunks": value} for value in (3, (2, "x"), (2, 2.5), (2,), "ab", (0, 2))],
        ("dims", "'a'"): [{"dims": value} for value in (3, 1.5, "yx", ("y", 3), ("y",))],
        ("variable_attrs['a']",): [{"variable_attrs": {"a": value}} for value in (3, "u", ["u"])],
        ("an option",): [{"compression": value} for value in ("gzip9", ("gzip", 99), b"gzip", 77777)]
        + [{"attrs": {"u": value}} for value in ("zero \0", [1, "b"])]
        + [{"locking": "x"}],
        ("alignment",): [{"alignment": value} for value in ("junk", 3, (1,), (1, 0), (-1, 1), (0.5, 2))],
        ("hints",): [{"hints": value} for value in ({"": 1}, {"k" * 300: 1}, {5: 6}, {"a": "\0"})],
        ("scale of dim 'x'",): [
            {"dims": ("y", "x"), "scales": {"x": value}}
            for value in (
                list("abcdefgh"),
                [None] * 8,
                np.arange(8).astype("M8[D]"),
                [[1], [2, 3]],
                torch.ones(8, device="meta"),
            )
        ],
        ("scale of dim 'time'",): [{"append": "time", "scales": {"time": value}} for value in ("2000-01-01", None)],
    }.items():
        for each in options:
            if not (backend == "virtual" and "append" in each):
                refused(
                    lambda each=each: ms.io.write(path, {"a": sharded(FULL + 1, mesh)}, backend=backend, **each), *words
                )
    assert torch.equal(ms.io.read(path, "a", mesh, (ms.Shard(0), ms.Shard(1))).full_tensor(), FULL)
    ms.io.write(path, {"a": sharded(FULL, mesh)}, backend=backend, chunks=np.array([2, 2]), dims=["y", "x"])
    assert torch.equal(ms.io.read(path, "a", mesh, (ms.Shard(0), ms.Shard(1))).full_tensor(), FULL)


def not_here():
    if WORLD.rank == WORLD.size - 1:
        raise RuntimeError("not here")


class Odd(str):
    """A name that one rank cannot tell."""

    __slots__ = ()

    def __str__(self):
        not_here()
        return "1"

    __repr__ = __str__


class OddHint(Odd):
    __slots__ = ()

    def __repr__(self):
        return "a hint"


class OddPath:
    def __fspath__(self):
        not_here()
        return "a.h5"


def test_what_one_rank_cannot_tell(mesh, folder):
    x, where = sharded(FULL, mesh), (ms.Shard(0), ms.Shard(1))
    path = folder / "a.h5"
    ms.io.write(path, {"a": x})
    refused(lambda: ms.io.write(path, {"a": x}, hints={"cb_nodes": OddHint()}), "hints")
    for call in (
        lambda: ms.io.read(OddPath(), "a", mesh, where),
        lambda: ms.io.Dataset(OddPath(), "a", mesh, (*where[:1], ms.Replicate())),
        lambda: ms.io.write(OddPath(), {"a": x}),
        lambda: ms.io.read(path, "a", mesh, where, device=Odd()),
        lambda: ms.io.Dataset(path, Odd("b"), mesh, (*where[:1], ms.Replicate())),
    ):
        with pytest.raises(MpishardError) as e:
            call()
        same_on_all(e)
    assert torch.equal(ms.io.read(path, "a", mesh, where, external=Odd()).full_tensor(), FULL)


def test_a_choice_that_cannot_be_printed(mesh, folder, monkeypatch):
    """Rank 0 alone tells of it, and the others waited for what it does next."""
    ms.io.write(folder / "a.h5", {"a": sharded(FULL, mesh)})
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    monkeypatch.setattr(choice, "_told", set())
    assert torch.equal(ms.io.read(folder / "a.h5", "a", mesh, (ms.Shard(0), ms.Shard(1))).full_tensor(), FULL)


@pytest.mark.parametrize("suffix", [".xdmf", ".vtkhdf", ".h5", ".safetensors"])
def test_names_that_leave_no_room_for_a_hidden_one(mesh, folder, suffix):
    """A file and its companions are written under such names."""
    x, option = sharded(FULL, mesh), suffix[1:] if suffix in (".xdmf", ".vtkhdf") else None
    for n, fits in ((233, True), (234, False)):
        stem = "n" * (n - len(suffix))

        def call(stem=stem):
            if suffix == ".safetensors":
                ms.io.export_safetensors(folder / f"{stem}{suffix}", {"a": x})
            else:
                options = {} if option is None else {option: True}
                ms.io.write(folder / f"{stem}.h5", {"a": x}, backend="virtual", **options)

        if fits:
            call()
        else:
            refused(call, "is too long for the name of a new file", "at most 233 bytes")
            assert not (folder / f"{stem}.h5").exists()


def test_sizes_of_files(mesh):
    for value in ("a", None, [1]):
        refused(lambda value=value: ms.io.choose_backend(mesh, value), "nbytes")
    assert ms.io.choose_backend(mesh, 1e3) == ms.io.choose_backend(mesh, 1000)


def test_read(mesh, folder):
    path = folder / "a.h5"
    ms.io.write(path, {"a": sharded(FULL, mesh)})
    for argument, wrong in {
        "dtype": ("float32", 3, np.float32),
        "sizes": (3, [1]),
        "device": ("nope", 2.5),
        "out": (3, "a", FULL.numpy()),
    }.items():
        for value in wrong:
            refused(lambda: ms.io.read(path, "a", mesh, (ms.Shard(0), ms.Shard(1)), **{argument: value}), argument)
            if argument != "out":
                refused(
                    lambda: ms.io.Dataset(path, "a", mesh, (ms.Shard(0), ms.Replicate()), **{argument: value}), argument
                )


def test_checkpoint(mesh, folder):
    x = sharded(FULL, mesh)
    for tensors in (3, [x], x):
        refused(lambda tensors=tensors: ms.io.save_checkpoint(folder, 1, tensors=tensors, mesh=mesh), "tensors")
    ms.io.save_checkpoint(folder, 1, tensors={"x": x})
    for tensors in (3, ["x"], x):
        refused(lambda tensors=tensors: ms.io.load_checkpoint(folder, tensors=tensors, mesh=mesh), "tensors")
    assert torch.equal(ms.io.load_checkpoint(folder, mesh=mesh).tensors["x"].full_tensor(), FULL)
