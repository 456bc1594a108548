"""Values that torch refuses where it reads them: every rank raises what one finds, with one text."""

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, mesh_of, shard, skew

VALID, FAR, BELOW = (torch.tensor(i) for i in ([0, 1, 2, 1], [0, 1, 2, 9], [0, 1, -9, 2]))
ONES, SQUARE = torch.ones(4), torch.ones(4, 4)
EYES = torch.eye(2).expand(4, 2, 2)


def wrong(i, yes, no):
    """Put ``yes`` where an index is out of range."""
    return torch.where((i < 0) | (i > 3), yes, no)


# called with an index, the same in plain, and what shards a tensor along a dim
CASES = {
    "gather": lambda i, p, s: ONES.gather(0, i),
    "gather of shards": lambda i, p, s: s(ONES).gather(0, i),
    "gather by a plain index": lambda i, p, s: s(SQUARE).gather(1, p[:, None]),
    "index a plain tensor": lambda i, p, s: ONES[i],
    "index shards": lambda i, p, s: s(ONES)[i],
    "index beside shards": lambda i, p, s: s(SQUARE, 1)[p],
    "index_add": lambda i, p, s: s(ONES).index_add(0, i, s(ONES)),
    "index_copy": lambda i, p, s: s(SQUARE, 1).index_copy(0, i, s(SQUARE)),
    "index_fill": lambda i, p, s: s(SQUARE, 1).index_fill(0, i, 2.0),
    "index_put": lambda i, p, s: s(SQUARE, 1).index_put((i,), torch.tensor(1.0)),
    "index_reduce": lambda i, p, s: s(SQUARE, 1).index_reduce(0, i, s(SQUARE), "prod"),
    "index_select": lambda i, p, s: torch.index_select(ONES, 0, i),
    "put": lambda i, p, s: s(ONES).put(i, ONES),
    "scatter": lambda i, p, s: ONES.scatter(0, i, 1.0),
    "scatter_add": lambda i, p, s: s(ONES).scatter_add(0, i, s(ONES)),
    "scatter_reduce": lambda i, p, s: s(SQUARE).scatter_reduce(1, p[:, None], s(SQUARE), "prod"),
    "take": lambda i, p, s: torch.take(ONES, i),
    "take_along_dim": lambda i, p, s: torch.take_along_dim(s(ONES), i),
    "embedding": lambda i, p, s: F.embedding(i, SQUARE),
    "embedding in columns": lambda i, p, s: F.embedding(p, s(SQUARE, 1)),
    "embedding with max_norm": lambda i, p, s: F.embedding(i, SQUARE.clone(), max_norm=1.0),
    "embedding_bag": lambda i, p, s: F.embedding_bag(i[:, None], SQUARE),
    "one_hot": lambda i, p, s: F.one_hot(i, 4),
    "cross_entropy": lambda i, p, s: F.cross_entropy(s(SQUARE), i),
    "cross_entropy, plain targets": lambda i, p, s: F.cross_entropy(s(SQUARE), p, reduction="sum"),
    "cross_entropy, plain scores": lambda i, p, s: F.cross_entropy(SQUARE, i, reduction="none"),
    "nll_loss": lambda i, p, s: F.nll_loss(s(SQUARE), i, weight=ONES),
    "multi_margin_loss": lambda i, p, s: F.multi_margin_loss(s(SQUARE), i),
    "max_unpool": lambda i, p, s: F.max_unpool1d(s(SQUARE[:, :1, None]), i[:, None, None], 4),
    "searchsorted": lambda i, p, s: torch.searchsorted(s(SQUARE), SQUARE, sorter=torch.stack([VALID, VALID, p, VALID])),
    "integer //": lambda i, p, s: s(VALID) // wrong(i, 0, 1),
    "integer %": lambda i, p, s: 5 % wrong(i, 0, 1),
    "integer div": lambda i, p, s: torch.div(s(VALID), wrong(p, 0, 1), rounding_mode="floor"),
    "integer fmod_": lambda i, p, s: s(VALID).fmod_(wrong(i, 0, 1)),
    "binary_cross_entropy": lambda i, p, s: F.binary_cross_entropy(wrong(i, 2.0, 0.5), s(ONES)),
    "bincount": lambda i, p, s: torch.bincount(wrong(i, -1, 1)),
    "ctc_loss": lambda i, p, s: F.ctc_loss(
        torch.zeros(5, 4, 3).log_softmax(-1), torch.ones_like(i)[:, None], wrong(i, 9, 5), torch.ones_like(i)
    ),
    "normal": lambda i, p, s: torch.normal(0.0, wrong(i, -1.0, 1.0)),
    "repeat_interleave": lambda i, p, s: torch.repeat_interleave(ONES, wrong(i, -1, 1)),
    "cholesky": lambda i, p, s: torch.linalg.cholesky(wrong(i, -1.0, 1.0)[:, None, None] * EYES),
    "inv": lambda i, p, s: torch.linalg.inv(wrong(i, 0.0, 1.0)[:, None, None] * EYES),
    "matrix_power": lambda i, p, s: torch.matrix_power(wrong(i, 0.0, 1.0)[:, None, None] * EYES, -1),
    "solve": lambda i, p, s: torch.linalg.solve(wrong(i, 0.0, 1.0)[:, None, None] * EYES, EYES),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", CASES)
def test_one_rank_finds_it_and_all_raise(name):
    mesh = mesh_of((WORLD.size,))
    for index in (VALID, FAR, BELOW):
        for sizes in (None, skew(4, WORLD.size)):

            def cut(t, dim=0, sizes=sizes):
                return shard(t, mesh, (ms.Shard(dim),), sizes and {dim: sizes})

            told = None
            try:
                CASES[name](cut(index), index, cut)
            except (IndexError, RuntimeError) as e:
                told = type(e).__name__, str(e)
            everyone = WORLD.allgather(told)
            assert len(set(everyone)) == 1, everyone
            assert (told is None) == (index is VALID)
