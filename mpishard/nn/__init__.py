"""Models on meshes."""

from mpishard.nn.compare import compare_module
from mpishard.nn.module import distribute_module
from mpishard.nn.pipeline import Pipeline
from mpishard.nn.sharded import parameter_memory
