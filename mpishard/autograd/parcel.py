"""Gradients of sharded parameters: summed over the ranks, each of which keeps its block."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.padded import Padded
from mpishard.comm.collective.blocking import all_reduce
from mpishard.comm.collective.nonblocking import PendingReduction, ireduce_scatter
from mpishard.comm.memory.buffer import cat
from mpishard.comm.mesh import CartMesh


class Part(NamedTuple):
    """A rank's share of the gradient of a parameter, of which it holds ``block``, in rows for the ranks."""

    block: Tensor
    padded: Padded
    rows: Tensor


# a mesh, the dims over which gradients are scattered, and those over which the sums are added up then
Way = tuple[CartMesh, tuple[int, ...], tuple[int, ...]]


def scatter(way: Way, parts: list[Part]) -> tuple[Callable[[], list[Tensor]], PendingReduction]:
    """Send shares together; return what waits for this rank's blocks of the sums, and for what. Collective."""
    mesh, dims, rest = way
    group = mesh.group(dims)
    of = [(p.padded, p.block) for p in parts]
    rows = [p.rows for p in parts]
    parts.clear()  # whole gradients: what travels is enough
    pending = ireduce_scatter(rows[0] if len(rows) == 1 else cat(rows, 1), group)
    del rows

    def finish() -> list[Tensor]:
        own = pending.wait()
        if rest:
            own = all_reduce(own, mesh.group(rest), in_place=True)
        split = torch.unsafe_split_with_sizes(own, [padded.width for padded, _ in of])
        return [padded.block_of(row, b.shape[padded.dim]).to(b.device) for (padded, b), row in zip(of, split)]

    return finish, pending


def accumulating(
    way: Way, parts: list[Part], accumulate: Callable[[Tensor, Tensor], None]
) -> tuple[Callable[[], None], PendingReduction]:
    """Do what `scatter` does, and ``accumulate`` the sums of the blocks."""
    blocks = [p.block for p in parts]
    finish, pending = scatter(way, parts)

    def accumulate_all() -> None:
        for block, g in zip(blocks, finish()):
            accumulate(block, g)

    return accumulate_all, pending


class Parcel:
    """Shares of small gradients that travel together, once those of a unit have been found.

    Attributes
    ----------
    unit
        Whose they are.
    ways : dict
        Way and dtype -> shares.
    """

    def __init__(self, unit: object, count: int) -> None:
        self.unit = unit
        self.ways: dict[tuple[Way, torch.dtype], list[Part]] = {}
        self._count = count

    def add(self, way: Way, part: Part) -> bool:
        """Take a share; return whether that was the last one. Not collective."""
        self.ways.setdefault((way, part.rows.dtype), []).append(part)
        self._count -= 1
        return self._count <= 0
