"""opt_einsum on shards: it finds its functions in the package of the first operand's class."""

from __future__ import annotations

import opt_einsum
import pytest

import mpishard as ms
from tests.compare import WORLD, compare, mesh_of
from tests.ops.windows import field

# as a spectral convolution with dense and with factorised weights; a product whose result is permuted
CASES = {
    "bixy,ioxy->boxy": [(2, 3, 7, 5), (3, 4, 7, 5)],
    "bixy,ir,or,xr,yr->boxy": [(2, 3, 7, 5), (3, 2), (4, 2), (7, 2), (5, 2)],
    "bix,iy->ybx": [(2, 3, 7), (3, 4)],
}


@pytest.mark.parametrize("equation", CASES)
def test_contractions(equation):
    mesh = mesh_of((WORLD.size,))
    first, *rest = (field(*shape) for shape in CASES[equation])
    weights = [w.requires_grad_() for w in rest]
    for dim in range(first.ndim):
        operand = (first, mesh, (ms.Shard(dim),), None)
        compare(lambda x: opt_einsum.contract(equation, x, *weights), [operand], weights, what=f"dim {dim}")
