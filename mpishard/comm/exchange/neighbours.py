"""Exchanges that are planned dim by dim, as one round: edges and corners straight from the ranks that own them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TypeVar

import numpy as np

from mpishard.comm.mesh import CartMesh

T = TypeVar("T")

# position along a dim's mesh dims (None: this rank's own) -> what goes there, or comes from there
Way = Mapping[int | None, Sequence[T]]


def across(
    mesh: CartMesh, mesh_dims: Sequence[tuple[int, ...]], ways: Sequence[Way[T]]
) -> list[tuple[int, list[tuple[T, ...]]]]:
    """Return, per other rank in ascending order, what travels between it and this one: one entry of every dim.

    Not collective. Both ends list the entries of a message in the same order, if they do so along every dim.

    Parameters
    ----------
    mesh
        The mesh.
    mesh_dims
        Per dim, the mesh dims that shard it.
    ways
        Per dim, its plan in one direction.

    Examples
    --------
    >>> across(mesh, [(0,), (1,)], [{None: ["own"], 0: ["low"]}, {None: ["own"]}])  # on rank (1, 0) of 2 x 1
    [(0, [("low", "own")])]
    """
    found = []
    for places in product(*ways):
        entries = list(product(*(way[place] for way, place in zip(ways, places))))
        if not entries or all(place is None for place in places):
            continue
        coords = list(mesh.coords)
        for dims, place in zip(mesh_dims, places):
            if place is not None:
                for m, c in zip(dims, np.unravel_index(place, [mesh.shape[m] for m in dims])):
                    coords[m] = int(c)
        found.append((mesh.rank_at(coords), entries))
    return sorted(found, key=lambda message: message[0])
