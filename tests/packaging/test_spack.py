"""Spack's recipe and environment: of setup.cfg's bounds, in the layout that Spack loads.

No registry has Spack, so the recipe runs here on stand-ins for its directives, which note what they are given. What
it asks of Spack's own recipes (names, versions, variants) can only be seen with Spack: `spack spec py-mpishard`.
"""

from __future__ import annotations

import configparser
import runpy
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import mpishard as ms

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "jobs" / "spack" / "spack_repo" / "mpishard"
RECIPE = REPOSITORY / "packages" / "py_mpishard" / "package.py"
ARCHITECTURES = ("80", "90")
# wheels that are named after what they were built for
SPACK_NAMES = {"cupy-cuda12x": "py-cupy"}

Directive = tuple[str, tuple[Any, ...], dict[str, Any]]


@pytest.fixture(scope="module")
def recipe() -> tuple[type, list[Directive]]:
    """Run the recipe; return its class, and its directives in order."""
    directives: list[Directive] = []
    defaults: list[dict[str, Any]] = []

    @contextmanager
    def default_args(**given: Any) -> Iterator[None]:
        defaults.append(given)
        yield
        defaults.pop()

    def noting(name: str) -> Any:
        def directive(*args: Any, **given: Any) -> None:
            merged = {key: value for outer in defaults for key, value in outer.items()}
            directives.append((name, args, merged | given))

        return directive

    package = types.ModuleType("spack.package")
    known = ("conflicts", "depends_on", "license", "variant", "version")
    package.__dict__.update({name: noting(name) for name in known})
    package.__dict__.update(default_args=default_args, when=lambda condition: default_args(when=condition))
    package.__dict__["__all__"] = [*known, "default_args", "when"]
    python, cuda = (types.ModuleType(f"spack_repo.builtin.build_systems.{name}") for name in ("python", "cuda"))
    python.__dict__["PythonPackage"] = type("PythonPackage", (), {})
    cuda.__dict__["CudaPackage"] = type("CudaPackage", (), {"cuda_arch_values": ARCHITECTURES})
    parents = ("spack", "spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems")
    with pytest.MonkeyPatch.context() as patch:
        for module in (*map(types.ModuleType, parents), package, python, cuda):
            patch.setitem(sys.modules, module.__name__, module)
        names = runpy.run_path(str(RECIPE))
    return names["PyMpishard"], directives


@pytest.fixture(scope="module")
def declared() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def spec_of(line: str) -> str:
    """Return what Spack calls a requirement of setup.cfg."""
    requirement = Requirement(line)
    (bound,) = requirement.specifier
    assert bound.operator == ">="
    return f"{SPACK_NAMES.get(requirement.name, f'py-{requirement.name.lower()}')}@{bound.version}:"


def specs_of(declared: configparser.ConfigParser, section: str, option: str) -> set[str]:
    return {spec_of(line) for line in declared[section][option].split("\n") if line and not line.startswith("#")}


def dependencies(directives: list[Directive], condition: str | None) -> set[str]:
    """Return the specs on which the package depends under a condition, without their variants."""
    found = [args[0] for name, args, given in directives if name == "depends_on" and given.get("when") == condition]
    return {spec.split(" ")[0] for spec in found}


def test_layout() -> None:
    # what Spack's second package interface expects: the namespace as folders, a package's name as a module's
    assert yaml.safe_load((REPOSITORY / "repo.yaml").read_text()) == {
        "repo": {"namespace": REPOSITORY.name, "api": "v2.0"}
    }
    index = yaml.safe_load((ROOT / "jobs" / "spack" / "spack-repo-index.yaml").read_text())
    assert [ROOT / "jobs" / "spack" / path for path in index["repo_index"]["paths"]] == [REPOSITORY]


def test_source_and_versions(recipe: tuple[type, list[Directive]]) -> None:
    package, directives = recipe
    assert [base.__name__ for base in package.__bases__] == ["PythonPackage", "CudaPackage"]
    assert vars(package)["git"] == f"file://{ROOT}"
    assert [args for name, args, _ in directives if name == "license"] == [("Apache-2.0",)]
    versions = {args[0] for name, args, _ in directives if name == "version"}
    assert "main" in versions
    assert versions <= {"main", ms.__version__}


def test_required_packages(recipe: tuple[type, list[Directive]], declared: configparser.ConfigParser) -> None:
    _, directives = recipe
    required = specs_of(declared, "options", "install_requires")
    tomli = {spec for spec in required if spec.startswith("py-tomli@")}
    python = f"python@{declared['options']['python_requires'].removeprefix('>=')}:"
    assert dependencies(directives, None) == required - tomli | {python, "py-setuptools@77:", "mpi"}
    assert dependencies(directives, "^python@:3.10") == tomli
    assert 'requires = ["setuptools>=77"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(("variant", "extra"), [("+hdf5", "io"), ("+examples", "examples")])
def test_variants_are_extras(
    recipe: tuple[type, list[Directive]], declared: configparser.ConfigParser, variant: str, extra: str
) -> None:
    _, directives = recipe
    assert variant[1:] in {args[0] for name, args, _ in directives if name == "variant"}
    assert dependencies(directives, variant) == specs_of(declared, "options.extras_require", extra)


def test_gpus(recipe: tuple[type, list[Directive]], declared: configparser.ConfigParser) -> None:
    _, directives = recipe
    for arch in ARCHITECTURES:
        expected = specs_of(declared, "options.extras_require", "cuda") | {"py-torch"}
        assert dependencies(directives, f"+cuda cuda_arch={arch}") == expected
    assert dependencies(directives, "~cuda") == {"py-torch"}
    assert [args for name, args, _ in directives if name == "conflicts"] == [("cuda_arch=none",)]


def test_every_dependency_has_its_kind(recipe: tuple[type, list[Directive]]) -> None:
    # without one, Spack links, and a package of Python is not found at run time
    _, directives = recipe
    assert all("type" in given for name, _, given in directives if name == "depends_on")


def test_environment(declared: configparser.ConfigParser) -> None:
    environment = yaml.safe_load((ROOT / "spack.yaml").read_text())
    assert list(environment) == ["spack"]
    environment = environment["spack"]
    assert set(environment) == {"definitions", "specs", "packages", "concretizer", "view"}
    computes = [entry for entry in environment["definitions"] if "compute" in entry]
    specs = {spec.split(" ")[0] for spec in environment["specs"]} - {"$compute"}
    wanted = specs_of(declared, "options", "install_requires") | specs_of(declared, "options.extras_require", "io")
    for compute in computes:
        assert set(compute) == {"compute", "when"}
        here = specs | {spec.split(" ")[0].rstrip(":") + ":" for spec in compute["compute"]}
        assert {spec for spec in wanted if not spec.startswith("py-tomli@")} <= here
    assert any(s.split(" ")[0] in specs_of(declared, "options.extras_require", "cuda") for s in computes[1]["compute"])
