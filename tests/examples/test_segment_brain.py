from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = EXAMPLES / "segment_brain.py"
SMALL = ("--subsample", "8", "--base", "4", "--levels", "3")
SHAPE = (25, 30, 24)
# Starts of a program, two of torch each: on a busy machine mostly waiting for a core.
LIMIT_S = 900


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The volumes, written once for all tests."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def segment(launch, data, tmp_path):
    def run(size, *options, program=(PROGRAM,), env=None):
        places = ("--data", data, "--out", tmp_path)
        return launch(size, *program, *SMALL, *places, *options, timeout_s=LIMIT_S, env=env)

    return run


def test_it_learns_writes_maps_and_equals_one_process(segment, tmp_path):
    done = segment(4, "--mesh", "2", "2", "--steps", "12", "--dtype", "float64", "--verify", "--compare-memory")
    assert done.returncode == 0, done.stdout
    assert "3 steps in float64: as good as equal" in done.stdout
    differences = re.findall(r"largest relative difference of a (\w+) from one process: (\S+)", done.stdout)
    assert [what for what, _ in differences] == ["loss", "gradient", "parameter"]
    assert all(float(value) < 1e-9 for _, value in differences)
    first, last = map(float, re.search(r"12 steps: loss (\S+) -> (\S+);", done.stdout).groups())
    assert last < 0.8 * first
    assert re.search(r"Dice gm \S+, wm \S+", done.stdout)
    assert re.search(r"\d s per step", done.stdout)
    assert len(re.search(r"peak memory per rank: (.*) MB;", done.stdout)[1].split(",")) == 4
    assert "one process:" in done.stdout

    assert sorted(os.listdir(tmp_path)) == ["segment_brain.h5", "segment_brain.png"]
    with h5py.File(tmp_path / "segment_brain.h5", "r") as f:
        assert sorted(f) == ["gm", "wm"]
        assert "12 steps" in f.attrs["title"]
        for name in f:
            assert f[name].shape == SHAPE
            assert 0 <= f[name][:].min() < f[name][:].max() <= 1
    png = (tmp_path / "segment_brain.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000


def test_verify_fails_where_the_numbers_differ(segment):
    code = f"""
import sys
sys.path.insert(0, {os.fspath(EXAMPLES)!r})
import segment_brain
segment_brain.__file__ = {os.fspath(PROGRAM)!r}
trace = segment_brain.trace
def off(args, model, *rest):
    with segment_brain.torch.no_grad():
        next(model.parameters()).mul_(1 + 1e-7)
    return trace(args, model, *rest)
segment_brain.trace = off
sys.exit(segment_brain.main())
"""
    done = segment(2, "--steps", "1", "--dtype", "float64", "--verify", program=("-c", code))
    assert done.returncode != 0
    assert "DIFFERENT" in done.stdout


STOPPED = f"""
import os, signal, sys
sys.path.insert(0, {os.fspath(EXAMPLES)!r})
import segment_brain
train = segment_brain.train
def signalled(*args):
    for i, step in enumerate(train(*args)):
        if i == 1 and os.environ.get("STOP") and segment_brain.MPI.COMM_WORLD.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        yield step
segment_brain.train = signalled
sys.exit(segment_brain.main())
"""


def test_a_job_that_is_told_to_stop_goes_on(segment, tmp_path):
    at = ("--steps", "4", "--dtype", "float64", "--checkpoints", tmp_path / "checkpoints")
    straight = segment(2, *at[:-2], program=("-c", STOPPED))
    stopped = segment(2, *at, program=("-c", STOPPED), env={"STOP": "1"})
    assert stopped.returncode == 75, stopped.stdout
    assert "told to stop: saved after step 2" in stopped.stdout
    # on another number of ranks
    done = segment(3, *at)
    assert done.returncode == 0, done.stdout
    assert "going on after step 2" in done.stdout
    result = [re.search("4 steps: loss .*", text)[0] for text in (straight.stdout, done.stdout)]
    assert result[0] == result[1]


def test_options_that_save_memory_on_other_meshes(segment, tmp_path):
    for size, options in ((2, ("--mesh", "1", "1", "2", "--amp")), (3, ("--mesh", "3", "--recompute"))):
        done = segment(size, "--steps", "1", *options)
        assert done.returncode == 0, done.stdout
        assert (tmp_path / "segment_brain.png").exists()


@pytest.mark.parametrize(
    ("options", "env", "text"),
    [
        ((), {"SLURM_NTASKS": "8"}, "8 ranks, as SLURM_NTASKS says"),
        (("--mesh", "3", "1"), {}, "the mesh shape does not fit the number of ranks"),
        (("--verify", "--amp"), {}, "more digits than bfloat16"),
    ],
    ids=["launcher", "mesh", "options"],
)
def test_mistakes_are_named(segment, options, env, text):
    # MPI programs under Slurm say how many they are; a test must not meet a surrounding job's
    done = segment(2, *options, env={"SLURM_NTASKS": "2", **env})
    assert done.returncode != 0
    assert text in done.stdout


def test_volumes_are_real_and_normalised(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXAMPLES)
    import brain_data

    path = brain_data.brain_path(tmp_path, 1)
    brain_data.write_brain(path)
    assert os.listdir(tmp_path) == [path.name]
    with h5py.File(path, "r") as f:
        volumes = {name: f[name][:] for name in f}
    assert sorted(volumes) == ["gm", "t1", "wm"]
    for volume in volumes.values():
        assert volume.shape == (197, 233, 189)
        assert volume.dtype == np.float32
    inside = volumes["t1"][volumes["t1"] > -3]
    assert abs(inside.mean()) < 0.05
    assert abs(inside.std() - 1) < 0.05
    for name in ("gm", "wm"):
        assert volumes[name].min() == 0
        assert 0.9 < volumes[name].max() <= 1


def test_without_nilearn(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXAMPLES)
    import brain_data

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps nilearn"):
        brain_data.write_brain(tmp_path / "a.h5")
    assert not os.listdir(tmp_path)


def test_difference_is_relative_to_the_largest_element(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from brain_training import largest_difference

    reference = [torch.tensor([4.0, 0.0]), torch.tensor(0.5)]
    assert largest_difference(reference, reference) == 0
    assert largest_difference([torch.tensor([4.0, 1.0]), torch.tensor(0.5)], reference) == 0.25
    assert largest_difference([torch.tensor([4.0, 0.0]), torch.tensor(1.0)], reference) == 1
