"""Whether autocast is on where a block lies; torch knows none for tensors without values."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_on_any_device = torch._C._is_any_autocast_enabled  # type: ignore[attr-defined]


def autocast_enabled(device_type: str) -> bool:
    """Tell whether autocast is on. Not collective."""
    # a name of a device takes torch ten times as long
    return _on_any_device() and device_type != "meta" and torch.is_autocast_enabled(device_type)


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context in which it is off. Not collective."""
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)
