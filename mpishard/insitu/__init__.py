"""Inside a simulation: a model on its ranks and arrays, or beside it as a program of its own."""

from mpishard.insitu.field import Field
from mpishard.insitu.hook import Hook
from mpishard.insitu.link import Link
from mpishard.insitu.program import Program, join
from mpishard.insitu.simulation import Simulation, adopt

__all__ = ["Field", "Hook", "Link", "Program", "Simulation", "adopt", "join"]
