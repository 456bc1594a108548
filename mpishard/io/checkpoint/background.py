"""Checkpoints that are written while the program goes on: without MPI, by one thread and one file per rank.

A thread that waits in MPI would take a core from the program, and not every MPI library lets it call at all. So
ranks meet in the file system: each writes its blocks into a file of its own and then a note with its shares of the
checksums; rank 0 waits for the notes, and finishes. ``tensors.h5`` shows the blocks as whole datasets (virtual ones).
Large blocks are written past h5py, whose calls would keep the program's Python waiting: the place of a block in its
file is known, and plain writes go on in parallel. The thread takes a sixteenth of a core, until the program waits.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.collective import blocking
from mpishard.comm.memory.buffer import address, dense
from mpishard.errors import FileError, MpishardError
from mpishard.io.checkpoint.folder import TENSORS, discard, flush, unwritable
from mpishard.io.checkpoint.snapshot import Snapshot, gives
from mpishard.io.file.dtype import NUMPY
from mpishard.io.file.open import import_h5py
from mpishard.tensor import wrap

_DIRECT_NBYTES = 64 << 10  # smaller blocks go through h5py
_WRITE_NBYTES = 2 << 20
# of a core, while the program goes on: cores that compute and caches are shared, and Python's lock is
_SHARE = 1 / 16
_TURN_S = 1e-3
_SIGN_S = 5.0  # how often a rank that writes for long shows that it is there
_pending: dict[Path, Saving] = {}


class _Pace:
    """Keeps a thread at a small share of a core, until ``hurry`` is set: called often, it sleeps now and then.

    Meanwhile it touches ``sign``, for others to see.
    """

    def __init__(self, hurry: threading.Event, sign: Path) -> None:
        self._hurry, self._sign = hurry, sign
        self._seen, self._signed = time.thread_time(), time.monotonic()

    def __call__(self) -> None:
        used = time.thread_time() - self._seen
        if used <= _TURN_S:
            return
        if threading.main_thread().is_alive():
            self._hurry.wait(used * (1 / _SHARE - 1))
        if time.monotonic() - self._signed > _SIGN_S:
            self._signed = time.monotonic()
            self._sign.touch()
        self._seen = time.thread_time()


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
        self._group = taken.mesh.group(tuple(range(taken.mesh.ndim)))
        self._error: MpishardError | None = None
        self._name = ""
        self._folder, self._partial = taken.folder, taken.partial
        self._hurry = threading.Event()  # the program waits
        self._own = threading.Event()  # this rank's part is written, or failed
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None
        if path is None:
            # not a daemon: a program that ends waits for its last checkpoint
            self._thread = threading.Thread(target=self._run, name="mpishard-checkpoint")
            _pending[self._folder] = self
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
            comm = self._group.comm
            self._hurry.set()
            self._own.wait()
            try:
                guard.agree(comm, self._error)
                self._end()
                guard.agree(comm, self._error)
            except MpishardError:
                self._abandoned.set()
                self._end()
                if self._group.rank == 0:
                    # not before every rank has stopped writing
                    discard(self._partial)
                raise
            self.path = self._folder / broadcast_text(self._name, self._group)
        assert self.path is not None
        return self.path

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        _pending.pop(self._folder, None)

    def _run(self) -> None:
        taken = self._taken
        assert taken is not None
        first = self._group.rank == 0
        with contextlib.suppress(AttributeError, OSError):
            # this thread, not the process (Linux): the program goes first where cores are short
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        pace = _Pace(self._hurry, taken.partial / _sign(self._group.rank))
        try:
            try:
                _write_part(taken, self._group.rank, pace)
            finally:
                self._own.set()
            if first:
                sums = self._sums(taken)
                if sums is not None:
                    self._name = taken.complete(sums).name
        except MpishardError as e:
            self._error = e
        except BaseException as e:  # noqa: BLE001 (told where the program waits for it)
            self._error = unwritable(taken.folder, e)
        finally:
            self._own.set()
            self._taken = None  # its copies

    def _sums(self, taken: Snapshot) -> Tensor | None:
        """Return the checksums, when every rank has written its part; None where one could not."""
        total, since, pause, seen = torch.zeros(0, dtype=torch.int64), time.monotonic(), 0.01, 0
        for rank in range(self._group.size):
            note = taken.partial / _note(rank)
            while not note.exists():
                if self._abandoned.wait(pause):
                    return None
                pause = min(2 * pause, 0.5)
                with contextlib.suppress(OSError):
                    changed = (taken.partial / _sign(rank)).stat().st_mtime_ns
                    since, seen = (since if changed == seen else time.monotonic()), changed
                if guard.TIMEOUT_S and time.monotonic() - since > guard.TIMEOUT_S:
                    raise unwritable(taken.folder, TimeoutError(f"rank {rank} has written nothing for a long time"))
            since, pause = time.monotonic(), 0.01
            told = json.loads(note.read_text())
            if "error" in told:
                raise FileError(told["error"])
            shares = torch.tensor(told["shares"], dtype=torch.int64)
            total = shares if rank == 0 else total + shares
            note.unlink()
        return total


def in_background(taken: Snapshot) -> Saving:
    """Copy the blocks that this rank gives, and start writing them. Not collective."""
    tensors = {}
    for name, x in taken.tensors.items():
        local = x.block
        if gives(x.sharding, taken.mesh.coords):
            local = dense(local.detach().to("cpu", copy=True))
        else:
            local = local.new_empty(0, device="cpu")
        tensors[name] = wrap(local, x.sharding, taken.mesh)
    return Saving(taken._replace(tensors=tensors))


def finish(folder: Path) -> None:
    """Wait for the checkpoint that is being written in a folder, if any. Collective where there is one."""
    if folder in _pending:
        _pending[folder].wait()


def broadcast_text(text: str, group: Any) -> str:
    """Return the text of the group's first rank. Collective."""
    raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    count = int(blocking.broadcast(torch.tensor(raw.numel()), group, 0))
    if group.rank:
        raw = torch.empty(count, dtype=torch.uint8)
    return blocking.broadcast(raw, group, 0).numpy().tobytes().decode() if count else ""


def _note(rank: int) -> str:
    return f"part-{rank}.json"


def _sign(rank: int) -> str:
    return f".{_note(rank)}"


def _write_part(taken: Snapshot, rank: int, pace: _Pace) -> None:
    """Write this rank's blocks and then its note, which holds the error if there is one."""
    try:
        sharded = {n: x for n, x in taken.tensors.items() if taken.info[n]["sharded"] is not None}
        own = {n: x.block for n, x in sharded.items() if gives(x.sharding, taken.mesh.coords) and x.block.numel()}
        if own:
            _write_blocks(taken.partial / f"part-{rank}.h5", own, None, pace)
        if rank == 0 and taken.tensors:
            whole = {n: x.block for n, x in taken.tensors.items() if n not in sharded}
            _write_blocks(taken.partial / TENSORS, whole, taken, pace)
        told: dict[str, Any] = {"shares": taken.shares(pace).tolist()}
    except (OSError, RuntimeError, TypeError, ValueError) as e:
        error = e if isinstance(e, MpishardError) else unwritable(taken.folder, e)
        told = {"error": str(error)}
    partial = taken.partial / _sign(rank)
    try:
        partial.write_text(json.dumps(told))
        os.replace(partial, taken.partial / _note(rank))
    except OSError as e:
        # no room for the note either: `wait` tells the others
        raise unwritable(taken.folder, e) from e
    if "error" in told:
        raise FileError(told["error"])


def _write_blocks(path: Path, blocks: dict[str, Tensor], taken: Snapshot | None, pace: _Pace) -> None:
    """Write tensors as datasets of a new file; where ``taken`` is given, also the virtual ones of the whole."""
    h5py = import_h5py()
    offsets: dict[str, int] = {}
    with _room(path, sum(b.nbytes for b in blocks.values()), len(blocks)), h5py.File(path, "w") as file:
        for name, block in blocks.items():
            if block.nbytes < _DIRECT_NBYTES:
                file.create_dataset(name, data=block.numpy())
                continue
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            dataset = file.create_dataset(name, shape=tuple(block.shape), dtype=NUMPY[block.dtype], dcpl=plist)
            offsets[name] = dataset.id.get_offset()
        if taken is not None:
            for name, x in taken.tensors.items():
                if taken.info[name]["sharded"] is not None:
                    _show_whole(file, name, x, taken)
            file.attrs["step"] = taken.step
    with open(path, "r+b", buffering=0) as raw:
        for name, offset in offsets.items():
            block = blocks[name]
            for at in range(0, block.nbytes, _WRITE_NBYTES):
                data: Any = address(block.data_ptr() + at, min(_WRITE_NBYTES, block.nbytes - at))
                done = 0
                while done < len(data):
                    done += os.pwrite(raw.fileno(), data[done:], offset + at + done)
                pace()
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


def _show_whole(file: Any, name: str, x: Any, taken: Snapshot) -> None:
    h5py = import_h5py()
    layout, dtype = x.sharding, NUMPY[x.dtype]
    if not all(layout.shape):
        file.create_dataset(name, shape=layout.shape, dtype=dtype)
        return
    if not layout.shape:
        if taken.mesh.rank == 0:
            file.create_dataset(name, data=x.block.numpy())
        return
    whole = h5py.VirtualLayout(layout.shape, dtype)
    for coords in product(*map(range, layout.mesh_shape)):
        shape = layout.local_shape(coords)
        if gives(layout, coords) and all(shape):
            source = h5py.VirtualSource(f"part-{taken.mesh.rank_at(coords)}.h5", name, shape=shape)
            whole[tuple(slice(lo, hi) for lo, hi in layout.box(coords))] = source
    file.create_virtual_dataset(name, whole)


def _tell() -> None:
    # nobody waited for it: the error would be lost
    for saving in _pending.values():
        if saving._error is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"{saving._error}\n")


atexit.register(_tell)
