"""Models by name: `module:factory` or `file.py:factory`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mpishard.errors import JobError
from mpishard.planning.step import told


def named(spec: str, options: Sequence[str] = (), what: str = "the model") -> Callable[[], Any]:
    """Return what a name means, with keyword arguments. Not collective.

    Parameters
    ----------
    spec
        ``module:name`` or ``path/file.py:name``, of a class or function.
    options
        Each ``name=value``; a value that is no Python literal is text.
    what
        What it is, for the error.

    Raises
    ------
    JobError
        There is no such module, file or name.
    """
    place, _, name = spec.rpartition(":")
    try:
        found = getattr(_module(place), name)
        if not callable(found):
            raise TypeError(f"a {type(found).__name__}, which cannot be called")
    except (Exception, SystemExit) as error:
        # whatever the module raises as it is imported; a script ends itself
        raise JobError(
            f"plan: {what}",
            expected="module:factory or file.py:factory",
            got=f"{spec!r}: {told(error)}",
            fix=f"name the function or class of {what}, as examples/unet.py:UNet does",
        ) from error
    return partial(found, **dict(map(_option, options)))


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        # as python -m does
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    path = Path(place).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"no file {place}")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise JobError("--option", expected="name=value", got=repr(text), fix="such as --option base=16")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
