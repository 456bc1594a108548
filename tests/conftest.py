"""Which tests run where, the fixtures they share, and what keeps ranks in step.

Folders in ``SERIAL`` run once, without an MPI launcher (they start their own MPI jobs, or need none).
Everything else runs under a launcher, at every number of ranks in ``SIZES``::

    python -m pytest tests                          # the serial part
    mpiexec -n 2 python -m pytest tests --ranks 2   # the parallel part, once per size

A test of the other part, or marked ``ranks`` for other sizes, is deselected, never skipped.

Every run has a seed, which it prints: the order of the tests, the cases that hypothesis draws and the tests of a
sample follow from it. ``--seed N`` repeats a run. ``--sample K`` leaves of the tests that run in full at another
size, or on another stack, one in K; ``--stack`` leaves those whose outcome may depend on the MPI and HDF5 libraries.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

# Before torch, and before mpishard reads them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPISHARD_TIMEOUT", "120")

import hypothesis
import pytest

TESTS = Path(__file__).parent
SERIAL = ("layout", "failure", "examples", "packaging", "coupling", "job", "scale")
CLUSTER = "cluster"
SIZES = (1, 2, 3, 4, 6)
# What runs at 6 ranks, where someone asks for it: operations, and what they send.
AT_SIX = ("autograd", "ops")
# Without a GPU its tests are rehearsed over an emulated device, and at one size.
GPU, REHEARSAL_SIZE = "gpu", 2
# What another MPI or HDF5 library may change: everything that sends, waits, reads or writes, and the models.
STACK = (
    *("autograd", "cluster", "comm", "coupling", "failure", "graph", "insitu", "io", "models", "nn", "points"),
    *("testing", "test_conv", "test_conv_overlap", "test_reduction", "test_traffic"),
)
# Where every test runs; other sizes may take a sample. On another stack each draws one of so many turns, those of sizes
# and idle ones: more ranks than cores take twice as long.
FULL_SIZES, STACK_SIZES, STACK_TURNS = (2,), (2, 2, 4), 5
# Programs that run in full on one stack, another or not; there may be a sample of them on the one that is left.
FULL_ON_STACK = {"failure": False, "coupling": True}
# What launchers tell each of their ranks: hydra, Open MPI, Slurm.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")

# How long an example takes is the machine's affair.
patient = {"deadline": None, "database": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("default", **patient)
# `--hypothesis-profile=search` looks longer
hypothesis.settings.register_profile("search", max_examples=500, print_blob=True, **patient)


def under_launcher() -> bool:
    return any(name in os.environ for name in RANK_VARIABLES)


def told_size() -> int:
    """Return the number of ranks that the launcher says it started, 0 where it says none."""
    return next((int(os.environ[name]) for name in SIZE_VARIABLES if name in os.environ), 0)


# Ranks that share a core leave it to the one that works: MPICH spins otherwise, Open MPI knows by itself. As many ranks
# as cores spin, also beside the serial part: asleep, they take a third longer.
os.environ.setdefault("MPIR_CVAR_POLLS_BEFORE_YIELD", "100")
os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", str(int(told_size() > (os.cpu_count() or 1))))

if under_launcher():
    # Ranks that clean up old temporary folders at the same time meet each other's half-removed ones.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="mpishard-tests-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ranks", type=int, help="fail unless there are exactly this many ranks")
    parser.addoption("--cluster", action="store_true", help="run tests/cluster, which needs Slurm and munge")
    parser.addoption("--seed", type=int, help="of the order, the drawn cases and the sample; printed by every run")
    parser.addoption("--sample", type=int, default=1, metavar="K", help="one test in K, of those in full elsewhere")
    parser.addoption("--stack", action="store_true", help="only what the MPI and HDF5 libraries may change")


@pytest.hookimpl(trylast=True)  # after the reporter exists
def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("--ranks")
    if config.getoption("--hypothesis-profile", None) is None:
        hypothesis.settings.load_profile("default")
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(10**6)
    if not under_launcher():
        hypothesis.core.global_force_seed = config.option.seed
        if wanted is not None:
            raise pytest.UsageError(f"--ranks {wanted}: no MPI launcher started this process; use mpiexec -n {wanted}")
        return
    from mpi4py import MPI

    from tests.lockstep import Lockstep

    size = MPI.COMM_WORLD.size
    told = told_size() or size
    if size not in SIZES or size != told or wanted not in (None, size):
        raise pytest.UsageError(
            f"MPI has {size} ranks, the launcher started {told}, --ranks asks for {wanted}, tests know {SIZES}; "
            "does the launcher belong to the MPI library that mpi4py loads?"
        )
    # ranks that draw different examples would make different calls
    config.option.seed = hypothesis.core.global_force_seed = MPI.COMM_WORLD.bcast(config.option.seed)
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


@functools.cache
def part_of(path: Path) -> str:
    """Return the first folder of a path below tests/."""
    return path.relative_to(TESTS).parts[0] if path != TESTS and path.is_relative_to(TESTS) else ""


def belongs(folder: str, config: pytest.Config) -> bool:
    """Whether the tests of a folder run in this part."""
    if folder == CLUSTER:
        return bool(config.getoption("--cluster")) and not under_launcher()
    return (folder in SERIAL) != under_launcher()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import nothing that would be deselected, where nobody asked for it by name."""
    folder = part_of(collection_path)
    asked = {part_of(Path(arg.partition("::")[0]).resolve()) for arg in config.args}
    return True if folder and "" in asked and collection_path.is_dir() and not belongs(folder, config) else None


def chosen(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether a test runs here: in this part, at this size, on this stack, in this sample."""
    folder = part_of(item.path)
    stack = config.getoption("--stack")
    if not belongs(folder, config) or (stack and {folder, item.path.stem}.isdisjoint(STACK)):
        return False
    drawn = zlib.crc32(f"{config.option.seed} {item.nodeid}".encode())
    of_sample = drawn % config.getoption("--sample") == 0
    if not under_launcher():
        return of_sample or FULL_ON_STACK.get(folder, stack) == stack
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    sizes = {REHEARSAL_SIZE} if folder == GPU and not has_gpu() else set(sizes_of(item))
    if size not in sizes or (size == 6 and folder not in AT_SIX):
        return False
    full = [n for n in (STACK_SIZES if stack else FULL_SIZES) if n in sizes]
    if not full or of_sample:
        return True
    turn = (drawn >> 16) % STACK_TURNS
    return size in (full[turn : turn + 1] if stack else full)


@functools.cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: dict[Path, list[pytest.Item]] = {}
    dropped = []
    for item in items:
        if chosen(item, config):
            kept.setdefault(item.path, []).append(item)
        else:
            dropped.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    # no test needs another one before it; a file's tests stay together, for the fixtures that they share
    draw = random.Random(config.option.seed)
    files = list(kept.values())
    draw.shuffle(files)
    for file in files:
        draw.shuffle(file)
    items[:] = [item for file in files for item in file]


def keep() -> None:
    """Spare what is alive the many collections to come: what is imported, compiled and reported stays."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    keep()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    done = yield
    if nextitem is not None and nextitem.path != item.path:
        keep()
    return done


def pytest_report_header(config: pytest.Config) -> str:
    if not under_launcher():
        return "part: serial (no MPI launcher); the other tests run under mpiexec -n 1, 2, 3 and 4"
    from mpi4py import MPI

    library = MPI.Get_library_version().splitlines()[0].rstrip("\0")
    return f"part: parallel, {MPI.COMM_WORLD.size} ranks, {library}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(f"seed of order, drawn cases and sample: --seed {config.option.seed} repeats them")
    ran = any(terminalreporter.stats.get(outcome) for outcome in ("passed", "failed", "error", "xfailed"))
    if terminalreporter.stats.get("deselected") and not ran:
        terminalreporter.write_line(
            "Nothing ran: every test asked for belongs to the other part (tests/conftest.py says which), "
            "or to another number of ranks.",
            red=True,
        )


@pytest.fixture(autouse=True)
def same_numbers(request: pytest.FixtureRequest) -> None:
    """Let no test draw numbers that depend on the tests before it, which may have left the ranks with others."""
    import torch

    # `torch.manual_seed` asks for devices that are not here, with a stack of this call for each
    seed = torch.manual_seed if has_gpu() else torch.default_generator.manual_seed
    seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled yet, counted, or warned of."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    from mpishard.tensor import compiler

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compiler, "_warned", False)


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """How often to kill what is to survive: in full on one stack, a quarter on another; `MPISHARD_KILLS` as often."""
    more = int(os.environ.get("MPISHARD_KILLS", "1"))
    return lambda times: more * (max(2, times // 4) if request.config.getoption("--stack") else times)


Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def launch() -> Launch:
    """Run a Python program under the MPI launcher, for serial tests.

    ``launch(size, "program.py", "--flag", timeout_s=60, env={"NAME": "value"})`` returns the completed
    process with stdout and stderr in one text. The launcher is ``$MPIEXEC``, or that of this environment. Its ranks
    are ``fresh`` processes, or forked from one that has imported torch (tests/warm.py).
    Past the timeout the whole job is killed and the test fails with what it wrote.
    """

    def run(
        size: int,
        *args: str | os.PathLike[str],
        timeout_s: float = 300,
        env: dict[str, str] | None = None,
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        command = [*mpiexec(), "-n", str(size), *python(*args, fresh=fresh)]
        return ended(command, TESTS.parent, timeout_s, env or {})

    return run


def ended(command: list[str], folder: Path, timeout_s: float, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a job that finds this package, in a folder; past its time, kill all of it and fail."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.fspath(TESTS.parent), **env},
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


def python(*words: str | os.PathLike[str], fresh: bool = False) -> list[str]:
    """Return the words that run a Python program, forked from a process that has imported torch, or fresh."""
    warm = () if fresh else ("-IS", os.fspath(TESTS / "warm.py"), warm_server())
    return [sys.executable, *warm, *map(os.fspath, words)]


@functools.cache
def warm_server() -> str:
    """Start the server of tests/warm.py, which ends with this process, and return its address."""
    folder = tempfile.mkdtemp(prefix="mpishard-warm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = os.path.join(folder, "server")
    server = subprocess.Popen(
        [sys.executable, TESTS / "warm.py", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    atexit.register(server.communicate)
    return path


def mpiexec() -> Sequence[str]:
    if given := os.environ.get("MPIEXEC"):
        return shlex.split(given)
    beside = Path(sys.executable).with_name("mpiexec")
    found = os.fspath(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.fail("no mpiexec: install an MPI library, or the extra mpishard[mpich]", pytrace=False)
    return [found]
