"""A setup of the ocean model veros whose temperature a convolutional network corrects after every step.

    pip install veros
    veros run veros_closure.py                                                              # one process
    mpiexec -n 4 veros run veros_closure.py -n 2 2                                          # on the ocean's ranks
    mpiexec -n 4 env CLOSURE=beside veros run veros_closure.py -n 2 2 : -n 2 python veros_closure.py

In the last line the network runs as a program of its own, beside the ocean. The basin is that of veros' own setup
`acc`; `after_timestep` is all that it does not have. The network is not trained.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from veros import runtime_settings, runtime_state, veros_routine

import mpishard as ms

BESIDE = os.environ.get("CLOSURE") == "beside"
if BESIDE and __name__ != "__main__":
    # taken until veros' core is imported
    PROGRAM = ms.insitu.join("ocean")
    runtime_settings.mpi_comm = PROGRAM.comm
from veros.setups.acc import acc  # noqa: E402 (which imports the core)


class Network(torch.nn.Module):
    """Two convolutions along the horizontal, over all levels [x, y, z]; the earth is round along x."""

    def __init__(self, levels: int, strength: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Conv2d(levels, 8, 3).double(), torch.nn.Conv2d(8, levels, 1).double()
        self.strength = strength

    def forward(self, temp: torch.Tensor) -> torch.Tensor:
        """Return the new temperature."""
        x = F.pad(temp.permute(2, 0, 1)[None], (0, 0, 1, 1), mode="circular")
        x = F.conv2d(x, self.first.weight, self.first.bias, padding=(0, 1))
        return temp + self.strength * self.last(torch.tanh(x))[0].permute(1, 2, 0)


class Coupling:
    """The fields of one run of veros, and the network that reads one and fills the other."""

    def __init__(self, temp: np.ndarray, settings: Any, model: torch.nn.Module) -> None:
        self.sim = ms.insitu.adopt(
            runtime_settings.mpi_comm,
            shape=(settings.nx, settings.ny),
            halo=2,
            names=("x", "y"),
            periodic=(settings.enable_cyclic_x, False),
            # rank 1 of veros is beside rank 0 along x
            grid=runtime_settings.num_proc,
            coords=runtime_state.proc_idx,
        )
        # veros never changes an array, it makes new ones
        self.temp = self.sim.field("temp", temp, dims=("x", "y", None), writable=False)
        self.new = np.empty_like(temp[2:-2, 2:-2])
        new = self.sim.field("new", self.new, halo=0, dims=("x", "y", None))
        if BESIDE:
            self.link = PROGRAM.connect("model", out={"temp": self.temp}, into={"new": new}, timeout=600)
        else:
            self.hook = self.sim.hook(model, ["temp"], ["new"])

    def __call__(self, temp: np.ndarray) -> np.ndarray:
        """Return the new temperature of this rank's own cells."""
        self.temp.rebind(temp)
        if BESIDE:
            self.link.put()
            self.link.get()
        else:
            self.temp.halo_valid = True  # veros has just exchanged it
            self.hook()
        return self.new

    def close(self) -> None:
        """Let the model end, and the arrays go."""
        if BESIDE:
            self.link.close()
        self.sim.release()


class Closure(acc.ACCSetup):
    """The basin of `acc`, its temperature corrected by a network."""

    make_model = Network
    coupling: Coupling | None = None

    @veros_routine
    def after_timestep(self, state: Any) -> None:
        """Replace the newest temperature of the wet cells, and its ghost cells."""
        from veros.core.operators import at, update
        from veros.core.operators import numpy as npx
        from veros.core.utilities import enforce_boundaries

        vs, settings = state.variables, state.settings
        temp = vs.temp[..., int(vs.taup1)]  # a view: this time level of veros' own array
        if self.coupling is None:
            self.coupling = Coupling(temp, settings, self.make_model(settings.nz))
        own = temp[2:-2, 2:-2]
        new = update(temp, at[2:-2, 2:-2], npx.where(vs.maskT[2:-2, 2:-2], self.coupling(temp), own))
        vs.temp = update(vs.temp, at[..., vs.taup1], enforce_boundaries(new, settings.enable_cyclic_x))

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Run as veros does, then end the coupling."""
        super().run(*args, **kwargs)
        if self.coupling is not None:
            self.coupling.close()


def main() -> None:
    """Run the network beside the ocean, on ranks of its own and in another decomposition."""
    parser = argparse.ArgumentParser(description="The model's program; the ocean's is `veros run`.")
    parser.add_argument("shape", type=int, nargs="*", default=(30, 42, 15), help="nx ny nz of the ocean")
    shape = parser.parse_args().shape
    me = ms.insitu.join("model")
    mesh = ms.init_mesh((-1,), ("y",), comm=me.comm)
    temp, new = (ms.zeros(*shape, mesh=mesh, placements=(ms.Shard(1),), dtype=torch.float64) for _ in range(2))
    model = Network(shape[2])
    with torch.no_grad(), me.connect("ocean", into={"temp": temp}, out={"new": new}, timeout=600) as link:
        for _ in link:
            new.copy_(model(temp))
            link.put()


if __name__ == "__main__":
    main()
