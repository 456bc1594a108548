"""The pages: their code, their links, and that the reference and the list of errors have what there is.

What a page says of other pages, and the reference of its names, is checked by `make docs`: there a warning is an error.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import types
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import mpishard as ms
from mpishard.cli.root import root

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
REFERENCE = "".join(p.read_text() for p in sorted((ROOT / "docs" / "reference").glob("*.md")))
ERRORS = (ROOT / "docs" / "errors.md").read_text()
# public packages, beside the names of mpishard itself
PACKAGES = sorted(ms._MODULES - {"autograd", "comm", "ops", "tensor"})

named = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())


@cache
def tokens(page: Path) -> list[Token]:
    parsed = MarkdownIt().enable("table").parse(page.read_text())
    return [token for outer in parsed for token in (outer, *(outer.children or []))]


def blocks(page: Path, *languages: str) -> list[tuple[str, int]]:
    """Return the code blocks of a page in some languages, each with its line."""
    return [
        (token.content, token.map[0] + 1)
        for token in tokens(page)
        if token.type == "fence" and token.map and token.info.split()[:1] in [[name] for name in languages]
    ]


@named
def test_python_compiles(page: Path) -> None:
    for code, line in blocks(page, "python"):
        compile("\n" * line + code, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@named
def test_shell_parses(page: Path) -> None:
    for code, line in blocks(page, "sh"):
        done = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"line {line}: {done.stderr}"


def commands(page: Path) -> list[list[str]]:
    """Return what follows `mpishard` in a page's shell blocks, but for lines that leave something out."""
    found = []
    for code, _ in blocks(page, "sh"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            started = [i for i, word in enumerate(words) if word == "mpishard"]
            if started and "..." not in words:
                end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&")), len(words))
                found.append(words[started[0] + 1 : end])
    return found


@named
def test_commands_exist(page: Path) -> None:
    for words in commands(page):
        command: click.Command = root
        while isinstance(command, click.Group):
            assert words[0] in command.commands, words
            command, words = command.commands[words[0]], words[1:]
        # wrong options raise
        command.make_context(str(command.name), list(words))


def test_some_commands_are_looked_at() -> None:
    assert sum(len(commands(page)) for page in PAGES) >= 5


@named
def test_fences_say_their_language(page: Path) -> None:
    # what is marked is run, or compared with what is printed, by tests/docs; a block of Sphinx has its name in braces
    known = {"", "python", "python run", "sh", "diff", "c", "fortran", "cmake", "yaml", "make", "text"}
    infos = {re.sub(r"^text rank \d of \d$", "text", token.info) for token in tokens(page) if token.type == "fence"}
    assert {info for info in infos if info not in known and not info.startswith("{")} == set()


@named
def test_links(page: Path) -> None:
    for link in (str(token.attrs["href"]) for token in tokens(page) if token.type == "link_open"):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https", link
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), link
            assert not re.search(r"[\s<>\"]", link), link
        elif parts.path:
            assert (page.parent / parts.path).exists(), link


# the reference


def public_names(module: types.ModuleType) -> set[str]:
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    offered = getattr(module, "__all__", None) or own
    return {n for n in offered if n[0] != "_" and not isinstance(getattr(module, n), types.ModuleType)}


def thing(name: str) -> Any:
    home, _, own = name.rpartition(".")
    return getattr(importlib.import_module(home), own)


def documented() -> set[str]:
    """Return the names, in full, that the pages of the reference ask Sphinx for."""
    found, module = set(), ""
    for kind, name, option in re.findall(r"^\.\. (\w+):: (\S+)\n((?:   :.*\n)*)", REFERENCE, re.MULTILINE):
        if kind == "currentmodule":
            module = name
        elif kind in ("autofunction", "autoclass"):
            found.add(name if name.startswith("mpishard.") else f"{module}.{name}")
        elif kind == "automodule" and ":members:" in option:
            names = public_names(importlib.import_module(name))
            excluded = re.search(r":exclude-members: (.*)", option)
            found |= {f"{name}.{n}" for n in names - set(excluded[1].split(", ") if excluded else ())}
    return found


def test_reference_is_complete() -> None:
    known = documented()
    # a name that several packages offer is documented once
    things = {id(thing(name)) for name in known}
    homes = ["mpishard", *(f"mpishard.{name}" for name in PACKAGES)]
    offered = [f"{home}.{name}" for home in homes for name in public_names(importlib.import_module(home))]
    assert len(offered) > 100
    assert [name for name in offered if id(thing(name)) not in things] == [], "add them to docs/reference"


def test_public_names_have_docstrings() -> None:
    for name in documented():
        assert (thing(name).__doc__ or "").strip(), name


# errors.md


def sections() -> dict[str, str]:
    return dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", ERRORS, re.MULTILINE | re.DOTALL))


def families(section: str) -> list[str]:
    """Return what the messages of a section's rows hold, by its first column."""
    cells = re.findall(r"^\| (`.*?) \| ", section, re.MULTILINE)
    return [words for cell in cells for words in re.findall(r"`([^`]+)`", cell)]


@cache
def messages() -> list[tuple[str, str]]:
    """Return the class and the first line of every error in the house's form."""
    calls = [
        node
        for path in (ROOT / "mpishard").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    return [
        (ast.unparse(call.func).rpartition(".")[2], first_line(text.args[0]))
        for call in calls
        for text in (call, *call.args)
        if isinstance(text, ast.Call) and text.args and "fix" in [k.arg for k in text.keywords]
    ]


def first_line(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    return "…"


def test_every_class_of_errors_has_its_section() -> None:
    classes = {n for n, c in vars(ms.errors).items() if isinstance(c, type) and issubclass(c, (Exception, Warning))}
    assert classes <= set(sections())
    for name in classes - {"GatherWarning"}:
        bases = [b.__name__ for b in getattr(ms.errors, name).__bases__ if b not in (Exception, ms.MpishardError)]
        assert all(f"Also a `{base}`" in sections()[name] or f"Also an `{base}`" in sections()[name] for base in bases)


def test_every_message_has_its_row() -> None:
    said = [(kind, text) for kind, text in messages() if kind in sections() and text != "…"]
    assert len(said) > 200
    rows = {name: families(text) for name, text in sections().items()}
    lost = [(kind, text) for kind, text in said if not any(words in text for words in rows[kind])]
    assert lost == [], "add their families to docs/errors.md"


def test_every_row_has_its_message() -> None:
    said = list(messages())
    for name, text in sections().items():
        kinds = {name, "kind", "CertainError"} if name == "PeerError" else {name}
        theirs = [first for kind, first in said if kind in kinds]
        stale = [words for words in families(text) if hasattr(ms.errors, name) and not any(words in t for t in theirs)]
        assert stale == [], name
