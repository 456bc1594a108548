"""The functions of `torch.nn.init` that torch hands over whole; the others are made of operations that have rules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from mpishard.ops.rule.write import require_writable
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor


@implements(nn.init.uniform_, sharded="local")
def uniform_(tensor: ShardTensor, a: float = 0.0, b: float = 1.0, generator: Any = None) -> ShardTensor:
    """Fill with numbers of an interval, as ``tensor.uniform_``. Collective."""
    with torch.no_grad():
        return tensor.uniform_(a, b, generator=generator)  # type: ignore[return-value]


@implements(nn.init.normal_, sharded="local")
def normal_(tensor: ShardTensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> ShardTensor:
    """Fill with normal numbers, as ``tensor.normal_``. Collective."""
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)  # type: ignore[return-value]


@implements(nn.init.constant_, sharded="local")
def constant_(tensor: ShardTensor, val: float) -> ShardTensor:
    """Fill with a number. Not collective."""
    with torch.no_grad():
        return tensor.fill_(val)  # type: ignore[return-value]


@implements(nn.init.kaiming_uniform_, sharded="local")
def kaiming_uniform_(
    tensor: ShardTensor,
    a: float = 0,
    mode: Any = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: Any = None,
) -> ShardTensor:
    """Fill with numbers whose variance suits the number of inputs. Collective.

    References
    ----------
    K. He et al., "Delving deep into rectifiers", ICCV 2015.
    """
    if 0 in tensor.shape:
        return tensor
    # of the fans only the shape counts, and torch's own errors
    fan = nn.init._calculate_correct_fan(torch.empty(tensor.shape, device="meta"), mode)
    bound = math.sqrt(3.0 / fan) * nn.init.calculate_gain(nonlinearity, a)
    return uniform_(tensor, -bound, bound, generator)  # type: ignore[no-any-return]


@implements(torch.eye, sharded="local")
def eye(n: int, m: int | None = None, *, out: ShardTensor, requires_grad: bool = False, **_: Any) -> ShardTensor:
    """Write the identity matrix into a ShardTensor, as ``nn.init.eye_`` does. Not collective."""
    shape = (n, n if m is None else m)
    if tuple(out.shape) != shape:
        raise RuntimeError(f"eye: out= has shape {tuple(out.shape)}, the result {shape}")
    require_writable(out, "torch.eye(out=)")
    (top, bottom), (left, right) = (out.sharding.interval(d, out.mesh.coords) for d in range(2))
    rows, columns = (torch.arange(*cells, device=out.block.device) for cells in ((top, bottom), (left, right)))
    with torch.no_grad():
        out.block.copy_(rows[:, None] == columns)
    return out
