"""Graphs and meshes of cells whose nodes and edges are sharded."""

from mpishard.graph.halo import GraphHalo, halo

__all__ = ["GraphHalo", "halo"]
