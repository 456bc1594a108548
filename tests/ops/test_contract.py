"""Products of operands whose shards do not match: what travels is the less, and the result is torch's."""

from __future__ import annotations

import itertools

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, mesh_of, mesh_shapes, shard
from tests.ops.windows import field

# the product, and the shapes of its operands
PRODUCTS = {
    "scores": (lambda q, k: q @ k.transpose(-2, -1), (2, 5, 3), (2, 7, 3)),
    "values": (lambda p, v: p @ v, (2, 5, 7), (2, 7, 3)),
    "matmul": (torch.matmul, (6, 5), (5, 7)),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), (2, 4, 5), (2, 3, 5)),
    "linear": (torch.nn.functional.linear, (3, 4, 5), (6, 5)),
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
