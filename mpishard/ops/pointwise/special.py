"""More functions of single cells: special functions, integers, and gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.ops.pointwise.pointwise import in_place, pointwise
from mpishard.ops.rule.dim import require_dtype
from mpishard.ops.rule.write import kept
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import RULES, implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap

_NAMES = """
airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v
chebyshev_polynomial_w entr gammainc gammaincc hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
legendre_polynomial_p modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln
scaled_modified_bessel_k0 scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w spherical_bessel_j0 gcd lcm
""".split()

pointwise(*spellings(*_NAMES))
in_place(*spellings("gcd_", "lcm_"))


@implements(torch.frexp, torch.Tensor.frexp, sharded="local")
def frexp(input: ShardTensor) -> Any:
    """Split into mantissa and exponent. Not collective."""
    x = resolved(input)
    return torch.return_types.frexp([wrap(t, x.sharding, x.mesh) for t in torch.frexp(x.block)])


@implements(torch.unravel_index, sharded="local")
def unravel_index(indices: ShardTensor, shape: Any) -> tuple[ShardTensor, ...]:
    """Turn flat indices into one index per dim. Not collective."""
    x = resolved(indices)
    return tuple(wrap(t, x.sharding, x.mesh) for t in torch.unravel_index(x.block, shape))


@implements(F.glu, *spellings("glu"), sharded="moves")
def glu(input: ShardTensor, dim: int = -1) -> Any:
    """Gate the first half of a dim with the second. Collective where it is sharded: the gates move to the values."""
    n = input.shape[dim]
    if n % 2:
        raise RuntimeError(f"Halving dimension must be even, but dimension {dim % input.ndim} is size {n}")
    require_dtype(input, F.glu)
    values, gates = input.narrow(dim, 0, n // 2), input.narrow(dim, n // 2, n // 2)
    return values * torch.sigmoid(gates)


implements(torch.Tensor.__contains__, sharded="local")(lambda self, element: bool((self == element).any()))
implements(torch.Tensor.__reversed__, sharded="local")(lambda self: torch.flip(self, (0,)) if self.ndim else self)


def _scan_in_place(name: str) -> Callable[..., Any]:
    def own(x: Tensor) -> Tensor:
        return getattr(torch.Tensor, f"{name}_")(x.detach(), 0)  # type: ignore[no-any-return]

    def rule(self: ShardTensor, dim: int, *, dtype: Any = None) -> Any:
        if dtype not in (None, self.dtype):
            raise RuntimeError(
                f"Bad in-place call: input tensor dtype {self.dtype} and output tensor dtype {dtype} should match"
            )
        require_dtype(self, own)  # of truths torch has none
        return self.copy_(getattr(kept(self), name)(dim))

    return rule


for _name in ("cumsum", "cumprod"):
    implements(getattr(torch.Tensor, f"{_name}_"), sharded="local")(_scan_in_place(_name))
for _name, _twin in (("__long__", "__int__"), ("__nonzero__", "__bool__")):
    implements(getattr(torch.Tensor, _name), sharded="local")(RULES[getattr(torch.Tensor, _twin)])
