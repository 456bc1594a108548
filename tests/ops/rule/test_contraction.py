"""Products of operands whose shards do not match: what travels is the less, and the result is torch's."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, compare, gathered, mesh_of, mesh_shapes, shard
from tests.ops.windows import field

# the product, and the shapes of its operands
PRODUCTS = {
    "scores": (lambda q, k: q @ k.transpose(-2, -1), (2, 5, 3), (2, 7, 3)),
    "values": (lambda p, v: p @ v, (2, 5, 7), (2, 7, 3)),
    "matmul": (torch.matmul, (6, 5), (5, 7)),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), (2, 4, 5), (2, 3, 5)),
    "linear": (F.linear, (3, 4, 5), (6, 5)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_any_two_layouts(name):
    f, a, b = PRODUCTS[name]
    for mesh_shape in mesh_shapes(2)[:2]:
        mesh = mesh_of(mesh_shape)
        options = [ms.Replicate(), *[ms.Shard(d) for d in range(3)]]
        pairs = itertools.product(*[itertools.product(options[: len(s) + 1], repeat=mesh.ndim) for s in (a, b)])
        for p, q in list(pairs)[:: 1 if mesh.ndim == 1 else 9]:
            compare(f, [(field(*a), mesh, p, None), (field(*b), mesh, q, None)], what=f"{p} {q}")


@pytest.mark.ranks(2, 3, 4)
def test_the_result_of_attention_by_hand_is_sharded_along_the_queries():
    mesh = mesh_of((WORLD.size,))
    q, k, v = (shard(field(2, 16, n), mesh, ms.Shard(1)) for n in (4, 4, 5))
    scores = q @ k.transpose(1, 2)
    assert scores.placements == (ms.Shard(1),)
    assert (scores.softmax(-1) @ v).placements == (ms.Shard(1),)


def test_gradients_of_gradients_by_the_cotangent_of_a_partial():
    full, weight, cotangent = field(2, 8, 3), field(5, 8), field(2, 3, 5)

    def second(x, v):
        (g,) = torch.autograd.grad(F.linear(x.mT**2, weight), x, v, create_graph=True)
        return torch.autograd.grad((g * g).sum(), [x, v])

    expected = second(full.clone().requires_grad_(), cotangent.clone().requires_grad_())
    mesh = mesh_of((WORLD.size,))
    for placements in (None, [ms.Replicate()], [ms.Shard(0)]):
        x = shard(full, mesh, [ms.Shard(1)], requires_grad=True)
        for e, g in zip(expected, second(x, shard(cotangent, mesh, placements, requires_grad=True)), strict=True):
            torch.testing.assert_close(gathered(g), e)
