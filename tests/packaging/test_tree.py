"""What the files say: style, layers, sizes, and nothing of any one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert paths
    return [path for path in paths if path.exists()]


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout


def test_style() -> None:
    run(sys.executable, "-m", "ruff", "check", "--no-cache")


def test_format() -> None:
    run(sys.executable, "-m", "ruff", "format", "--check", "--no-cache")


def test_imports_point_down() -> None:
    run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main(['--no-cache'])")


# Kernel and shell names that are the same everywhere.
PORTABLE = re.compile(r"^(/usr/bin/env|/bin/(ba)?sh|/dev/(full|null|shm|zero)|/proc|/sys)\b")
ABSOLUTE = re.compile(r"""(?<=["' =(])(/(?:bin|dev|etc|home|mnt|opt|proc|root|srv|sys|tmp|usr|var|work)/[^"' )]*)""")


def machine_paths(text: str) -> list[str]:
    return [path for path in ABSOLUTE.findall(text) if not PORTABLE.match(path)]


@pytest.mark.parametrize("text", ['p = "/home/me/x"', "cd /work/main", "open('/usr/lib/x.so')", "A=/opt/x"])
def test_machine_paths_are_found(text: str) -> None:
    assert machine_paths(text)


def test_no_machine_paths() -> None:
    own = Path(__file__).resolve()
    found = {
        path.relative_to(ROOT).as_posix(): paths
        for path in tracked("*.py", "*.sbatch", "*.md", "*.yaml", "setup.cfg", "pyproject.toml", "Makefile", ".ci/*")
        if path.resolve() != own and (paths := machine_paths(path.read_text()))
    }
    assert found == {}


def test_no_catch_all_modules() -> None:
    names = {path.stem for path in tracked("*.py")}
    assert names.isdisjoint({"utils", "util", "common", "helpers", "helper", "misc"})


# functions that take the default device, which a program may have set, where none is named
MAKERS = set(
    "arange as_tensor asarray empty empty_permuted empty_strided eye full linspace logspace normal ones rand randint "
    "randn randperm range scalar_tensor tensor tril_indices triu_indices zeros".split()
)


def takes_the_default_device(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
            return name in MAKERS and not {"device", "out", None} & {word.arg for word in node.keywords}
    return False


def test_tensors_of_the_package_name_their_device() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]
        for path in tracked("mpishard/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if takes_the_default_device(node)
    ]
    assert found == []


def test_modules_are_short() -> None:
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in tracked("mpishard/*.py")}
    assert {name: count for name, count in lines.items() if count > 500} == {}


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_pages_name_what_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    rows = re.findall(r"^(mpishard/\S+?)(?:, (\S+))?(?:, (\S+))?  ", text, re.M)
    named = re.findall(r"`((?:mpishard|tests|benchmarks|docs)/[\w/.]+)`", text)
    named += re.findall(r"`((?:tensor|autograd|comm|ops|layout|io)/[\w/]+\.py)`", text)
    named += [
        str(Path(first).parent / name) if i else first
        for first, *rest in rows
        for i, name in enumerate([first, *rest])
        if name
    ]
    assert named
    places = [[ROOT / name, ROOT / "mpishard" / name, (ROOT / name).with_suffix(".py")] for name in named]
    assert [name for name, tried in zip(named, places) if not any(p.exists() for p in tried)] == []
