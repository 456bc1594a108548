"""Blocks as rows of equal length, and back."""

from __future__ import annotations

import pytest
import torch

from mpishard.autograd.padded import Padded
from mpishard.layout import balanced


@pytest.mark.ranks(1)
@pytest.mark.parametrize("count", [2, 3, 4, 6, 7])
@pytest.mark.parametrize(("shape", "dim"), [((12,), 0), ((7,), 0), ((13, 3), 0), ((3, 12), 1), ((2, 9, 3), 1)], ids=str)
def test_there_and_back(shape, dim, count):
    x = torch.randn(shape)
    padded = Padded(shape, dim, count)
    blocks = x.split(balanced(shape[dim], count), dim)
    rows = padded.rows_of(x)
    assert rows.shape == (count, padded.width)
    for row, block in zip(rows, blocks, strict=True):
        assert torch.equal(padded.row_of(block), row)
        assert torch.equal(padded.block_of(row, block.shape[dim]), block)
    for given in (rows, torch.cat([rows, rows], 1)[:, : padded.width]):
        found = padded.whole_of(given)
        assert torch.equal(found, x)
        assert found.is_contiguous()
