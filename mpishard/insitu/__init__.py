"""Inside a simulation: its communicator, its ghosted arrays and its time loop stay, a model joins them."""

from mpishard.insitu.field import Field
from mpishard.insitu.hook import Hook
from mpishard.insitu.simulation import Simulation, adopt

__all__ = ["Field", "Hook", "Simulation", "adopt"]
