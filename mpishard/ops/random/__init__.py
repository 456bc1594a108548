"""Random operations: dropout, tensors and distributions, the same global numbers on every mesh."""

from mpishard.ops.random import distribution, random

__all__ = ["distribution", "random"]
