"""Fourier neural operators on shards: the example's, and spectral convolutions as others write them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpishard as ms
from tests.compare import WORLD, mesh_of
from tests.models.twin import data, twins


@pytest.fixture
def fno(monkeypatch):
    """The example's module."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import fno

    return fno


@pytest.mark.parametrize(
    ("ndim", "shape", "dims"),
    [
        (2, (2, 1, 9, 12), (2, 3)),
        (2, (2, 1, 13, 10), (3, 2)),
        (3, (1, 1, 7, 8, 6), (2, 3)),
        (3, (2, 1, 6, 7, 9), (4, 3)),
    ],
)
def test_operator(fno, ndim, shape, dims):
    twins(lambda: fno.FNO(ndim=ndim, width=3, modes=3, layers=2), data(*shape), dims, sharded=True)


def test_more_ranks_than_modes_along_a_dim(fno):
    # blocks beyond the low modes have nothing to multiply
    twins(lambda: fno.FNO(width=2, modes=1, layers=1), data(1, 1, 16, 5), (2, 3), sharded=True)


def test_solver(fno):
    twins(lambda: Solver(fno.burgers), data(2, 1, 12, 9), (2, 3), sharded=True)


class Solver(nn.Module):
    """A differentiable solver and a parameter of it."""

    def __init__(self, solve):
        super().__init__()
        self.solve = solve
        self.size = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.solve(self.size * x, steps=3)


class Spectral(nn.Module):
    """The spectral convolution of many repositories; ``style`` says how the product gets back into a spectrum."""

    def __init__(self, style, inputs=2, outputs=3, modes=3):
        super().__init__()
        self.style, self.outputs, self.modes = style, outputs, modes
        shape = (inputs, outputs, modes, modes)
        self.lo = nn.Parameter(torch.rand(shape, dtype=torch.cfloat))
        self.hi = nn.Parameter(torch.rand(shape, dtype=torch.cfloat))

    def forward(self, x):
        m, spectrum = self.modes, torch.fft.rfft2(x, norm="ortho")
        rows, columns = spectrum.shape[-2:]
        lo = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.lo)
        hi = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.hi)
        if self.style == "zeros":
            out = torch.zeros(x.shape[0], self.outputs, rows, columns, dtype=spectrum.dtype, device=x.device)
            out[:, :, :m, :m] = lo
            out[:, :, -m:, :m] = hi
        elif self.style == "cat":
            between = torch.zeros(x.shape[0], self.outputs, rows - 2 * m, m, dtype=spectrum.dtype)
            out = F.pad(torch.cat([lo, between, hi], -2), (0, columns - m))
        elif self.style == "pad":
            out = F.pad(lo, (0, columns - m, 0, rows - m)) + F.pad(hi, (0, columns - m, rows - m, 0))
        elif self.style == "shift":
            spectrum, middle = torch.fft.fftshift(spectrum, dim=-2), rows // 2
            out = torch.zeros_like(spectrum[:, :1]).repeat(1, self.outputs, 1, 1)
            window = (..., slice(middle - m, middle + m), slice(m))
            weight = torch.cat([self.hi, self.lo], -2)
            out[window] = torch.einsum("bixy,ioxy->boxy", spectrum[window], weight)
            out = torch.fft.ifftshift(out, dim=-2)
        else:
            out = lo
        return torch.fft.irfft2(out, s=x.shape[-2:], norm="ortho")


@pytest.mark.parametrize("style", ["zeros", "cat", "pad", "shift"])
def test_spectral_convolutions(style):
    twins(lambda: Spectral(style), data(2, 2, 11, 8), (2, 3))


def test_inverse_transform_pads_the_modes():
    twins(lambda: Spectral("low"), data(2, 2, 11, 8), (2, 3), sharded=True)


@pytest.mark.ranks(2, 3, 4)
def test_what_is_written_into_a_plain_tensor_is_gathered():
    x = ms.distribute_tensor(data(2 * WORLD.size, 3), mesh_of((WORLD.size,)), (ms.Shard(0),)).requires_grad_()
    out = torch.zeros(3 * WORLD.size, 3, dtype=torch.float64)
    with ms.comm_counter() as count:
        out[: 2 * WORLD.size] = x
    assert list(count.by_op) == ["all_gather"]
    assert type(out) is torch.Tensor
    (g,) = torch.autograd.grad((out**2).sum(), x)
    torch.testing.assert_close(out[: 2 * WORLD.size], data(2 * WORLD.size, 3))
    torch.testing.assert_close(g.full_tensor(), 2 * data(2 * WORLD.size, 3))


@pytest.mark.ranks(2, 3, 4)
def test_only_transforms_exchange_fields(fno):
    n = WORLD.size
    model = fno.SpectralConv(2, 2, 2).double()
    model.weights = nn.ParameterList(w.to(torch.complex128) for w in model.weights)
    x = ms.distribute_tensor(data(1, 2, 4 * n, 8 * n - 2), mesh_of((n,)), (ms.Shard(2),))
    with ms.comm_counter() as count:
        model(x)
    # once there, once back; the low modes are multiplied where they are
    assert list(count.by_op) == ["redistribute"]
    assert count.calls == 2
