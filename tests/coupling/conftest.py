"""Jobs of several programs, each under a launcher of its own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mpishard.insitu.build import build
from tests.conftest import ended, mpiexec, python

Part = tuple[int, Sequence[object]]


@pytest.fixture
def programs(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``programs((2, "text of a program"), (1, ["prog.py", "--flag"]), timeout_s=60)``; return the ended job.

    A text is written to a file and run by this Python; a sequence that ends with a text is a command.
    """
    count = 0

    def command(what: object) -> list[str]:
        nonlocal count
        if not isinstance(what, str):
            first, *rest = [os.fspath(word) for word in what]  # type: ignore[attr-defined]
            return python(*rest) if first == sys.executable else [first, *rest]
        count += 1
        path = tmp_path / f"program{count}.py"
        path.write_text(what)
        return python(path)

    def run(*parts: Part, timeout_s: float = 120, env: dict[str, str] | None = None, flags: Sequence[str] = ()):
        words = [*mpiexec(), *flags]
        for i, (ranks, what) in enumerate(parts):
            words += [":"] * (i > 0) + ["-n", str(ranks), *command(what)]
        # let Open MPI 4 and 5 start small jobs on any machine, in a container too
        anywhere = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        return ended(words, tmp_path, timeout_s, {**anywhere, **(env or {})})

    return run


def mpi_of_launcher() -> str:
    """Return whose the launcher is, "Open MPI 4" among others."""
    version = subprocess.run([*mpiexec(), "--version"], capture_output=True, text=True).stdout
    found = re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)", version)  # `mpirun` names the one, `mpiexec` the other
    return f"Open MPI {found[1]}" if found else "another"


@pytest.fixture
def survives() -> Sequence[str]:
    """Return the launcher's flags with which a job outlives one of its ranks."""
    if mpi_of_launcher() == "Open MPI 4":
        return ("--enable-recovery",)
    pytest.skip("this launcher ends the whole job with a rank")


def wrapper(name: str) -> str | None:
    """Return the compiler of the MPI that the launcher belongs to, where there is one that works."""
    launcher = shutil.which(mpiexec()[0])
    assert launcher is not None
    found = Path(launcher).with_name(name)
    works = found.exists() and subprocess.run([found, "--version"], capture_output=True).returncode == 0
    return os.fspath(found) if works else None


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile a host in C or Fortran against the libraries, which are built once: ``compiled(source, program)``."""
    folder = tmp_path_factory.mktemp("libraries") / "built"
    cc, fc = wrapper("mpicc"), wrapper("mpif90")

    def compile_host(source: Path, program: Path, *, link: bool = False) -> Path:
        compiler = cc if source.suffix == ".c" else fc
        if cc is None or compiler is None:
            pytest.skip(f"no MPI compiler for {source.suffix} that works beside the launcher")
        flags = ["-Wall", "-Werror"] if source.suffix == ".c" else []
        built = build(folder, cc, fc or "no Fortran", link=link)
        words = [compiler, *flags, os.fspath(source), *shlex.split(f"{built.cflags} {built.libs}"), "-lm"]
        done = subprocess.run([*words, "-o", os.fspath(program)], cwd=program.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return program

    return compile_host
