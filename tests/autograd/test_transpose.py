"""The plan of an all-to-all, in one process: its blocks and its bound are those of every rank, one by one."""

from __future__ import annotations

import math
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpishard.autograd import step
from mpishard.comm.mesh import Group
from mpishard.layout import balanced


@st.composite
def calls(draw):
    """Draw a call: the ranks' shapes, the dims, and the split if one is given."""
    size, ndim = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    shape = [draw(st.integers(0, 5)) for _ in range(ndim)]
    split_dim, concat_dim = (draw(st.integers(0, ndim - 1)) for _ in range(2))
    some = st.lists(st.integers(0, 4), min_size=size, max_size=size)
    extents = draw(st.one_of(some, st.integers(0, 4).map(lambda n: [n] * size), st.just(balanced(3 * size + 1, size))))
    split = tuple(draw(some)) if draw(st.booleans()) else None
    if split and split_dim == concat_dim:
        extents = [sum(split)] * size
    shapes = []
    for n in extents:
        own = list(shape)
        own[concat_dim] = n
        if split:
            own[split_dim] = sum(split)
        shapes.append(tuple(own))
    return shapes, split_dim, concat_dim, split


@given(calls())
def test_blocks_are_those_of_every_rank(call):
    shapes, split_dim, concat_dim, split = call
    size, at = len(shapes), 0
    tensors = []
    for shape in shapes:
        tensors.append(torch.arange(at, at + math.prod(shape)).reshape(shape))
        at += math.prod(shape)
    blocks = [x.split(list(split or balanced(x.shape[split_dim], size)), split_dim) for x in tensors]
    loads = [*blocks, *([row[r] for row in blocks] for r in range(size))]
    most = max(sum(b.nbytes for b in load) for load in loads)
    bounds = set()
    for rank in range(size):
        going, coming = blocks[rank], [row[rank] for row in blocks]

        def travel(flat, out, into, _group, bound, going=going, coming=coming):
            assert flat.tolist() == torch.cat([b.reshape(-1) for b in going]).tolist()
            assert (list(out), list(into)) == ([b.numel() for b in going], [b.numel() for b in coming])
            bounds.add(bound)
            return torch.cat([b.reshape(-1) for b in coming])

        x, group = tensors[rank], Group(None, rank, size, {})
        extents = tuple(s[concat_dim] for s in shapes)
        plan = step.transpose_step(group, x.shape, x.itemsize, split_dim, concat_dim, split, extents)
        with mock.patch.object(step.blocking, "all_to_all_flat", travel):
            y = plan.run(x)
        assert torch.equal(y, torch.cat(coming, concat_dim))
        going, coming = coming, going
        with mock.patch.object(step.blocking, "all_to_all_flat", lambda *a, t=travel, g=going, c=coming: t(*a, g, c)):
            assert torch.equal(plan.adjoint.run(y), x)
    (bound,) = bounds
    assert bound >= most
