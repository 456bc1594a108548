"""Special functions, integers and look-ups, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpishard as ms
from tests.compare import compare, gathered, layouts, shard
from tests.ops.windows import check, field, refused_alike, same, sampled

ONE = "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_k1 entr".split()


@pytest.mark.parametrize("name", ONE)
def test_functions_without_gradient(name):
    same(getattr(torch.special, name), field(3, 7).abs() + 0.1, (0, 1), len(name))


def test_functions():
    check(lambda x: torch.special.entr(x.abs() + 0.1), field(3, 7), (0, 1), 0)
    check(lambda x: torch.special.multigammaln(x.abs() + 2, 2), field(3, 7), (0, 1), 1)
    same(lambda x: torch.special.chebyshev_polynomial_t(x, 3), field(3, 7), (0, 1), 2)
    same(lambda x: torch.special.gammainc(x.abs(), 2 * x.abs() + 1), field(3, 7), (0, 1), 3)
    check(lambda x: torch.frexp(x)[0], field(5, 4), (0, 1), 4)
    same(lambda x: torch.frexp(x)[1], field(5, 4), (0, 1), 5)


def test_integers():
    numbers = torch.arange(24).reshape(6, 4) * 3
    same(lambda x: torch.gcd(x, x.flip(0)), numbers, (0, 1), 0)
    same(lambda x: torch.lcm(x, torch.tensor([2, 5, 7, 9])), numbers, (0, 1), 1)
    same(lambda x: x.clone().gcd_(torch.tensor(6)), numbers, (0, 1), 2)
    same(lambda x: torch.stack(torch.unravel_index(x, (9, 2, 5))), numbers, (0, 1), 3)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_glu(dim):
    check(lambda x: F.glu(x, dim), field(6, 4, 8), (0, 1, 2), dim, count=6)
    check(nn.GLU(1), field(2, 8, 5), (0, 1, 2), 3)


def test_glu_of_odd_extents():
    refused_alike(lambda x: F.glu(x, 1), field(4, 3))


def test_membership_and_buckets():
    numbers = torch.arange(28).reshape(7, 4) % 9
    same(lambda x: torch.isin(x, torch.tensor([1, 5, 8])), numbers, (0, 1), 0)
    same(lambda x: torch.isin(x, 3, invert=True), numbers, (0, 1), 1)
    same(lambda x: torch.isin(torch.arange(4), x[2:3]), numbers, (0, 1), 2)
    same(lambda x: torch.bucketize(x, torch.tensor([0.5, 3.0, 7.0]), right=True), field(7, 4), (0, 1), 3)
    same(lambda x: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), x, right=True), field(7, 4).float(), (0, 1), 4)
    same(lambda x: torch.searchsorted(x.sort(1)[0], x[:, :2].contiguous()), field(7, 4), (0,), 5)
    same(lambda x: torch.searchsorted(x.cumsum(1), torch.full((7, 3), 4)), numbers, (0, 1), 6)
    same(lambda x: torch.searchsorted(x, 0.3), field(7).sort()[0], (0,), 7)
    assert torch.isin(torch.arange(3), torch.tensor([1])).tolist() == [False, True, False]


def test_protocols():
    full = field(6, 3)
    for mesh, placements, sizes in sampled((6, 3), (0, 1), 2):
        x = shard(full, mesh, placements, sizes)
        assert float(full[4, 1]) in x
        assert 77.0 not in x
        assert torch.equal(gathered(reversed(x)), full.flip(0))
        y = x.clone()
        assert y.cumsum_(0) is y
        torch.testing.assert_close(gathered(y), full.cumsum(0))


def test_values_and_sequence_in_any_layouts():
    sequence, values = field(5, 6).sort(1)[0], field(5, 4)
    for mesh, placements, sizes in layouts((5, 6), (0, 1)):
        for other in ((ms.Shard(1),) * mesh.ndim, None):
            compare(
                lambda a, b: torch.searchsorted(a.detach(), b.detach()),
                [(sequence, mesh, placements, sizes), (values, mesh, other, None)],
            )


def test_arguments():
    same(lambda x: torch.bucketize(x, torch.tensor([0.5, 3.0]), out_int32=True), field(7, 4), (0, 1), 0)
    edges = torch.tensor([0.0, 1.0]).double()
    same(lambda x: torch.searchsorted(edges, x, side="right"), field(7, 4), (0, 1), 1)
    same(lambda x: torch.searchsorted(edges.flip(0), x, sorter=torch.tensor([1, 0])), field(7), (0,), 2)
    same(lambda x: torch.isin(3, x), torch.arange(9), (0,), 3)
    same(lambda x: torch.gradient(x, spacing=torch.tensor(0.5))[0], field(7, 4), (0, 1), 4)
    check(lambda x: torch.gradient(torch.complex(x, x * 2))[1].abs(), field(7, 4), (0, 1), 5)
