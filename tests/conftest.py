"""Which tests run where, the fixtures they share, and what keeps ranks in step.

Folders in ``SERIAL`` run once, without an MPI launcher (they start their own MPI jobs, or need none).
Everything else runs under a launcher, at every number of ranks in ``SIZES``::

    python -m pytest tests                          # the serial part
    mpiexec -n 2 python -m pytest tests --ranks 2   # the parallel part, once per size

A test of the other part, or marked ``ranks`` for other sizes, is deselected, never skipped.
"""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

# Before torch, and before mpishard reads them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPISHARD_TIMEOUT", "120")

import hypothesis
import pytest

TESTS = Path(__file__).parent
SERIAL = ("layout", "failure", "examples", "packaging", "coupling")
CLUSTER = "cluster"
SIZES = (1, 2, 3, 4)
# What launchers tell each of their ranks: hydra, Open MPI, Slurm.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")

# Ranks that draw different examples would make different calls.
hypothesis.settings.register_profile("ranks", derandomize=True, deadline=None, database=None)
# The same examples in every run; `--hypothesis-profile=search` looks for new ones.
hypothesis.settings.register_profile("serial", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("search", max_examples=500, deadline=None, print_blob=True)


def under_launcher() -> bool:
    return any(name in os.environ for name in RANK_VARIABLES)


if under_launcher():
    # Ranks that clean up old temporary folders at the same time meet each other's half-removed ones.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="mpishard-tests-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ranks", type=int, help="fail unless there are exactly this many ranks")
    parser.addoption("--cluster", action="store_true", help="run tests/cluster, which needs Slurm and munge")


@pytest.hookimpl(trylast=True)  # after the reporter exists
def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("--ranks")
    if not under_launcher():
        if config.getoption("--hypothesis-profile", None) is None:
            hypothesis.settings.load_profile("serial")
        if wanted is not None:
            raise pytest.UsageError(f"--ranks {wanted}: no MPI launcher started this process; use mpiexec -n {wanted}")
        return
    hypothesis.settings.load_profile("ranks")
    from mpi4py import MPI

    from tests.lockstep import Lockstep

    size = MPI.COMM_WORLD.size
    told = next((int(os.environ[name]) for name in SIZE_VARIABLES if name in os.environ), size)
    if size not in SIZES or size != told or wanted not in (None, size):
        raise pytest.UsageError(
            f"MPI has {size} ranks, the launcher started {told}, --ranks asks for {wanted}, tests know {SIZES}; "
            "does the launcher belong to the MPI library that mpi4py loads?"
        )
    config.pluginmanager.register(Lockstep(config), "lockstep")


def pytest_unconfigure() -> None:
    if under_launcher():
        shutil.rmtree(os.environ["PYTEST_DEBUG_TEMPROOT"], ignore_errors=True)


def sizes_of(item: pytest.Item) -> tuple[int, ...]:
    """Return the numbers of ranks that a test runs at; of its markers, the nearest counts."""
    marker = item.get_closest_marker("ranks")
    if marker is None:
        return SIZES
    if not marker.args or not set(marker.args) <= set(SIZES):
        raise pytest.UsageError(f"{item.nodeid}: ranks{marker.args} must name sizes among {SIZES}, or it never runs")
    return marker.args


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parallel = under_launcher()
    if parallel:
        from mpi4py import MPI
    kept, dropped = [], []
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder == CLUSTER:
            runs = config.getoption("--cluster") and not parallel
        elif folder in SERIAL:
            runs = not parallel
        else:
            sizes = sizes_of(item)
            runs = parallel and MPI.COMM_WORLD.size in sizes
        (kept if runs else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def pytest_collection_finish() -> None:
    # what was imported stays: the many collections during the tests need not look at it again
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    if not under_launcher():
        return "part: serial (no MPI launcher); the other tests run under mpiexec -n 1, 2, 3 and 4"
    from mpi4py import MPI

    library = MPI.Get_library_version().splitlines()[0].rstrip("\0")
    return f"part: parallel, {MPI.COMM_WORLD.size} ranks, {library}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran = any(terminalreporter.stats.get(outcome) for outcome in ("passed", "failed", "error", "xfailed"))
    if terminalreporter.stats.get("deselected") and not ran:
        terminalreporter.write_line(
            "Nothing ran: every test asked for belongs to the other part (tests/conftest.py says which), "
            "or to another number of ranks.",
            red=True,
        )


Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch() -> Launch:
    """Run a Python program under the MPI launcher, for serial tests.

    ``launch(size, "program.py", "--flag", timeout_s=60, env={"NAME": "value"})`` returns the completed
    process with stdout and stderr in one text. The launcher is ``$MPIEXEC``, or that of this environment.
    Past the timeout the whole job is killed and the test fails with what it wrote.
    """

    def run(
        size: int, *args: str | os.PathLike[str], timeout_s: float = 60, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [*mpiexec(), "-n", str(size), sys.executable, *map(os.fspath, args)]
        process = subprocess.Popen(
            command,
            cwd=TESTS.parent,
            env={**os.environ, "PYTHONPATH": os.fspath(TESTS.parent), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"no end within {timeout_s} s: {shlex.join(command)}\n{output}", pytrace=False)
        return subprocess.CompletedProcess(command, process.returncode, output)

    return run


def mpiexec() -> Sequence[str]:
    if given := os.environ.get("MPIEXEC"):
        return shlex.split(given)
    beside = Path(sys.executable).with_name("mpiexec")
    found = os.fspath(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.fail("no mpiexec: install an MPI library, or the extra mpishard[mpich]", pytrace=False)
    return [found]
