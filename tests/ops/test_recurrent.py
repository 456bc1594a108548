"""Recurrent layers and cells, bags of embeddings and CTC, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpishard as ms
from tests.compare import compare, gathered, shard
from tests.ops.windows import field, sampled

LAYERS = [
    (nn.LSTM, {"num_layers": 2}),
    (nn.LSTM, {"bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 2}),
    (nn.GRU, {"num_layers": 2, "bias": False}),
    (nn.GRU, {"batch_first": True}),
    (nn.RNN, {}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


@pytest.mark.parametrize("case", range(len(LAYERS)))
def test_layers(case):
    kind, options = LAYERS[case]
    torch.manual_seed(case)
    layer = kind(3, 4, **options).double()
    for mesh, placements, sizes in sampled((5, 6, 3), (0, 1, 2), case, 4):
        compare(
            lambda x: flatten(layer(x)),
            [(field(5, 6, 3), mesh, placements, sizes)],
            list(layer.parameters()),
            what=f"{placements} {sizes}",
        )


def flatten(found):
    out, state = found
    return [out, *state] if isinstance(state, tuple) else [out, state]


def test_first_states():
    layer = nn.LSTM(3, 4).double()
    h, c = field(1, 6, 4), field(1, 6, 4) * 2
    for mesh, placements, sizes in sampled((5, 6, 3), (1,), 0, 3):
        compare(
            lambda x, a, b: flatten(layer(x, (a, b))),
            [(field(5, 6, 3), mesh, placements, sizes), (h, mesh, placements, sizes), (c, mesh, None, None)],
            list(layer.parameters()),
        )


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind):
    cell = kind(3, 4).double()

    def two_steps(x):
        state = cell(x)
        state = cell(x * 2, state)
        return list(state) if isinstance(state, tuple) else state

    for mesh, placements, sizes in sampled((6, 3), (0, 1), 1, 4):
        compare(two_steps, [(field(6, 3), mesh, placements, sizes)], list(cell.parameters()))


def test_refusals():
    layer = nn.GRU(3, 4, num_layers=2, dropout=0.5)
    mesh, placements, sizes = next(iter(sampled((5, 6, 3), (1,), 0, 2)))
    x = shard(field(5, 6, 3).float(), mesh, placements, sizes)
    with pytest.raises(ms.UnsupportedOperationError, match="dropout between its layers"):
        layer(x)
    assert layer.eval()(x)[0].shape == (5, 6, 4)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode):
    weight = field(9, 4)
    index = (torch.arange(24) * 5 % 9).reshape(6, 4)
    for mesh, placements, sizes in sampled((6, 4), (0, 1), 1, 4):
        weight.requires_grad_(True)
        compare(lambda i: F.embedding_bag(i, weight, mode=mode), [(index, mesh, placements, sizes)], [weight])
        compare(
            lambda i: F.embedding_bag(i, weight, mode=mode, padding_idx=2), [(index, mesh, placements, sizes)], [weight]
        )
    flat, offsets = index.reshape(-1), torch.tensor([0, 3, 3, 11])
    for mesh, placements, sizes in sampled((24,), (0,), 1, 3):
        compare(lambda i: F.embedding_bag(i, weight, offsets, mode=mode), [(flat, mesh, placements, sizes)], [weight])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc(reduction):
    scores = field(8, 6, 5)
    targets = torch.arange(18).reshape(6, 3) % 4 + 1
    lengths, target_lengths = torch.tensor([8, 7, 8, 6, 8, 5]), torch.tensor([3, 2, 3, 1, 2, 3])

    def loss(x, t):
        return F.ctc_loss(x.log_softmax(2), t, lengths, target_lengths, reduction=reduction, zero_infinity=True)

    for k, (mesh, placements, sizes) in enumerate(sampled((8, 6, 5), (0, 1, 2), 1, 4)):
        other = None if k % 2 else (ms.Shard(0),) * mesh.ndim
        compare(loss, [(scores, mesh, placements, sizes), (targets, mesh, other, None)], what=f"{placements} {sizes}")
    mesh, placements, sizes = next(iter(sampled((8, 6, 5), (1,), 0, 2)))
    whole = torch.cat([t[:n] for t, n in zip(targets, target_lengths)])
    got = F.ctc_loss(shard(scores, mesh, placements, sizes).log_softmax(2), whole, lengths, target_lengths)
    torch.testing.assert_close(gathered(got), F.ctc_loss(scores.log_softmax(2), whole, lengths, target_lengths))


def test_one_sequence_and_modules():
    torch.manual_seed(1)
    layer, bag = nn.LSTM(3, 4).double(), nn.EmbeddingBag(9, 4, mode="sum").double()
    index, factors = torch.arange(24).reshape(6, 4) % 9, field(6, 4)
    for mesh, placements, sizes in sampled((5, 3), (0, 1), 1, 3):
        compare(lambda x: flatten(layer(x)), [(field(5, 3), mesh, placements, sizes)], list(layer.parameters()))
    for mesh, placements, sizes in sampled((6, 4), (0,), 1, 3):
        operands = [(index, mesh, placements, sizes), (factors, mesh, placements, sizes)]
        compare(lambda i, f: bag(i, per_sample_weights=f), operands, [bag.weight])
    targets = torch.arange(18).reshape(6, 3) % 4 + 1
    loss = nn.CTCLoss()
    for mesh, placements, sizes in sampled((8, 6, 5), (1,), 1, 3):
        compare(
            lambda x: loss(x.log_softmax(2), targets, (8,) * 6, (3, 2, 3, 1, 2, 3)),
            [(field(8, 6, 5), mesh, placements, sizes)],
        )
