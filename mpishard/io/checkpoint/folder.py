"""A folder of checkpoints: what is in it, and how one appears in it all at once. For one rank; nothing communicates.

A checkpoint is a folder ``step_0000000100`` of its own. It is written under a hidden name and renamed when all of
it is on the disk, so one that has its name is complete, whatever ends the job. ``latest`` lists the names, newest
first: its first line is the checkpoint to load. A step that is saved again gets a name of its own
(``step_0000000100-2``) before the old one goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

from mpishard.errors import FileError, described

TENSORS, STATE, LATEST = "tensors.h5", "state.json", "latest"
FORMAT, VERSION = "mpishard checkpoint", 1
_NAME = re.compile(r"step_(\d+)(?:-(\d+))?$")


def step_of(name: str) -> int:
    """Return the step of a checkpoint's name. Not collective."""
    found = _NAME.match(name)
    assert found is not None
    return int(found[1])


def names(folder: Path) -> list[str]:
    """Return the names of the checkpoints, the latest first. Not collective."""
    try:
        there = {entry.name for entry in os.scandir(folder) if _NAME.match(entry.name) and entry.is_dir()}
    except FileNotFoundError:
        return []
    told: list[str] = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        told = (folder / LATEST).read_text().split()
    told = [name for name in dict.fromkeys(told) if name in there]
    return told + sorted(there.difference(told), key=_order, reverse=True)


def _order(name: str) -> tuple[int, int]:
    found = _NAME.match(name)
    assert found is not None
    return int(found[1]), int(found[2] or 1)


def partial_of(folder: Path, step: int) -> Path:
    """Return the hidden folder that a checkpoint is written in. Not collective."""
    return folder / f".step_{step:010d}.partial"


def begin(folder: Path, step: int) -> None:
    """Make the hidden folder that a checkpoint is written in, and remove what a killed job left.

    Not collective.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in [*folder.glob(".step_*"), *folder.glob(f".{LATEST}.*")]:
            _remove(left)
        partial_of(folder, step).mkdir()
    except OSError as e:
        raise unwritable(folder, e) from e


def commit(folder: Path, step: int, keep: int | None) -> Path:
    """Give a complete checkpoint its name, and remove the oldest ones. Not collective.

    Returns
    -------
    pathlib.Path
        The checkpoint.
    """
    partial = partial_of(folder, step)
    try:
        for file in sorted(partial.rglob("*")):
            flush(file)
        flush(partial)
        known = names(folder)
        again = [_order(name)[1] for name in known if step_of(name) == step]
        name = f"step_{step:010d}" + (f"-{max(again) + 1}" if again else "")
        os.rename(partial, folder / name)
        flush(folder)
        old = [k for k in known if step_of(k) != step]
        kept = [name, *old][: keep or None]
        _point(folder, kept)
    except OSError as e:
        raise unwritable(folder, e) from e
    for gone in known:
        if gone not in kept:
            _drop(folder, gone)
    return folder / name


def _drop(folder: Path, name: str) -> None:
    # first out of sight: half a checkpoint must not have a checkpoint's name
    hidden = folder / f".{name}.old"
    try:
        os.rename(folder / name, hidden)
        _remove(hidden)
    except OSError as e:
        warnings.warn(f"save_checkpoint: {folder / name} could not be removed: {e}", stacklevel=2)


def _point(folder: Path, lines: list[str]) -> None:
    hidden = folder / f".{LATEST}.{os.getpid()}"
    hidden.write_text("".join(f"{line}\n" for line in lines))
    flush(hidden)
    os.replace(hidden, folder / LATEST)
    flush(folder)


def discard(partial: Path) -> None:
    """Remove an unfinished checkpoint. Not collective."""
    shutil.rmtree(partial, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Have a file or a folder's entries on the disk before this returns. Not collective."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        if not path.is_dir():  # not every file system flushes folders
            raise
    finally:
        os.close(fd)


def write_state(partial: Path, state: dict[str, Any]) -> None:
    """Write everything but the tensors, with a checksum. Not collective."""
    whole = {"format": FORMAT, "version": VERSION, "checksum": _checksum(state), **state}
    try:
        (partial / STATE).write_text(json.dumps(whole, allow_nan=False, indent=1))
    except OSError as e:
        raise unwritable(partial.parent, e) from e


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return what `write_state` was given. Not collective.

    Raises
    ------
    FileError
        It is missing or damaged, or written by a newer version.
    """
    try:
        state = json.loads((checkpoint / STATE).read_bytes())
        if not isinstance(state, dict) or state.pop("format", None) != FORMAT:
            raise damaged(checkpoint, f"no {FORMAT}")
        version = state.pop("version", None)
        if type(version) is int and version > VERSION:
            raise FileError(
                described(
                    f"load_checkpoint: {os.fspath(checkpoint)!r} was written by a newer mpishard",
                    expected=f"version {VERSION} of the format, or an older one",
                    got=f"version {version}",
                    fix="load it with the mpishard that wrote it, or a newer one",
                )
            )
        if state.pop("checksum", None) != _checksum(state):
            raise damaged(checkpoint, f"the checksum of {STATE} is wrong")
    except FileError:
        raise
    except (OSError, RecursionError, ValueError) as e:
        raise damaged(checkpoint, f"{STATE}: {type(e).__name__}: {e}") from e
    return state


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(state, allow_nan=False).encode(), digest_size=16).hexdigest()


def damaged(checkpoint: Path, what: str) -> FileError:
    """Return the error for a checkpoint that is not as it was written. Not collective."""
    return FileError(
        described(
            f"load_checkpoint: {os.fspath(checkpoint)!r} is damaged",
            expected="a checkpoint as save_checkpoint wrote it",
            got=what,
            fix="load another one: fallback=True takes the newest that is good",
        )
    )


def unwritable(folder: Path, e: Exception) -> FileError:
    """Return the error for a checkpoint that cannot be written. Not collective."""
    return FileError(
        described(
            f"save_checkpoint: cannot write a checkpoint in {os.fspath(folder)!r}",
            expected="a folder that can be made and written to, and room in it",
            got=f"{type(e).__name__}: {e}",
            fix="make room, or choose another folder; the checkpoints that are there are as they were",
        )
    )
