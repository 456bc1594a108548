"""Models that were not distributed: their parameters are compared when they are first used with data on a mesh."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpishard as ms
from tests.compare import WORLD


class Added(nn.Module):
    """A parameter of which each rank takes its part."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(6, 8))

    def forward(self, x):
        return x + self.p


MODELS = {
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1), (1, 3, 6, 8)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 3), (1, 1, 6, 8, 5)),
    "transposed": (lambda: nn.ConvTranspose1d(3, 2, 2, stride=2), (1, 3, 8)),
    "linear": (lambda: nn.Linear(8, 4), (1, 3, 6, 8)),
    "norm": (lambda: nn.Sequential(nn.GroupNorm(1, 3), nn.Conv2d(3, 1, 1)), (2, 3, 6, 8)),
    "cut": (Added, (1, 3, 6, 8)),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (1, 6, 8)),
    "recurrent": (lambda: nn.GRU(8, 4, batch_first=True), (2, 6, 8)),
}


def called(model, x):
    y = model(x, x, x) if isinstance(model, nn.MultiheadAttention) else model(x)
    return y[0] if isinstance(y, tuple) else y


def field(shape, mesh):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return ms.distribute_tensor(x, mesh, [ms.Shard(min(2, len(shape) - 1 - (len(shape) == 3)))])


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["trained", "without gradients", "frozen", "autocast"])
def test_parameters_that_differ_raise(name, way):
    mesh = ms.init_mesh((-1,), ("y",))
    make, shape = MODELS[name]
    torch.manual_seed(WORLD.rank // 2)
    if WORLD.size == 2:
        torch.manual_seed(WORLD.rank)
    model = make().requires_grad_(way != "frozen")
    x = field(shape, mesh)
    for _ in range(2):  # whoever catches it has it again
        with (
            torch.set_grad_enabled(way != "without gradients"),
            torch.autocast("cpu", enabled=way == "autocast"),
            pytest.raises(ms.DesyncError, match=r"parameter.*differs between ranks(?s:.*)distribute_module"),
        ):
            called(model, x)
    ms.distribute_module(model, mesh)
    assert called(model, x).full_tensor().isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_those_that_agree_are_compared_once_and_no_tensors_travel_for_it(name):
    mesh = ms.init_mesh((-1,), ("y",))
    make, shape = MODELS[name]
    torch.manual_seed(5)
    model, x = make(), field(shape, mesh)
    torch.manual_seed(5)
    expected = called(make(), x.full_tensor())
    counts = []
    for _ in range(2):
        with ms.comm_counter() as count:
            y = called(model, x)
        torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-5, atol=1e-6)
        counts.append((count.messages, count.nbytes))
    assert counts[0] == counts[1]


@pytest.mark.ranks(2, 3)
def test_rounding_of_other_processors_passes():
    mesh = ms.init_mesh((-1,), ("y",))
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 1e-6 * WORLD.rank)
    model(field((1, 3, 6, 8), mesh))


@pytest.mark.ranks(2, 3)
def test_a_parameter_of_another_shape_on_one_rank_raises():
    mesh = ms.init_mesh((-1,), ("y",))
    model = nn.Linear(8, 4 + (WORLD.rank == WORLD.size - 1))
    with pytest.raises(ms.DesyncError):
        model(field((1, 3, 6, 8), mesh))


@pytest.mark.ranks(4)
def test_members_of_an_ensemble_may_differ():
    mesh = ms.init_mesh((2, 2), ("member", "y"))
    torch.manual_seed(mesh.coords[0])
    model, x = nn.Conv2d(3, 4, 3), field((1, 3, 6, 8), mesh["y"])
    torch.testing.assert_close(model(x).full_tensor(), model(x.full_tensor()), rtol=1e-5, atol=1e-6)
    other = ms.distribute_tensor(x.full_tensor(), mesh, [ms.Replicate(), ms.Shard(2)])
    with pytest.raises(ms.DesyncError, match="differs between ranks"):
        model(other)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_programs_compare_them_too():
    mesh = ms.init_mesh((-1,), ("y",))
    x = field((1, 3, 6, 8), mesh)
    call = torch.compile(lambda model, x: torch.relu(model(x)))
    torch.manual_seed(0)
    call(nn.Linear(8, 4), x)
    torch.manual_seed(WORLD.rank)
    with pytest.raises(ms.DesyncError, match="differs between ranks"):
        call(nn.Linear(8, 4), x)
