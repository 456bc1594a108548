"""Messages of several plans: they share the memory that none of them is using."""

from __future__ import annotations

import pytest
import torch

from mpishard.comm.exchange.pool import ExchangePool
from mpishard.comm.mesh import init_mesh


@pytest.fixture
def ring():
    """Make pools whose messages go from each rank to the next one."""
    mesh = init_mesh((-1,), periodic=True)
    to, source = mesh.neighbour(0, 1), mesh.neighbour(0, -1)

    def pool(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> ExchangePool:
        def build() -> ExchangePool:
            return ExchangePool(mesh, (0,), [(to, shapes)], [(source, shapes)], dtype, "test", mesh.label)

        return mesh.plan((shapes, dtype), build)

    yield mesh, source, pool
    mesh.free()


def start(pool, value):
    exchange = pool.take(torch.empty(0))
    for view in exchange.sends[0]:
        view.fill_(value)
    exchange.start()
    return exchange


def test_one_after_the_other_in_the_same_memory(ring):
    mesh, source, pool = ring
    for shapes in [((40, 30),), ((3,), (0, 7), (2, 5)), ((1,),), ()]:
        exchange = start(pool(*shapes), mesh.rank)
        exchange.finish()
        assert [tuple(view.shape) for view in exchange.recvs[0]] == list(shapes)
        assert all((view == source).all() for view in exchange.recvs[0])
        exchange.release()
    assert len(mesh.storages) == 1


def test_at_once_each_in_its_own(ring):
    mesh, source, pool = ring
    large, small = pool((40, 30)), pool((5,), dtype=torch.float32)
    for _ in range(2):
        several = [start(p, 10 * k + mesh.rank) for k, p in enumerate((large, small, large))]
        for k, exchange in reversed(list(enumerate(several))):
            exchange.finish()
            assert (exchange.recvs[0][0] == 10 * k + source).all()
        for exchange in several:
            exchange.release()
    assert len(mesh.storages) == 3


def test_the_adjoint_direction(ring):
    mesh, _, pool = ring
    exchange = pool((4, 2)).take(torch.empty(0))
    exchange.recvs[0][0].fill_(mesh.rank)
    exchange.start(adjoint=True)
    exchange.finish(adjoint=True)
    assert (exchange.sends[0][0] == mesh.neighbour(0, 1)).all()
    exchange.release()
