"""Runs of veros in one job, each to a restart file: ``ocean.py FOLDER RANKS_X RANKS_Y NAME...``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from veros import runtime_settings

FOLDER, RANKS, NAMES = Path(sys.argv[1]), tuple(map(int, sys.argv[2:4])), sys.argv[4:]
runtime_settings.num_proc = RANKS
runtime_settings.loglevel = "warning"
runtime_settings.force_overwrite = True

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import veros_closure as closure  # noqa: E402 (which imports the core of veros, and it wants the settings before)


class ByHand:
    """The closure on an ocean that is whole on one process: torch on its cells, nothing of mpishard."""

    def __init__(self, temp, settings, model):
        self.model = model

    def __call__(self, temp):
        with torch.no_grad():
            return self.model(torch.tensor(temp[2:-2, 2:-2])).numpy()

    def close(self):
        pass


for name in NAMES:
    setup = closure.acc.ACCSetup if name == "plain" else type("Setup", (closure.Closure,), {})
    if name == "nothing":
        setup.make_model = lambda self, levels: lambda temp: temp
    closure.Coupling = ByHand if name == "by_hand" else closure.Coupling
    sim = setup(override={"nx": 12, "ny": 12, "runlen": 4 * 43200, "restart_output_filename": f"{FOLDER}/{name}.h5"})
    sim.setup()
    sim.run()
