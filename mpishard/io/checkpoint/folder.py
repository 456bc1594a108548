"""A folder of checkpoints: what is in it, and how one appears in it all at once. For one rank; nothing communicates.

A checkpoint is a folder ``step_0000000100`` of its own; that of a pipeline has folders ``stage_0``, ``stage_1``, ... in
it. It is written under a hidden name and renamed when all of it is on the disk, so one that has its name is complete,
whatever ends the job. ``latest`` lists the names, newest first: its first line is the checkpoint to load, its last one
a checksum. A step that is saved again gets a name of its own (``step_0000000100-2``) before the old one goes. One job
saves into a folder at a time (see `mpishard.io.file.lock`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from mpishard.errors import FileError
from mpishard.io.checkpoint.stages import Stages
from mpishard.io.file.close import flush
from mpishard.io.file.lock import hold
from mpishard.io.file.trust import check_memory, fresh, read_bounded, shown

TENSORS, STATE, LATEST = "tensors.h5", "state.json", "latest"
FORMAT, VERSION = "mpishard checkpoint", 1
# of a state's JSON: `encode` takes 64 levels, of at most three each
_DEPTH = 210
_STATE_NBYTES, _LATEST_NBYTES = 1 << 30, 1 << 24
# all ten digits: a `step_100` is another program's, and is neither loaded nor removed
_NAME = re.compile(r"step_([0-9]{10,})(?:-([0-9]+))?")
# what a job that was killed leaves
_LEFT = re.compile(rf"\.{_NAME.pattern}\.(?:.*\.)?(?:partial|old)|\.{LATEST}\..*")
_CHECKSUM = "checksum "
_begun: set[str] = set()  # names of the hidden folders that this process writes in


def step_of(name: str) -> int:
    """Return the step of a checkpoint's name. Not collective."""
    return _order(name)[0]


class Found(NamedTuple):
    """The checkpoints of a folder, the latest first; what is wrong with ``latest``, and what it lists in vain."""

    names: list[str]
    problem: str | None = None
    gone: tuple[str, ...] = ()


def look(folder: Path) -> Found:
    """Return which checkpoints there are. Not collective."""
    try:
        there = {entry.name for entry in os.scandir(folder) if _NAME.fullmatch(entry.name) and entry.is_dir()}
    except FileNotFoundError:
        return Found([])
    by_step = sorted(there, key=_order, reverse=True)
    try:
        lines = read_bounded(folder / LATEST, _LATEST_NBYTES).decode("ascii").splitlines()
    except FileNotFoundError:
        return Found(by_step)
    except (OSError, ValueError) as e:
        return Found(by_step, f"{LATEST} cannot be read ({type(e).__name__}: {e})")
    listed = lines[:-1] if lines and lines[-1].startswith(_CHECKSUM) else lines
    odd = [line for line in listed if not _NAME.fullmatch(line)]
    gone = tuple(name for name in listed if name not in there)
    problem = None
    if odd:
        problem = f"{LATEST} has a line {shown(odd[0])}"
    elif len(listed) < len(lines):
        if lines[-1] != _CHECKSUM + _sum_of(listed):
            problem = f"the checksum of {LATEST} is wrong"
    elif gone:
        problem = f"{LATEST}, of a version without a checksum, lists {gone[0]}, which is not there"
    if problem is not None:
        return Found(by_step, problem)
    told = [name for name in dict.fromkeys(listed) if name in there]
    return Found(told + [name for name in by_step if name not in told], None, gone)


def _sum_of(lines: list[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _order(name: str) -> tuple[int, int]:
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1]), int(found[2] or 1)


def begin(folder: Path, step: int, stages: Stages) -> str:
    """Take a folder for this job, remove what a killed one left, and make a hidden folder to write a checkpoint in.

    Not collective.

    Returns
    -------
    str
        Name of the hidden folder, which no other job has.

    Raises
    ------
    FileError
        It cannot be written to, or another job saves into it.
    """
    host = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:40]
    name = f".step_{step:010d}.{host}-{os.getpid()}-{secrets.token_hex(4)}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        hold(folder)
        for left in os.listdir(folder):
            if _LEFT.fullmatch(left) and left not in _begun:
                _remove_if_it_goes(folder / left)
        for path in (folder / name, *stages.folders(folder / name)):
            path.mkdir()
        _begun.add(name)
    except FileError:
        raise
    except OSError as e:
        raise unwritable(folder, e) from e
    return name


def commit(partial: Path, step: int, keep: int | None) -> Path:
    """Give a complete checkpoint its name, and remove the oldest ones. Not collective.

    Of those that are there, ``keep`` counts what still has its state and all of its files, in full: one that is damaged
    is no reason for a good one to go.

    Returns
    -------
    pathlib.Path
        The checkpoint.
    """
    folder = partial.parent
    try:
        for file in sorted(partial.rglob("*")):
            flush(file)
        flush(partial)
        known = look(folder).names
        again = [_order(name)[1] for name in known if step_of(name) == step]
        name = f"step_{step:010d}" + (f"-{max(again) + 1}" if again else "")
        os.rename(partial, folder / name)
        _begun.discard(partial.name)
        flush(folder)
        good, kept = 1, [name]
        for old in known:
            if step_of(old) != step and (keep is None or good < keep):
                kept.append(old)
                good += is_whole(folder / old)
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
    _listed.pop(folder / name, None)
    try:
        os.rename(folder / name, hidden)
    except OSError as e:
        warnings.warn(f"save_checkpoint: {folder / name} could not be removed: {e}", stacklevel=2)
    else:
        _remove_if_it_goes(hidden)


def _point(folder: Path, lines: list[str]) -> None:
    hidden = folder / f".{LATEST}.{secrets.token_hex(6)}"
    with fresh(hidden) as file:
        file.write("".join(f"{line}\n" for line in [*lines, _CHECKSUM + _sum_of(lines)]).encode())
    flush(hidden)
    os.replace(hidden, folder / LATEST)
    flush(folder)


# the files of checkpoints whose state was read once: it may be long
_listed: dict[Path, tuple[tuple[int, ...], dict[str, int]]] = {}


def is_whole(checkpoint: Path) -> bool:
    """Tell whether a checkpoint has its state, and all files that it was saved with, in full. Not collective."""
    try:
        there = os.lstat(checkpoint / STATE)
        state = (there.st_ino, there.st_size, there.st_mtime_ns)
        if _listed.get(checkpoint, ((), {}))[0] != state:
            _listed[checkpoint] = (state, read_state(checkpoint).get("files", {}))
        files = _listed[checkpoint][1]
        return all(os.lstat(checkpoint / name).st_size == nbytes for name, nbytes in files.items())
    except (OSError, AttributeError, TypeError, ValueError):
        return False


def sizes(partial: Path) -> dict[str, int]:
    """Return the files of a checkpoint, by their names in it, with their numbers of bytes. Not collective."""
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    return {path.relative_to(partial).as_posix(): path.stat().st_size for path in files}


def discard(partial: Path) -> None:
    """Remove an unfinished checkpoint. Not collective."""
    _begun.discard(partial.name)
    shutil.rmtree(partial, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_if_it_goes(path: Path) -> None:
    # NFS keeps a folder of which a file is still read, and other users' files need not go: no reason not to save
    try:
        _remove(path)
    except OSError as e:
        warnings.warn(f"save_checkpoint: {path} could not be removed: {e}", stacklevel=3)


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
        raw = read_bounded(checkpoint / STATE, _STATE_NBYTES)
        check_memory(16 * len(raw), STATE)
        state = json.loads(raw)
        if _is_deeper(state, _DEPTH):
            raise damaged(checkpoint, f"{STATE} is nested deeper than anything that is saved")
        if not isinstance(state, dict) or state.pop("format", None) != FORMAT:
            raise damaged(checkpoint, f"{STATE} is no {FORMAT}")
        version = state.pop("version", None)
        if type(version) is int and version > VERSION:
            raise FileError(
                f"load_checkpoint: {os.fspath(checkpoint)!r} was written by a newer mpishard",
                expected=f"version {VERSION} of the format, or an older one",
                got=f"version {version}",
                fix="load it with the mpishard that wrote it, or a newer one",
            )
        if state.pop("checksum", None) != _checksum(state):
            raise damaged(checkpoint, f"the checksum of {STATE} is wrong")
    except FileError:
        raise
    except (MemoryError, OSError, RecursionError, ValueError) as e:
        raise damaged(checkpoint, f"{STATE}: {type(e).__name__}: {e}") from e
    return state


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    while level and depth:
        depth -= 1
        lists = [v for v in level if isinstance(v, list)] + [list(v.values()) for v in level if isinstance(v, dict)]
        level = [v for each in lists for v in each if isinstance(v, (dict, list))]
    return bool(level)


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(state, allow_nan=False).encode(), digest_size=16).hexdigest()


def damaged(checkpoint: Path, what: str) -> FileError:
    """Return the error for a checkpoint that is not as it was written. Not collective."""
    return FileError(
        f"load_checkpoint: {os.fspath(checkpoint)!r} is damaged",
        expected="a checkpoint as save_checkpoint wrote it",
        got=what,
        fix="load another one: fallback=True takes the newest that is good",
    )


def unwritable(folder: Path, e: BaseException) -> FileError:
    """Return the error for a checkpoint that cannot be written. Not collective."""
    return FileError(
        f"save_checkpoint: cannot write a checkpoint in {os.fspath(folder)!r}",
        expected="a folder that can be made and written to, and room in it",
        got=f"{type(e).__name__}: {e}",
        fix="make room, or choose another folder; the checkpoints that are there are as they were",
    )
