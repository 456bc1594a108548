"""A Fourier neural operator, and a solver to learn from, in ordinary torch: neither knows of shards."""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SpectralConv(nn.Module):
    """Multiply the low modes of a field by complex weights; drop the others.

    Modes of both signs are low along every dim but the last, of whose Hermitian spectrum half is kept: the
    corners of the spectrum, each with weights of its own.
    """

    def __init__(self, channels: int, modes: int, ndim: int) -> None:
        super().__init__()
        self.modes, self.dims = modes, tuple(range(2, 2 + ndim))
        low, high = slice(modes), slice(-modes, None)
        self.corners = [(..., *signs, low) for signs in product((low, high), repeat=ndim - 1)]
        dtype = torch.get_default_dtype().to_complex()
        shape = (channels, channels, *(modes,) * ndim)
        self.weights = nn.ParameterList(torch.randn(shape, dtype=dtype) / channels for _ in self.corners)

    def forward(self, x: Tensor) -> Tensor:
        if min(*(x.shape[d] for d in self.dims[:-1]), x.shape[-1] + 2) < 2 * self.modes:
            raise ValueError(f"{self.modes} modes of both signs need twice as many cells, got {tuple(x.shape[2:])}")
        spectrum = torch.fft.rfftn(x, dim=self.dims)
        out = torch.zeros_like(spectrum)
        for corner, weight in zip(self.corners, self.weights, strict=True):
            out[corner] = torch.einsum("bi...,io...->bo...", spectrum[corner], weight)
        return torch.fft.irfftn(out, s=x.shape[2:], dim=self.dims)


class FNO(nn.Module):
    """Fields in, fields out, on any grid: lift, a few spectral layers with a shortcut for what is local, project.

    Parameters
    ----------
    inputs, outputs
        Channels of the fields.
    ndim
        Of the grid: 2 or 3.
    width
        Channels in between.
    modes
        Modes that are kept along each dim, of either sign.
    layers
        Spectral layers.
    """

    def __init__(
        self, inputs: int = 1, outputs: int = 1, *, ndim: int = 2, width: int = 16, modes: int = 8, layers: int = 4
    ) -> None:
        super().__init__()
        conv = {2: nn.Conv2d, 3: nn.Conv3d}[ndim]
        self.lift = conv(inputs, width, 1)
        self.spectral = nn.ModuleList(SpectralConv(width, modes, ndim) for _ in range(layers))
        self.local = nn.ModuleList(conv(width, width, 1) for _ in range(layers))
        self.project = nn.Sequential(conv(width, 4 * width, 1), nn.GELU(), conv(4 * width, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x)


def wavenumbers(x: Tensor) -> list[Tensor]:
    """Return the wavenumber along each dim of the grid of ``x``, (samples, channels, *grid), for rfftn."""
    grid = x.shape[2:]
    out = []
    for d, n in enumerate(grid):
        frequencies = torch.fft.rfftfreq if d == len(grid) - 1 else torch.fft.fftfreq
        k = frequencies(n, 1 / n, dtype=x.dtype, device=x.device)
        out.append(k.reshape(-1, *[1] * (len(grid) - 1 - d)))
    return out


def smooth(noise: Tensor, wave: float = 2.0) -> Tensor:
    """Make white noise a smooth random field of unit variance, whose waves are mostly longer than 1 / ``wave``."""
    dims = tuple(range(2, noise.ndim))
    damping = torch.exp(-sum(k**2 for k in wavenumbers(noise)) / (2 * wave**2))
    x = torch.fft.irfftn(torch.fft.rfftn(noise, dim=dims) * damping, s=noise.shape[2:], dim=dims)
    x = x - x.mean(dims, keepdim=True)
    return x / x.std(dims, keepdim=True)


def burgers(u: Tensor, *, time: float = 0.05, steps: int = 25, viscosity: float = 0.002) -> Tensor:
    """Return the solution of Burgers' equation, u_t + u (u_x + u_y + ...) = viscosity * laplacian(u), at ``time``.

    On the periodic unit cube, by Fourier modes: diffusion exactly, advection by Heun's steps, products without
    aliases.
    """
    dims, grid = tuple(range(2, u.ndim)), u.shape[2:]
    waves = wavenumbers(u)
    slope = torch.pi * 1j * sum(waves)
    for k, n in zip(waves, grid):
        slope = slope * (3 * k.abs() < n)
    step = time / steps
    decay = torch.exp(-viscosity * (2 * torch.pi) ** 2 * step * sum(k**2 for k in waves))

    def advected(v: Tensor) -> Tensor:
        return -slope * torch.fft.rfftn(torch.fft.irfftn(v, s=grid, dim=dims) ** 2, dim=dims)

    v = torch.fft.rfftn(u, dim=dims)
    for _ in range(steps):
        first = advected(v)
        second = advected(decay * (v + step * first))
        v = decay * (v + step / 2 * first) + step / 2 * second
    return torch.fft.irfftn(v, s=grid, dim=dims)


def loss_of(predicted: Tensor, truth: Tensor) -> Tensor:
    """Mean over the samples of the distance to the truth, relative to the size of the truth."""
    one = tuple(range(1, truth.ndim))
    return (torch.linalg.vector_norm(predicted - truth, dim=one) / torch.linalg.vector_norm(truth, dim=one)).mean()
