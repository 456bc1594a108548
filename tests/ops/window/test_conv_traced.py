"""Convolutions in compiled programs: in the form and by the kernels of eager ones, equal to the whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

import mpishard as ms
from mpishard.comm import traced
from mpishard.ops.window import conv
from tests.compare import WORLD, gathered, shard, skew

SIZE = WORLD.size


class Case(NamedTuple):
    """A convolution: its function, input (the first spatial extent a rank), weight, and what else it is told."""

    func: Any
    shape: tuple[int, ...]
    weight: tuple[int, ...]
    told: dict[str, Any] = {}
    form: str = ""
    dtype: torch.dtype = torch.float64


CASES = {
    "overlapped": Case(F.conv2d, (2, 3, 6, 5), (4, 3, 3, 3), {"padding": 1}, "Overlapped"),
    "strided": Case(F.conv2d, (2, 3, 6, 8), (4, 3, 3, 3), {"padding": 1, "stride": 2}, "Overlapped"),
    "grouped, dilated": Case(
        F.conv2d, (1, 4, 8, 9), (6, 2, 3, 3), {"padding": 2, "dilation": 2, "groups": 2}, "Overlapped"
    ),
    "one dim": Case(F.conv1d, (2, 3, 8), (4, 3, 5), {"padding": 2}, "Overlapped"),
    "unpadded": Case(F.conv2d, (2, 3, 6, 7), (4, 3, 3, 3), {}, "Fetched"),
    "transposed": Case(F.conv_transpose2d, (2, 4, 5, 6), (4, 3, 3, 3), {"padding": 1, "stride": 2}, "Fetched"),
    "transposed groups": Case(
        F.conv_transpose1d, (2, 4, 7), (4, 2, 4), {"stride": 3, "output_padding": 1, "groups": 2}, "Fetched"
    ),
    # blocks of a kernel that torch would not choose
    "columns": Case(F.conv3d, (1, 8, 6, 6, 8), (4, 8, 3, 3, 3), {"padding": 1}),
    "oneDNN": Case(F.conv3d, (1, 8, 8, 10, 10), (8, 8, 3, 3, 3), {"padding": 1}, dtype=torch.float32),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def asked(monkeypatch):
    """The names of what compiled programs hand to `traced.Recording`, of both kinds."""
    names = []
    for kind in ("call", "compute"):
        known = getattr(traced.Recording, kind)

        def run(self, name, *args, _known=known, **kwargs):
            if self.tracing:
                names.append(name)
            return _known(self, name, *args, **kwargs)

        monkeypatch.setattr(traced.Recording, kind, run)
    return names


@pytest.mark.parametrize("needs", ["all", "weight", "input"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("cut", ["even", "uneven"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_whole(name, cut, channels_last, needs, monkeypatch):
    case = CASES[name]
    if case.form:
        monkeypatch.setattr(conv, "LARGE_CELLS", 0)
    names, kernels = asked(monkeypatch), []
    chosen = conv.kernel_for
    monkeypatch.setattr(conv, "kernel_for", lambda *args: kernels.append(chosen(*args)) or kernels[-1])
    n, c, extent, *rest = case.shape
    draw = torch.Generator().manual_seed(3)
    whole = torch.rand(n, c, extent * SIZE, *rest, generator=draw, dtype=torch.float64).to(case.dtype)
    if channels_last and whole.ndim > 3:
        whole = whole.to(memory_format=torch.channels_last if whole.ndim == 4 else torch.channels_last_3d)
    weight = torch.rand(case.weight, generator=draw, dtype=torch.float64).to(case.dtype)
    groups = case.told.get("groups", 1)
    bias = torch.rand(case.weight[1] * groups if "transpose" in case.func.__name__ else case.weight[0], generator=draw)
    bias = bias.to(case.dtype) if needs != "weight" else None
    mesh = ms.init_mesh((SIZE,), ("x",))  # without plans
    x = shard(whole, mesh, (ms.Shard(2),), {2: skew(extent * SIZE, SIZE)} if cut == "uneven" else None)
    model = torch.compile(lambda x, w, b: case.func(x, w, b, **case.told), backend="aot_eager", fullgraph=True)
    results = []
    for call, given in ((model, x), (lambda x, w, b: case.func(x, w, b, **case.told), whole)):
        given = given.detach().requires_grad_(needs != "weight")
        w, b = (t if t is None else t.clone().requires_grad_(needs != "input") for t in (weight, bias))
        for _ in range(2):  # the second time by the program of the first
            y = call(given, w, b)
            y.square().sum().backward()
        results.append([y, *(t.grad for t in (given, w, b) if t is not None and t.requires_grad)])
    tolerance = {"rtol": 1e-4, "atol": 1e-3} if case.dtype is torch.float32 else {}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(gathered(ours), gathered(theirs), **tolerance)
    if case.form and SIZE > 1 and cut == "even":
        assert "halo of convolution" in names
    if not case.form:
        assert ("convolution" in names) == any(not kernel.is_torch for kernel in kernels)
    mesh.free()
