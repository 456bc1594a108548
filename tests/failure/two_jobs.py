"""Two jobs that save into one folder at drawn moments, and are killed in some rounds: one saves, one gets an error.

``python -m tests.failure.two_jobs FOLDER ROUNDS SEED`` forks the jobs, one process each, which share the imports.
After each round a third one loads: no step is lost that a job was told to be saved.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from typing import Any

STEPS = 3
# of one process, which does a few steps
PATIENCE_S = 300


def saving(folder: str, draw: random.Random, report: int, go: int) -> None:
    """Save a few steps, from a drawn moment on; tell what came of each."""
    import torch

    import mpishard as ms

    mesh = ms.init_mesh((1,))

    def tell(*words: object) -> None:
        os.write(report, (" ".join(map(str, (os.getpid(), *words))).replace("\n", " ")[:1500] + "\n").encode())

    tell("ready")
    os.read(go, 1)
    time.sleep(0.1 * draw.random() ** 2)
    for _ in range(STEPS):
        step = time.monotonic_ns() // 100_000 % 10**10  # both jobs count with one clock
        tell("begun", step)
        x = ms.distribute_tensor(torch.full((64, 64), float(os.getpid())), mesh, (ms.Shard(0),))
        try:
            extra = (step, os.getpid())
            saved = ms.io.save_checkpoint(
                folder, step, tensors={"x": x}, extra=extra, rng=False, keep=2, asynchronous=draw.random() < 0.5
            )
            if saved is not None:
                saved.wait()
        except ms.errors.FileError as e:
            tell("refused", e)
            return
        tell("saved", step)
        time.sleep(0.02 * draw.random())


def loading(folder: str, report: int) -> None:
    """Load the last step; all of it is of one job."""
    import torch

    import mpishard as ms

    found = ms.io.load_checkpoint(folder, mesh=ms.init_mesh((1,)), placements=(ms.Shard(0),), rng=False)
    step, job = found.extra
    assert step == found.step
    assert torch.equal(found.tensors["x"].full_tensor(), torch.full((64, 64), float(job)))
    os.write(report, f"{job} loaded {step}\n".encode())


def forked(work: Any, *args: Any) -> int:
    """Do work in a child, which ends when it hangs."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(PATIENCE_S)
            work(*args)
            status = 0
        except BaseException:  # noqa: BLE001  the end of the process, whatever it was
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def a_round(folder: str, draw: random.Random) -> str:
    """Let two jobs save, check what they told and what is there; return what came of it."""
    (read, report), (wait, go) = os.pipe(), os.pipe()
    jobs = [forked(saving, folder, random.Random(draw.random()), report, wait) for _ in range(2)]
    reports = os.fdopen(read)
    told = [reports.readline().split(maxsplit=2) for _ in jobs]
    assert {words[1] for words in told} == {"ready"}, told
    os.write(go, b"gg")
    doomed = draw.choice([*jobs, None, None])
    if doomed is not None:
        time.sleep(0.3 * draw.random())
        os.kill(doomed, signal.SIGKILL)
    statuses = {pid: ended(pid) for pid in jobs}
    status = ended(forked(loading, folder, report)) if _any_saved(folder) else 0
    os.close(report)
    told += [line.split(maxsplit=2) for line in reports]
    for fd in (wait, go):
        os.close(fd)
    reports.close()
    what = f"{statuses}, killed {doomed}: {told}"
    assert status == 0, f"nothing could be loaded after {what}"
    steps = {kind: [(w[0], int(w[2])) for w in told if w[1] == kind] for kind in ("begun", "saved", "loaded")}
    refused = {w[0]: w[2] for w in told if w[1] == "refused"}
    saved_by = [job for job, _ in steps["saved"]]
    for pid in jobs:
        assert statuses[pid] == 0 or (pid == doomed and statuses[pid] == -signal.SIGKILL), what
        if pid != doomed:
            assert saved_by.count(str(pid)) == (0 if str(pid) in refused else STEPS), what
    for job, text in refused.items():
        other = next(str(pid) for pid in jobs if str(pid) != job)
        assert "another job saves into" in text, what
        assert other in text, what
    assert doomed is not None or len(refused) < 2, what
    # who saves has the folder to its end
    assert saved_by in (sorted(saved_by), sorted(saved_by, reverse=True)), what
    if steps["saved"]:
        assert steps["loaded"], what
        assert steps["loaded"][0][1] >= max(step for _, step in steps["saved"]), f"a step was lost: {what}"
    return "refused" if refused else "in turn" if len(set(saved_by)) == 2 else "killed"


def _any_saved(folder: str) -> bool:
    return os.path.isdir(folder) and any(name.startswith("step_") for name in os.listdir(folder))


def main(folder: str, rounds: int, seed: int) -> None:
    """Play so many rounds, and print how often what came."""
    draw = random.Random(seed)
    came = [a_round(folder, draw) for _ in range(rounds)]
    print(*(f"{what}: {came.count(what)}" for what in sorted(set(came))))


if __name__ == "__main__":
    import h5py  # noqa: F401  what all of them need, and no MPI: every child is an MPI job of its own
    import torch  # noqa: F401

    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
