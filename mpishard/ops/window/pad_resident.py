"""Circular padding of a block whose halo stands beside it, around a periodic domain: the new cells are there already.

The padded block is a copy, as torch's is, and takes the rest of the halo along: a convolution of it sends nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.linear import apply, in_transform
from mpishard.comm.exchange.window import WindowOp
from mpishard.layout import Layout
from mpishard.ops.window.beside import Beside
from mpishard.tensor.resident import ResidentHalo, Widths
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class Around(NamedTuple):
    """How a block is padded from its own storage.

    Attributes
    ----------
    extents
        Tensor dim -> cells (lo, hi) beside this rank's block that are copied.
    pads
        As of ``F.pad``, of the dims that no rank cuts.
    kept
        Tensor dim -> halo of all positions around the padded blocks.
    """

    extents: dict[int, tuple[int, int]]
    pads: tuple[int, ...]
    kept: dict[int, Widths]


def circular_beside(
    x: ShardTensor, pads: Sequence[int], window: WindowOp, out: Layout, key: Hashable
) -> ShardTensor | None:
    """Return the padded tensor, or None where the storage of ``x`` does not have what it takes.

    Neighborwise collective.

    Parameters
    ----------
    x
        A tensor with a resident halo.
    pads
        As of ``F.pad``.
    window, out
        The same by messages, and its layout.
    key
        Of their plan.
    """
    halo, mesh = x._halo, x.mesh
    assert halo is not None
    if in_transform():
        return None
    told = (key, halo.key)
    plan = mesh.plans.get(told) or mesh.plan(told, lambda: _plan(x, pads, halo))
    if isinstance(plan, str) or not (halo.writable or halo.fresh(x.block)):
        return None
    halo.watch(x.block, all_cells=False)
    local = apply(_Copied(window, plan, halo, x.sharding), x.block)
    padded = wrap(local, out, mesh)
    mesh_dims = {d: out.shard_dims[d] for d in plan.kept}
    padded._halo = ResidentHalo(
        mesh,
        {mesh_dims[d]: widths for d, widths in plan.kept.items()},
        {mesh_dims[d]: out.sizes[d] or () for d in plan.kept},
        {mesh_dims[d]: local.stride(d) for d in plan.kept},
        name=halo.name,
    )
    padded._halo.claim(local, sampled=False)
    return padded


def _plan(x: ShardTensor, pads: Sequence[int], halo: ResidentHalo) -> Around | str:
    layout, mesh = x.sharding, x.mesh
    near = halo.along(layout)
    if 0 in layout.shape:
        return "empty"
    rest, kept = list(pads), {d: list(w) for d, w in near.items()}
    read = False
    for i in range(len(pads) // 2):
        dim, (lo, hi) = x.ndim - 1 - i, pads[2 * i : 2 * i + 2]
        if min(lo, hi) < 0:
            return "a crop"
        if dim not in layout.shard_dims or lo == hi == 0:
            continue
        if dim not in near or not all(mesh.periodic[m] for m in layout.shard_dims[dim]):
            return "not around the domain"
        if near[dim][0][0] < lo or near[dim][-1][1] < hi:
            return "the halo beside the block is narrower than the padding"
        rest[2 * i : 2 * i + 2] = 0, 0
        read = True
        # the padded domain ends here: nothing lies beyond it
        kept[dim][0] = (0, kept[dim][0][1])
        kept[dim][-1] = (kept[dim][-1][0], 0)
    if not read:
        return "no halo"
    extents = {}
    for dim, widths in kept.items():
        k = layout.index(dim, mesh.coords)
        i = x.ndim - 1 - dim
        lo, hi = pads[2 * i : 2 * i + 2] if 2 * i < len(pads) else (0, 0)
        last = len(widths) - 1
        extents[dim] = (widths[k][0] + (lo if k == 0 else 0), widths[k][1] + (hi if k == last else 0))
    return Around(extents, tuple(rest), {d: tuple(w) for d, w in kept.items()})


class _Copied(Beside):
    """The padded block with its halo, in storage of its own: the plan is an `Around`."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the padded block. Neighborwise collective."""
        plan, layout, halo = self._plan, self._layout, self._halo
        halo.ensure(x, layout)
        array = halo.around(x, layout, plan.extents)
        if any(plan.pads):
            array = F.pad(array, plan.pads, mode="circular")
        else:
            array = array.clone(memory_format=torch.contiguous_format)
        for dim, widths in plan.kept.items():
            lo, hi = widths[layout.index(dim, halo.mesh.coords)]
            array = array.narrow(dim, lo, array.shape[dim] - lo - hi)
        return array.detach()
