"""Hints for MPI's file layer, from plain Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from mpi4py import MPI


@contextlib.contextmanager
def info_of(hints: Mapping[str, object] | None) -> Iterator[MPI.Info]:
    """Give an MPI.Info with these hints for the time of a ``with`` block. Not collective.

    Examples
    --------
    >>> with info_of({"striping_factor": 8}) as info:
    ...     ...
    """
    if not hints:
        yield MPI.INFO_NULL
        return
    info = MPI.Info.Create()
    try:
        for key, value in hints.items():
            info.Set(key, str(value))
        yield info
    finally:
        info.Free()
