"""Products over dims: of the block, then of the ranks' products."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.linear import differentiated
from mpishard.ops.rule.dim import strict_int
from mpishard.ops.rule.reduction import HALVES, combined, dim_and_keepdim, reduced
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _product(local: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: Any = None) -> Tensor:
    if len(dims) == local.ndim and not keepdim:
        return torch.prod(local, dtype=dtype)
    for d in reversed(dims):
        local = torch.prod(local, d, keepdim, dtype=dtype)
    return local


def _product_of_parts(parts: Tensor) -> Tensor:
    """Return the product along dim 0, whose derivative divides by none: a part may be infinite."""
    return reduce(torch.mul, parts.unbind())


@implements(torch.prod, torch.Tensor.prod, sharded="reduction")
def prod(input: ShardTensor, *args: Any, dtype: Any = None, **kwargs: Any) -> ShardTensor:
    """Multiply over one dim, or all. Collective where a reduced dim is sharded."""
    dim, keepdim = dim_and_keepdim(args, kwargs, torch.prod, named=True)
    dim = dim if dim is None else strict_int(dim)
    x = resolved(input)
    plan, local = reduced(x.sharding, dim, keepdim), x.block
    if not plan.over:
        return wrap(_product(local, plan.dims, keepdim, dtype), plan.out, x.mesh)
    result = torch.prod(local.new_ones(1), dtype=dtype).dtype
    wide = torch.float32 if result in HALVES else result
    own = _product(local, plan.dims, keepdim, wide)
    combine = _product_of_parts if differentiated(own) else partial(torch.prod, dim=0)
    product = combined(own, x.mesh, plan.over, combine)
    return wrap(product.to(result), plan.out, x.mesh)
