"""Every case runs, small, by one entry; what it measures is not tested."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from mpishard.cli import main

ROOT = Path(__file__).parents[2]
CASES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
# a start of torch on a busy machine is mostly waiting for a core
LIMIT_S = 900


@pytest.fixture(scope="module")
def ran(launch, tmp_path_factory):
    """Run all of them in one job."""
    folder = tmp_path_factory.mktemp("bench")
    done = launch(2, "-m", "benchmarks", "--quick", "--output", folder, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout
    return done.stdout, folder


@pytest.fixture(scope="module")
def rows(ran):
    data = json.loads((ran[1] / "benchmarks.json").read_text())
    assert data["options"]["cases"] == CASES
    machine = data["machine"]
    assert machine["size"] == 2
    assert machine["versions"]["torch"] == torch.__version__
    assert {"cpu", "cores", "mpi", "threads_per_rank", "load"} <= machine.keys()
    return data["rows"]


@pytest.mark.parametrize("case", CASES)
def test_it_has_figures(rows, case):
    mine = [row for row in rows if row["case"] == case]
    figures = [row for row in mine if not row["error"]]
    if case == "gpu" and not torch.cuda.is_available():
        assert [row["error"] for row in mine] == ["torch finds no GPU"]
        return
    assert figures, mine
    for row in figures:
        assert all(math.isfinite(row[key]) for key in ("median", "low", "high")), row
        assert row["low"] <= row["median"] <= row["high"], row
        if row["floor"]:
            assert row["ratio"] > 0, row
            assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"], row
    for row in set(map(json.dumps, mine)) - set(map(json.dumps, figures)):
        # of rivals alone, and of what a busy machine does not show in two rounds
        assert case in ("rivals", "checkpoint"), row


def test_a_rival_that_cannot_run_is_a_row(rows):
    missing = [row for row in rows if row["case"] == "rivals" and row["who"] == "HeAT" and row["error"]]
    assert missing
    assert all(row["median"] is None for row in missing)


def test_report(ran, rows):
    printed, folder = ran
    table = (folder / "benchmarks.md").read_text()
    assert "Warning" not in printed
    for case in CASES:
        assert f"\n## {case}\n" in table
    for row in rows:
        assert row["who"] in table
    pytest.importorskip("matplotlib")
    drawn = {path.stem for path in folder.glob("*.png")}
    assert drawn >= {"attention", "conv", "halo", "overhead", "rivals"}


def test_list_and_misuse(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # from anywhere
    assert main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out
    for case in CASES:
        assert f"\n{case} " in f"\n{listed}"
    assert "--set models=" in listed
    for arguments, text in (
        (["--case", "convolution"], "expected: one of attention, "),
        (["--case", "conv", "--set", "models=fno"], "expected: an option of these cases: they have none"),
    ):
        assert main(["bench", *arguments]) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--set", "models"])
    assert "NAME=VALUE, not 'models'" in capsys.readouterr().err


def test_without_a_checkout(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mpishard.cli.bench.__file__", str(tmp_path / "mpishard" / "cli" / "bench.py"))
    assert main(["bench", "--list"]) == 2
    assert "fix:      start it in a checkout" in capsys.readouterr().err


def test_an_output_that_cannot_be_is_one_error(launch, tmp_path):
    (tmp_path / "file").touch()
    done = launch(1, "-m", "mpishard", "bench", "--case", "overhead", "--output", tmp_path / "file")
    assert done.returncode == 1, done.stdout
    assert "expected: a folder that can be written to" in done.stdout
