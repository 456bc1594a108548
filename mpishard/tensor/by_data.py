"""Writes by ``.data`` of a parameter: torch does not count them, and what was gathered of it must not outlive them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def data_of(x: Any) -> Tensor:
    """Return the block outside autograd; of a parameter it counts what is written into it. Not collective."""
    if not getattr(x, "_is_param", False):
        return x.block.data  # type: ignore[no-any-return]
    known = x._by_data
    if known is None or known[0] is not x.block:
        known = x._by_data = x.block, x.block.data, written(x)
    return known[1].detach()  # type: ignore[no-any-return]


def note_set(x: Any) -> None:
    """Note that the block got other memory. Not collective."""
    if getattr(x, "_is_param", False):
        x._by_data = x.block, x.block.data, written(x) + 1


def written(param: Any) -> int:
    """Return how often a parameter was written by ``.data``, or got other memory. Not collective."""
    known = param._by_data
    return 0 if known is None else known[1]._version + known[2]  # type: ignore[no-any-return]
