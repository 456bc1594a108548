"""A model in the host's time loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mpishard as ms
from tests.insitu.hosts import WORLD, Host, cut

SIZE = WORLD.size


@pytest.fixture
def host():
    made = Host((SIZE, 1), [cut(12, SIZE), (8,)], [(1, 1), (1, 1)])
    yield made
    made.free()


@pytest.fixture
def sim(host):
    with ms.insitu.adopt(host.cart, host.shape, 1, ("x", "y")) as made:
        yield made


def batched(*fields):
    return torch.stack(fields)[None]


def test_inference_equals_torch(host, sim):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(3, 1, 3, padding=1)
    ).double()
    u, v, tau = host.array(), host.array() * 2, host.array() * 0
    for name, array in (("u", u), ("v", v), ("tau", tau)):
        sim.field(name, array)
    hook = sim.hook(model, ["u", "v"], ["tau"], pack=batched, unpack=lambda y: y[0, 0])
    for step in range(3):
        assert hook()
        whole = torch.from_numpy(host.whole) * (1 + step)
        with torch.no_grad():
            expected = model(torch.stack([whole, 2 * whole])[None])[0, 0]
        np.testing.assert_allclose(tau[host.interior], expected[host.box], rtol=1e-12)
        # the solver goes on
        u[host.interior] += host.whole[host.box]
        v[host.interior] += 2 * host.whole[host.box]
    assert hook.runs == 3
    assert all(t > 0 for t in hook.times.values())


def test_every(host, sim):
    sim.field("u", host.array())
    seen = []
    hook = sim.hook(lambda u: seen.append(1), ["u"], every=3)
    assert [hook() for _ in range(7)] == [True, False, False, True, False, False, True]
    assert len(seen) == 3


def test_names_of_outputs(host, sim):
    u, v = host.array(), host.array()
    sim.field("u", u)
    sim.field("v", v)
    sim.hook(lambda a, b: {"v": a + b, "u": a - b}, ["u", "v"], ["u", "v"])()
    np.testing.assert_array_equal(u[host.interior], 0 * host.whole[host.box])
    np.testing.assert_array_equal(v[host.interior], 2 * host.whole[host.box])


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda u: u[1:], "does not fit"),
        (lambda u: (u, u), "does not fit"),
        (lambda u: u.to_local(), "does not fit"),
        (lambda u: u.to(torch.complex128), "cannot hold"),
    ],
)
def test_outputs_that_do_not_fit(host, sim, model, text):
    array = host.array()
    before = array.copy()
    sim.field("u", array)
    with pytest.raises(ms.MpishardError, match=text):
        sim.hook(model, ["u"], ["u"])()
    np.testing.assert_array_equal(array, before)


def test_a_model_that_raises_on_one_rank(host, sim):
    array = host.array()
    before = array.copy()
    sim.field("u", array)

    def model(u):
        if WORLD.rank == SIZE - 1:
            raise ValueError("no such regime")
        return u + 1

    hook = sim.hook(model, ["u"], ["u"])
    for _ in range(2):
        with pytest.raises(ms.MpishardError, match="no such regime") as caught:
            hook()
        assert isinstance(caught.value.__cause__, ValueError) == (WORLD.rank == SIZE - 1)
        np.testing.assert_array_equal(array, before)
    sim.hook(lambda u: u + 1, ["u"], ["u"])()
    np.testing.assert_array_equal(array[host.interior], before[host.interior] + 1)
