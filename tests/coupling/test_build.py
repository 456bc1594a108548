"""The libraries for hosts are those of the compilers that are there now, and of one MPI library."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from mpishard.errors import MpishardError
from mpishard.insitu.build import build
from tests.coupling.conftest import wrapper


def script(path: Path, line: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path.parent)


@pytest.fixture
def cc() -> str:
    found = wrapper("mpicc")
    if found is None:
        pytest.skip("no MPI compiler that works beside the launcher")
    return found


def test_another_compiler_of_the_same_name_compiles_anew(cc, tmp_path, monkeypatch):
    times = []
    folders = [script(tmp_path / name / "mpicc", f'exec {cc} "$@"') for name in ("one", "other")]
    for folder in (folders[0], folders[0], folders[1], folders[1]):
        monkeypatch.setenv("PATH", folder, prepend=":")
        build(tmp_path / "built", mpif90="no Fortran")
        times.append((tmp_path / "built" / "lib" / "libmpishard.so").stat().st_mtime_ns)
    assert times[0] == times[1] < times[2] == times[3]


def test_the_module_of_an_earlier_compiler_does_not_stay(cc, tmp_path):
    left = tmp_path / "built" / "include" / "mpishard.mod"
    left.parent.mkdir(parents=True)
    left.touch()
    build(tmp_path / "built", cc, "no Fortran")
    assert not left.exists()


def test_a_folder_whose_name_is_two_words(cc, tmp_path):
    folder = tmp_path / "two words"
    built = build(folder, cc, "no Fortran", link=True)
    include, *libs = shlex.split(f"{built.cflags} {built.libs}")
    assert include == f"-I{folder}/include"
    assert libs == [f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib", "-lmpishard_f", "-lmpishard_link"]


def test_two_mpi_libraries_are_refused(cc, tmp_path):
    fortran = shutil.which("gfortran")
    if fortran is None:
        pytest.skip("no gfortran")
    other = tmp_path / "other"
    other.mkdir()
    (other / "mpi.c").write_text("void mpi_init_(int *error) { *error = 0; }\n")
    module = "module mpi_f08\ntype, bind(c) :: MPI_Comm\ninteger :: MPI_VAL\nend type\nend module\n"
    (other / "mpi_f08.f90").write_text(module)
    subprocess.run([fortran, "-c", "mpi_f08.f90"], cwd=other, check=True)
    library = other / "libmpi.so.99"
    subprocess.run([cc, "-shared", "-fPIC", "-Wl,-soname,libmpi.so.99", other / "mpi.c", "-o", library], check=True)
    script(other / "mpif90", f'exec {fortran} -I{other} "$@" {library} -Wl,-rpath,{other}')
    for _ in range(2):  # not taken for built the second time
        with pytest.raises(MpishardError, match=r"of two MPI libraries[\s\S]*libmpi\.so\.99"):
            build(tmp_path / "built", cc, str(other / "mpif90"))
    build(tmp_path / "built", cc, "no Fortran")


def test_several_at_once_compile_one_after_the_other(cc, tmp_path, monkeypatch):
    busy = tmp_path / "busy"
    alone = f'case "$*" in *" -o "*) mkdir {busy} || exit 1;; esac; {cc} "$@"; code=$?; rmdir {busy} 2>&-; exit $code'
    monkeypatch.setenv("PATH", script(tmp_path / "bin" / "mpicc", alone), prepend=":")
    with ThreadPoolExecutor(3) as pool:
        built = list(pool.map(lambda _: build(tmp_path / "built", mpif90="no Fortran"), range(3)))
    assert built[0] == built[1] == built[2]


def test_what_failed_halfway_is_not_taken_for_the_one_before(cc, tmp_path, monkeypatch):
    good = script(tmp_path / "good" / "mpicc", f'exec {cc} "$@"')
    bad = script(tmp_path / "bad" / "mpicc", f'case "$*" in *python.c*) exit 1;; esac; exec {cc} "$@"')
    library, times = tmp_path / "built" / "lib" / "libmpishard_link.so", []
    for folder in (good, bad, good):
        with monkeypatch.context() as patch:
            patch.setenv("PATH", folder, prepend=":")
            with pytest.raises(MpishardError, match="a compiler failed") if folder is bad else nullcontext():
                build(tmp_path / "built", mpif90="no Fortran")
        times.append(library.stat().st_mtime_ns)
    assert times[0] < times[1] < times[2]
