"""A process that is killed at a random moment of its work, again and again; the next one goes on from the files.

Run as a program it forks the processes, so that they share the imports. The environment variable PROGRAM has the
text that defines ``first(i)``, which checks the files and returns the step to go on with, and ``work(step, i)``;
``i`` counts the processes. One that hangs ends by an alarm; how long all of them take is not limited.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

# of one process, which does a few steps
PATIENCE_S = 300


def killed(program: str, times: int, *, may_lose: int = 0, **environment: str) -> int:
    """Run the program and have it killed ``times`` times; return the step that it was at in the end.

    Every process does at least two steps, then dies within about two more, whatever a step takes here, unless it
    dies by its own hand before. Fails where one goes on with a step earlier than the last one begun by its
    predecessor less ``may_lose``.
    """
    from tests.conftest import python  # what the program below need not import

    root = os.fspath(Path(__file__).parents[2])
    done = subprocess.run(
        python("-m", "tests.failure.killed", str(times), str(may_lose)),
        cwd=root,
        env={**os.environ, "PYTHONPATH": root, "PROGRAM": program, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split()[-1])


def child(program: str, report: int, i: int) -> None:
    """Work until the end comes."""
    signal.alarm(PATIENCE_S)
    space: dict[str, object] = {}
    exec(program, space)
    for step in itertools.count(space["first"](i)):  # type: ignore[operator]
        os.write(report, b"%d\n" % step)
        space["work"](step, i)  # type: ignore[operator]


def steps_of(program: str, i: int) -> tuple[int, int]:
    """Return the first and the last step that one process began."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            child(program, write, i)
        except BaseException:  # noqa: BLE001  the end of the process, whatever it was
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as reports:
        begun = [reports.readline(), reports.readline()]
        start = time.monotonic()
        begun.append(reports.readline())  # empty where it is dead already
        time.sleep(2 * random.random() * (time.monotonic() - start))
        os.kill(pid, signal.SIGKILL)
        begun += reports
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended != -signal.SIGALRM, f"it hung: no end of a few steps within {PATIENCE_S} s, after {begun}"
    assert ended == -signal.SIGKILL, f"it ended by itself: {ended}"
    steps = [int(line) for line in begun if line]
    return steps[0], steps[-1]


def main(times: int, may_lose: int) -> None:
    """Kill one after the other."""
    random.seed(0)
    reached = 0
    for i in range(times):
        first, last = steps_of(os.environ["PROGRAM"], i)
        assert first >= reached - may_lose, f"a step was lost: {first} after {reached}"
        reached = last
    print("REACHED", reached)


if __name__ == "__main__":
    import h5py  # noqa: F401  what all of them need, and no MPI: every child is an MPI job of its own
    import torch  # noqa: F401

    main(*map(int, sys.argv[1:]))
