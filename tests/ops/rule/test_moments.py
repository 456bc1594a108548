"""Moments and products of rows, in pieces, against float64."""

from __future__ import annotations

import pytest
import torch

from mpishard.ops.rule import moments


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(
    "shape", [(5, 17), (70, 300), (300, 64), (3, 1000), (2, 1100), (1, 5000), (4, 1024), (9, 257), (1, 1)]
)
def test_rows_in_pieces(shape, offset, dtype, monkeypatch):
    # small ones: rows below, of, and above a block and a piece
    monkeypatch.setattr(moments, "BLOCK", 256)
    monkeypatch.setattr(moments, "AT_ONCE", 1024)
    monkeypatch.setattr(moments, "_FEW", 0)
    generator = torch.Generator().manual_seed(0)
    v = (torch.randn(shape, generator=generator) + offset).to(dtype)
    g = torch.randn(shape, generator=generator).to(dtype)
    mean, squares = moments.row_moments(v)
    exact = v.double()
    centre = exact.mean(1)
    deviations = (exact - centre.unsqueeze(1)).square().sum(1)
    torch.testing.assert_close(mean, centre, rtol=0, atol=1e-6 * (1 + offset * 1e-2))
    torch.testing.assert_close(squares, deviations, rtol=1e-5, atol=1e-3 if offset else 1e-6)
    sums, products = moments.dots(g, v)
    torch.testing.assert_close(sums, g.double().sum(1), rtol=0, atol=1e-3)
    scale = exact.norm(dim=1) * g.double().norm(dim=1)
    torch.testing.assert_close(products / scale, (g.double() * exact).sum(1) / scale, rtol=0, atol=1e-6)


def test_a_call_of_torch_serves_many_rows():
    v = torch.randn(256, 1024)
    calls = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Counting():
        moments.row_moments(v)
        moments.dots(v, v)
    assert len(calls) <= 40, len(calls)
