"""Graphs and meshes of cells whose nodes and edges are sharded."""

from mpishard.graph.halo import GraphHalo, halo
from mpishard.graph.partition import edge_order, partition, renumber

__all__ = ["GraphHalo", "edge_order", "halo", "partition", "renumber"]
