from __future__ import annotations

import pytest
import torch

from mpishard.comm.collective import blocking
from mpishard.comm.collective.gather_sizes import gather_extents
from mpishard.errors import DesyncError


@pytest.fixture
def group():
    return blocking.world()


def test_gathered_extents(group):
    shape = torch.Size((3, group.rank, 2))
    assert gather_extents("probe", shape, 1, "same", group) == tuple(range(group.size))


@pytest.mark.ranks(2, 3, 4)
def test_gathered_extents_name_the_rank_that_differs(group):
    shape = torch.Size((3 + (group.rank == 1), 2))
    # under MPISHARD_DEBUG=1 before the extents are known
    with pytest.raises(DesyncError, match=r"(?s)rank.*shape \(3, (2|-1)\).*rank 1.*shape \(4, (2|-1)\)"):
        gather_extents("probe", shape, 1, "same", group)
    with pytest.raises(DesyncError, match=r"rank 1: (call \d+: )?probe.*other"):
        gather_extents("probe", torch.Size((3, 2)), 1, "other" if group.rank == 1 else "same", group)
