"""The pages' blocks that are marked to run, ```` ```python run ````, as they stand there: one program a page."""

from __future__ import annotations

from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]


def program(page: Path) -> str:
    """Return the marked blocks of a page, each on the lines where it stands."""
    lines: list[str] = []
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "fence" and token.info == "python run" and token.map:
            lines += [""] * (token.map[0] + 1 - len(lines)) + token.content.splitlines()
    return "\n".join(lines)


PROGRAMS = {p: code for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if (code := program(p))}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("page", PROGRAMS, ids=lambda p: p.stem)
def test_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec(compile(PROGRAMS[page], str(page), "exec"), {"__name__": "__main__"})


def test_there_are_some():
    assert len(PROGRAMS) >= 3
