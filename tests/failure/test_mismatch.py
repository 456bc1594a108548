"""Calls that differ between ranks, in drawn pairs: never a wrong value in a job that ends well, never a silent end.

``python -m tests.failure.test_mismatch SEED COUNT RANKS...`` tries COUNT pairs for each number of ranks, with
MPISHARD_DEBUG=1 and without, and prints tables of how they ended.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import mpiexec, python

ROOT = Path(__file__).parents[2]
# where calls are compared, nothing should wait for the watchdog, and a busy machine has time
TIMEOUT_S = (3, 12)
# How a pair ended, the good ways first.
NAMED, WATCHDOG, RIGHT, ABORTED = "named at once", "by the watchdog", "all values right", "MPI's own abort"
BAD = LATE, WRONG, NAMELESS = "wrong value, then named", "wrong value", "error without a name"


class End(NamedTuple):
    """A pair, how it ended, and what there is to say."""

    pair: str
    family: str
    end: str
    text: str


class Tries(NamedTuple):
    """Which pairs are tried, and how."""

    seed: int
    ranks: int
    count: int
    debug: bool


def batch(tries: Tries, first: int) -> list[End]:
    """Run pairs from the number ``first`` on, until one ends the job; return how each of them ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "notes"
        path.touch()
        done = subprocess.run(
            [
                *mpiexec(),
                "-n",
                str(tries.ranks),
                *python("-m", "tests.failure.mismatched", *map(str, (tries.seed, first, tries.count - first, path))),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "FOLDER": folder,
                "MPISHARD_DEBUG": str(int(tries.debug)),
                "MPISHARD_TIMEOUT": str(TIMEOUT_S[tries.debug]),
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=600,
        )
        notes = [json.loads(line) for line in path.read_text().splitlines()]
    cases: dict[int, list[dict[str, str]]] = {}
    for what in notes:
        cases.setdefault(what["case"], []).append(what)
    assert cases, done.stdout
    found = []
    for told in cases.values():
        pair, family = next((what["pair"], what["family"]) for what in told if "pair" in what)
        texts = [what["came"] for what in told if "came" in what]
        output = "" if any("over" in what for what in told) else f"exit {done.returncode}\n{done.stdout}"
        found.append(End(pair, family, ending(texts, output), "\n".join([*texts, output[-3000:]])))
    return found


def ending(texts: list[str], output: str) -> str:
    """How a pair ended, by what its ranks came to and what a job that it ended has printed."""
    errors = [text for text in texts if text not in ("right", "wrong")]
    if errors:
        if any(text.startswith("after") for text in errors):
            return LATE
        return NAMED if all(is_clear(text) for text in errors) else NAMELESS
    if not output:
        return WRONG if "wrong" in texts else RIGHT
    if re.search(r"MPISHARD_TIMEOUT: \S.* has waited \d+ s for rank", output):
        return WATCHDOG
    return ABORTED if re.search(r"MPI|Abort|abort", output) else NAMELESS


def is_clear(text: str) -> bool:
    """Whether an error says that ranks differ, and which."""
    ours = re.match(r"(Desync|Layout|Mesh|File|Checkpoint)Error", text)
    return bool(ours and "rank" in text and re.search(r"differ|does not fit|MPI failed on rank", text))


def tried(tries: Tries, starts: int = 10**6) -> Iterator[End]:
    """Try pairs, or as many as ``starts`` jobs come to."""
    number = 0
    while number < tries.count and starts:
        found = batch(tries, number)
        yield from found
        number += len(found)
        starts -= 1


def is_right(end: End, debug: bool) -> bool:
    if end.family == "messages of two ranks against a call of all":
        return end.end in {NAMED, RIGHT, WATCHDOG} | (set() if debug else {ABORTED})
    may = {NAMED, RIGHT} if debug and "different communicators" not in end.family else {NAMED, RIGHT, WATCHDOG, ABORTED}
    # what has no mark of its own is named at the next small sum, as docs/robustness.md says
    if not debug and not re.search("broadcast|torch.distributed", end.pair):
        may |= {LATE}
    return end.end in may


@pytest.mark.parametrize("debug", [False, True])
def test_pairs_of_calls(debug: bool, request: pytest.FixtureRequest) -> None:
    tries = Tries(request.config.option.seed, 3, 20, debug)
    bad = [end for end in tried(tries, starts=1) if not is_right(end, debug)]
    assert not bad, "\n".join(map(str, (tries, *bad)))


def shortened(text: str) -> list[str]:
    lines = text.splitlines()
    return lines if len(lines) < 60 else [*lines[:40], "...", *lines[-15:]]


def main(seed: int, count: int, *ranks: int) -> None:
    wrong = 0
    debugs = json.loads(os.environ.get("FUZZ_DEBUGS", "[true, false]"))
    for tries in (Tries(seed, n, count, debug) for debug in debugs for n in ranks):
        found = []
        for end in tried(tries):
            found.append(end)
            if end.end == ABORTED or not is_right(end, tries.debug):
                wrong += end.end != ABORTED
                text = "\n    ".join([f"- {tries}: {end.pair}: {end.end}", *shortened(end.text)])
                print(text, file=sys.stderr, flush=True)
        ends = Counter((end.family, end.end) for end in found)
        columns = (NAMED, WATCHDOG, RIGHT, ABORTED, *BAD)
        print(
            f"\nMPISHARD_DEBUG={int(tries.debug)}, {tries.ranks} ranks\n\n| class | tried |", " | ".join(columns), "|"
        )
        print("| --- " * (2 + len(columns)) + "|")
        for kind in sorted({kind for kind, _ in ends}):
            numbers = [ends[kind, end] for end in columns]
            print(f"| {kind} | {sum(numbers)} |", " | ".join(map(str, numbers)), "|")
        sys.stdout.flush()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
