"""The ``.data`` of plain parameters.

A ShardTensor has no memory of its own, but torch takes it for one that has: a later read ends the process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mpishard.tensor.shard_tensor import ShardTensor

_data: Any = torch.Tensor.data


def _set_data(self: nn.Parameter, value: Any) -> None:
    """Assign a tensor. Of a ShardTensor the whole, as a write in place takes; collective then."""
    _data.__set__(self, value.full_tensor().detach() if isinstance(value, ShardTensor) else value)


nn.Parameter.data = property(_data.__get__, _set_data, doc=_data.__doc__)  # type: ignore[assignment]
