"""The page for Python hosts: its solver as it stands there, alone and with the lines of its diff."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch

from tests.insitu.hosts import WORLD

PAGE = (Path(__file__).parents[2] / "docs" / "insitu.md").read_text()
SOLVER = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
DIFF = re.search(r"```diff\n(.*?)```", PAGE, re.DOTALL)[1]


def run(source):
    names = {}
    torch.manual_seed(WORLD.rank)  # the page has one for all
    exec(compile(source, "docs/insitu.md", "exec"), names)
    mine = names["x0"], names["y0"], names["u"][1:-1, 1:-1]
    names["cart"].Free()
    whole = np.zeros((names["NX"], names["NY"]))
    for x0, y0, block in WORLD.allgather(mine):
        whole[x0 : x0 + block.shape[0], y0 : y0 + block.shape[1]] = block
    return whole, names


def test_the_solver_and_its_diff():
    added, kept = DIFF.split("\n+\n for n in range(STEPS):\n")
    lines = [line[1:] for line in (added + "\n\n for n in range(STEPS):\n" + kept).splitlines()]
    coupled = SOLVER[: SOLVER.index("for n in range(STEPS)")] + "\n".join(lines)
    alone, _ = run(SOLVER)
    together, names = run(coupled)
    names["sim"].release()
    # the same on one process
    model = names["model"]
    u = np.zeros((names["NX"], names["NY"]))
    x, y = np.meshgrid(np.arange(names["NX"]), np.arange(names["NY"]), indexing="ij")
    u[...] = np.sin(2 * np.pi * x / names["NX"]) * np.sin(np.pi * (y + 0.5) / names["NY"])
    plain = u.copy()
    for _ in range(names["STEPS"]):
        with torch.no_grad():
            rate = 0.2 + 0.01 * model(torch.from_numpy(u)[None, None])[0, 0].numpy()
        for field, by in ((u, rate), (plain, 0.2)):
            ghosted = np.pad(np.pad(field, ((1, 1), (0, 0)), "wrap"), ((0, 0), (1, 1)))
            lap = ghosted[2:, 1:-1] + ghosted[:-2, 1:-1] + ghosted[1:-1, 2:] + ghosted[1:-1, :-2] - 4 * field
            field += by * lap
    np.testing.assert_allclose(alone, plain, atol=1e-12)
    np.testing.assert_allclose(together, u, atol=1e-12)
    assert abs(together - alone).max() > 1e-4
