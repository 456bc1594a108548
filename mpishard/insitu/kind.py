"""Kinds of fields: what a field that is like one before need not find out, or agree on, again."""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpishard.comm.agreement import Agreement
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout
from mpishard.tensor.resident import ResidentHalo
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def outline(array: Any) -> tuple[Any, ...] | None:
    """Return what can be seen of an array without asking torch; None where that is not enough. Not collective.

    Arrays of numpy with one outline, which may be written, are all views that torch takes, or none is.
    """
    if type(array) is not np.ndarray or not array.flags.writeable or torch.is_inference_mode_enabled():
        return None
    return array.shape, array.strides, array.dtype


class Kind(NamedTuple):
    """What fields have in common whose arrays have one outline on this rank, and that were told alike."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    interior: int
    layout: Layout
    halo: ResidentHalo


class Kinds:
    """The kinds of a simulation's fields. A kind is that of the same field on all ranks, its number counts fields."""

    def __init__(self, mesh: CartMesh, agreement: Agreement) -> None:
        self._mesh, self._agreement = mesh, agreement
        self._known: dict[Hashable, Kind] = {}
        self._count = 0

    def again(self, name: str, array: Any, key: Hashable, *, new: bool) -> tuple[Tensor, ShardTensor] | None:
        """Return a field's array and tensor, where on all ranks it is of one known kind; ``new``: so is its name.

        Collective: one reduction of 32 bytes where there are fields. ``key``: what its kind depends on, or None.
        """
        if not self._count:
            return None
        kind = self._known.get(key) if new and key is not None else None
        agreement = self._agreement
        if kind is None:
            agreement.begin(0, failed=True)
            agreement.together("field")
            return None
        agreement.begin(zlib.crc32(name.encode(errors="replace"), kind.number))
        found = torch.from_numpy(array)
        tensor = wrap(found.as_strided(kind.shape, kind.strides, kind.interior), kind.layout, self._mesh)
        tensor._halo = halo = kind.halo.again()
        halo.name = name
        return (found, tensor) if agreement.together("field") else None

    def note(self, key: Hashable, array: Tensor, tensor: ShardTensor) -> None:
        """Note a field that was made. Collective in that all ranks do, whatever their keys."""
        self._count += 1
        if key is None or tensor._halo is None:
            return
        block = tensor.block
        interior = int(block.storage_offset() - array.storage_offset())
        halo = tensor._halo.again()
        self._known[key] = Kind(self._count, tuple(block.shape), block.stride(), interior, tensor.sharding, halo)
