"""Files: every rank reads its own block of a dataset, and blocks are written as one dataset."""

from mpishard.io.backend import Choice, choose_backend
from mpishard.io.dataset import Dataset, Loader
from mpishard.io.read import read
from mpishard.io.write import Written, write

__all__ = ["Choice", "Dataset", "Loader", "Written", "choose_backend", "read", "write"]
