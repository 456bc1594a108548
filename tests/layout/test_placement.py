"""Placements: torch's vocabulary, equal to torch's instances, and refused where they do not fit."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch.distributed.tensor as dtensor

from mpishard.errors import LayoutError
from mpishard.layout import Partial, Replicate, Shard, as_placements, layout_of
from tests.release import RELEASE

PAIRS = [
    (Shard(0), dtensor.Shard(0)),
    (Shard(3), dtensor.Shard(3)),
    (Shard(-1), dtensor.Shard(-1)),
    (Replicate(), dtensor.Replicate()),
    (Partial(), dtensor.Partial()),
]


@pytest.mark.parametrize(("own", "theirs"), PAIRS, ids=repr)
def test_equal_to_torchs(own, theirs):
    assert own == theirs
    if RELEASE >= (2, 13):  # torch 2.8 knows its own classes alone
        assert theirs == own
    assert hash(own) == hash(theirs)
    assert {own: "found"}[theirs] == "found"
    assert own.is_shard() == theirs.is_shard()
    assert own.is_replicate() == theirs.is_replicate()
    assert own.is_partial() == theirs.is_partial()


def test_different_from_everything_else():
    kinds = [Shard(0), Shard(1), Replicate(), Partial()]
    theirs = [dtensor.Shard(0), dtensor.Shard(1), dtensor.Replicate(), dtensor.Partial()]
    for i, own in enumerate(kinds):
        for j, (other, torchs) in enumerate(zip(kinds, theirs)):
            assert (own == other) == (own == torchs) == (i == j)
        assert own != "Shard(dim=0)"
        assert own != 0
        assert own is not None
    assert Partial() != dtensor.Partial("avg")
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)


def test_torchs_instances_become_ours():
    placements = as_placements([dtensor.Shard(-1), dtensor.Replicate(), dtensor.Partial()], 3, 4)
    assert [type(p) for p in placements] == [Shard, Replicate, Partial]
    assert placements == (Shard(3), Replicate(), Partial())
    assert layout_of((2, 2), (dtensor.Shard(1), dtensor.Replicate()), (4, 4)) is layout_of(
        (2, 2), (Shard(-1), Replicate()), (4, 4)
    )
    assert as_placements(Shard(0), 1, 1) == (Shard(0),)


@pytest.mark.parametrize(
    ("placements", "mesh_ndim", "says"),
    [
        ((Shard(0),), 2, "2 placements, one per mesh dim"),
        ((Shard(0), Shard(1), Shard(2)), 2, "got:      3"),
        ((Shard(2), Replicate()), 2, r"Shard\(2\) for a tensor of 2 dims"),
        ((Shard(-3), Replicate()), 2, r"dim in \[-2, 2\)"),
        ((Shard(0), "replicate"), 2, "'replicate'"),
        ((0, 1), 2, "Shard"),
        ((dtensor.Partial("max"), Replicate()), 2, "max"),
    ],
)
def test_placements_that_do_not_fit(placements, mesh_ndim, says):
    with pytest.raises(LayoutError, match=says) as info:
        as_placements(placements, mesh_ndim, 2)
    for part in ("expected:", "got:", "fix:"):
        assert str(info.value).count(part) == 1


@pytest.mark.parametrize("dim", [1.9, 1.0, "a", None])
def test_a_dim_that_is_no_integer(dim):
    with pytest.raises(LayoutError, match="Shard: no tensor dim"):
        Shard(dim)
    assert Shard(np.int64(1)) == Shard(1)


def test_partial_that_is_no_sum():
    with pytest.raises(LayoutError, match="all_reduce"):
        Partial("max")


@pytest.mark.parametrize("placement", [Shard(1), Replicate(), Partial()], ids=repr)
def test_placements_are_frozen_and_can_be_copied(placement):
    for name in ("dim", "reduce_op", "other"):
        with pytest.raises(AttributeError, match="shared"):
            setattr(placement, name, 0)
    for same in (pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement)):
        assert type(same) is type(placement)
        assert same == placement


def test_a_partial_knows_its_reduction():
    assert Partial().is_partial("sum")
    assert not Partial().is_partial("max")
    assert not Replicate().is_partial("sum")
    assert not Shard(0).is_partial(reduce_op="sum")
