"""Short-time Fourier transforms: windows of a signal are fetched, and transformed where they lie."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.errors import UnsupportedOperationError
from mpishard.ops.rule.dim import on_domain, plain
from mpishard.tensor.operand import mesh_of, on_mesh
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor


def _taper(window: Any, n_fft: int, length: int, like: ShardTensor) -> Tensor:
    """Return the window, as long as a frame."""
    if window is None:
        window = torch.ones(length, dtype=like.dtype.to_real(), device=like.device)
    left = (n_fft - length) // 2
    return F.pad(window, (left, n_fft - length - left)) if length < n_fft else window


@implements(torch.stft, torch.Tensor.stft, sharded="halo")
def stft(
    input: ShardTensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> ShardTensor:
    """Transform the frames of signals. Neighborwise collective; frames are cut as the signals are.

    Raises
    ------
    UnsupportedOperationError
        ``align_to_window=True``.
    """
    x, window = on_mesh(input, mesh_of((input, window))), plain(window)
    if align_to_window:
        raise UnsupportedOperationError(
            "stft: align_to_window with ShardTensors",
            expected="None or False",
            got=align_to_window,
            fix="pad the signal and the window yourself",
        )
    # errors and dtype are torch's own
    result = on_domain(
        torch.stft,
        x,
        n_fft,
        hop_length,
        win_length,
        window,
        center,
        pad_mode,
        normalized,
        onesided,
        return_complex,
        align_to_window,
    )
    signals: Any = x if x.ndim == 2 else x.unsqueeze(0)
    if center:
        signals = F.pad(signals.unsqueeze(0), (n_fft // 2, n_fft // 2), pad_mode).squeeze(0)
    taper = _taper(window, n_fft, n_fft if win_length is None else win_length, x)
    frames = signals.unfold(-1, n_fft, n_fft // 4 if hop_length is None else hop_length) * taper
    if onesided is None:
        onesided = not frames.is_complex()
    out = (torch.fft.rfft if onesided else torch.fft.fft)(frames, norm="ortho" if normalized else None).transpose(1, 2)
    if x.ndim == 1:
        out = out.squeeze(0)
    return out if result.is_complex() else torch.view_as_real(out)  # type: ignore[no-any-return]


@implements(torch._C._VariableFunctions.stft, sharded="halo")  # type: ignore[attr-defined]
def stft_of_padded(input: Any, n_fft: int, hop: Any, length: Any, window: Any, *rest: Any) -> ShardTensor:
    """Transform the frames of signals that torch has padded, as it does for a plain signal and a sharded window."""
    return stft(input, n_fft, hop, length, window, False, "constant", *rest)


@implements(torch.istft, torch.Tensor.istft, sharded="halo")
def istft(
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> ShardTensor:
    """Add frames up to signals, which are cut as the frames are.

    Collective where frequencies are sharded, else neighborwise collective.
    """
    x, window = on_mesh(input, mesh_of((input, window))), plain(window)
    hop = n_fft // 4 if hop_length is None else hop_length
    own = n_fft if win_length is None else win_length
    if onesided is None:
        onesided = x.ndim in (2, 3) and x.shape[-2] != n_fft
    _require_frames(x, n_fft, hop, own, window, onesided, return_complex)
    taper = _taper(window, n_fft, own, x)
    frames: Any = x.unsqueeze(0) if x.ndim == 2 else x
    frames, norm = frames.transpose(1, 2), "ortho" if normalized else None
    if return_complex:
        frames = torch.fft.ifft(frames, norm=norm) * taper
    else:
        frames = torch.fft.irfft(frames[..., : n_fft // 2 + 1], n_fft, norm=norm) * taper
    count = x.shape[-1]
    total = n_fft + hop * (count - 1)
    geometry: Any = ((total, 1), (n_fft, 1), 1, 0, (hop, 1))
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else total - start
    y = F.fold(frames.transpose(1, 2), *geometry)[:, 0, start:end, 0]
    envelope = F.fold((taper * taper)[None, :, None].expand(1, n_fft, count), *geometry)[0, 0, start:end, 0]
    if center and length is None and not start:
        envelope = envelope[:0]  # torch cuts half of n_fft off the end, and where that is 0 everything
    if not envelope.numel() or envelope.abs().min() <= 1e-11:
        raise RuntimeError(
            f"istft(...) window overlap add min: {float(envelope.abs().min()) if envelope.numel() else 0}"
        )
    y = y / envelope
    if end > total:
        warnings.warn("The length of signal is shorter than the length parameter. Result is being padded", stacklevel=2)
        y = F.pad(y, (0, end - total))
    return y.squeeze(0) if x.ndim == 2 else y  # type: ignore[no-any-return]


def _require_frames(
    x: ShardTensor, n_fft: int, hop: int, own: int, window: Any, onesided: bool, return_complex: bool
) -> None:
    """Refuse what torch refuses, whose checks need the data."""
    shape = list(x.shape)
    if not x.is_complex():
        problem = "a complex input, as stft returns it"
    elif x.ndim not in (2, 3) or 0 in shape:
        problem = f"a non-empty tensor with 2 or 3 dimensions, got {shape}"
    elif shape[-2] != (n_fft // 2 + 1 if onesided else n_fft):
        problem = f"the frequencies of n_fft={n_fft}, onesided={onesided}, got {shape}"
    elif not 0 < hop <= own <= n_fft:
        problem = f"0 < hop_length <= win_length <= n_fft, got {hop}, {own}, {n_fft}"
    elif window is not None and (window.ndim != 1 or len(window) != own):
        problem = f"a 1D window of win_length={own}, got {list(window.shape)}"
    elif (onesided and return_complex) or (window is not None and window.is_complex() and not return_complex):
        problem = f"onesided={onesided} and a real window, or return_complex=True, got {return_complex}"
    else:
        return
    raise RuntimeError(f"istft expected {problem}")
