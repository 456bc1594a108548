"""Calls that differ between ranks, in drawn pairs: never a wrong value in a job that ends well, never a silent end.

``python -m tests.failure.test_mismatch SEED COUNT`` tries COUNT pairs, without and with MPISHARD_DEBUG=1, and prints
a table of how they ended.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import python
from tests.failure.mismatched import family, pairs

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 3
# How a pair ended, the good ways first.
NAMED, WATCHDOG, RIGHT, ABORTED = "named at once", "by the watchdog", "all values right", "MPI's own abort"
BAD = WRONG, NAMELESS = "wrong value", "error without a name"


def batch(mpiexec: list[str], seed: int, first: int, last: int, debug: bool) -> tuple[list[str], str]:
    """Run pairs until one ends the job; return how each of them ended, and what the job printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "notes"
        path.touch()
        numbers = map(str, (seed, first, last - first))
        done = subprocess.run(
            [*mpiexec, "-n", "3", *python("-m", "tests.failure.mismatched", *numbers, os.fspath(path))],
            cwd=ROOT,
            env={
                **os.environ,
                "MPISHARD_TIMEOUT": str(TIMEOUT_S),
                "MPISHARD_DEBUG": str(int(debug)),
                "PYTHONPATH": ".",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        notes = [json.loads(line) for line in path.read_text().splitlines()]
    came: dict[int, list[str]] = {}
    for what in notes:
        texts = came.setdefault(what["case"], [])
        if "came" in what:
            texts.append(what["came"])
    ends = [ending(texts, "" if i < max(came) or not done.returncode else done.stdout) for i, texts in came.items()]
    return ends, done.stdout


def ending(texts: list[str], output: str) -> str:
    """How a pair ended, by what its ranks came to and what a job that it ended has printed."""
    errors = [text for text in texts if text not in ("right", "wrong")]
    if errors:
        return NAMED if all(re.search(r"differ|does not fit", e) and "rank" in e for e in errors) else NAMELESS
    if not output:
        return WRONG if "wrong" in texts else RIGHT
    if re.search(r"MPISHARD_TIMEOUT: \S.* has waited \d+ s for rank", output):
        return WATCHDOG
    return ABORTED if re.search(r"MPI|Abort|abort", output) else NAMELESS


def tried(mpiexec: list[str], seed: int, count: int, debug: bool, starts: int = 10**6) -> list[tuple[int, str, str]]:
    """Number, end and what was printed of ``count`` pairs, or of as many as ``starts`` jobs come to."""
    found: list[tuple[int, str, str]] = []
    while len(found) < count and starts:
        ends, output = batch(mpiexec, seed, len(found), count, debug)
        assert ends, output
        found += [(len(found) + i, end, output) for i, end in enumerate(ends)]
        starts -= 1
    return found


def check(found: list[tuple[int, str, str]], seed: int, debug: bool) -> None:
    """Fail where a pair ended otherwise than it may."""
    allowed = {NAMED, RIGHT} if debug else {NAMED, RIGHT, WATCHDOG, ABORTED}
    every = pairs(seed)
    bad = [
        f"{every[i]}: {end}\n{output[-1500:] if end != WRONG else ''}" for i, end, output in found if end not in allowed
    ]
    assert not bad, f"seed {seed}\n" + "\n".join(bad)


@pytest.mark.parametrize("debug", [False, True])
def test_pairs_of_calls(debug: bool, request: pytest.FixtureRequest) -> None:
    from tests.conftest import mpiexec

    seed = request.config.option.seed
    check(tried(list(mpiexec()), seed, 20, debug, starts=1), seed, debug)


def main(seed: int, count: int) -> None:
    launcher = shlex.split(os.environ.get("MPIEXEC", os.fspath(Path(sys.executable).with_name("mpiexec"))))
    for debug in (True, False):
        found = tried(launcher, seed, count, debug)
        ends = Counter((family(pairs(seed)[i]), end) for i, end, _ in found)
        print(f"\nMPISHARD_DEBUG={int(debug)}\n")
        columns = (NAMED, WATCHDOG, RIGHT, ABORTED, *BAD)
        print("| class | tried |", " | ".join(columns), "|")
        print("| --- " * (2 + len(columns)) + "|")
        for kind in sorted({kind for kind, _ in ends}):
            numbers = [ends[kind, end] for end in columns]
            print(f"| {kind} | {sum(numbers)} |", " | ".join(map(str, numbers)), "|")
        for i, end, output in found:
            if end in BAD or (debug and end not in (NAMED, RIGHT)):
                print(f"- {pairs(seed)[i]}: {end}", *output.splitlines()[-30:], sep="\n    ", file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
