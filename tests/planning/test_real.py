"""What is planned for a mesh is what real ranks do on it."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI
from torch import nn

import mpishard as ms
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
    "transformer": Program(attention, (1, 34, 16), (1,), optimizer="sgd"),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_counts_and_memory(name, device):
    program, size = PROGRAMS[name], MPI.COMM_WORLD.size
    if device == "meta" and name == "transformer":
        program = Program(attention, (1, 34, 16), (1,), torch.bfloat16)  # keys are not gathered on a CPU either
    shapes = [(size,), (2, 2)] if size == 4 and len(program.dims) > 1 else [(size,)]
    for shape in shapes:
        mesh = ms.init_mesh(shape, device="cpu")
        with ms.testing.LiveMemory() as live:
            step = step_on(mesh, program)
            step()
            with ms.comm_counter() as count:
                step()
        planned = trace(program, shape, mesh.coords, device)
        assert planned.by_op == {op: (c.calls, c.messages, c.nbytes) for op, c in count.by_op.items()}
        assert planned.memory == pytest.approx(live.peak, rel=0.1)
        assert (size == 1) == (count.messages == 0)
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
