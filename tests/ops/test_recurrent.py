"""Recurrent layers and cells, bags of embeddings and CTC, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpishard as ms
from tests.compare import WORLD, compare, gathered, mesh_of, shard
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


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_between_layers_does_not_depend_on_the_mesh(kind):
    torch.manual_seed(3)
    layer = kind(3, 4, num_layers=3, dropout=0.5, bidirectional=True).double()
    mesh = mesh_of((WORLD.size,))
    on_all = shard(field(5, 6, 3), mesh, (ms.Replicate(),))

    def f(x):
        whole = x if isinstance(x, ms.ShardTensor) else on_all + (x - x.detach())
        torch.manual_seed(8)
        found = flatten(layer(whole))
        return found if isinstance(x, ms.ShardTensor) else [t.full_tensor() for t in found]

    for _, placements, sizes in (l for l in sampled((5, 6, 3), (0, 1), 1, 8) if l[0] is mesh):
        compare(f, [(field(5, 6, 3), mesh, placements, sizes)], list(layer.parameters()), what=f"{placements} {sizes}")
    kept = layer(on_all)[0].to_local()
    assert not torch.equal(kept, layer.eval()(on_all)[0].to_local())


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences(enforce_sorted):
    torch.manual_seed(4)
    lstm, gru = nn.LSTM(3, 4, 2, bidirectional=True).double(), nn.GRU(3, 4).double()
    lengths = torch.tensor([5, 5, 4, 3, 3, 1] if enforce_sorted else [3, 5, 1, 5, 4, 3])

    def f(x):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted)
        a, state = lstm(packed)
        b, last = gru(packed)
        a, b = (nn.utils.rnn.pad_packed_sequence(t, total_length=6, padding_value=2.0) for t in (a, b))
        return [a[0], b[0], *state, last]

    for mesh, placements, sizes in sampled((5, 6, 3), (0, 1, 2), 1, 4):
        compare(f, [(field(5, 6, 3), mesh, placements, sizes)], [*lstm.parameters(), *gru.parameters()])


def test_pad_sequence():
    def f(x):
        return nn.utils.rnn.pad_sequence([x[:4], x, x[1:2]], padding_value=1.5), nn.utils.rnn.pad_sequence(
            [x[:3], x], True, padding_side="left"
        )

    for mesh, placements, sizes in sampled((5, 6), (0, 1), 1, 4):
        compare(f, [(field(5, 6), mesh, placements, sizes)])


def test_options_that_look_at_all_indices():
    index = (torch.arange(24) * 5 % 7).reshape(6, 4)
    for mesh, placements, sizes in sampled((6, 4), (0, 1), 1, 4):
        weight = field(9, 4).requires_grad_(True)
        compare(
            lambda i, w=weight: F.embedding(i, w, 2, scale_grad_by_freq=True),
            [(index, mesh, placements, sizes)],
            [weight],
        )
        tables = [field(9, 4) * 3 for _ in range(2)]
        for table, i in zip(tables, (index, shard(index, mesh, placements, sizes))):
            F.embedding(i, table, max_norm=1.5)
        torch.testing.assert_close(*tables)
        assert not torch.equal(tables[0], field(9, 4) * 3)


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
