"""Jobs that go wrong, each under an MPI launcher of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

# The default of MPISHARD_TIMEOUT in these jobs; what is found before ends sooner, on a busy machine too.
PATIENCE_S = 120

PRELUDE = '''
import os, signal, subprocess, sys, time
import torch
import mpishard as ms
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
notes = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND)

def note(*words):
    os.write(notes, " ".join(map(str, (*words, "\\n"))).encode())

def doom(seconds):
    """Have this process killed, and note it: what others say from then on tells nothing about them."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; echo DOOM >> {os.environ['NOTES']}; kill -9 {os.getpid()}"])

def until_doom(work):
    try:
        work()
    except Exception as error:
        note("ERROR", repr(error))
        raise

world.Barrier()
if rank == 0:
    note("START", time.time())
world.Barrier()
'''


@dataclass
class Outcome:
    """How a job ended.

    Attributes
    ----------
    status
        Exit status of the launcher.
    output
        Standard output and error of all ranks and of the launcher.
    notes
        What the ranks noted, in words: a launcher may mix, tear or lose what a rank printed before it was killed.
    seconds
        From the start of the program's own work, after its imports, to the end of the job.
    """

    size: int
    status: int
    output: str
    notes: list[list[str]]
    seconds: float

    def noted(self, name: str) -> list[list[str]]:
        """Return what follows the name in each note that begins with it."""
        return [words for first, *words in self.notes if first == name]

    def was_killed(self) -> None:
        """Assert that the job ended because a rank was killed by ``doom``, and nothing was wrong before."""
        names = [first for first, *_ in self.notes]
        assert "DOOM" in names, self
        assert "ERROR" not in names[: names.index("DOOM")], self
        assert self.status != 0, self.output

    def failed_with(self, *texts: str) -> None:
        """Assert that the job ended in failure, and before the watchdog's, with each text at most once per rank."""
        assert self.status != 0, self.output
        for text in texts:
            assert 1 <= self.output.count(text) <= self.size, f"{text!r} in:\n{self.output}"
        assert self.seconds < PATIENCE_S, f"{self.seconds} s:\n{self.output}"


@pytest.fixture(autouse=True)
def more_ranks_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Open MPI 4 and 5 start small jobs on any machine, in a container too."""
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    monkeypatch.setenv("OMPI_MCA_rmaps_base_oversubscribe", "1")
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")


@pytest.fixture
def job(launch: Callable, tmp_path: Path) -> Callable[..., Outcome]:
    """Run ``job(size, body, NAME=value)``: a program after `PRELUDE`, with environment variables, as `launch` does.

    The program leaves words for the test by ``note("NAME", value)``.
    """

    def run(size: int, body: str, *, fresh: bool = False, **env: str) -> Outcome:
        program = tmp_path / "program.py"
        program.write_text(PRELUDE + body)
        notes = tmp_path / "notes"
        notes.write_text("")
        settings = {"MPISHARD_TIMEOUT": str(PATIENCE_S), "PYTHONFAULTHANDLER": "", "NOTES": os.fspath(notes), **env}
        done = launch(size, program, timeout_s=3 * PATIENCE_S, env=settings, fresh=fresh)
        end = time.time()
        noted = [line.split() for line in notes.read_text().splitlines()]
        assert noted, f"the program did not start:\n{done.stdout}"
        (_, start), *rest = noted
        return Outcome(size, done.returncode, done.stdout, rest, end - float(start))

    return run
