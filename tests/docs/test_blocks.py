"""The pages' blocks that are marked to run, ```` ```python run ````, as they stand there: one program a page.

A block that is marked ```` ```text rank 1 of 2 ```` is among what that rank prints.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mpi4py import MPI

ROOT = Path(__file__).parents[2]


def blocks(page: Path, mark: str) -> list[Token]:
    """Return the blocks of a page with a mark."""
    return [t for t in MarkdownIt().parse(page.read_text()) if t.type == "fence" and t.info == mark]


def program(page: Path) -> str:
    """Return the blocks of a page that run, each on the lines where it stands."""
    lines: list[str] = []
    for token in blocks(page, "python run"):
        assert token.map
        lines += [""] * (token.map[0] + 1 - len(lines)) + token.content.splitlines()
    return "\n".join(lines)


PROGRAMS = {p: code for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if (code := program(p))}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("page", PROGRAMS, ids=lambda p: p.stem)
def test_blocks_run(page, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(PROGRAMS[page], str(page), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    for block in blocks(page, f"text rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}"):
        assert block.content in printed


def test_there_are_some():
    assert len(PROGRAMS) >= 3
