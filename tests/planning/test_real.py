"""What is planned for a mesh is what real ranks do on it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import mpishard as ms
from mpishard.comm import guard
from mpishard.comm.collective import blocking
from mpishard.ops.window import conv_kernel
from mpishard.planning.predict import trace
from mpishard.planning.step import Program, step_on


class Net(nn.Module):
    """Strides, norms, a skip, and the way back up: what a U-Net does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU())
        self.down = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1)
        self.last = nn.Conv2d(12, 2, 3, padding=1)

    def forward(self, x):
        a = self.first(x)
        return self.last(torch.cat((a, self.up(torch.relu(self.down(a)))), 1))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def classifier() -> nn.Module:
    """Random numbers, and cells that are pooled over all ranks."""
    layers = [nn.Conv2d(2, 24, 3, padding=1), nn.GELU(), nn.Dropout2d(0.1), nn.Conv2d(24, 24, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Conv2d(24, 4, 1))


PROGRAMS = {
    "classifier": Program(classifier, (1, 2, 38, 52), (2, 3), optimizer="sgd"),
    "net": Program(Net, (1, 2, 38, 52), (2, 3), optimizer="adam"),
    "forward": Program(Net, (2, 2, 38, 52), (2, 3), optimizer=None),
    "transformer": Program(attention, (1, 170, 16), (1,), optimizer="sgd"),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_counts_and_memory(name, device, monkeypatch):
    program, size = PROGRAMS[name], MPI.COMM_WORLD.size
    shapes = [(size,), (2, 2)] if size == 4 and len(program.dims) > 1 else [(size,)]
    # without values there are no kernels of a CPU's: that of attention keeps no scores, oneDNN's hold copies
    kernels = [SDPBackend.MATH] if device == "meta" else [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    monkeypatch.setattr(conv_kernel, "VECTOR", conv_kernel.VECTOR if device == "cpu" else 0)
    for shape in shapes:
        mesh = ms.init_mesh(shape, device="cpu")
        with sdpa_kernel(kernels), ms.testing.LiveMemory() as live:
            step = step_on(mesh, program)
            step()
            with ms.comm_counter() as count:
                step()
        planned = trace(program, shape, mesh.coords, device)
        assert planned.by_op == {op: (c.calls, c.messages, c.nbytes) for op, c in count.by_op.items()}
        assert planned.memory == pytest.approx(live.peak, rel=0.1)
        assert (size == 1) == (count.messages == 0)
        mesh.free()


class Looks(nn.Module):
    """An operation whose rule asks torch for the shape of the whole result, between others that keep their input."""

    def __init__(self, operation):
        super().__init__()
        self.operation, self.scale = operation, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.operation(x * self.scale).sin()


def attended(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


LOOKS = {
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), (1, 2, 96, 64), (2, 3)),
    "avg_pool": (lambda x: F.avg_pool2d(x, 2), (1, 2, 96, 64), (2, 3)),
    "lp_pool": (lambda x: F.lp_pool2d(x, 2.0, 2), (1, 2, 96, 64), (2, 3)),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (6, 5)), (1, 2, 96, 64), (2, 3)),
    "interpolate": (lambda x: F.interpolate(x, size=(50, 70), mode="bilinear"), (1, 2, 96, 64), (2, 3)),
    "reflect": (lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"), (1, 2, 96, 64), (2, 3)),
    "circular": (lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"), (1, 2, 96, 64), (2, 3)),
    "unfold": (lambda x: F.unfold(x, 3, padding=1), (1, 2, 96, 64), (2, 3)),
    "rfft": (lambda x: torch.fft.rfft2(x).abs(), (1, 2, 96, 64), (2, 3)),
    "stft": (lambda x: torch.stft(x, 16, window=torch.ones(16, device=x.device), return_complex=True).abs(),
             (2, 4096), (1,)),
    "attention": (attended, (1, 2, 512, 8), (2,)),
}  # fmt: skip


def counts(mesh: ms.CartMesh, **how) -> dict[str, tuple[int, int, int]]:
    """Return what travels in the second step of training, when all plans are made."""
    torch.manual_seed(0)
    with torch.device(mesh.device):
        model = ms.distribute_module(Net(), mesh, **how)
    x = ms.ones(1, 2, 38, 52, mesh=mesh, placements=[ms.Shard(2)])
    for _ in range(2):
        with ms.comm_counter() as count:
            model(x).square().mean().backward()
    return {op: (c.calls, c.messages, c.nbytes) for op, c in count.by_op.items()}


@pytest.mark.parametrize(
    ("how", "switch"),
    [
        ({}, (guard, "DEBUG")),
        ({}, (blocking, "DETERMINISTIC")),
        ({"shard_parameters": 0}, None),
        ({"shard_parameters": 0}, (guard, "DEBUG")),
        ({"shard_parameters": 0}, (blocking, "DETERMINISTIC")),
    ],
)
def test_counts_of_other_ways_to_train(how, switch, monkeypatch):
    if switch is not None:
        monkeypatch.setattr(*switch, True)
    monkeypatch.setattr(conv_kernel, "VECTOR", 0)
    mesh = ms.init_mesh(-1, device="cpu")
    assert counts(ms.planning.mesh(mesh.shape, coords=mesh.coords), **how) == counts(mesh, **how)
    mesh.free()


@pytest.mark.parametrize("name", LOOKS)
def test_what_the_whole_field_would_take_is_not_planned(name):
    """Shapes of results are asked of torch on tensors of the whole field, which no rank holds."""
    operation, shape, dims = LOOKS[name]
    program, size = Program(lambda: Looks(operation), shape, dims), MPI.COMM_WORLD.size
    mesh = ms.init_mesh((size,), device="cpu")
    with sdpa_kernel([SDPBackend.MATH]), ms.testing.LiveMemory() as live:
        step = step_on(mesh, program)
        step()
        step()
    planned = trace(program, (size,), mesh.coords)
    assert planned.memory == pytest.approx(live.peak, rel=0.1)
    mesh.free()


def test_a_planning_mesh_beside_a_real_one():
    """They have nothing in common: a tensor of one is refused with one of the other."""
    mesh = ms.init_mesh(-1, device="cpu")
    shape = [4 * n for n in mesh.shape]
    where = [ms.Shard(d) for d in range(mesh.ndim)]
    real = ms.ones(*shape, mesh=mesh, placements=where)
    planned = ms.ones(*shape, mesh=ms.planning.mesh(mesh.shape, coords=mesh.coords), placements=where)
    with pytest.raises(ms.MeshError, match="different meshes"):
        real + planned
    assert real.sum().item() == real.numel()


@pytest.mark.parametrize("sizes", ["infer", "chunk", {0: (2, 2, 2, 2)}], ids=str)
def test_blocks_of_a_planning_mesh(sizes):
    """Rules of users end with them (docs/extending.md)."""
    x = ms.ones(8, 3, mesh=ms.planning.mesh((4,)), placements=ms.Shard(0), requires_grad=True)
    y = ms.ShardTensor.from_local(x.to_local() * 2, x.mesh, x.placements, sizes)
    assert y.sharding is x.sharding
    y.sum().backward()
    assert x.grad.sharding == x.sharding


def test_indices_without_values():
    x = ms.ones(8, 3, mesh=ms.planning.mesh((4,)), placements=ms.Shard(0))
    index = torch.zeros(2, dtype=torch.int64, device="meta")
    assert x.index_select(1, index).shape == (8, 2)
    assert x.index_add(1, index, x[:, :2]).shape == (8, 3)
    assert x.repeat_interleave(torch.arange(8), 0).sharding.sizes[0] == (1, 5, 9, 13)


def test_values_of_a_planning_mesh():
    x = ms.ones(8, mesh=ms.planning.mesh((4,)), placements=ms.Shard(0))
    for ask in (float, int, bool, torch.Tensor.item, torch.Tensor.tolist):
        with pytest.raises(ms.MeshError, match="on a mesh for planning"):
            ask(x.sum())


def test_what_other_ranks_have_is_not_there(tmp_path):
    mesh = ms.planning.mesh((4,), coords=(2,))
    x = ms.ones(8, mesh=mesh, placements=ms.Shard(0))
    for call in (
        lambda: ms.scatter_tensor(torch.ones(8), 0, mesh, ms.Shard(0)),
        lambda: ms.process_group(mesh),
        lambda: ms.io.write(tmp_path / "x.h5", {"x": x}),
        lambda: ms.io.read(tmp_path / "x.h5", "x", mesh, ms.Shard(0)),
    ):
        with pytest.raises(ms.MeshError, match="on a mesh for planning"):
            call()
