"""A trace that Perfetto and chrome://tracing read: one track a rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mpishard.profiling.recorder import Event

# the Trace Event Format has microseconds, on tracks (tid) of processes (pid); threads beside the ranks' own come apart
_RANKS, _OTHERS = 0, 1


def writable(path: str | os.PathLike[str]) -> None:
    """Raise OSError where a trace could not be written. Not collective."""
    if os.path.isdir(path):
        raise IsADirectoryError(f"{os.fspath(path)} is a folder")
    part = f"{os.fspath(path)}.part"
    with open(part, "w"):
        pass
    os.remove(part)


class Writer:
    """A trace file, rank by rank; it takes the place of an old one when it is whole."""

    def __init__(self, path: str | os.PathLike[str], facts: dict[str, Any]) -> None:
        self._path, self._part = os.fspath(path), f"{os.fspath(path)}.part"
        self._file = open(self._part, "w", encoding="utf-8")  # noqa: SIM115 (closed by `close` or `drop`)
        self._file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [\n')
        first = {"ph": "M", "name": "process_name", "pid": _RANKS, "args": {"name": "ranks"}}
        self._file.write(json.dumps(first))

    def add(self, rank: int, label: str, events: Sequence[Event]) -> None:
        """Write the track of a rank."""
        for line in _lines(rank, label, events):
            self._file.write(",\n" + json.dumps(line))

    def close(self) -> None:
        """Make the file the trace."""
        self._file.write("\n]}\n")
        self._file.close()
        os.replace(self._part, self._path)

    def drop(self) -> None:
        """Leave no file."""
        self._file.close()
        os.remove(self._part)


def _lines(rank: int, label: str, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "thread_name", "pid": _RANKS, "tid": rank, "args": {"name": label}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": _RANKS, "tid": rank, "args": {"sort_index": rank}}
    for event in events:
        line = {
            "ph": "X",
            "name": event.name,
            "cat": event.kind,
            "pid": _OTHERS if event.thread else _RANKS,
            "tid": rank,
            "ts": event.start / 1e3,
            "dur": event.duration / 1e3,
        }
        if event.messages or event.nbytes:
            line["args"] = {"messages": event.messages, "bytes": event.nbytes}
        yield line
