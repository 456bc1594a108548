"""Scaled dot-product attention on shards against torch on whole tensors: the ring, by heads, and local."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import mpishard as ms
from mpishard.layout import Shard, balanced, layout_of, plan_stage
from mpishard.ops.attention import online_softmax, scaled_dot_product
from mpishard.ops.attention.layout import Stretch, contiguous, mirrored, moved_back, moved_into
from mpishard.ops.attention.online_softmax import is_needed
from mpishard.ops.attention.ring import reach_of
from tests.compare import WORLD, compare, gathered, mesh_of, mesh_shapes, shard, skew
from tests.ops.windows import field

P = WORLD.size
BATCH, HEADS, SEQUENCE, FEATURES = (ms.Shard(d) for d in range(4))
WHOLE = ms.Replicate()
sdpa = F.scaled_dot_product_attention


def operands(rows=11, keys=13, heads=4, shared=None, features=7):
    """Queries, keys and values; heads of keys that several heads of queries share; features of the values."""
    shared = heads if shared is None else shared
    return field(2, heads, rows, 5), field(2, shared, keys, 5) * 0.9 + 0.1, field(2, shared, keys, features)


def attended(layouts, qkv, masks=(), second=False, mesh=None, **options):
    """Compare attention of queries, keys, values and masks in these layouts: (placements, sizes) each."""
    mesh = mesh_of((P,)) if mesh is None else mesh
    ops = [(x, mesh, *own) for x, own in zip((*qkv, *masks), layouts, strict=True)]
    return compare(lambda *x: sdpa(*x, **options), ops, second=second, what=f"{mesh.shape} {layouts} {options}")


def along(placement, *sizes, dim=2):
    """(placements, sizes) on a mesh of one dim."""
    return (placement,), {dim: sizes} if sizes else None


RING = [along(SEQUENCE)] * 3
METHODS = ("ring", "all_to_all", "gather", "auto")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("features", [5, 7])  # as many as those of the queries: torch's fused kernel
def test_sequences_of_any_lengths(method, causal, features):
    with ms.attention_method(method):
        for rows, keys in ((12, 12), (11, 13), (13, 5), (2, 9), (9, 1)):
            attended(RING, operands(rows, keys, features=features), is_causal=causal)
        q, k = skew(11, P), skew(13, P)
        for own, other in ((q, k), (q[::-1], k), (q, k[::-1])):
            qkv = operands(features=features)
            attended([along(SEQUENCE, *own), *[along(SEQUENCE, *other)] * 2], qkv, is_causal=causal)
        attended([along(BATCH), *[along(WHOLE)] * 2], operands(features=features), is_causal=causal)


@pytest.mark.parametrize("method", METHODS)
def test_queries_of_no_features(method):
    q, k, v = operands()
    with ms.attention_method(method):
        for layouts in (RING, [along(BATCH)] * 3):
            attended(layouts, (q[..., :0], k[..., :0], v))


@pytest.mark.parametrize(("which", "causal"), [(0, False), (0, True), (1, False)])
def test_scores_that_are_nan(which, causal):
    """Of a row of queries, or of all keys of a rank: torch's fused kernel makes 0 of a row of nothing else."""
    qkv = [x[:, 0] for x in operands(2 * P, 2 * P, features=5)]
    qkv[which][:, 2 * P - 2 :] = torch.nan
    with sdpa_kernel(SDPBackend.MATH):  # of three dims, torch 2.15 takes the fused one too
        expected = sdpa(*qkv, is_causal=causal)
    with ms.attention_method("ring"):
        got = sdpa(*(shard(x, mesh_of((P,)), (ms.Shard(1),)) for x in qkv), is_causal=causal)
    torch.testing.assert_close(gathered(got), expected, equal_nan=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("order", [(0, 1, 3, 2), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_any_order_in_memory(method, order):
    """As of queries that a convolution makes, whose features are rows: fused kernels read them as neighbours."""

    def laid_out(x):
        return x.permute(order).contiguous().permute([order.index(d) for d in range(4)])

    qkv = operands(features=5)
    with ms.attention_method(method):
        for which in (0, 1, 2, (0, 1, 2)):
            chosen = (which,) if isinstance(which, int) else which

            def f(*x, chosen=chosen):
                return sdpa(*(laid_out(t) if i in chosen else t for i, t in enumerate(x))).mT.mT

            ops = [(x, mesh_of((P,)), *own) for x, own in zip(qkv, RING)]
            compare(f, ops, what=f"{order} {which}")


def broadcast(draw, batch, *rest, full=False):
    """A field whose batch dims are some of these from the last, of one cell or whole, and how it is cut by any dim."""
    some = [draw.choice([n, n, 1]) for n in batch[draw.randint(0, len(batch)) :]]
    x = field(*(batch if full else some), *rest)
    dim = draw.randrange(x.ndim)
    whole = x.shape[dim]
    cut = draw.choice([balanced(whole, P), skew(whole, P), (*(0,) * (P - 1), whole), (whole, *(0,) * (P - 1))])
    return x, draw.choice([((ms.Shard(dim),), {dim: cut})] * 4 + [along(WHOLE)])


@pytest.mark.parametrize("method", METHODS)
def test_batch_dims_that_broadcast(method, request):
    draw = random.Random(f"{request.config.option.seed} {method}")
    with ms.attention_method(method):
        for _ in range(8):
            batch = draw.choice([(4,), (3, 2), (2, 3, 2)])
            masks = [broadcast(draw, batch, 5, 6)] if draw.random() < 0.4 else []
            q = broadcast(draw, batch, 5, 4, full=bool(masks))  # torch adds a mask to the scores in place
            k, v = (broadcast(draw, batch, 6, n) for n in (4, draw.choice([3, 4])))
            tensors, layouts = zip(q, k, v, *masks)
            attended(layouts, tensors[:3], tensors[3:], is_causal=not masks and draw.random() < 0.5)


@pytest.mark.parametrize("method", METHODS)
def test_every_pair_of_layouts(method):
    options = [along(p) for p in (BATCH, HEADS, SEQUENCE, FEATURES, WHOLE)] + [(None, None)]
    with ms.attention_method(method):
        for k, (q, kv) in enumerate(itertools.product(options, repeat=2)):
            if q[0] is not None or kv[0] is not None:
                attended([q, kv, kv], operands(), is_causal=k % 2 == 0)
        attended([along(SEQUENCE), along(HEADS), along(BATCH)], operands())


@pytest.mark.parametrize("method", ["ring", "gather", "auto"])
def test_two_mesh_dims(method):
    for mesh_shape in mesh_shapes(2):
        if len(mesh_shape) == 2:
            mesh = mesh_of(mesh_shape)
            pairs = [(SEQUENCE, SEQUENCE), (SEQUENCE, HEADS), (BATCH, SEQUENCE), (WHOLE, SEQUENCE)]
            with ms.attention_method(method):
                for k, (q, kv) in enumerate(itertools.product(pairs, repeat=2)):
                    layouts = [(p, None) for p in (q, kv, kv)]
                    attended(layouts, operands(), mesh=mesh, is_causal=k % 2 == 0)
                    if k % 3 == 0:
                        attended([*layouts, (None, None)], operands(), [field(2, 1, 11, 13)], mesh=mesh)


@pytest.mark.parametrize("method", METHODS)
def test_masks(method):
    shapes = [(11, 13), (1, 13), (11, 1), (2, 1, 1, 13), (4, 11, 13), (2, 4, 11, 13), (1, 1, 1, 1)]
    with ms.attention_method(method):
        for k, shape in enumerate(shapes):
            seen = field(*shape) > -1
            if shape[-2] > 1:
                seen[..., 1, :] = False  # a query that sees nothing
            own = along(ms.Shard((len(shape) - 1, len(shape) - 2, 0)[k % 3]))
            for layout in ((None, None), own):
                attended([*RING, layout], operands(), [seen])
                attended([*RING, layout], operands(), [field(*shape)])
        attended([along(BATCH)] * 3 + [along(ms.Shard(2))], operands(), [field(2, 1, 11, 13)])
        attended([along(SEQUENCE), *[along(WHOLE)] * 2, (None, None)], operands(), [field(11, 13)])
        attended([*[along(WHOLE)] * 3, along(ms.Shard(1))], operands(), [field(11, 13)])


@pytest.mark.parametrize("method", METHODS)
def test_heads_that_share_keys(method):
    with ms.attention_method(method):
        for shared in (1, 2):
            qkv = operands(heads=4, shared=shared)
            for q, kv in itertools.product((HEADS, SEQUENCE), repeat=2):
                attended([along(q), *[along(kv)] * 2], qkv, enable_gqa=True, scale=0.3)
        uneven = along(HEADS, *([1, 3] + [0] * (P - 2))[:P], dim=1) if P > 1 else along(HEADS)
        attended([uneven, *[along(HEADS)] * 2], operands(heads=4, shared=2), enable_gqa=True)


def test_few_queries_stay_where_they_are():
    for q, kv in itertools.product((along(WHOLE), (None, None)), (along(SEQUENCE), along(SEQUENCE, *skew(13, P)))):
        for causal in (False, True):
            attended([q, kv, kv], operands(2), is_causal=causal)
        for mask in (field(2, 13), field(2, 13) > 5, field(2, 4, 1, 13)):
            attended([q, kv, kv, (None, None)], operands(2), [mask])
            attended([q, kv, kv, along(ms.Shard(mask.ndim - 1))], operands(2), [mask])
        attended([q, kv, kv], operands(2, shared=2), enable_gqa=True, scale=0.3)
        attended([q, kv, kv], operands(1, shared=1))
        with sdpa_kernel(SDPBackend.MATH):
            attended([q, kv, kv], operands(2), second=True)
    for mesh_shape in mesh_shapes(2):
        placements = [(WHOLE, BATCH), (SEQUENCE, SEQUENCE), (SEQUENCE, SEQUENCE)]
        attended([(p[: len(mesh_shape)], None) for p in placements], operands(2), mesh=mesh_of(mesh_shape))
    q, *kv = operands(2, 8 * P)
    kv = [shard(x, mesh_of((P,)), (SEQUENCE,)) for x in kv]
    y, count = counted(lambda: sdpa(q, *kv))
    assert y.placements == (WHOLE,)
    assert P == 1 or list(count.by_op) == ["all_reduce"]
    torch.manual_seed(7)
    few = gathered(sdpa(q, *kv, dropout_p=0.5))
    torch.manual_seed(7)
    with ms.attention_method("ring"):
        torch.testing.assert_close(few, gathered(sdpa(q, *kv, dropout_p=0.5)))


def test_keys_that_all_of_the_batch_share():
    q, k, v = operands()
    for own in (BATCH, HEADS, SEQUENCE):
        attended([along(own), *[along(SEQUENCE)] * 2], (q, k[:1], v[:1]))
        attended([along(own), *[along(SEQUENCE)] * 2], (q, k[:, :1], v[:, :1]))
    attended([along(ms.Shard(0)), *[along(ms.Shard(0))] * 2], (q[0, 0], k[0, 0], v[0, 0]), is_causal=True)


def test_tiles(monkeypatch):
    monkeypatch.setattr(online_softmax, "TILE", 1)
    monkeypatch.setattr(online_softmax, "FUSED", 1)
    monkeypatch.setattr(online_softmax, "_ROWS", 2)
    monkeypatch.setattr(online_softmax, "_EDGE", 2)
    with ms.attention_method("ring"):
        for features, causal in itertools.product((5, 7), (False, True)):
            qkv = operands(features=features)
            attended(RING, qkv, is_causal=causal)
            attended([along(SEQUENCE, *skew(11, P)), *RING[1:]], qkv, is_causal=causal)
        attended([*RING, (None, None)], operands(), [field(4, 11, 13)])


def test_long_causal_sequences_are_balanced(monkeypatch):
    monkeypatch.setattr(scaled_dot_product, "BALANCED", 1)
    # other scales than above: plans are cached
    for rows, keys in ((12, 12), (11, 13), (13, 5)):
        qkv = operands(rows, keys, heads=1)
        attended(RING, operands(rows, keys, heads=1, features=5), is_causal=True, scale=0.41)
        attended(RING, qkv, is_causal=True, scale=0.41)
        attended([along(SEQUENCE), *[along(WHOLE)] * 2], qkv, is_causal=True, scale=0.41)
        with sdpa_kernel(SDPBackend.MATH):
            attended([along(SEQUENCE, *skew(rows, P)), *RING[1:]], qkv, is_causal=True, scale=0.41, second=True)


def test_mirrored_blocks_have_equal_work():
    for count in (1, 2, 3, 4):
        blocks = mirrored(8 * count, count)
        cells = [[c for s in block for c in range(s.start, s.start + s.count)] for block in blocks]
        for keys in cells if count > 1 else []:
            pairs = [sum(k <= q for q in own for k in keys) for own in cells]
            assert max(pairs) - min(pairs) <= 8  # half a diagonal
        assert sorted(itertools.chain(*cells)) == list(range(8 * count))
        assert moved_into(blocks, 2).n_outs == (8,) * count
        assert moved_back(blocks, 2, (8,) * count).n_outs == (8,) * count


def drawn_cut(rng, cells, count):
    borders = sorted([0, cells, *(rng.randint(0, cells) for _ in range(count - 1))])
    return tuple(b - a for a, b in itertools.pairwise(borders))


def pieces_of(cells, count):
    """Return mirrored blocks, all of them at once."""
    sizes = balanced(cells, 2 * count)
    starts = [0, *itertools.accumulate(sizes)]
    blocks = []
    for i in range(count):
        j = 2 * count - 1 - i
        blocks.append(
            tuple(s for s in (Stretch(0, sizes[i], starts[i]), Stretch(sizes[i], sizes[j], starts[j])) if s[1])
        )
    return blocks


def hops(rows, columns, causal):
    n = len(columns)
    return [max((h for h in range(n) if is_needed(rows[(j + h) % n], columns[j], causal)), default=0) for j in range(n)]


def test_hops_are_those_to_the_last_rank_that_sees_a_block(request):
    rng = random.Random(request.config.option.seed)
    for _ in range(300):
        n, cells = rng.choice([*range(1, 10), 23]), rng.randint(0, 40)
        rows, columns = (
            contiguous(layout_of((n,), [Shard(0)], (cells,), {0: drawn_cut(rng, cells, n)}), 0) for _ in "qk"
        )
        if rng.random() < 0.4:
            rows, columns = mirrored(cells + 2 * n, n), mirrored(cells, n)
            assert list(columns) == pieces_of(cells, n)
            assert columns.sizes == tuple(sum(s.count for s in block) for block in columns)
        for causal in (False, True):
            assert list(reach_of(rows, columns, causal)) == hops(list(rows), list(columns), causal)


def test_hops_among_ranks_with_some_of_the_queries(request):
    rng = random.Random(request.config.option.seed)
    for _ in range(100):
        n, share, cells = rng.choice([1, 2, 5, 21]), rng.randint(1, 3), rng.randint(0, 60)
        cut = drawn_cut(rng, cells, n * share)
        rows = contiguous(layout_of((n * share,), [Shard(0)], (cells,), {0: cut}), 0)
        columns = contiguous(layout_of((n,), [Shard(0)], (cells,), {0: drawn_cut(rng, cells, n)}), 0)
        at = rng.choice([lambda i: i * share + share - 1, lambda i, n=n: n * (share - 1) + i])
        own = [rows[at(i)] for i in range(n)]
        for causal in (False, True):
            assert list(reach_of(rows, columns, causal, at)) == hops(own, list(columns), causal)


def test_windows_of_mirrored_blocks_bring_every_cell_where_it_is_wanted(request):
    """Those near a block are found: all others' windows have no cell of it."""
    rng = random.Random(request.config.option.seed)
    for _ in range(100):
        n, cells = rng.choice([1, 2, 3, 7, 20]), rng.randint(0, 70)
        sizes = rng.choice([drawn_cut(rng, cells, n), balanced(cells, n)])
        blocks = mirrored(cells - rng.randint(0, cells // 3), n)
        order = [c for block in blocks for s in block for c in range(s.start, s.start + s.count)]
        kept = drawn_cut(rng, len(order), n)
        for wanted, source, held, told, ends in (
            (moved_into(blocks, 0), sizes, range(cells), order, blocks.sizes),
            (moved_back(blocks, 0, kept), blocks.sizes, order, sorted(order), kept),
        ):
            starts = [0, *itertools.accumulate(source)]
            ends = [0, *itertools.accumulate(ends)]
            for i in range(n):
                window = [held[r.src + k] for r in wanted.runs[i] for k in range(r.count)]
                assert window == told[ends[i] : ends[i + 1]]
                near = wanted.near(starts[i], starts[i + 1])
                every = plan_stage(0, (0,), source, wanted.runs, wanted.n_outs, i)
                assert plan_stage(0, (0,), source, wanted.runs, wanted.n_outs, i, near=near) == every


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_gradients(method):
    with sdpa_kernel(SDPBackend.MATH), ms.attention_method(method):
        attended(RING, operands(), second=True)
        attended(RING, operands(), second=True, is_causal=True)
        attended([*RING, (None, None)], operands(), [field(11, 13)], second=True)


def test_forward_mode():
    qkv = operands()
    tangents = [field(*x.shape) + 0.2 for x in qkv]
    mesh = mesh_of((P,))
    with sdpa_kernel(SDPBackend.MATH), torch.autograd.forward_ad.dual_level():
        make, unpack = torch.autograd.forward_ad.make_dual, torch.autograd.forward_ad.unpack_dual
        expected = unpack(sdpa(*[make(x, t) for x, t in zip(qkv, tangents)], is_causal=True)).tangent
        parts = [make(*(shard(y, mesh, (SEQUENCE,)).to_local() for y in (x, t))) for x, t in zip(qkv, tangents)]
        y = sdpa(*[ms.ShardTensor.from_local(x, mesh, (SEQUENCE,)) for x in parts], is_causal=True)
        got = ms.ShardTensor.from_local(unpack(y.to_local()).tangent, mesh, y.placements)
    torch.testing.assert_close(got.full_tensor(), expected)


def dropped(mesh, placements, causal, mask):
    """Result and gradients with a third of the weights dropped."""
    torch.manual_seed(7)
    x = [shard(t, mesh, placements, requires_grad=True) for t in operands()]
    y = sdpa(*x, mask, 0.3, causal)
    sizes = {d: s for d, s in enumerate(y.sharding.sizes) if s is not None}
    w = ms.distribute_tensor(field(*y.shape), y.mesh, y.placements, sizes=sizes)
    first = torch.autograd.grad(y, x, w, create_graph=True)
    for a, b in zip(first, torch.autograd.grad(y, x, w), strict=True):
        torch.testing.assert_close(gathered(a), gathered(b))
    return [gathered(t) for t in (y, *first)]


def test_dropout_is_the_same_on_every_mesh():
    for causal, mask in ((False, None), (True, None), (False, field(11, 13))):
        expected = dropped(mesh_of((P,)), (WHOLE,), causal, mask)
        for mesh_shape in mesh_shapes(2):
            for placements in ((SEQUENCE, SEQUENCE), (BATCH, SEQUENCE), (SEQUENCE, HEADS)):
                got = dropped(mesh_of(mesh_shape), placements[: len(mesh_shape)], causal, mask)
                for a, b in zip(got, expected, strict=True):
                    torch.testing.assert_close(a, b)
    # each weight is kept with probability 1 - p and scaled: the mean stays
    ones = shard(torch.ones(1, 1, 64, 64, dtype=torch.float64), mesh_of((P,)), (SEQUENCE,))
    y = gathered(sdpa(ones, ones, ones, dropout_p=0.25))
    assert y.std() > 0
    assert abs(y.mean() - 1) < 0.05
    assert gathered(sdpa(ones, ones, ones, dropout_p=1.0)).eq(0).all()


def test_half_types_are_summed_in_float32():
    for dtype in (torch.bfloat16, torch.float16):
        qkv = [x.to(dtype).requires_grad_() for x in operands()]
        exact = [x.detach().double().requires_grad_() for x in qkv]
        e = sdpa(*exact, is_causal=True)
        parts = [shard(x, mesh_of((P,)), (SEQUENCE,), requires_grad=True) for x in qkv]
        y = sdpa(*parts, is_causal=True)
        assert y.dtype == dtype
        torch.testing.assert_close(gathered(y).double(), e.detach(), rtol=1e-2, atol=1e-2)
        w = field(*y.shape)
        sizes = {2: y.sharding.sizes[2]}
        got = torch.autograd.grad(y, parts, ms.distribute_tensor(w.to(dtype), y.mesh, y.placements, sizes=sizes))
        for g, x in zip(got, torch.autograd.grad(e, exact, w), strict=True):
            torch.testing.assert_close(gathered(g).double(), x, rtol=3e-2, atol=3e-2)


def test_autocast():
    x = [shard(t.float(), mesh_of((P,)), (SEQUENCE,)) for t in operands()]
    with torch.autocast("cpu", torch.bfloat16):
        y = sdpa(*x)
        assert y.dtype == sdpa(*[t.float() for t in operands()]).dtype == torch.bfloat16


def counted(f):
    with ms.comm_counter() as count:
        out = f()
    return out, count


@pytest.mark.ranks(2, 3, 4)
def test_the_ring_sends_each_block_to_every_other_rank_once():
    q, k, v = (shard(x, mesh_of((P,)), (SEQUENCE,), requires_grad=True) for x in operands(4 * P, 6 * P))
    block = 2 * 4 * 6 * (5 + 7) * 8
    with ms.attention_method("ring"):
        sdpa(q, k, v)
        y, forward = counted(lambda: sdpa(q, k, v))
        _, backward = counted(lambda: y.backward(y.detach()))
    assert list(forward.by_op) == list(backward.by_op) == ["ring_attention"]
    assert (forward.messages, forward.nbytes) == (P - 1, (P - 1) * block)
    # the blocks again, and their cotangents as often: a rank's share of its own block's stays where it is
    assert (backward.messages, backward.nbytes) == (2 * P - 2, (2 * P - 2) * block)


@pytest.mark.ranks(2, 3, 4)
def test_few_keys_are_gathered_by_one_message():
    q, k, v = (shard(x, mesh_of((P,)), (SEQUENCE,), requires_grad=True) for x in operands(4 * P, 6 * P, features=5))
    block = 2 * 4 * 6 * (5 + 5) * 8
    with ms.attention_method("gather"):
        sdpa(q, k, v)
        y, forward = counted(lambda: sdpa(q, k, v))
        _, backward = counted(lambda: y.backward(y.detach()))
    assert {op: (c.messages, c.nbytes) for op, c in forward.by_op.items()} == {"all_gather": (1, block)}
    # the cotangents of all keys, and of all values
    assert {op: (c.messages, c.nbytes) for op, c in backward.by_op.items()} == {"reduce_scatter": (2, P * block)}


@pytest.mark.ranks(2, 3, 4)
def test_keys_beyond_a_bound_are_not_gathered(monkeypatch):
    nbytes = 2 * operands(4 * P, 6 * P, heads=1, features=5)[1].numel() * 8
    for bound, used in ((nbytes, "all_gather"), (nbytes - 1, "ring_attention")):
        monkeypatch.setattr(scaled_dot_product, "GATHERED_NBYTES", bound)
        # another scale: plans are cached
        x = [shard(t, mesh_of((P,)), (SEQUENCE,)) for t in operands(4 * P, 6 * P, heads=1, features=5)]
        _, count = counted(lambda x=x, bound=bound: sdpa(*x, scale=1 / bound))
        assert list(count.by_op) == [used]


@pytest.mark.ranks(2)
def test_of_as_many_bytes_heads_move_but_few_keys_are_gathered(monkeypatch):
    full = operands(4 * P, 4 * P, heads=P, features=5)
    nbytes = 2 * full[1].numel() * 8
    for bound, causal, used in (
        (nbytes, False, "all_gather"),
        (nbytes, True, "redistribute"),
        (nbytes - 1, False, "redistribute"),
        (nbytes - 1, True, "redistribute"),
    ):
        monkeypatch.setattr(scaled_dot_product, "FEW_NBYTES", bound)
        x = [shard(t, mesh_of((P,)), (SEQUENCE,)) for t in full]
        y, count = counted(lambda x=x, bound=bound, causal=causal: sdpa(*x, is_causal=causal, scale=1 / bound))
        assert list(count.by_op) == [used]
        torch.testing.assert_close(gathered(y), sdpa(*full, is_causal=causal, scale=1 / bound))


@pytest.mark.ranks(2, 3, 4)
def test_causal_blocks_stop_where_nobody_sees_them():
    q, k, v = (shard(x, mesh_of((P,)), (SEQUENCE,), requires_grad=True) for x in operands(4 * P, 4 * P))
    with ms.attention_method("ring"):
        sdpa(q, k, v, is_causal=True)
        y, forward = counted(lambda: sdpa(q, k, v, is_causal=True))
        _, backward = counted(lambda: y.backward(y.detach()))
    # block j goes on to the ranks after it only
    on = WORLD.rank + 1 if WORLD.rank < P - 1 else 0
    assert forward.messages == on
    assert backward.messages == on + WORLD.rank


@pytest.mark.ranks(2, 3, 4)
def test_keys_that_every_rank_has_do_not_travel():
    q, k, v = operands()
    mesh = mesh_of((P,))
    for placements, causal in itertools.product(((SEQUENCE,), (BATCH,), (HEADS,)), (False, True)):
        x = shard(q, mesh, placements)
        kv = [shard(t, mesh, (WHOLE,)) for t in (k, v)]
        sdpa(x, *kv, is_causal=causal)
        assert counted(lambda x=x, kv=kv, causal=causal: sdpa(x, *kv, is_causal=causal))[1].messages == 0


@pytest.mark.ranks(3, 4)
def test_the_method_is_chosen_by_size():
    mesh = mesh_of((P,))

    def ops(heads, keys, mask=None, **options):
        x = [shard(t, mesh, (SEQUENCE,)) for t in operands(4 * P, keys, heads)]
        sdpa(*x, mask, **options)
        return list(counted(lambda: sdpa(*x, mask, **options))[1].by_op)

    assert ops(P, 4 * P) == ["redistribute"]
    assert ops(P, 4 * P, torch.ones(1, 4 * P, dtype=torch.bool)) == ["redistribute"]
    assert ops(P, 4 * P, torch.ones(4 * P, 4 * P, dtype=torch.bool)) == ["ring_attention"]
    assert ops(P + 1, 4 * P) == ["ring_attention"]  # heads that do not divide
    assert ops(P, P) == ["ring_attention"]  # few keys are sooner sent than many queries
    with ms.attention_method("ring"):
        assert ops(P, 4 * P) == ["ring_attention"]
    with ms.attention_method("all_to_all"):
        assert ops(P + 1, P) == ["redistribute"]


def test_bad_arguments():
    q, k, v = (shard(x, mesh_of((P,)), (SEQUENCE,)) for x in operands())
    with pytest.raises(ms.UnsupportedOperationError, match="no such method"), ms.attention_method("star"):
        pass
    plain = [gathered(x) for x in (q, k, v)]
    for change in (
        lambda q, k, v: sdpa(q, k[..., :3], v),
        lambda q, k, v: sdpa(q, k.float(), v),
        lambda q, k, v: sdpa(q, k, v, torch.ones(11, 13, dtype=torch.bool), is_causal=True),
        lambda q, k, v: sdpa(q, k, v, dropout_p=1.5),
        lambda q, k, v: sdpa(q[:, :3], k[:, :2], v[:, :2], enable_gqa=True),
    ):
        for args in ((q, k, v), plain):
            with pytest.raises(RuntimeError):
                change(*args)


def test_first_gradients_that_keep_a_graph_where_operands_depend_on_each_other():
    """Queries, keys and values of one leaf: no path is counted twice."""
    mesh, scale = mesh_of((WORLD.size,)), field(6)
    for f in (
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: F.scaled_dot_product_attention(x, x * scale, x * scale),
    ):
        compare(f, [(field(7, 6), mesh, (ms.Shard(0),), None)], second=True, rtol=1e-8, atol=1e-9)


def test_second_gradients_with_empty_blocks():
    mesh, x = mesh_of((WORLD.size,)), field(7, 6)
    for f in (lambda t: F.scaled_dot_product_attention(t, x, x), lambda t: F.scaled_dot_product_attention(x, t, x)):
        operand = (x + 1, mesh, (ms.Shard(0),), {0: skew(7, WORLD.size)})
        compare(f, [operand], second=True, rtol=1e-8, atol=1e-9)


def test_derivatives_that_torch_refuses_are_refused_on_ranks_without_heads():
    """The kernel of a CPU has no second derivatives: also a rank without heads says so, or others would wait for it."""
    full, mesh = torch.randn(2, 2, 6, 4, generator=torch.Generator().manual_seed(0)).double(), mesh_of((WORLD.size,))

    def penalty(x):
        y = F.scaled_dot_product_attention(x, 2 * x, x.sin())
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return g

    expected = penalty(full.clone().requires_grad_())
    nothing = (0,) * (WORLD.size - 1)
    for dim in (0, 1):
        for sizes in ((2, *nothing), (*nothing, 2)):
            x = shard(full, mesh, (ms.Shard(dim),), {dim: sizes}, True)
            g = penalty(x)
            torch.testing.assert_close(gathered(g), expected)
            with pytest.raises(RuntimeError, match="derivative for"):
                torch.autograd.grad(g.square().sum(), x)
