"""Short-time Fourier transforms of sharded signals, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, mesh_of, shard
from tests.ops.windows import check, field, refused_alike

HANN = torch.hann_window(8, dtype=torch.float64)
SHORT = torch.hamming_window(6, dtype=torch.float64)

# shape, arguments, arguments of the inverse
CASES = [
    ((2, 40), {"n_fft": 8, "window": HANN}, {"length": 40}),
    ((37,), {"n_fft": 8, "hop_length": 3, "window": HANN, "normalized": True}, {}),
    ((3, 31), {"n_fft": 9, "hop_length": 2, "win_length": 6, "window": SHORT, "pad_mode": "constant"}, {}),
    ((2, 41), {"n_fft": 8, "hop_length": 4, "window": HANN + 0.1, "center": False, "onesided": False}, {}),
]


def split(arguments):
    return {k: v for k, v in arguments.items() if k != "pad_mode"}


@pytest.mark.parametrize("case", range(len(CASES)))
def test_there_and_back(case):
    shape, arguments, inverse = CASES[case]
    dims = range(len(shape))
    check(lambda x: torch.stft(x, **arguments, return_complex=True), field(*shape), dims, case)
    spectrum = torch.stft(field(*shape), **arguments, return_complex=True)
    check(lambda x: torch.istft(x, **split(arguments), **inverse), spectrum, range(spectrum.ndim), case, count=6)


def test_complex_signals():
    x = torch.complex(field(2, 33), field(2, 33).flip(-1))
    check(lambda t: t.stft(8, window=HANN), x, (0, 1), 1)
    spectrum = torch.stft(x, 8, window=HANN)
    check(lambda t: t.istft(8, window=HANN, return_complex=True), spectrum, (0, 1, 2), 2)


def test_torchs_own_errors():
    refused_alike(lambda t: torch.stft(t, 8, window=HANN), field(2, 33))
    signal = shard(field(2, 33), mesh_of((WORLD.size,)), (ms.Shard(1),))
    with pytest.raises(RuntimeError, match="expected a 1D window tensor of size equal to win_length=8"):
        torch.stft(signal, 8, window=SHORT, return_complex=True)
    with pytest.raises(ms.UnsupportedOperationError, match="align_to_window"):
        torch.stft(signal, 8, window=HANN, center=False, return_complex=True, align_to_window=True)
    x = shard(field(2, 5, 12).to(torch.complex128), mesh_of((WORLD.size,)), (ms.Shard(2),))
    for n_fft, hop, window in ((12, 3, torch.ones(12).double()), (8, 9, HANN), (8, 2, SHORT)):
        with pytest.raises(RuntimeError, match="istft"):
            torch.istft(x, n_fft, hop, window=window)
        with pytest.raises(RuntimeError, match="istft"):
            torch.istft(x.full_tensor(), n_fft, hop, window=window)
    with pytest.raises(RuntimeError, match="window overlap add min"):
        torch.istft(x, 8, 8, window=HANN, center=False)
