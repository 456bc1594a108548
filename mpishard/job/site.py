"""Sites: what their own pages say of nodes, launchers and binding, read from sites.toml."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

from mpishard.errors import JobError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Site(NamedTuple):
    """A site's facts by name, each as ``{"value": ..., "source": address}``; see sites.toml for what they mean."""

    name: str
    title: str
    note: str
    facts: dict[str, dict[str, Any]]

    def fact(self, name: str, default: Any = None) -> Any:
        """Return a fact's value, or the default where no page that was read states it. Not collective."""
        return self.facts[name]["value"] if name in self.facts else default


@lru_cache(1)
def _sites() -> dict[str, Site]:
    text = files("mpishard.job").joinpath("sites.toml").read_text(encoding="utf-8")
    return {
        name: Site(name, entry.pop("title"), entry.pop("note", ""), entry)
        for name, entry in tomllib.loads(text).items()
    }


def site_names() -> list[str]:
    """Return the names of all sites. Not collective."""
    return list(_sites())


def site_named(name: str) -> Site:
    """Return a site. Not collective.

    Raises
    ------
    JobError
        There is no site of this name.
    """
    known = name.lower().replace(" ", "-").replace("_", "-")
    if known not in _sites():
        near = get_close_matches(known, site_names(), 1)
        generic = "take generic-cpu or generic-gpu, and give what your site needs as options"
        raise JobError(
            "unknown site",
            expected=f"one of {', '.join(site_names())}",
            got=repr(name),
            fix=f"write {near[0]}, or {generic}" if near else generic,
        )
    return _sites()[known]
