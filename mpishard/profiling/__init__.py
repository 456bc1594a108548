"""What a program's time goes into: a table over the ranks, and a trace with a track for each."""

from mpishard.profiling.profile import profile
from mpishard.profiling.summary import Row, Spread

__all__ = ["Row", "Spread", "profile"]
