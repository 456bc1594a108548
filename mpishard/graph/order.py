"""Rows in the order of their keys, over the ranks of a group: no rank has all keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpishard.autograd.rows import told_counts
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import Group
from mpishard.layout import bounds

_SAMPLES = 16  # of each rank's keys, by which all are parted

Array = np.ndarray[Any, Any]


def in_order(keys: Array, sizes: tuple[int, ...], group: Group, borders: Array | None = None) -> tuple[Array, Array]:
    """Return the numbers of rows in ascending order of (key, number): this rank's part, and the lengths of all parts.

    Collective over the group.

    Parameters
    ----------
    keys
        Of this rank's rows, int64.
    sizes
        How many rows each rank has.
    group
        The ranks.
    borders
        The first key of every part but the first. None: parts of about the same length.
    """
    first = bounds(sizes)[group.rank]
    order = np.argsort(keys, kind="stable")
    mine = np.stack([keys[order], order + first])
    if group.size == 1:
        return mine[1], np.array([len(keys)])
    if borders is None:
        starts = _splitters(mine, sizes, group)
    else:
        starts = np.stack([borders, np.full_like(borders, -1)])
    cuts = [0, *_places(mine, starts, first).tolist(), len(keys)]
    go = torch.from_numpy(np.diff(cuts))
    come = told_counts(go, group)
    flat = torch.from_numpy(np.ascontiguousarray(mine.T).reshape(-1))
    bound = 16 * bounds(sizes)[-1]
    came = blocking.all_to_all_flat(flat, (2 * go).tolist(), (2 * come).tolist(), group, bound).numpy().reshape(-1, 2)
    part = came[np.lexsort((came[:, 1], came[:, 0])), 1]
    return part, blocking.gather_counts("renumber", len(part), group, bounds(sizes)[-1:]).numpy()


def _splitters(mine: Array, sizes: tuple[int, ...], group: Group) -> Array:
    """Return the first (key, number) of every part but the first: parts of samples of about the same number."""
    step = max(1, bounds(sizes)[-1] // (_SAMPLES * group.size))
    counts = tuple(-(-n // step) for n in sizes)
    every = blocking.all_gather(torch.from_numpy(np.ascontiguousarray(mine[:, ::step])), group, 1, counts).numpy()
    every = every[:, np.lexsort((every[1], every[0]))]
    if not every.shape[1]:
        return np.zeros((2, group.size - 1), np.int64)
    return np.asarray(every[:, np.arange(1, group.size) * every.shape[1] // group.size])


def _places(mine: Array, starts: Array, first: int) -> Array:
    """Return how many of a rank's sorted (key, number) pairs lie before each; its numbers begin at ``first``."""
    lo, hi = (np.searchsorted(mine[0], starts[0], side) for side in ("left", "right"))
    count = mine.shape[1]
    places = np.where(starts[1] >= first + count, hi, lo)
    # a key that several rows have is parted by their numbers
    for i in np.flatnonzero((lo < hi) & (starts[1] >= first) & (starts[1] < first + count)):
        places[i] = lo[i] + np.searchsorted(mine[1, lo[i] : hi[i]], starts[1, i])
    return np.asarray(places)
