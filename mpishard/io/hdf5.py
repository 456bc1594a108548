"""ShardTensors in HDF5 files: both ways in one place."""

from mpishard.io.read import read
from mpishard.io.write import write

__all__ = ["read", "write"]
