"""Files: every rank reads its own block of a dataset, and blocks are written as one dataset."""

from mpishard.io.backend.choice import Choice, choose_backend
from mpishard.io.checkpoint.background import Saving
from mpishard.io.checkpoint.preemption import preemption
from mpishard.io.checkpoint.restore import Checkpoint
from mpishard.io.checkpoint.save_load import load_checkpoint, save_checkpoint
from mpishard.io.dataset import Dataset, Loader
from mpishard.io.file.journal import heal
from mpishard.io.foreign.dcp import import_dcp
from mpishard.io.foreign.safetensors import export_safetensors
from mpishard.io.read import read
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
