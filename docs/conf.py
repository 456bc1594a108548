"""Makes the documentation: `make docs`, then open build/docs/index.html. Needs no network, nor do its readers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# an import on one rank, which is no job
os.environ["MPISHARD_ABORT"] = "0"

import torch
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

import mpishard

project = "mpishard"
author = "The mpishard developers"
copyright = "The mpishard developers, Apache-2.0"
version = release = mpishard.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_click",
]
html_theme = "furo"
html_title = f"mpishard {release}"

myst_heading_anchors = 4
# docstrings write `name`, of Python, without a role
default_role = "py:obj"
add_module_names = False
autodoc_member_order = "groupwise"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = False
napoleon_use_ivar = True
# A tree may name a page that this version lacks: one that no tree names is a warning, so no page gets lost. And a
# docstring may say `shape`, which several classes have.
suppress_warnings = ["toc.not_readable", "ref.python"]

ROOT = Path(__file__).parents[1]
# files above docs/, and the pages that include them
PAGES = {"CONTRIBUTING": "contributing", "CHANGELOG": "changelog", "README": "what"}


def link_pages(_: Sphinx, doctree: nodes.document) -> None:
    """Lead links to files above docs/, as they must be where the repository is browsed, to pages; or leave the text."""
    for link in list(doctree.findall(pending_xref)):
        path = Path(link["reftarget"])
        if path.is_absolute() and path.name in PAGES:
            link["reftarget"] = PAGES[path.name]
        elif link.get("reftype") == "myst" and len(path.parts) + len(path.suffixes) > 1 and (ROOT / path.name).exists():
            link.replace_self(link.children)


def of_torch(_app: Sphinx, _what: str, name: str, member: Any, _skip: bool, _options: Any) -> bool | None:
    """Leave torch's methods of a ShardTensor out: torch documents them."""
    theirs = getattr(torch.Tensor, name, None)
    return True if theirs is not None and theirs.__doc__ == member.__doc__ else None


def setup(app: Sphinx) -> None:
    """Sphinx calls it."""
    app.connect("doctree-read", link_pages)
    app.connect("autodoc-skip-member", of_torch)
