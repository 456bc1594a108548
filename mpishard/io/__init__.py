"""Files: every rank reads its own block of a dataset, and blocks are written as one dataset."""

from mpishard.io.backend import Choice, choose_backend
from mpishard.io.background import Saving
from mpishard.io.checkpoint import load_checkpoint, save_checkpoint
from mpishard.io.dataset import Dataset, Loader
from mpishard.io.dcp import import_dcp
from mpishard.io.journal import heal
from mpishard.io.preemption import preemption
from mpishard.io.read import read
from mpishard.io.restore import Checkpoint
from mpishard.io.safetensors import export_safetensors
from mpishard.io.write import Written, write

__all__ = [
    "Checkpoint",
    "Choice",
    "Dataset",
    "Loader",
    "Saving",
    "Written",
    "choose_backend",
    "export_safetensors",
    "heal",
    "import_dcp",
    "load_checkpoint",
    "preemption",
    "read",
    "save_checkpoint",
    "write",
]
