"""Reductions of the segments of a dim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.graph import apart
from mpishard.ops.rule.align import meet
from mpishard.ops.rule.dim import normal_dim, plain
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor


@implements(*spellings("segment_reduce"), sharded="gathers")
def segment_reduce(
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    indices: Any = None,
    offsets: Any = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> ShardTensor:
    """Reduce the segments of a dim. Collective where that dim is sharded: it is gathered, and the segments are."""
    if indices is not None:
        raise RuntimeError("segment_reduce(): indices based reduction is not supported yet.")
    borders = lengths if offsets is None else offsets
    if borders is None:
        raise RuntimeError("segment_reduce(): Either lengths or offsets must be defined.")
    axis = normal_dim(axis, data.ndim)
    _require_borders(data, borders, offsets is not None, axis, unsafe)
    lead, rest = tuple(range(axis)), tuple(range(axis + 1, data.ndim))
    met = meet((data, borders), ((*lead, None, *rest), (*lead, None)))
    cells, own = met.locals
    count = own.shape[-1] - (offsets is not None)
    if 0 in cells.shape[:axis] + cells.shape[axis + 1 :]:
        # torch refuses no cells; of one, for its graph: it refuses second derivatives, and would here alone not
        one = torch.segment_reduce(cells.sum().reshape(1), reduce, lengths=own.new_ones(1))
        out = apart(one.new_zeros(1).add(one).expand(*cells.shape[:axis], count, *cells.shape[axis + 1 :]))
    else:
        name = "lengths" if offsets is None else "offsets"
        out = torch.segment_reduce(cells, reduce, **{name: own}, axis=axis, unsafe=unsafe, initial=initial)
    return met.result(out, (*lead, None, *rest))


def _require_borders(data: Tensor, borders: Tensor, are_offsets: bool, axis: int, unsafe: bool) -> None:
    """Refuse what torch refuses: looking at all borders, so that every rank does. Collective where they are sharded."""
    name = "offsets" if are_offsets else "lengths"
    if borders.ndim != axis + 1:
        raise RuntimeError(f"segment_reduce(): Expected axis to be the last dimension of {name} but got {axis}.")
    if tuple(borders.shape[:axis]) != tuple(data.shape[:axis]):
        raise RuntimeError(f"segment_reduce(): {name} and data must have the same shape before dim {axis}.")
    if borders.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"segment_reduce(): {name} must be of int32 or int64, got {borders.dtype}")
    if unsafe:
        return
    whole = plain(borders)
    lengths = whole.diff(dim=-1) if are_offsets else whole
    if (lengths < 0).any():
        raise RuntimeError("segment_reduce(): lengths contains negative value!")
    if not are_offsets and (lengths.sum(-1) != data.shape[axis]).any():
        raise RuntimeError(
            "segment_reduce(): Expected all rows of lengths along axis to sum to data.size(lengths.dim()-1) when "
            "!unsafe."
        )
