"""A pytest plugin that keeps the ranks of one MPI job in step, and ends the job where they cannot be.

After the call and the tear-down of every test the ranks agree on its outcome: a failure on one is a failure
on all, so every rank leaves with the same exit code. Rank 0 prints the one report, with the
failing ranks' own texts in it. Where the ranks do not meet (one raised, the others wait for it in a
collective; or all wait), every rank dumps its Python stacks and the job is aborted.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import socket
import sys
import threading
import time
import zlib
from array import array
from collections.abc import Generator

import pytest
from mpi4py import MPI

from mpishard.comm import exit

# How long a rank with a failure waits for the others before it gives up on them.
GRACE_S = 20
# Left for the dumps of all stacks before the abort.
DUMP_S = 3
OUTCOMES = ("passed", "skipped", "failed")


class Lockstep:
    """Agrees on every outcome over a communicator of its own, and watches for hangs."""

    def __init__(self, config: pytest.Config) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        # the runner captures descriptors during a test; these stay
        self.out = os.fdopen(os.dup(2), "w", buffering=1)
        exit.uncaptured = self.out.fileno()
        # Any rank can ask the others on its host for their stacks, also while they wait in MPI.
        faulthandler.register(signal.SIGUSR2, file=self.out, all_threads=True)
        host = socket.gethostname()
        everyone = enumerate(self.comm.allgather((host, os.getpid())))
        self.peers = [(rank, pid) for rank, (name, pid) in everyone if name == host]
        # pytest dumps the stacks of each rank at its own limit; only then is the job ended
        self.limit_s = float(config.getini("faulthandler_timeout")) + DUMP_S
        self.doing = "starting"
        self.since = time.monotonic()
        self.finished = threading.Event()
        threading.Thread(target=self._watch, name="lockstep", daemon=True).start()
        if self.comm.rank:
            silence(config)

    def _watch(self) -> None:
        while not self.finished.wait(1):
            if time.monotonic() - self.since > self.limit_s:
                # every rank has just dumped its stacks, by the same limit
                self.out.write(
                    f"\n[rank {self.comm.rank}] hang guard: no progress for {self.limit_s:.0f} s, aborting\n"
                )
                MPI.COMM_WORLD.Abort(1)

    def abort(self, why: str) -> None:
        """Have every rank dump its stacks, one after the other, then end the job. Not collective."""
        self.out.write(f"\n[rank {self.comm.rank}] hang guard, {self.doing}: {why}; the stacks of every rank follow\n")
        for rank, pid in self.peers:
            self.out.write(f"\n[rank {rank}]\n")
            os.kill(pid, signal.SIGUSR2)
            time.sleep(DUMP_S / len(self.peers))
        MPI.COMM_WORLD.Abort(1)

    def agree(self, code: int, failure: str | None = None) -> list[int]:
        """Return the codes of all ranks; where this rank failed, give up on the others soon. Collective."""
        mine, codes = array("i", [code]), array("i", [0] * self.comm.size)
        request = self.comm.Iallgather(mine, codes)
        start = time.monotonic()
        pause = 1e-4
        while not request.Test():
            # ranks share cores: leave them to those that are not here yet
            time.sleep(pause)
            # short, since every round of the exchange waits for the next look of each rank
            pause = min(2 * pause, 1e-3)
            if failure is not None and time.monotonic() - start > GRACE_S:
                self.out.write(f"\n[rank {self.comm.rank}] failed, {self.doing}:\n{failure}\n")
                self.abort(f"this rank failed and the others did not follow within {GRACE_S} s")
        return codes.tolist()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        nodes = "\n".join(item.nodeid for item in session.items)
        if any(self.agree(session.testsfailed)):
            # pytest stops after such errors; a rank that has none stops with the others
            session.testsfailed = max(1, session.testsfailed)
        elif len(set(self.agree(zlib.crc32(nodes.encode()) >> 1))) > 1:
            raise pytest.UsageError("ranks collected different tests: is a parametrisation ordered by a set or a hash?")
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self.doing = f"{report.when} of {item.nodeid}"
        if report.when == "setup" and report.passed:
            # told with the call, where the ranks whose set-up failed, and who have no call, wait with that
            return report
        text = report.longreprtext if report.failed else None
        outcomes = [OUTCOMES[code] for code in self.agree(OUTCOMES.index(report.outcome), text)]
        self.since = time.monotonic()
        if "failed" in outcomes:
            report.longrepr = "\n".join(rank_texts(self.comm.allgather(text)))
        elif len(set(outcomes)) > 1:
            report.longrepr = f"skipped on some ranks only: {outcomes}"
        else:
            return report
        report.outcome = "failed"
        if hasattr(report, "wasxfail"):
            del report.wasxfail
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        self.doing = "finishing"
        session.exitstatus = max(self.agree(int(session.exitstatus)))
        yield

    def pytest_internalerror(self, excrepr: object) -> None:
        self.out.write(f"\n[rank {self.comm.rank}] internal error, {self.doing}:\n{excrepr}\n")
        MPI.COMM_WORLD.Abort(1)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.out.write(f"\n[rank {self.comm.rank}] interrupted, {self.doing}: {excinfo.value}\n")
        MPI.COMM_WORLD.Abort(1)

    def pytest_unconfigure(self) -> None:
        self.finished.set()
        faulthandler.unregister(signal.SIGUSR2)
        self.comm.Free()


def rank_texts(texts: list[str | None]) -> list[str]:
    """Return the failing ranks' texts, each different text once, headed by its ranks. Not collective."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks.setdefault(text, []).append(rank)
    passed = [str(rank) for rank, text in enumerate(texts) if text is None]
    lines = [f"===== rank {', '.join(map(str, which))} =====\n{text}" for text, which in ranks.items()]
    if passed:
        lines.append(f"===== rank {', '.join(passed)}: passed =====")
    return lines


def silence(config: pytest.Config) -> None:
    """Send the report of this rank nowhere, errors of collection and set-up apart. Not collective."""
    old = config.pluginmanager.getplugin("terminalreporter")
    config.pluginmanager.unregister(old)
    config.pluginmanager.register(Quiet(config, io.StringIO()), "terminalreporter")


class Quiet(pytest.TerminalReporter):
    """A report that only says what rank 0's cannot know: what this rank could not import."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        super().pytest_collectreport(report)
        if report.failed:
            sys.__stderr__.write(f"\n[rank {MPI.COMM_WORLD.rank}] {report.nodeid}:\n{report.longreprtext}\n")
