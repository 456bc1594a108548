"""`whole`: what is gathered, what is cut again, blocks without cells, and errors of one rank."""

import pytest
import torch
from mpi4py.MPI import COMM_WORLD as WORLD
from torch import Tensor

import mpishard as ms
from mpishard.ops.rule.whole import whole
from tests.compare import compare, gathered, layouts, mesh_of, shard
from tests.ops.windows import field


def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert 0 not in a.shape
    product = a.sum(-1) * b.cumsum(0).sum(0)
    return product, a.flip(-1), torch.tensor([3])


def test_results_are_cut_as_their_labels_say() -> None:
    a, b = field(5, 3, 4), field(2, 5, 1)
    rows, columns = ("batch", "row", None), (None, "batch", "row")

    def rule(a: Tensor, b: Tensor) -> Tensor:
        if not any(isinstance(t, ms.ShardTensor) for t in (a, b)):
            found = both(a, b)
        else:
            found = whole(both, (a, b), (rows, columns), [("batch", "row"), rows, None])
        assert type(found[2]) is Tensor
        return found[0].sum() * 2 + (found[1] ** 2).sum() + found[0].square().sum()

    for mesh, placements, sizes in layouts((5, 3, 4), range(3)):
        compare(rule, [(a, mesh, placements, sizes), (b, mesh, [ms.Replicate()] * mesh.ndim, None)])
        compare(rule, [(a, mesh, placements, sizes), (b, mesh, [ms.Shard(1)] * mesh.ndim, None)])


def test_a_rank_without_cells_calls_too() -> None:
    mesh = mesh_of((WORLD.size,))
    sizes = {0: (3, *(0,) * (WORLD.size - 1))}
    x = shard(field(3, 4), mesh, (ms.Shard(0),), sizes, requires_grad=True)
    seen = []

    def last(t: Tensor) -> Tensor:
        seen.append(t.shape[0])
        return t[:, -1:]

    y = whole(last, (x,), (("row", None),), ("row", None))
    assert seen == [3 if WORLD.rank == 0 else 1]
    assert (y.placements, tuple(y.shape), y.block.shape[0]) == ((ms.Shard(0),), (3, 1), sizes[0][WORLD.rank])
    y.sum().backward()
    expected = torch.zeros(3, 4, dtype=torch.float64)
    expected[:, -1] = 1
    assert torch.equal(gathered(x.grad), expected)


def test_by_default_everything_is_gathered() -> None:
    mesh = mesh_of((WORLD.size,))
    y = whole(torch.block_diag, (shard(field(3, 4), mesh, (ms.Shard(1),)), field(2, 2)))
    assert y.placements == (ms.Replicate(),)
    assert torch.equal(y.block, torch.block_diag(field(3, 4), field(2, 2)))


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    x = shard(torch.arange(WORLD.size), mesh_of((WORLD.size,)), (ms.Shard(0),))

    def picky(t: Tensor) -> Tensor:
        if bool((t == 0).any()):
            raise RuntimeError("no zeros")
        return t

    with pytest.raises(RuntimeError, match="no zeros"):
        whole(picky, (x,), (("row",),), ("row",), checked=True)
