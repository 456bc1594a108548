"""Cells at a mask, read and written: what is picked stays with the ranks that have it, and goes back to them."""

from __future__ import annotations

import random

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, gathered, mesh_of, mesh_shapes, shard, skew
from tests.ops.index.test_added import drawn_operand
from tests.ops.windows import field

SHAPE = (5, 6, 4)


def mask_of(*shape):
    return field(*shape) > 0.2


def written(index_of, value_of):
    """Return a function that writes at a mask into a copy."""

    def f(x, m, v):
        y = x * 1
        index = index_of(m)
        y[index] = value_of(y[index], v)
        return y

    return f


def added(x, m, v):
    return x.index_put((m,), v, accumulate=True)


FIRST, WHOLE, MIDDLE = mask_of(5), mask_of(*SHAPE), mask_of(6, 4)
# what is called, the mask, and a value
WRITES = {
    "what it picked": (written(lambda m: m, lambda p, v: p * p + v), WHOLE, field(1)),
    "of first dims": (written(lambda m: m, lambda p, v: p.sin() * v), mask_of(5, 6), field(4)),
    "of later dims": (written(lambda m: (slice(None), m), lambda p, v: p.exp() + v), MIDDLE, field(5, 1)),
    "within a slice": (written(lambda m: (slice(1, 4), m[1:], 2), lambda p, v: p**3 + v), mask_of(7), field(1)),
    "other values": (written(lambda m: m, lambda _, v: v), WHOLE, field(int(WHOLE.sum()))),
    "rows": (written(lambda m: m, lambda _, v: v), FIRST, field(int(FIRST.sum()), 6, 4)),
    "one for all rows": (written(lambda m: m, lambda _, v: v), FIRST, field(1, 6, 4)),
    "one for each row": (written(lambda m: m, lambda _, v: v), FIRST, field(int(FIRST.sum()), 1, 1)),
    "one for the cells of a later dim": (written(lambda m: (..., m), lambda _, v: v), mask_of(4), field(5, 6, 1)),
    "added": (added, FIRST, field(int(FIRST.sum()), 6, 4)),
    "one added": (added, mask_of(5, 6), field(4)),
    "nothing": (written(lambda m: m & ~m, lambda p, v: p * v), FIRST, field(1)),
    "masked_scatter": (lambda x, m, v: x.masked_scatter(m, v), WHOLE, field(11, 13)),
    "masked_scatter, broadcast": (lambda x, m, v: x.masked_scatter(m, v.T), mask_of(6, 1), field(13, 11)),
    "masked_scatter, in place": (lambda x, m, v: (x * v[0]).masked_scatter_(m, x[m].cos()), WHOLE, field(1)),
}


@pytest.mark.parametrize("name", WRITES)
def test_as_on_the_whole(name, request):
    f, mask, value = WRITES[name]
    rng = random.Random(f"{request.config.option.seed} {name}")
    for case, mesh_shape in enumerate((*mesh_shapes(2), *mesh_shapes(2))):
        mesh = mesh_of(mesh_shape)
        x = drawn_operand(rng, field(*SHAPE), mesh, range(3))
        others = [
            drawn_operand(rng, t, mesh, range(t.ndim)) if rng.random() < 0.6 else (t, None, None, None)
            for t in (mask, value)
        ]
        compare(f, [x, *others], second=case == 1, what=f"{mesh_shape} {x[2:]} {[o[2:] for o in others]}")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("accumulate", [False, True])
def test_values_of_every_kind(dtype, accumulate):
    full, mask = (field(7, 3) * 3).to(dtype), mask_of(7)
    value = (field(int(mask.sum()), 3) * 5).to(dtype)
    if dtype.is_floating_point:
        full[::2], value[0], value[1, 1] = -0.0, torch.nan, -0.0
    for sizes in (None, {0: skew(7, WORLD.size)}):
        x, m, v = (
            shard(t, mesh_of((WORLD.size,)), (ms.Shard(0),), s) for t, s in ((full, sizes), (mask, None), (value, None))
        )
        got, want = gathered(x.index_put((m,), v, accumulate)), full.index_put((mask,), value, accumulate)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        if dtype.is_floating_point:
            assert torch.equal(got.signbit(), want.signbit())


def test_what_does_not_fit_is_an_error_on_every_rank():
    mesh, mask = mesh_of((WORLD.size,)), torch.zeros(6, dtype=torch.bool)
    mask[-2:] = True
    few = torch.zeros(3, 2), "shape mismatch"
    unknown = torch.zeros(2, 2), "dtypes match"
    no_kernel = torch.zeros(2, 2, dtype=torch.uint16), "not implemented"
    for full, (value, said) in (
        (torch.ones(6, 2), few),
        (torch.ones(6, 2).double(), unknown),
        (torch.ones(6, 2, dtype=torch.uint16), no_kernel),
    ):
        x, m = shard(full, mesh, (ms.Shard(0),)), shard(mask, mesh, (ms.Shard(0),))
        for y, where, v in ((full.clone(), mask, value), (x, m, value), (x, m, shard(value, mesh, (ms.Shard(0),)))):
            with pytest.raises(RuntimeError, match=said):
                y[where] = v
        assert torch.equal(gathered(x), full)
    with pytest.raises(RuntimeError, match="source < number of ones"):
        shard(torch.ones(6), mesh, (ms.Shard(0),)).masked_scatter_(shard(mask, mesh, (ms.Shard(0),)), torch.ones(1))


def test_one_mask_twice_names_pairs_of_cells():
    mask = torch.tensor([True, False, True, True])
    x = shard(torch.zeros(4, 4), mesh_of((WORLD.size,)), (ms.Shard(0),))
    x[mask, mask] = 3.0
    assert torch.equal(gathered(x), torch.diag(mask * 3.0))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("plain", [True, False])
def test_counts_travel_and_not_the_cells(plain):
    full, mesh = field(8 * WORLD.size, 6), mesh_of((WORLD.size,))
    x = shard(full, mesh, (ms.Shard(0),), requires_grad=True)
    mask = full > 0.2 if plain else x.detach() > 0.2

    def written(x):
        y = x * 1
        y[mask] = y[mask] * 2
        return y.masked_scatter(mask, y[mask] + 1)

    written(x)
    with ms.comm_counter() as count:
        y = written(x)
        y.backward(torch.ones_like(y))
    # two reads, two writes
    assert {op: c.nbytes for op, c in count.by_op.items()} == {"all_gather": 4 * 8}


@pytest.mark.ranks(2, 3, 4)
def test_a_mask_of_a_whole_dim_moves_nothing():
    x = shard(field(5, 8 * WORLD.size), mesh_of((WORLD.size,)), (ms.Shard(1),))
    with ms.comm_counter() as count:
        picked = x[FIRST]
        x[FIRST] = picked * 2
    assert not count.nbytes
    assert picked.placements == (ms.Shard(1),)
