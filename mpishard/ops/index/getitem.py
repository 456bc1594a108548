"""x[index] and x[index] = value: basic indices stay where they are, others go by points."""

from __future__ import annotations

from typing import Any

import torch

from mpishard.ops.index.advanced import picked
from mpishard.ops.index.basic import as_torch_takes, indexed, key_of, write_at
from mpishard.ops.index.index_put import put
from mpishard.ops.rule.dim import plain
from mpishard.ops.rule.write import written_through
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor


@implements(torch.Tensor.__getitem__, sharded="moves")
def getitem(self: Any, index: Any) -> Any:
    """Index. Not collective, unless one cell of a sharded dim is selected, or a sharded dim by a tensor."""
    index = as_torch_takes(index)
    key = key_of(index)
    if key is not None and isinstance(self, ShardTensor):
        return indexed(self, key)
    return self[key] if key is not None else picked(self, index)


@implements(torch.Tensor.__setitem__, sharded="gathers")
def setitem(self: Any, index: Any, value: Any) -> None:
    """Write at an index. Collective where the value is laid out differently.

    A plain tensor is Replicate, so it stays whole on every rank: what is written into it, and what says where, are
    gathered. Write into a sharded tensor (``torch.zeros_like(x)``), or pad or join tensors, and nothing is.
    """
    index = as_torch_takes(index)
    if not isinstance(self, ShardTensor):
        self[plain(index)] = plain(value)
        return
    key = key_of(index)
    if key is not None:
        write_at(self, key, value)
    elif not (self._gathered_view and written_through(self, lambda y: setitem(y, index, value))):
        put(self, index, value)
