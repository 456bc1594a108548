"""Files: every rank reads its own block of a dataset, and blocks are written as one dataset."""

from mpishard.io.hdf5 import read, write

__all__ = ["read", "write"]
