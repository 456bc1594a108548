"""Checkpoints that are written while the program goes on: without MPI, by one thread of each rank.

A thread that waits in MPI would take a core from the program, and not every MPI library lets it call at all. So
ranks meet in the file system: each writes its blocks to their places in a file that many ranks share (see
`mpishard.io.backend.part`) and then a note with its shares of the checksums. Notes go up a tree, in which a rank
waits for at most 63 others a level; rank 0 finishes, with a pipeline when the first ranks of all stages have told it.
``tensors.h5`` shows the blocks as whole datasets (virtual ones). The thread takes a sixteenth of a core, until the
program waits.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.comm import exit, guard
from mpishard.comm.collective import blocking
from mpishard.comm.memory.buffer import dense
from mpishard.comm.mesh import Group
from mpishard.errors import FileError, MpishardError
from mpishard.io.backend.part import Part, Planned, fill, lay_out, make_folders, with_room
from mpishard.io.checkpoint.folder import TENSORS, discard, unwritable
from mpishard.io.checkpoint.snapshot import Snapshot
from mpishard.io.file.close import flush, made
from mpishard.io.file.dtype import NUMPY
from mpishard.io.file.excepthook import noted
from mpishard.io.file.open import LIBVER
from mpishard.io.file.parts import Parts, Plan, gives, show, show_boxes, tell, writes
from mpishard.io.file.schema import Variable
from mpishard.tensor import ShardTensor, wrap

_DIRECT_NBYTES = 64 << 10  # smaller blocks go through h5py
_FANOUT = 64  # of the tree of notes
PARTS, _NOTES = "parts", "notes"  # folders
# of a core, while the program goes on: cores that compute and caches are shared, and Python's lock is
_SHARE = 1 / 16
_TURN_S = 1e-3
_SIGN_S = 5.0  # how often a rank that writes for long shows that it is there
_NO_SUMS = torch.zeros(0, dtype=torch.int64, device="cpu")
_pending: dict[str, Saving] = {}  # by the folder's real path, whatever links lead there


class _Pace:
    """Keeps a thread at a small share of a core, until ``hurry`` is set: called often, it sleeps now and then.

    Meanwhile it touches its ``signs``, for others to see.
    """

    def __init__(self, hurry: threading.Event, signs: Sequence[Path]) -> None:
        self._hurry, self.signs = hurry, signs
        self._seen, self._signed = time.thread_time(), time.monotonic()

    def __call__(self) -> None:
        used = time.thread_time() - self._seen
        if used <= _TURN_S:
            return
        if threading.main_thread().is_alive():
            self._hurry.wait(used * (1 / _SHARE - 1))
        self.sign()
        self._seen = time.thread_time()

    def sign(self) -> None:
        """Show that this rank is there."""
        if time.monotonic() - self._signed > _SIGN_S:
            self._signed = time.monotonic()
            for sign in self.signs:
                sign.touch()


class Saving:
    """A checkpoint that is saved, or on its way.

    Attributes
    ----------
    path : pathlib.Path or None
        The checkpoint; None until it is known to be complete.
    """

    def __init__(self, taken: Snapshot, path: Path | None = None) -> None:
        self.path = path
        self._taken: Snapshot | None = taken
        self._group, self._stages = taken.group, taken.stages
        self._error: MpishardError | None = None
        self._name = ""
        self._folder, self._partial = taken.folder, taken.partial
        self._key = os.path.realpath(taken.folder)
        self._hurry = threading.Event()  # the program waits
        self._own = threading.Event()  # this rank's part is written, or failed
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None
        if path is None:
            # not a daemon: a program that ends waits for its last checkpoint
            self._thread = threading.Thread(target=self._run, name="mpishard-checkpoint")
            _pending[self._key] = self
            self._thread.start()

    def done(self) -> bool:
        """Tell whether this rank has nothing more to write. Not collective."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return it.

        Collective. The next save or load in the same folder does it too.

        Raises
        ------
        FileError
            It could not be written; the checkpoints before it are as they were.
        """
        if self._thread is not None:
            whole = self._stages.group
            self._hurry.set()
            self._own.wait()
            try:
                guard.agree(whole.comm, self._error)
                self._end()
                guard.agree(whole.comm, self._error)
            except MpishardError as e:
                self._error = e
                self._abandoned.set()
                self._end()
                if whole.rank == 0:
                    # not before every rank has stopped writing
                    discard(self._partial)
                raise
            self.path = self._folder / broadcast_text(self._name, whole)
        if self.path is None:
            # told before, perhaps by the next save
            assert self._error is not None
            raise self._error
        return self.path

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        _pending.pop(self._key, None)

    def _run(self) -> None:
        taken = self._taken
        assert taken is not None
        with contextlib.suppress(AttributeError, OSError):
            # this thread, not the process (Linux): the program goes first where cores are short
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        pace = _Pace(self._hurry, [folder / _sign(i) for folder, i, _ in self._trees(taken)])
        try:
            try:
                _write_part(taken, self._group, pace)
                sums = taken.shares(pace)
            except BaseException as e:  # noqa: BLE001 (told where the program waits for it)
                self._fail(taken, e)
                return
            finally:
                self._own.set()
            try:
                self._pass_on(taken, sums, pace)
            except BaseException as e:  # noqa: BLE001
                self._fail(taken, e)
        finally:
            self._taken = None  # its copies

    def _trees(self, taken: Snapshot) -> list[tuple[Path, int, int]]:
        """Return the trees that this rank is in, as folder, number in it and size: its ranks', and that of stages."""
        trees = [(taken.own, self._group.rank, self._group.size)]
        if self._stages.count and self._group.rank == 0:
            trees.append((taken.partial, self._stages.index, self._stages.count))
        return trees

    def _fail(self, taken: Snapshot, e: BaseException) -> None:
        self._error = e if isinstance(e, MpishardError) else unwritable(taken.folder, e)
        folder, number, _ = self._trees(taken)[-1]
        if number:
            # where there is no room for the note either, `wait` tells the others
            with contextlib.suppress(OSError):
                _leave(folder, number, self._error, _NO_SUMS)

    def _pass_on(self, taken: Snapshot, sums: Tensor, pace: _Pace) -> None:
        """Tell those above this rank in its trees, when all below have told; on rank 0 finish."""
        for folder, number, size in self._trees(taken):
            found = self._heard(folder, number, size, sums, pace)
            if found is None:
                return
            sums = found
            if number:
                _leave(folder, number, None, sums)
                return
            pace.signs = pace.signs[1:]
            shutil.rmtree(folder / _NOTES)
            if folder == taken.own:
                taken.complete(sums)
                sums = _NO_SUMS
        self._name = taken.commit().name

    def _heard(self, folder: Path, number: int, size: int, total: Tensor, pace: _Pace) -> Tensor | None:
        """Add the sums of those below this one in a tree; None where the program has given up."""
        for other in below(number, size):
            if not self._awaited(folder, other, pace):
                return None
            note = folder / _note(other)
            head, _, sums = note.read_bytes().partition(b"\n")
            told = json.loads(head)
            if told["error"]:
                raise FileError(told["error"])
            tiles, values = (
                torch.frombuffer(bytearray(sums), dtype=torch.int64).view(2, -1) if sums else (total[:0],) * 2
            )
            total[tiles] += values
            note.unlink()
        return total

    def _awaited(self, folder: Path, other: int, pace: _Pace) -> bool:
        """Wait for a rank's note, as long as the rank shows that it is there; False where the program has given up."""
        note, sign = folder / _note(other), folder / _sign(other)
        since, pause, seen = time.monotonic(), 0.01, 0
        while not note.exists():
            if self._abandoned.wait(pause):
                return False
            pace.sign()
            pause = min(2 * pause, 0.5)
            with contextlib.suppress(OSError):
                changed = sign.stat().st_mtime_ns
                since, seen = (since if changed == seen else time.monotonic()), changed
            if guard.TIMEOUT_S and time.monotonic() - since > guard.TIMEOUT_S:
                raise unwritable(folder, TimeoutError(f"rank {other} has written nothing for a long time"))
        return True


def below(rank: int, size: int) -> Iterator[int]:
    """Give the ranks from which a rank takes notes: by digits of base 64, those with one more. Not collective.

    Examples
    --------
    >>> list(below(64, 200))[:2], list(below(0, 200))[-3:], list(below(65, 200))
    ([65, 66], [63, 64, 128], [])
    """
    stride = 1
    while stride < size and rank % (stride * _FANOUT) == 0:
        yield from range(rank + stride, min(rank + stride * _FANOUT, size), stride)
        stride *= _FANOUT


def in_background(taken: Snapshot) -> Saving:
    """Copy the blocks that this rank gives, make the files for all, and start writing them. Collective."""
    group, whole = taken.group, taken.stages.group
    plan = Plan.of(group.size)
    tensors: dict[str, ShardTensor] = {}

    def copy() -> None:
        for name, x in taken.tensors.items():
            local = x.block
            if gives(x.sharding, taken.mesh.coords):
                local = dense(local.detach().to("cpu", copy=True))
            else:
                local = local.new_empty(0, device="cpu")
            tensors[name] = wrap(local, x.sharding, taken.mesh)

    parts, notes = taken.own / PARTS, (taken.own / _note(group.rank)).parent

    def begin() -> None:
        copy()  # memory may be short on one rank
        if whole.rank == 0:
            for folder in {(taken.partial / _note(stage)).parent for stage in range(taken.stages.count)}:
                folder.mkdir(parents=True)
        if group.rank == 0:
            make_folders(parts, plan)
            notes.parent.mkdir()

    def begin_group() -> None:
        if plan.turn(group.rank) == 0:
            lay_out(parts, group.rank, plan, _planned(taken))
        if group.rank % _FANOUT == 0:
            notes.mkdir()

    try:
        for call in (begin, begin_group):
            error: MpishardError | None = None
            try:
                call()
            except Exception as e:  # noqa: BLE001 (the others wait for this rank)
                error = e if isinstance(e, MpishardError) else unwritable(taken.folder, e)
            guard.agree(whole.comm, error)
    except MpishardError:
        if whole.rank == 0:
            discard(taken.partial)
        raise
    return Saving(taken._replace(tensors=tensors))


def finish(folder: Path) -> None:
    """Wait for the checkpoint that is being written in a folder, if any. Collective where there is one."""
    pending = _pending.get(os.path.realpath(folder))
    if pending is not None:
        pending.wait()


def broadcast_text(text: str, group: Any) -> str:
    """Return the text of the group's first rank. Collective."""
    raw = (
        torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        if text
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    count = int(blocking.broadcast(torch.tensor(raw.numel(), device="cpu"), group, 0))
    if group.rank:
        raw = torch.empty(count, dtype=torch.uint8, device="cpu")
    return blocking.broadcast(raw, group, 0).numpy().tobytes().decode() if count else ""


def _note(rank: int) -> str:
    return f"{_NOTES}/{rank // _FANOUT}/{rank}"


def _sign(rank: int) -> str:
    return f"{_NOTES}/{rank // _FANOUT}/.{rank}"


def _leave(partial: Path, rank: int, error: MpishardError | None, sums: Tensor) -> None:
    """Write a note: an error or None, and the sums of those tiles that this rank, or one below it, has cells of."""
    tiles = sums.nonzero().view(-1)
    hidden = partial / _sign(rank)
    head = json.dumps({"error": None if error is None else str(error)}).encode()
    hidden.write_bytes(head + b"\n" + torch.stack((tiles, sums[tiles])).numpy().tobytes())
    os.replace(hidden, partial / _note(rank))


def _sharded(taken: Snapshot) -> dict[str, ShardTensor]:
    return {n: x for n, x in taken.tensors.items() if taken.info[n]["sharded"] is not None and x.ndim}


def _planned(taken: Snapshot) -> list[Planned]:
    return [
        Planned(Variable(name, tuple(x.shape), np.dtype(NUMPY[x.dtype]), None, None, None, {}), x.sharding)
        for name, x in _sharded(taken).items()
    ]


def _write_part(taken: Snapshot, group: Group, pace: _Pace) -> None:
    """Write this rank's blocks, and what else is its to write."""
    folder, plan, sharded = taken.own / PARTS, Plan.of(group.size), _sharded(taken)
    own = {n: x.block for n, x in sharded.items() if writes(x.sharding, taken.mesh.coords)}
    if own:
        part = Part(folder, group.rank, plan)
        part.write(own, pace)
        flush(part.path)
    whole = {name: Parts(x.sharding, PARTS, plan) for name, x in sharded.items()}
    for index in show_boxes(folder, group.rank, [(n, NUMPY[sharded[n].dtype], parts) for n, parts in whole.items()]):
        flush(index)
    if group.rank == 0 and taken.tensors:
        tell(folder, plan, whole)
        _write_whole(taken, whole, pace)


def _write_whole(taken: Snapshot, parts: dict[str, Parts], pace: _Pace) -> None:
    """Write the file that holds the plain tensors, and shows the sharded ones whole."""
    path = taken.own / TENSORS
    plain = {n: x.block for n, x in taken.tensors.items() if n not in parts}
    large: list[tuple[int, Tensor]] = []
    with (
        noted() as lost,
        _room(path, sum(b.nbytes for b in plain.values()), len(taken.tensors)),
        made(path, libver=LIBVER) as file,
    ):
        for name, block in plain.items():
            if block.nbytes < _DIRECT_NBYTES:
                file.create_dataset(name, data=block.numpy())
            else:
                dataset = with_room(file, name, tuple(block.shape), NUMPY[block.dtype])
                large.append((dataset.id.get_offset(), block))
        for name, each in parts.items():
            dtype = NUMPY[taken.tensors[name].dtype]
            if all(each.layout.shape):
                show(file, name, dtype, each)
            else:
                file.create_dataset(name, shape=each.layout.shape, dtype=dtype)
        file.attrs["step"] = taken.step
    if lost:
        raise lost[0]
    # h5py would keep the program's Python waiting
    fill(path, large, pace)
    flush(path)


@contextlib.contextmanager
def _room(path: Path, nbytes: int, count: int) -> Iterator[None]:
    """Hold room on the disk for what is written next, so that a full one is found out here.

    HDF5 cannot close a file that it cannot write; the few pages that it writes here find the room that is let go.
    """
    own = (1 << 20) + (count << 12)
    held = path.with_name(f".{path.name}.room")
    with open(held, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes + own)
            file.truncate(nbytes + 1)
            yield
        finally:
            held.unlink()


def _tell() -> None:
    # nobody waited for it: the error would be lost
    for saving in _pending.values():
        taken = saving._taken
        if saving._error is None and taken is not None:
            # Ctrl-C came while Python waited for the thread, which ends with the process
            saving._fail(taken, KeyboardInterrupt("at the end of the program"))
        if saving._error is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # None, where it is closed
                sys.stderr.write(f"{saving._error}\n")
            exit.fail_at_end()


atexit.register(_tell)
