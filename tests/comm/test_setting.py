"""Environment variables that change which messages ranks send, where one rank has another value."""

from __future__ import annotations

import pytest
from mpi4py import MPI

import mpishard as ms
from mpishard.comm import guard, setting
from mpishard.comm.environment import switch
from mpishard.errors import MeshError

WORLD = MPI.COMM_WORLD


def from_comm():
    cart = WORLD.Create_cart([WORLD.size])
    try:
        return ms.CartMesh.from_comm(cart)
    finally:
        cart.Free()


def adopt():
    ms.insitu.adopt(WORLD, (4 * WORLD.size,), 1, ("x",), grid=(WORLD.size,), coords=(WORLD.rank,))


def preemption():
    with ms.io.preemption():
        raise AssertionError


MEETINGS = [
    lambda: ms.init_mesh((-1,)),
    from_comm,
    adopt,
    lambda: ms.process_group(WORLD),
    lambda: ms.insitu.join("alone"),
    preemption,
]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("meet", MEETINGS)
@pytest.mark.parametrize(
    ("variable", "module", "name"),
    [("MPISHARD_DEBUG", guard, "DEBUG"), ("MPISHARD_DETERMINISTIC", setting, "DETERMINISTIC")],
)
def test_a_variable_of_one_rank(monkeypatch, meet, variable, module, name):
    monkeypatch.setattr(module, name, WORLD.rank == 1)
    with pytest.raises(MeshError, match=f"differ between ranks: {variable}\n") as info:
        meet()
    assert f"rank 1: {variable}=1" in str(info.value)
    assert len(set(WORLD.allgather(str(info.value)))) == 1


@pytest.mark.ranks(2, 3, 4)
def test_another_error_comes_first(monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", WORLD.rank == 1)
    with pytest.raises(MeshError, match="does not fit the number of ranks"):
        ms.init_mesh((WORLD.size + 1,))


@pytest.mark.parametrize(
    ("text", "on"),
    [("", None), (" ", None), ("0", False), ("off", False), ("False", False), ("1", True), ("on", True), ("YES", True)],
)
def test_what_a_switch_says(monkeypatch, text, on):
    monkeypatch.setenv("MPISHARD_TEST", text)
    assert switch("MPISHARD_TEST") is on
