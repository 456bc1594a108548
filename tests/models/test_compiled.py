"""Whole training steps under torch.compile: one graph of each, nothing runs eagerly, and equal to one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

import mpishard as ms
from mpishard.tensor import compiler
from tests.compare import WORLD, mesh_of
from tests.models.convolutional import UNet
from tests.models.transformer import SwinBlock, VisionTransformer
from tests.models.twin import close, data, mean_square, run, same_state, seeded
from tests.release import RELEASE


def fno():
    import fno

    return fno.FNO(ndim=2, width=3, modes=3, layers=2)


MODELS = {
    "U-Net": (lambda: UNet(2), (2, 1, 17, 23), 2),
    "FNO": (fno, (2, 1, 9, 12), 2),
    "ViT": (lambda: VisionTransformer((20, 28), layer="fused"), (2, 3, 20, 28), 2),
    # looks up its biases in a table
    "Swin": (lambda: SwinBlock(8, shift=1), (2, 16, 12, 8), 1),
}


# Dynamo of torch 2.8 does not read the FNO
@pytest.mark.parametrize("name", [name for name in MODELS if name != "FNO" or RELEASE >= (2, 13)])
def test_a_step_is_one_graph(name, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    build, shape, dim = MODELS[name]
    torch._dynamo.reset()
    counters.clear()
    eagerly = []
    monkeypatch.setattr(compiler, "_warn", eagerly.append)
    full, mesh = data(*shape), mesh_of((WORLD.size,))
    model, reference = seeded(build, full.dtype), seeded(build, full.dtype)
    compiled = torch.compile(ms.distribute_module(model, mesh), backend="aot_eager", fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in (model, reference)]
    for _ in range(2):
        x, whole = ms.distribute_tensor(full, mesh, (ms.Shard(dim),)).requires_grad_(), full.clone().requires_grad_()
        out, loss = run(compiled, x, mean_square)
        expected, expected_loss = run(reference, whole, mean_square)
        close(out, expected, "output")
        close(loss, expected_loss, "loss")
        close(x.grad, whole.grad, "gradient of the input")
        same_state(model, reference, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not eagerly
