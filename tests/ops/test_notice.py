"""The warning of large gathers: when it comes, how often, and on which rank."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

import mpishard as ms
from mpishard.tensor import notice
from tests.compare import WORLD, mesh_of
from tests.ops.windows import field

pytestmark = pytest.mark.ranks(2, 3, 4)


def rows():
    return ms.distribute_tensor(field(8, 8), mesh_of((WORLD.size,)), (ms.Shard(0),))


def test_one_warning_per_line(monkeypatch):
    monkeypatch.setenv("MPISHARD_GATHER_WARN", "100")
    x = rows()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.linalg.matrix_exp(x)
        torch.linalg.matrix_exp(x)
    mine = [w for w in caught if w.category is ms.GatherWarning]
    assert len(mine) == (2 if x.mesh.rank == 0 else 0)
    if mine:
        assert "linalg" in str(mine[0].message)
        assert "512 bytes on every rank" in str(mine[0].message)
        assert mine[0].filename == __file__
        assert mine[1].lineno == mine[0].lineno + 1


def test_an_error_comes_on_every_rank(monkeypatch):
    monkeypatch.setenv("MPISHARD_GATHER_WARN", "0")
    x = rows()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ms.GatherWarning, match="gathers a ShardTensor"):
            x.unbind(0)


def write(y, x):
    y[:, :8] = x


@pytest.mark.parametrize(
    "into", [write, lambda y, x: y[:, :8].add_(x), lambda y, x: y.index_add_(1, torch.arange(8), x)]
)
@pytest.mark.parametrize("kind", ["plain", "replicated"])
def test_a_write_into_what_is_whole(monkeypatch, into, kind):
    monkeypatch.setenv("MPISHARD_GATHER_WARN", "0")
    x = rows()[..., None] * 1
    y = torch.zeros(8, 9, 1, dtype=x.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ms.GatherWarning, match="gathers a ShardTensor"):
            into(y if kind == "plain" else ms.distribute_tensor(y, x.mesh, (ms.Replicate(),)), x)
        into(x.new_zeros(8, 9, 1), x)  # where it lies as `x` does, nothing is gathered


def first_rows_only(mesh):
    return ms.distribute_tensor(field(8, 4), mesh, (ms.Shard(0),), sizes={0: (8, *[0] * (WORLD.size - 1))})


def uneven_columns(mesh):
    return ms.distribute_tensor(field(4, WORLD.size * 2 - 1), mesh, (ms.Shard(1),))


@pytest.mark.parametrize("made", [first_rows_only, uneven_columns])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("by", [{}, {"message": ".*gathers"}, {"module": ".*test_notice"}])
def test_an_error_comes_on_every_rank_whatever_its_block(monkeypatch, made, again, by):
    monkeypatch.setenv("MPISHARD_GATHER_WARN", "0")
    monkeypatch.setattr(notice, "_noticed", set())
    x = made(mesh_of((WORLD.size,)))
    for action in ("ignore", "error") if again else ("error", "error"):
        with warnings.catch_warnings():
            warnings.filterwarnings(action, category=ms.GatherWarning, **by)
            try:
                torch.linalg.qr(x)
            except ms.GatherWarning as e:
                raised = str(e)
            else:
                raised = ""
        assert set(WORLD.allgather(raised)) == {raised}
    assert raised


@pytest.mark.ranks(4)
@pytest.mark.parametrize("limit", [59, 60])
def test_blocks_around_the_limit_warn_alike(monkeypatch, limit):
    monkeypatch.setenv("MPISHARD_GATHER_WARN", str(limit))
    # gathered along the second dim, 60 bytes on two ranks and 40 on the others
    x = ms.distribute_tensor(field(5, 5, 1).float(), mesh_of((2, 2)), (ms.Shard(0), ms.Shard(1)))
    with contextlib.nullcontext() if limit == 60 else pytest.raises(ms.GatherWarning, match="60 bytes on every rank"):
        x.unbind(1)


@pytest.mark.parametrize("limit", ["", "1000", "-1"])
def test_small_gathers_and_none(monkeypatch, limit):
    monkeypatch.setenv("MPISHARD_GATHER_WARN", limit)
    torch.linalg.det(rows())  # a warning is an error in tests


def test_a_limit_that_is_no_number(monkeypatch):
    monkeypatch.setenv("MPISHARD_GATHER_WARN", "1 GB")
    with pytest.raises(ms.errors.MeshError, match="MPISHARD_GATHER_WARN: unknown value"):
        torch.linalg.det(rows())


def test_what_stays_warns_of_nothing(monkeypatch):
    monkeypatch.setenv("MPISHARD_GATHER_WARN", "0")
    x = rows()
    y = ms.distribute_tensor(field(8, 3, 3), x.mesh, (ms.Shard(0),))
    assert torch.linalg.det(y).sharding.shape == (8,)
    assert (x + x.sum(0)).shape == x.shape
