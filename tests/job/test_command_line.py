"""The command line as a whole: help, versions, closed pipes, completion, and `mpishard run`."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from pathlib import Path

import pytest

import mpishard
from mpishard.cli import main
from mpishard.comm import exit
from tests.conftest import python

ROOT = Path(__file__).parents[2]


def said(*command: str, code: int = 0, fresh: bool = False, **variables: str) -> str:
    done = subprocess.run(
        python("-m", "mpishard", *command, fresh=fresh),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **variables},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_help_teaches() -> None:
    text = said("--help")
    for word in ("info --check", "ops conv2d", "slurm render", "Exit codes", "init_mesh"):
        assert word in text
    assert main(["run", "--help"]) == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mpishard {mpishard.__version__}\n"


@pytest.mark.parametrize("command", ["ops", "ops conv2d", "info --check"])
def test_a_reader_that_has_had_enough(command: str) -> None:
    words = python("-m", "mpishard", *command.split())
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    # long before the first line
    process.stdout.close()
    _, error = process.communicate(timeout=300)
    assert error == b""
    assert process.returncode == 1


@pytest.mark.parametrize("command", ["ops conv2d", "slurm render -- program", "info --json"])
def test_a_full_disk_is_said_in_one_line(command: str) -> None:
    words = python("-m", "mpishard", *command.split())
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr == "mpishard: No space left on device: not all of the output is written\n"


@pytest.mark.parametrize("command", ["ops conv2d", "run -m this"])
def test_a_closed_standard_output_is_no_error(command: str) -> None:
    words = ["sh", "-c", 'exec "$@" >&-', "sh", *python("-m", "mpishard", *command.split(), fresh=True)]
    done = subprocess.run(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_list_of_cases_is_told_once_a_job(launch) -> None:
    done = launch(2, "-m", "mpishard", "bench", "--list")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("\nconv ") == 1, done.stdout


def test_a_build_folder_that_cannot_be() -> None:
    assert "expected: a folder that can be written" in said("config", "--build", "/dev/null/x", code=2)


def test_wrong_use_is_2() -> None:
    assert "No such command" in said("nonsense", code=2)
    assert "no file" in said("run", "no-such-script.py", code=2)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("nonsense", "No such command"),
        ("run no-such-script.py", "no file"),
        ("plan no.module:none --shape 1x1x8x8 --ranks 2", "module:factory"),
    ],
)
def test_wrong_use_is_told_once_a_node(launch, command: str, told: str) -> None:
    done = launch(3, "-m", "mpishard", *command.split())
    assert done.returncode == 2
    assert done.stdout.count(told) == 1, done.stdout


def test_wrong_use_is_told_each_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setattr(exit, "_SETTLED_S", 0.0)
    for _ in range(2):
        with pytest.raises(SystemExit):
            main(["nonsense"])
        assert "No such command" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "_MPISHARD_COMPLETE" in capsys.readouterr().out


def test_completion_completes() -> None:
    text = said(_MPISHARD_COMPLETE="bash_complete", COMP_WORDS="mpishard slurm re", COMP_CWORD="2")
    assert "render" in text


SCRIPT = """
import os, sys
import torch
from helper_of_script import value
assert __name__ == "__main__"
print(sys.argv[1:], value, torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]), flush=True)
from mpi4py import MPI
if "--exit" in sys.argv:
    sys.exit(75)
if "--raise" in sys.argv and MPI.COMM_WORLD.rank == 1:
    raise KeyError("rank 1 has had enough")
if "--raise" in sys.argv:
    MPI.COMM_WORLD.Barrier()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "a script.py"
    path.write_text(SCRIPT)
    (tmp_path / "helper_of_script.py").write_text("value = 7\n")
    return path


def test_run_passes_arguments_and_exit_codes(script: Path) -> None:
    # torch reads the number of threads where it is loaded
    assert "['--help', 'a b'] 7 True" in said("run", str(script), "--help", "a b", fresh=True, OMP_NUM_THREADS="")
    said("run", str(script), "--exit", code=75)


FAULTS = """
import resource, sys
import torch
from mpishard.comm.memory import heap
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        arrays = [torch.ones(1 << 21) for _ in range(4)]
        del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print("faults", faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's thresholds")
def test_run_shows_the_scripts_own_lines(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    for text, shown in (("raise KeyError('enough')", "KeyError: 'enough'"), ("a b", "SyntaxError: ")):
        script.write_text(text)
        told = said("run", str(script), code=1)
        assert shown in told
        assert "runpy" not in told
    assert said("run", "-m", "no_such_module", code=1) == "ImportError: No module named no_such_module\n"


def test_run_keeps_what_arrays_free(tmp_path: Path) -> None:
    path = tmp_path / "faults.py"
    path.write_text(FAULTS)
    pages = 20 * 4 * (1 << 23) // resource.getpagesize()
    text = said("run", str(path), fresh=True)
    assert int(text.split("faults")[1]) < pages // 20
    # what the user sets stays
    text = said("run", str(path), fresh=True, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    assert int(text.split("faults")[1]) > pages // 600


def test_run_checks_the_job_first(script: Path, tmp_path: Path) -> None:
    text = said("run", "--check", str(script), code=1, SLURM_NTASKS="4")
    assert "SLURM_NTASKS=4" in text
    assert "7 True" not in text


def test_a_rank_that_fails_ends_all(launch, script: Path) -> None:
    done = launch(2, "-m", "mpishard", "run", script, "--raise")
    assert done.returncode != 0
    assert done.stdout.count("KeyError: 'rank 1 has had enough'") == 1
    # the traceback begins in the script, not in what started it
    trace = done.stdout.partition("Traceback")[2]
    assert "runpy" not in trace
    assert "a script.py" in trace
