"""Fourier transforms."""

from mpishard.ops.spectral import fft, stft
