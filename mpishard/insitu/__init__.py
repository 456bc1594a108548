"""Inside a simulation: models on the ranks of a host program, or beside it as a program of their own."""

from mpishard.insitu.link import Link
from mpishard.insitu.program import Program, join

__all__ = ["Link", "Program", "join"]
