"""What environment variables say."""

from __future__ import annotations

import os

from mpishard.errors import MeshError

_SAID = {"0": False, "off": False, "no": False, "false": False, "1": True, "on": True, "yes": True, "true": True}


def switch(name: str) -> bool | None:
    """Return whether a variable is on: 1, or a word for it; None where it is empty or not set. Not collective.

    Raises
    ------
    MeshError
        It says neither.
    """
    text = os.environ.get(name, "").strip().lower()
    if not text:
        return None
    if text in _SAID:
        return _SAID[text]
    raise MeshError(f"{name}: unknown value", expected="0 or 1", got=repr(os.environ[name]), fix="set or unset it")
