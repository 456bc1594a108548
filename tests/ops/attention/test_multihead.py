"""nn.MultiheadAttention and the transformer layers, batch or sequence sharded, against one process."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn

import mpishard as ms
from tests.compare import WORLD, compare, gathered, mesh_of, mesh_shapes, shard, skew
from tests.ops.windows import field

L, S, N, E = 7, 9, 4, 6


def sequence(length, batch_first):
    return field(N, length, E) if batch_first else field(length, N, E)


def hidden(length):
    """Two samples with keys that are hidden; never all of one."""
    mask = torch.zeros(N, length, dtype=torch.bool)
    mask[0, -2:] = True
    mask[2, 3] = True
    return mask


def same(module, mesh, f, operands, what=""):
    """Compare ``f`` of operands (full tensor, placements, sizes), and gradients of the module's parameters."""
    ms.distribute_module(module.double(), mesh)
    ops = [(x, None if p is None else mesh, p, s) for x, p, s in operands]
    compare(f, ops, params=list(module.parameters()), what=f"{mesh.shape} {[o[2:] for o in ops]} {what}")


def attention(batch_first, **options):
    torch.manual_seed(1)
    return nn.MultiheadAttention(E, 2, batch_first=batch_first, **options)


def layouts():
    """Meshes with batch or sequence (dims 0 and 1) sharded, in every combination."""
    for mesh_shape in mesh_shapes(2):
        for placements in itertools.product((ms.Shard(0), ms.Shard(1)), repeat=len(mesh_shape)):
            yield mesh_of(mesh_shape), placements


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_self_attention(batch_first, train):
    x = sequence(L, batch_first)
    module = attention(batch_first).train(train)
    for mesh, placements in layouts():
        same(module, mesh, lambda t: module(t, t, t), [(x, placements, None)])
        same(module, mesh, lambda t: module(t, t, t, need_weights=False)[:1], [(x, placements, None)])


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"bias": False}])
def test_cross_attention(options):
    module = attention(True, **options)
    mesh = mesh_of((WORLD.size,))
    every = [(ms.Shard(0),), (ms.Shard(1),), (ms.Replicate(),), None]
    for k, (p, other) in enumerate(itertools.product(every, repeat=2)):
        if p is not None or other is not None:
            operands = [(sequence(L, True), p, None), (sequence(S, True), other, None)]
            need = k % 2 == 0
            same(module, mesh, lambda t, u, need=need: module(t, u, u, need_weights=need)[: 1 + need], operands)


def test_keys_and_values_of_other_widths():
    module = attention(True, kdim=5, vdim=3)
    mesh = mesh_of((WORLD.size,))
    for p, other in itertools.product([(ms.Shard(0),), (ms.Shard(1),)], repeat=2):
        operands = [(sequence(L, True), p, None), (field(N, S, 5), other, None), (field(N, S, 3), other, None)]
        same(module, mesh, module, operands)
        same(module, mesh, lambda *t: module(*t, need_weights=False)[:1], operands)


@pytest.mark.parametrize("need", [False, True])
def test_masks(need):
    module = attention(True)
    mesh = mesh_of((WORLD.size,))
    pad, row, each = hidden(S), field(L, S), field(N * 2, L, S)
    sizes = {1: skew(L, WORLD.size)}

    def f(t, u, *masks, **named):
        return module(t, u, u, *masks, need_weights=need, average_attn_weights=False, **named)[: 1 + need]

    for p, other in itertools.product([(ms.Shard(0),), (ms.Shard(1),)], repeat=2):
        x = [(sequence(L, True), p, sizes if p == (ms.Shard(1),) else None), (sequence(S, True), other, None)]
        same(module, mesh, lambda t, u: f(t, u, pad), x, "padding")
        same(module, mesh, lambda t, u: f(t, u, attn_mask=row < -1), x, "boolean")
        for mask in ((row, None, None), (row, (ms.Shard(0),), None), (row, (ms.Shard(1),), None), (each, None, None)):
            same(module, mesh, lambda t, u, m: f(t, u, attn_mask=m), [*x, mask], "added")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # masks of two kinds
            same(module, mesh, lambda t, u, m: f(t, u, pad, attn_mask=m), [*x, (row, None, None)], "both")
        padding = ms.distribute_tensor(pad, mesh, other)
        got = f(*[shard(t, mesh, q, s) for t, q, s in x], padding)
        for a, b in zip(got, f(*[t for t, _, _ in x], pad), strict=True):
            torch.testing.assert_close(gathered(a), b.detach())


def test_causal_hint_and_no_batch():
    module = attention(False)
    mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    for mesh, placements in layouts():
        x = [(sequence(L, False), placements, None)]
        for need in (False, True):
            same(
                module,
                mesh,
                lambda t, need=need: module(t, t, t, attn_mask=mask, is_causal=True, need_weights=need)[: 1 + need],
                x,
            )
    mesh = mesh_of((WORLD.size,))
    for need in (False, True):
        same(
            module,
            mesh,
            lambda t, u, need=need: module(t, u, u, hidden(S)[0], need_weights=need)[: 1 + need],
            [(field(L, E), (ms.Shard(0),), None), (field(S, E), (ms.Shard(0),), None)],
        )


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder(batch_first, norm_first):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(E, 2, 12, 0.0, batch_first=batch_first, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(E), enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    for k, (mesh, placements) in enumerate(layouts()):
        encoder.train(k % 2 == batch_first)
        x = [(sequence(L, batch_first), placements, None)]
        same(encoder, mesh, lambda t: encoder(t, src_key_padding_mask=hidden(L)), x)
        same(encoder, mesh, lambda t: encoder(t, mask=mask), x)
        encoder.eval()
        with torch.no_grad():  # where torch takes its fast path
            got = encoder(shard(x[0][0], mesh, placements))
            torch.testing.assert_close(gathered(got), encoder(x[0][0]))


@pytest.mark.parametrize("batch_first", [False, True])
def test_decoder(batch_first):
    torch.manual_seed(1)
    decoder = nn.TransformerDecoderLayer(E, 2, 12, 0.0, batch_first=batch_first)
    mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    for k, (mesh, placements) in enumerate(layouts()):
        decoder.train(k % 2 == batch_first)
        x = [(sequence(n, batch_first), placements, None) for n in (L, S)]
        same(decoder, mesh, lambda t, u: decoder(t, u, tgt_mask=mask, tgt_is_causal=True), x)
        same(decoder, mesh, lambda t, u: decoder(t, u, memory_key_padding_mask=hidden(S)), x)


def test_dropout_is_the_same_on_every_mesh():
    module = attention(True, dropout=0.4)
    for need in (False, True):
        results = []
        for mesh, placements in layouts():
            ms.distribute_module(module.double(), mesh)
            torch.manual_seed(5)
            x = shard(sequence(L, True), mesh, placements)
            results.append(gathered(module(x, x, x, need_weights=need)[0]))
        for other in results[1:]:
            torch.testing.assert_close(other, results[0])


@pytest.mark.ranks(2, 3, 4)
def test_long_sequences_are_not_gathered_without_weights():
    mesh = mesh_of((WORLD.size,))
    module = ms.distribute_module(attention(True).double(), mesh)
    x = shard(sequence(4 * WORLD.size, True), mesh, (ms.Shard(1),))
    with ms.attention_method("ring"):
        module(x, x, x, need_weights=False)
        with ms.comm_counter() as count:
            module(x, x, x, need_weights=False)
    assert list(count.by_op) == ["ring_attention"]
    assert count.messages == WORLD.size - 1


def test_torchs_own_errors():
    mesh = mesh_of((WORLD.size,))
    module = attention(True).double()
    full = sequence(L, True)
    x = shard(full, mesh, (ms.Shard(0),))
    for t in (full, x):
        with pytest.raises(AssertionError):
            module(t, t, t[:, :2])
        with pytest.raises(RuntimeError):
            module(t, t, t, attn_mask=field(L, S), need_weights=False)
        with pytest.raises(RuntimeError):
            module(t, t, t, is_causal=True)
