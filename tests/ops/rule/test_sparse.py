"""Products of plain sparse matrices with ShardTensors, against torch on the whole tensors."""

from __future__ import annotations

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, gathered, layouts, mesh_of, shard
from tests.ops.windows import check, field

DENSE = field(5, 7).where(field(5, 7) > 0.2, 0)
# torch's own, of the compressed forms
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS")
TWICE = torch.sparse_coo_tensor(
    [[0, 0, 4], [6, 6, 1]], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), (5, 7), check_invariants=True
)
PRODUCTS = {
    "@": ((7, 3), lambda s, x: s @ x),
    "mm": ((7, 3), torch.mm),
    "sparse.mm": ((7, 3), torch.sparse.mm),
    "vector": ((7,), lambda s, x: s @ x),
    "mv": ((7,), torch.mv),
    "from the right": ((4, 5), lambda s, x: x @ s),
    "addmm": ((7, 3), lambda s, x: torch.addmm(x[:5], s, x, beta=2, alpha=3)),
    "sparse.addmm": ((7, 3), lambda s, x: torch.sparse.addmm(x[:5], s, x, alpha=0.5)),
}


def form(name):
    return getattr(DENSE, f"to_sparse_{name}")()


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    shape, f = PRODUCTS[name]
    for i, s in enumerate((form("coo"), form("csr"), form("csc"), TWICE)):
        check(lambda x, s=s: f(s, x), field(*shape), range(len(shape)), i, count=3)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax"])
def test_reductions(reduce):
    check(lambda x: torch.sparse.mm(form("csr"), x, reduce), field(7, 3), (0, 1), 1)


@pytest.mark.parametrize("kind", ["coo", "csr"])
@pytest.mark.parametrize("f", [torch.sparse.mm, lambda s, x: torch.sparse.addmm(x[:5], s, x)])
def test_gradients_of_the_entries(kind, f):
    weights = field(5, 3)
    expected = form(kind).clone().requires_grad_()
    (f(expected, field(7, 3)) * weights).sum().backward()
    for mesh, placements, sizes in layouts((7, 3), (0, 1)):
        s = form(kind).clone().requires_grad_()
        x = shard(field(7, 3), mesh, placements, sizes, requires_grad=True)
        (f(s, x) * weights).sum().backward()
        assert s.grad.layout == expected.grad.layout
        torch.testing.assert_close(s.grad.to_dense(), expected.grad.to_dense())


def test_dense_gradients_of_the_entries_are_refused():
    x = shard(field(7, 3), mesh_of((WORLD.size,)), [ms.Shard(0)])
    s = form("coo").clone().requires_grad_()
    with pytest.raises(ms.UnsupportedOperationError, match=r"torch\.sparse\.mm"):
        s @ x
    with torch.no_grad():
        assert torch.allclose(gathered(s @ x), DENSE @ field(7, 3))
