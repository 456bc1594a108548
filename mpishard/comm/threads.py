"""Cores and threads of the ranks of a node."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from mpi4py import MPI

from mpishard.comm import guard


class Cores(NamedTuple):
    """What this rank may run on, and what the ranks of its node have together."""

    own: int
    threads: int
    of_node: int
    threads_of_node: int
    sharing: int


def cores() -> Cores:
    """Count cores and threads on this node. Collective over the node's ranks of MPI_COMM_WORLD."""
    mine = _affinity()
    with guard.waiting("the count of cores", (), MPI.COMM_WORLD):
        node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        every = node.allgather((mine, torch.get_num_threads()))
        node.Free()
    return Cores(
        len(mine),
        torch.get_num_threads(),
        len(frozenset().union(*(other for other, _ in every))),
        sum(threads for _, threads in every),
        sum(bool(mine & other) for other, _ in every),
    )


def share_cores() -> None:
    """Give this rank its share of the cores that it may run on, unless OMP_NUM_THREADS is set.

    Collective over the node's ranks of MPI_COMM_WORLD.
    """
    found = cores()
    if not os.environ.get("OMP_NUM_THREADS"):
        threads = max(1, found.own // found.sharing)
        # for libraries that are loaded later, and for torch, which is here
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def _affinity() -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return frozenset(range(os.cpu_count() or 1))
