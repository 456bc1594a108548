"""Neighbourhood attention against attention with a mask of all pairs."""

from __future__ import annotations

import itertools

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, gathered, mesh_of, mesh_shapes, shard
from tests.ops.windows import field, sampled

# spatial shape, kernel size, dilation, causal
CASES = [
    ((11,), 3, 1, False),
    ((13,), 5, 2, False),
    ((12,), 4, 3, False),  # even, and as wide as the domain
    ((9,), 9, 1, False),
    ((13,), 3, 3, True),
    ((5, 6), 3, 1, False),
    ((7, 6), (5, 2), (1, 3), False),
    ((6, 7), 3, (1, 2), (True, False)),
    ((5, 4, 6), (3, 3, 2), (1, 1, 2), False),
    ((4, 3, 6), 3, 1, (False, True, True)),
]


def sees(n: int, query: int, key: int, kernel: int, dilation: int, causal: bool) -> bool:
    """Whether a query sees a key, along one dim of ``n`` cells."""
    same = list(range(query % dilation, n, dilation))
    at = same.index(query)
    if causal:
        window = same[max(0, at - kernel + 1) : at + 1]
    else:
        first = min(max(at - kernel // 2, 0), len(same) - kernel)
        window = same[first : first + kernel]
    return key in window


def dense(q, k, v, kernel, dilation, causal, scale=None):
    """Attention of all pairs, with a mask."""
    spatial = q.shape[1:-2]
    ndim = len(spatial)
    kernel, dilation, causal = ((x,) * ndim if not isinstance(x, tuple) else x for x in (kernel, dilation, causal))
    mask = torch.ones(1, 1, dtype=torch.bool)
    for d, n in enumerate(spatial):
        own = [[sees(n, i, j, kernel[d], dilation[d], causal[d]) for j in range(n)] for i in range(n)]
        mask = torch.kron(mask.int(), torch.tensor(own).int()).bool()
    q, k, v = (x.flatten(1, ndim).transpose(1, 2) for x in (q, k, v))
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    out = s.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    return out.transpose(1, 2).unflatten(1, spatial)


def operands(spatial):
    return field(2, *spatial, 2, 3), field(2, *spatial, 2, 3) * 0.7 + 0.1, field(2, *spatial, 2, 4)


def either(*args, **options):
    """The sharded operation on shards, all pairs on whole tensors."""
    if any(isinstance(x, ms.ShardTensor) for x in args):
        return ms.neighborhood_attention(*args, **options)
    return dense(*args, options["kernel_size"], options["dilation"], options["is_causal"], options.get("scale"))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_against_all_pairs(case):
    spatial, kernel, dilation, causal = CASES[case]
    options = {"kernel_size": kernel, "dilation": dilation, "is_causal": causal}
    every = operands(spatial)
    plain = [x.clone().requires_grad_() for x in every]
    got, expected = ms.neighborhood_attention(*plain, **options), dense(*plain, kernel, dilation, causal)
    torch.testing.assert_close(got, expected)
    w = field(*got.shape)
    for g, e in zip(torch.autograd.grad(got, plain, w), torch.autograd.grad(expected, plain, w), strict=True):
        torch.testing.assert_close(g, e)
    for k, (mesh, placements, sizes) in enumerate(sampled(every[0].shape, range(1, len(spatial) + 1), case, 5)):
        compare(
            lambda *x: either(*x, **options),
            [(x, mesh, placements, sizes) for x in every],
            second=k == 1,
            what=f"{spatial} on {mesh.shape} {placements} {sizes}",
        )


def test_batch_heads_and_features_sharded():
    options = {"kernel_size": 3, "dilation": 2, "is_causal": False, "scale": 0.4}
    every = operands((7, 6))
    for mesh, placements, sizes in sampled(every[0].shape, (0, 1, 3, 4), 2, 6):
        compare(lambda *x: either(*x, **options), [(x, mesh, placements, sizes) for x in every])


def test_operands_laid_out_differently():
    options = {"kernel_size": 5, "dilation": 1, "is_causal": False}
    q, k, v = operands((9, 6))
    mesh = mesh_of((WORLD.size,))
    for layouts in itertools.product([(ms.Shard(1),), (ms.Shard(2),), (ms.Replicate(),), None], repeat=3):
        if any(p is not None for p in layouts) and layouts.count(None) + layouts.count((ms.Replicate(),)) > 0:
            compare(lambda *x: either(*x, **options), [(x, mesh, p, None) for x, p in zip((q, k, v), layouts)])


def test_forward_mode():
    q, k, v = operands((7,))
    t = [field(*x.shape) + 0.3 for x in (q, k, v)]
    _, expected = torch.func.jvp(lambda *x: dense(*x, 3, 1, False), (q, k, v), tuple(t))
    mesh = mesh_of((WORLD.size,))
    with torch.autograd.forward_ad.dual_level():
        duals = [
            ms.ShardTensor.from_local(
                torch.autograd.forward_ad.make_dual(*(shard(y, mesh, (ms.Shard(1),)).to_local() for y in (x, d))),
                mesh,
                (ms.Shard(1),),
            )
            for x, d in zip((q, k, v), t)
        ]
        y = ms.neighborhood_attention(*duals, kernel_size=3)
        tangent = torch.autograd.forward_ad.unpack_dual(y.to_local()).tangent
        got = ms.ShardTensor.from_local(tangent, mesh, (ms.Shard(1),))
    torch.testing.assert_close(got.full_tensor(), expected)


@pytest.mark.ranks(2, 3, 4)
def test_only_the_halo_travels():
    n = 8 * WORLD.size
    mesh = mesh_of((WORLD.size,))
    x = [shard(field(1, n, 2, 3), mesh, (ms.Shard(1),), requires_grad=True) for _ in range(3)]
    ms.neighborhood_attention(*x, 5)
    with ms.comm_counter() as count:
        y = ms.neighborhood_attention(*x, 5)
    neighbours = 2 - (WORLD.rank in (0, WORLD.size - 1))
    assert list(count.by_op) == ["neighborhood_attention"]
    assert count.messages == 2 * neighbours  # keys and values
    assert count.nbytes == 2 * neighbours * 2 * 2 * 3 * 8
    with ms.comm_counter() as back:
        y.backward(y.detach())
    assert (back.messages, back.nbytes) == (count.messages, count.nbytes)


def test_half_types_are_summed_in_float32():
    for dtype in (torch.bfloat16, torch.float16):
        every = [x.to(dtype) for x in operands((12,))]
        mesh = mesh_of((WORLD.size,))
        y = ms.neighborhood_attention(*[shard(x, mesh, (ms.Shard(1),)) for x in every], 5)
        exact = dense(*[x.double() for x in every], 5, 1, False)
        assert y.dtype == dtype
        torch.testing.assert_close(gathered(y).double(), exact, rtol=1e-2, atol=5e-3)


def test_bad_arguments():
    q, k, v = operands((6, 5))
    for x in ([q, k, v], [shard(t, mesh_of((WORLD.size,)), (ms.Shard(1),)) for t in (q, k, v)]):
        for kernel, dilation, causal in ((6, 1, False), (3, 2, False), (0, 1, False), ((3, 3, 3), 1, False)):
            with pytest.raises(ms.LayoutError, match="neighborhood_attention"):
                ms.neighborhood_attention(*x, kernel, dilation, causal)
        with pytest.raises(ms.LayoutError, match="shapes"):
            ms.neighborhood_attention(x[0], x[1][:1], x[2], 3)
        with pytest.raises(ms.LayoutError, match="dtypes"):
            ms.neighborhood_attention(x[0].float(), x[1], x[2], 3)


def test_every_mesh():
    every = operands((7, 6))
    options = {"kernel_size": 3, "dilation": 1, "is_causal": False}
    for mesh_shape in mesh_shapes(2):
        mesh = mesh_of(mesh_shape)
        for placements in itertools.product((ms.Shard(1), ms.Shard(2)), repeat=len(mesh_shape)):
            compare(lambda *x: either(*x, **options), [(x, mesh, placements, None) for x in every])
