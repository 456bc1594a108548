from __future__ import annotations

import re
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "examples" / "mesh_graph_net.py"


def test_every_number_of_ranks_learns_the_same(launch):
    told = {}
    for size in (1, 4):
        done = launch(size, PROGRAM, "--points", "300", "--steps", "12")
        assert done.returncode == 0, done.stdout
        ranks, ghosts, first, last = re.search(
            r"(\d+) ranks, (\d+) rows from others: loss (\S+), after 12 steps (\S+)", done.stdout
        ).groups()
        assert int(ranks) == size
        # a rank's border is far shorter than its part of the points
        assert int(ghosts) < 300 if size > 1 else ghosts == "0"
        assert float(last) < 0.6 * float(first)
        told[size] = first, last
    assert told[1] == told[4]
