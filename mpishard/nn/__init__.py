"""Models on meshes."""

from mpishard.nn.module import distribute_module
