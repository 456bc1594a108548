from __future__ import annotations

import os

import pytest
from mpi4py import MPI

import mpishard as ms


@pytest.fixture
def folder(tmp_path):
    """One folder for all ranks: tmp_path is each rank's own."""
    return type(tmp_path)(MPI.COMM_WORLD.bcast(os.fspath(tmp_path)))


@pytest.fixture(scope="module")
def mesh():
    return ms.init_mesh((-1, -1), ("y", "x"))
