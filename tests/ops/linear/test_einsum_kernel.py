"""Einsums of modes: products of cells and a sum in place of matrix products of a row or two."""

from __future__ import annotations

import pytest
import torch

import mpishard as ms
from mpishard.ops.linear.einsum_kernel import MODES, summed_products
from mpishard.ops.linear.matmul import _einsum_labels
from tests.compare import WORLD, compare, mesh_of
from tests.ops.windows import check, field

COMPLEX = torch.complex128
SPECTRAL = "bixy,ioxy->boxy"
# equation, spectrum, weight
CASES = [
    (SPECTRAL, (1, 3, 5, 7), (3, 2, 5, 7)),
    (SPECTRAL, (2, 3, 5, 7), (3, 2, 5, 7)),
    ("ixy,ioxy->xoy", (3, 5, 7), (3, 2, 5, 7)),
    ("...ixy,ioxy->...oxy", (1, 3, 5, 7), (3, 2, 5, 7)),
    ("bixy,ixy->bxy", (2, 3, 5, 7), (3, 5, 7)),
    ("ijx,ijx->x", (3, 2, 20), (3, 2, 20)),
]
LEFT = {
    "many rows": (SPECTRAL, (3, 3, 5, 7), (3, 4, 5, 7), COMPLEX),
    "few modes": (SPECTRAL, (1, 3, 3, 5), (3, 2, 3, 5), COMPLEX),
    "real": (SPECTRAL, (1, 3, 5, 7), (3, 2, 5, 7), torch.float64),
    "no cells": (SPECTRAL, (1, 0, 5, 7), (0, 2, 5, 7), COMPLEX),
    "nothing summed": ("bixy,ioxy->bioxy", (1, 3, 5, 7), (3, 2, 5, 7), COMPLEX),
    "summed innermost": ("bxyi,oxyi->boxy", (1, 5, 7, 3), (2, 5, 7, 3), COMPLEX),
    "a sum of one operand": ("bixy,ioxy->bxy", (1, 3, 5, 7), (3, 2, 5, 7), COMPLEX),
    "a diagonal": ("bixx,ioxy->boxy", (1, 3, 7, 7), (3, 2, 7, 7), COMPLEX),
}


def modes(*shape):
    """Cells with imaginary parts."""
    return torch.complex(field(*shape), field(*shape).flip(-1))


def chosen(equation, *operands):
    return summed_products(*_einsum_labels(equation, tuple(x.ndim for x in operands))[:2], operands)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_modes(case):
    equation, spectrum, weight = CASES[case]
    w = modes(*weight)
    assert chosen(equation, modes(*spectrum), w) is not None
    check(lambda x: torch.einsum(equation, x, w), modes(*spectrum), range(len(spectrum)), case)


@pytest.mark.parametrize("dim", range(1, 4))
def test_gradients_of_both(dim):
    mesh = mesh_of((WORLD.size,))
    x, w = modes(1, 3, 5, 7), modes(3, 2, 5, 7)
    for own in (ms.Shard(0), ms.Shard(3), ms.Replicate()):
        operands = [(x, mesh, (ms.Shard(dim),), None), (w, mesh, (own,), None)]
        compare(lambda x, w: torch.einsum(SPECTRAL, x, w), operands, what=f"{dim}, {own}")


def test_modes_as_they_lie_in_memory():
    x, w = modes(1, 3, 5, 7), modes(3, 2, 5, 7)
    turned = w.movedim(0, -1).contiguous().movedim(-1, 0)  # channels innermost
    assert chosen(SPECTRAL, x, turned) is None
    y = chosen(SPECTRAL, x.mT.contiguous().mT, w.mT.contiguous().mT)
    torch.testing.assert_close(y, torch.einsum(SPECTRAL, x, w))


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_torch(name):
    equation, *shapes, dtype = LEFT[name]
    assert MODES == 16
    assert chosen(equation, *(field(*shape, dtype=dtype) for shape in shapes)) is None


def test_dtypes_that_torch_refuses_together():
    x, w = modes(1, 3, 5, 7), field(3, 2, 5, 7, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="expected"):
        torch.einsum(SPECTRAL, ms.distribute_tensor(x, mesh_of((WORLD.size,)), (ms.Shard(3),)), w)
