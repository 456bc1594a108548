"""Sharded parameters of layers in an order of their own: read as they are, sent for once, dropped behind."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

import mpishard as ms
from tests.models.twin import close, data, seeded


class Drawn(nn.Module):
    """Takes another way at each step, as layers that are dropped, or experts that are chosen, do."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.step = 0

    def forward(self, x):
        for i in random.Random(self.step).choices(range(6), k=5):
            x = torch.tanh(self.parts[i](x))
        return x


def attention():
    # its norms are gathered with the second linear layer, before and behind the first
    return nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True)


@pytest.fixture
def mesh():
    return ms.init_mesh((-1,), ("data",))


def pair(build, mesh):
    reference = seeded(build, torch.float64)
    return reference, ms.distribute_module(copy.deepcopy(reference), mesh, shard_parameters="data")


@pytest.mark.parametrize("build", [Drawn, attention])
def test_what_was_sent_for_in_vain_is_dropped(mesh, build):
    reference, model = pair(build, mesh)
    full = data(4, 5, 8)
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0),))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    for step in range(8):
        reference.step = model.step = step
        for m, optimizer, given in zip((reference, model), optimizers, (full, x)):
            optimizer.zero_grad()
            loss = m(given).square().mean()
            assert m is reference or ms.parameter_memory(m)["gathered"] == 0
            loss.backward()
            assert m is reference or ms.parameter_memory(m)["gathered"] == 0
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(p.detach().full_tensor() if isinstance(p, ms.ShardTensor) else p.detach(), q.detach(), name)


@pytest.mark.ranks(2, 3, 4)
def test_layers_that_compute_between_others_are_sent_for_once(mesh):
    _, model = pair(attention, mesh)
    x = ms.distribute_tensor(data(4, 5, 8), mesh, (ms.Shard(0),))
    sent = []
    for _ in range(4):
        with ms.comm_counter() as forward:
            loss = model(x).square().mean()
        with ms.comm_counter() as backward:
            loss.backward()
        sent.append((forward.by_op["all_gather"].messages, backward.by_op["all_gather"].messages))
    # attention, second layer for the norm, first layer, second layer; the same way back
    assert sent[2:] == [(4, 4), (4, 4)]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_steps_are_seen_by_what_was_gathered_before(mesh, optimizer):
    """Torch does not count what its fused kernels write."""
    reference, model = pair(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), mesh)
    full = data(4, 5, 8)
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0),))
    outputs = []
    for m, given in ((reference, full), (model, x)):
        step = getattr(torch.optim, optimizer)(m.parameters(), lr=0.1, fused=True)
        m(given).square().mean().backward()
        with torch.no_grad():  # not as a whole: the first is sent for, as it followed the last
            for part in (m[0], m[2], m[0], m[2]):
                part(given)
        step.step()
        with torch.no_grad():
            outputs.append(m[0](given))
    close(outputs[1].full_tensor(), outputs[0], "behind the step")
