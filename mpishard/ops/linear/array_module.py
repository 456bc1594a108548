"""What opt_einsum asks of the package whose arrays it contracts: three functions, by these names.

It looks for them in the top-level package of the class of the first operand, which is `mpishard`. Fourier neural
operators come here, through tensorly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def einsum(equation: str, *operands: Tensor, **_: Any) -> Tensor:
    """Contract as `torch.einsum`. Collective as that."""
    return torch.einsum(equation, *operands)


def tensordot(a: Tensor, b: Tensor, axes: int | Sequence[Sequence[int]] = 2) -> Tensor:
    """Contract as `torch.tensordot`, with numpy's name of the last argument. Collective as that."""
    return torch.tensordot(a, b, dims=axes)


def transpose(a: Tensor, axes: Sequence[int]) -> Tensor:
    """Permute the dims, as `torch.permute`. Not collective."""
    return torch.permute(a, tuple(axes))
