"""Compile the libraries for hosts in C and Fortran, with the user's own MPI wrappers, from sources in the package."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mpishard.errors import MissingPackageError, MpishardError

NATIVE = Path(__file__).with_name("native")
SOURCES = ("object.c", "layout.c", "meeting.c", "domain.c", "link.c", "fortran.c")
# the second in a file of its own: a host that calls nothing of it needs no libmpishard
MODULES = ("mpishard", "mpishard_hook")

# of any compiler of Fortran: no module
_PROGRAM = """program main
  integer :: error
  call MPI_Init(error)
end program
"""
# of C, which Fortran's stand on: as `ldd` has them
_LIBMPI = re.compile(r"^\s*(lib(?:mpi|mpich|mpi_abi|mpi_cray|mpi_gnu\w*)[-.\w]*\.so[.\d]*) => (/\S+|not)", re.MULTILINE)


class Built(NamedTuple):
    """What a compiler and a linker need to be told, in a shell's words."""

    cflags: str
    libs: str


def build(
    folder: str | os.PathLike[str], mpicc: str | None = None, mpif90: str | None = None, *, link: bool = False
) -> Built:
    """Compile both libraries and, where there is a Fortran compiler, module ``mpishard``, where not current.

    Not collective.

    Parameters
    ----------
    folder
        Gets ``include`` and ``lib``.
    mpicc, mpif90
        The MPI wrappers; ``$MPICC`` and ``$MPIFC``, or those of these names on the path, if not given.
    link
        Whether to link ``libmpishard_link``, side by side alone, instead of ``libmpishard``.

    Returns
    -------
    Built

    Raises
    ------
    MpishardError
        There is no wrapper, or it fails: with what it printed; or the two are of different MPI libraries.

    Notes
    -----
    ``lib`` has ``libmpishard_link.so`` (plain C and MPI), ``libmpishard.so`` (the same, and what starts Python at the
    first hook: this one, if ``MPISHARD_PYTHON`` names no other) and ``libmpishard_f.a`` (the Fortran module's code).
    """
    folder = Path(folder).resolve()
    include, lib = folder / "include", folder / "lib"
    cc = _wrapper(mpicc, "MPICC", "mpicc")
    if cc is None:
        raise MissingPackageError(
            "config: no MPI compiler",
            expected="mpicc on the path, or in $MPICC",
            got="none",
            fix="load the MPI that the simulation is built with",
        )
    fc = _wrapper(mpif90, "MPIFC", "mpif90")
    marks = [_told(cc), _told(fc or []), sys.executable]
    marks += [f"{path.name} {path.stat().st_mtime_ns}" for path in sorted(NATIVE.iterdir())]
    stamp, mark = folder / "built", "\n".join(marks)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        if not stamp.exists() or stamp.read_text() != mark:
            stamp.unlink(missing_ok=True)  # what follows may fail halfway
            _compile(folder, cc, fc)
            stamp.write_text(mark)
    libs = f"-L{lib}", f"-Wl,-rpath,{lib}", "-lmpishard_f", f"-lmpishard{'_link' if link else ''}"
    return Built(shlex.quote(f"-I{include}"), shlex.join(libs))


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Have other processes wait that want to compile into the same folder, where its file system has locks."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _compile(folder: Path, cc: list[str], fc: list[str] | None) -> None:
    include, lib = folder / "include", folder / "lib"
    for place in (include, lib):
        place.mkdir(parents=True, exist_ok=True)
    shutil.copy(NATIVE / "mpishard.h", include)
    (include / "mpishard.mod").unlink(missing_ok=True)  # of an earlier compiler, with code that goes
    c = [*cc, "-std=c99", "-O2", "-fPIC", "-fvisibility=hidden", f"-I{NATIVE}"]
    sources = [os.fspath(NATIVE / name) for name in SOURCES]
    python = [f'-DMPS_PYTHON="{sys.executable}"', os.fspath(NATIVE / "python.c"), "-ldl", "-lm"]
    for name, rest in (("libmpishard_link.so", []), ("libmpishard.so", python)):
        _run([*c, "-shared", *sources, *rest, f"-Wl,-soname,{name}", "-o", os.fspath(lib / name)], folder)
    objects = []
    if fc is not None:
        for name in MODULES:
            _run([*fc, "-O2", "-fPIC", "-c", os.fspath(NATIVE / f"{name}.f90"), "-o", f"{name}.o"], lib)
            objects.append(f"{name}.o")
        (lib / "mpishard.mod").replace(include / "mpishard.mod")
        for left in lib.glob("*.smod"):
            left.unlink()
        _check_same(cc, fc, lib)
    # ar keeps what an archive of another version had besides
    (lib / "libmpishard_f.a").unlink(missing_ok=True)
    _run(["ar", "rcs", "libmpishard_f.a", *objects], lib)
    for name in objects:
        (lib / name).unlink()


def _wrapper(given: str | None, variable: str, name: str) -> list[str] | None:
    words = shlex.split(given or os.environ.get(variable, name))
    return words if words and shutil.which(words[0]) else None


def _told(wrapper: list[str]) -> str:
    """Return what tells a wrapper from another of the same name: where it is, and what it calls."""
    if not wrapper:
        return "none"
    place = shutil.which(wrapper[0]) or wrapper[0]
    shown = subprocess.run([*wrapper, "-show"], check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return f"{shlex.join(wrapper)} {place} {os.path.realpath(place)} {'' if shown.returncode else shown.stdout.strip()}"


def _check_same(cc: list[str], fc: list[str], lib: Path) -> None:
    """Refuse wrappers of two MPI libraries, whatever they are called: a host would load both, and crash."""
    program, linked = lib / "program.f90", lib / "program"
    program.write_text(_PROGRAM)
    _run([*fc, program.name, "-o", linked.name], lib)
    of_c, of_fortran = _mpi_of(lib / "libmpishard_link.so"), _mpi_of(linked)
    for left in (program, linked):
        left.unlink()
    if of_c and of_fortran and not of_c & of_fortran:
        raise MpishardError(
            "config: the compilers of C and Fortran are of two MPI libraries",
            expected=f"one MPI library behind {shlex.join(cc)} and {shlex.join(fc)}",
            got=f"{', '.join(sorted(of_c))} and {', '.join(sorted(of_fortran))}",
            fix="name the wrappers of one in $MPICC and $MPIFC; MPIFC= leaves Fortran out",
        )


def _mpi_of(linked: Path) -> set[str]:
    """Return the MPI libraries that a program or library loads, where the system tells."""
    if shutil.which("ldd") is None:
        return set()
    done = subprocess.run(["ldd", linked], check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found = _LIBMPI.findall(done.stdout)
    return {os.path.realpath(place) if place.startswith("/") else name for name, place in found}


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, check=False, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise MpishardError(
            "config: a compiler failed",
            expected=shlex.join(command),
            got=done.stdout.strip(),
            fix="name the wrappers that the simulation is built with, in $MPICC and $MPIFC",
        )
