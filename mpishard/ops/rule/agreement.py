"""Local calls that fail where the data is bad: on one rank they would leave the others waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from mpishard.comm import guard
from mpishard.comm.mesh import CartMesh
from mpishard.errors import MpishardError
from mpishard.layout import Layout

T = TypeVar("T")

# what torch raises of bad values; agreement among ranks knows the package's own errors, and tells these by name
_KINDS = (IndexError, RuntimeError, ValueError, NotImplementedError, torch.linalg.LinAlgError)
_OF_TORCH: dict[str, Any] = {kind.__name__: kind for kind in _KINDS}


def agreed(call: Callable[[], T], mesh: CartMesh, layouts: Iterable[Layout]) -> T:
    """Return ``call()``, or raise on every rank what it raises on any.

    Collective over the mesh dims that shard one of the layouts: one reduction of 24 bytes where all is well.

    Parameters
    ----------
    call
        Communicates nothing. Torch checks values as it reads them: an index that is out of range stops the ranks
        whose cells it names, and blocks without cells stop nobody.
    mesh, layouts
        Of the operands; ranks whose blocks of all of them are the same do not differ.
    """
    over = tuple(sorted({m for layout in layouts for m in layout.sharded_mesh_dims if mesh.shape[m] > 1}))
    if not over:
        return call()
    error: Exception | None = None
    result: Any = None
    try:
        result = call()
    except (IndexError, RuntimeError, ValueError) as e:
        error = e
    comm = mesh.group(over).comm
    try:
        guard.agree(comm, error)
    except MpishardError as e:
        kind, _, text = str(e).partition(": ")
        if type(e) is not MpishardError or kind not in _OF_TORCH:
            raise
        raise guard.common(_OF_TORCH[kind](text), comm) from None
    return result  # type: ignore[no-any-return]
