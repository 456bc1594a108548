"""A warning where an operation gathers a large sharded tensor: once per operation and line of the user's code.

``MPISHARD_GATHER_WARN`` is the size in bytes, per rank and after gathering, above which it warns: by default
1 GiB; 0 warns of every gather, -1 of none.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from typing import Any, cast

from mpishard.comm.mesh import CartMesh
from mpishard.errors import GatherWarning, MeshError, described
from mpishard.layout import Layout, most_cells
from mpishard.tensor.registry import name_of

VARIABLE = "MPISHARD_GATHER_WARN"
DEFAULT_NBYTES = 1 << 30

_noticed: set[tuple[str, str, int]] = set()


def limit_nbytes() -> float:
    """Return the size above which a gather is warned of. Not collective.

    Raises
    ------
    MeshError
        The variable is set to something else than a number.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        limit = int(text) if text else DEFAULT_NBYTES
    except ValueError:
        raise MeshError(
            f"{VARIABLE}: unknown value",
            expected="a size in bytes; 0: warn of every gather; -1: of none",
            got=repr(text),
            fix=f"export {VARIABLE}={DEFAULT_NBYTES}",
        ) from None
    return limit if limit >= 0 else math.inf


def notice_gather(mesh: CartMesh, source: Layout, target: Layout, itemsize: int) -> None:
    """Warn, if it is large, that an operation makes dims whole that were sharded. Not collective.

    One rank warns for all: the first of the mesh; all of them where the user made errors of warnings. So layouts
    decide, which all ranks know, and not the block of this rank.
    """
    cells = most_cells(target)
    if cells * itemsize <= limit_nbytes() or not gathers(source, target):
        return
    op, path, line = _called()
    lost = [d for d in source.shard_dims if d not in target.shard_dims]
    text = described(
        f"{op} gathers a ShardTensor of shape {source.shape} along dim {', '.join(map(str, lost))}",
        expected=f"at most {VARIABLE}={os.environ.get(VARIABLE, DEFAULT_NBYTES)} bytes on a rank",
        got=f"{cells * itemsize} bytes on every rank",
        fix="redistribute to a dim that the operation does not need whole, or set the variable",
    )
    if not _is_error(text, path, line):
        if mesh.rank or (op, path, line) in _noticed:
            return
        _noticed.add((op, path, line))
    warnings.warn_explicit(text, GatherWarning, path, line)


def gathers(source: Layout, target: Layout) -> bool:
    """Tell whether more ranks will hold a cell; otherwise cells only move. Not collective."""
    return _holders(target) > _holders(source)


def _holders(layout: Layout) -> int:
    """Return how many ranks hold each cell."""
    return math.prod(layout.mesh_shape) // math.prod(layout.mesh_shape[m] for m in layout.sharded_mesh_dims)


def _is_error(text: str, path: str, line: int) -> bool:
    """Tell whether the user's filters make an error of the warning, as `warnings` looks through them."""
    module, filters = path.removesuffix(".py"), cast("Any", warnings.filters)
    for action, said, kind, where, at in filters:
        fits = issubclass(GatherWarning, kind) and (said is None or said.match(text))
        if fits and (where is None or where.match(module)) and at in (0, line):
            return bool(action == "error")
    return False


def _called() -> tuple[str, str, int]:
    """Return the torch function that the user called, and where."""
    op, frame = "an operation", sys._getframe(2)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if module not in ("mpishard", "torch"):
            break
        # __torch_function__ has it as `func`, a method as `function`; the outermost is the user's
        for name in ("func", "function"):
            if callable(found := frame.f_locals.get(name)) and module == "mpishard":
                op = name_of(found)
        frame = frame.f_back
    return op, frame.f_code.co_filename, frame.f_lineno
