"""Few cells picked along a sharded dim: their owners are asked, and the tensor stays."""

from __future__ import annotations

import random

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, gathered, mesh_of, mesh_shapes, shard, skew
from tests.ops.index.test_added import drawn_operand
from tests.ops.windows import field
from tests.release import RELEASE

SHAPE = (4, 13, 3)


def numbers(n, *shape):
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(n))


# older torch takes no numbers around the end
AROUND = 6 if RELEASE >= (2, 13) else 0
PICKS = {
    "one of each": (lambda x, i: x.gather(1, i), numbers(13, 4, 1, 3)),
    "some of some": (lambda x, i: torch.gather(x, -2, i) ** 2, numbers(13, 2, 2, 2)),
    "the same": (lambda x, i: x.gather(1, i * 0 + 5), numbers(13, 4, 3, 1)),
    "first dim": (lambda x, i: x.gather(0, i), numbers(4, 1, 13, 3)),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i - AROUND, 1), numbers(13, 1, 2, 1)),
    "of all": (lambda x, i: x.take_along_dim(i), numbers(4 * 13 * 3, 7)),
    "many": (lambda x, i: x.gather(1, i), numbers(13, 4, 20, 3)),
    "a vector": (lambda x, i: x[0, :, 0].gather(0, i) * x.sum(), numbers(13, 2)),
    "a number": (lambda x, i: x[0, :, 0].gather(0, i[0]) * x.sum(), numbers(13, 2)),
}


@pytest.mark.parametrize("name", PICKS)
def test_as_on_the_whole(name, request):
    f, index = PICKS[name]
    rng = random.Random(f"{request.config.option.seed} {name}")
    for case, mesh_shape in enumerate(mesh_shapes(3) * 2):
        mesh = mesh_of(mesh_shape)
        x = drawn_operand(rng, field(*SHAPE), mesh, range(3))
        i = drawn_operand(rng, index, mesh, range(index.ndim)) if rng.random() < 0.6 else (index, None, None, None)
        compare(f, [x, i], second=case == 1, what=f"{mesh_shape} {x[2:]} {i[2:]}")


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_cells_arrive_as_they_are(dtype):
    full = (field(11, 4) * 90).to(dtype)
    if dtype.is_floating_point:
        full[3], full[5, 0], full[5, 1], full[5, 2], full[5, 3] = -0.0, torch.nan, torch.inf, -torch.inf, 0.0
    elif dtype.is_complex:
        full[3], full[5, 0] = complex(-0.0, -0.0), complex(0.0, torch.nan)
    index = torch.tensor([[3, 5, 3, 5], [5, 3, 5, 3]])
    for sizes in (None, {0: skew(11, WORLD.size)}):
        got = gathered(shard(full, mesh_of((WORLD.size,)), (ms.Shard(0),), sizes).gather(0, index))
        want = full.gather(0, index)
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        signs = [torch.view_as_real(t) if dtype.is_complex else t for t in (got, want)]
        if not signs[0].dtype.is_floating_point:
            continue
        numbers = ~signs[1].isnan()
        assert torch.equal(signs[0].signbit()[numbers], signs[1].signbit()[numbers])


@pytest.mark.parametrize("sizes", [None, {0: skew(9, WORLD.size)}])
def test_a_cell_that_is_not_there_is_an_error_on_every_rank(sizes):
    x = shard(field(9, 2), mesh_of((WORLD.size,)), (ms.Shard(0),), sizes)
    for wrong in (-1, 9):
        index = torch.tensor([[0, wrong]])
        for i in (index, shard(index, x.mesh, (ms.Shard(1),))):
            with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
                x.gather(0, i)
    with pytest.raises(RuntimeError, match="int64"):
        x.gather(0, torch.zeros(1, 2))


@pytest.mark.ranks(2, 3, 4)
def test_few_cells_travel():
    rows, mesh = 16 * WORLD.size, mesh_of((WORLD.size,))
    x = shard(field(8, rows), mesh, (ms.Shard(1),), requires_grad=True)
    index = numbers(rows, 8, 1)
    for i, op in ((index, "all_reduce"), (shard(index, mesh, (ms.Shard(0),)), "reduce_scatter")):
        x.gather(1, i)
        with ms.comm_counter() as count:
            y = x.gather(1, i)
            y.backward(torch.ones_like(y))
        assert op in count.by_op
        assert count.by_op[op].nbytes <= 8 * 8
        assert count.nbytes <= 3 * 8 * 8  # of 1024 a rank
