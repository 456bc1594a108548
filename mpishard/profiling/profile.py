"""`ms.profile`: where the time of a program's block goes, on all ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from mpishard.comm import guard
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh, Group
from mpishard.comm.tag import hashed
from mpishard.errors import FileError, MeshError, MpishardError, UnsupportedOperationError
from mpishard.profiling.hook import load, looking
from mpishard.profiling.recorder import Event, Recorder
from mpishard.profiling.summary import Row, Spread, as_data, as_text, merged, of_rank, rows_of
from mpishard.profiling.trace import Writer, writable

_running: profile | None = None

Path = str | os.PathLike[str]


class profile:  # noqa: N801 (reads as a verb: `with ms.profile(mesh)`)
    """Measure what operations take while the block runs: time, waits, messages, bytes, and how even ranks are.

    Collective at its begin and at its end. A program without a profile pays nothing for it; one with a profile some
    microseconds per operation.

    Parameters
    ----------
    mesh
        The ranks that are compared, all ranks of the program if not given; what they do on other meshes counts too.
    trace
        A file for the trace (JSON of Chrome's trace events, for Perfetto: one track a rank), written at the end by
        rank 0 of the mesh. `save` writes one later.
    quiet
        Whether rank 0 of the mesh leaves out to print the table at the end.
    most_events
        How many spans each rank keeps for a trace, of about 200 bytes; those after are in the table alone.

    Attributes
    ----------
    rows : list of Row
        The table, the same on every rank: operations, the backward of operations, ``"outside"``, which is what no
        operation took (plain torch, Python), and then the same once more by what travelled. Empty until the end.
    elapsed_s : Spread
        Seconds of the block.
    ranks : int
        How many ranks the rows are of.

    Raises
    ------
    UnsupportedOperationError
        On every rank: a profile runs already.
    MeshError
        On every rank: ``mesh`` is no mesh, or was freed.
    FileError
        On every rank: ``trace`` cannot be written.
    DesyncError
        The ranks' arguments differ.

    Notes
    -----
    The rows are reduced over the ranks, log P messages whose size does not grow with P. A trace goes through rank 0,
    rank by rank: its time grows with P. Clocks start together after a collective call, so tracks are shifted by no more
    than that takes.

    Times are the host's: what a GPU does after a call has returned shows where the host next waits for it.

    An error within the block ends the profile without communication: other ranks may be elsewhere. The rows are then
    those of this rank alone, and neither table nor trace is written.

    Examples
    --------
    >>> with ms.profile(mesh, trace="step.json") as prof:
    ...     loss = F.mse_loss(model(x), y)
    ...     loss.backward()
    >>> slowest = prof.rows[0].name, prof.rows[0].time_s.max
    """

    def __init__(
        self,
        mesh: CartMesh | None = None,
        *,
        trace: Path | None = None,
        quiet: bool = False,
        most_events: int = 200_000,
    ) -> None:
        self._mesh, self._trace, self._quiet, self._most = mesh, trace, quiet, most_events
        self.rows: list[Row] = []
        self.elapsed_s = Spread(0.0, 0.0, 0.0)
        self.ranks = 0
        self._recorder = Recorder(0)
        self._stack = ExitStack()

    def __enter__(self) -> profile:
        global _running  # noqa: PLW0603
        error: MpishardError | None = None
        try:
            self._check()
        except MpishardError as e:
            error = e
        load()
        self._agree(error, f"profile({self._trace!s}, {self._quiet}, {self._most})")
        self._recorder = Recorder(self._most if isinstance(self._most, int) else 0)
        self._recorder.begin()
        self._stack.enter_context(looking(self._recorder))
        _running = self
        return self

    @property
    def _group(self) -> Group:
        mesh = self._mesh
        if mesh is None:
            return blocking.world()
        if not isinstance(mesh, CartMesh):
            raise MeshError(
                "profile",
                expected="a mesh, or nothing: all ranks",
                got=type(mesh).__name__,
                fix="give what ms.init_mesh returned",
            )
        return mesh.all_ranks

    def _agree(self, error: MpishardError | None, signature: str) -> None:
        comm = self._group.comm
        agree = guard.agree if self._mesh is None else self._mesh.agree
        agree(comm, error, signature)

    def _check(self) -> None:
        if _running is not None:
            raise UnsupportedOperationError(
                "profile within a profile",
                expected="one at a time",
                got="one that has not ended",
                fix="profile the larger block alone",
            )
        if not isinstance(self._most, int) or self._most < 0:
            raise UnsupportedOperationError(
                "profile: most_events", expected="an int, 0 or more", got=repr(self._most), fix="give one"
            )
        if self._trace is not None and self._group.rank == 0:
            _writable(self._trace)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _running  # noqa: PLW0603
        self._recorder.end()
        self._stack.close()
        _running = None
        table = of_rank(self._recorder)
        if kind is not None:
            self.ranks = 1
            self.rows, self.elapsed_s = rows_of(table, 1)
            return
        comm = self._group.comm
        with guard.waiting("profile", (), comm):
            # a tree of messages, then one broadcast: nothing grows with the ranks
            table = comm.bcast(comm.reduce(table, merged))
        self.ranks = self._group.size
        self.rows, self.elapsed_s = rows_of(table, self.ranks)
        if not self._quiet and self._group.rank == 0:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            text = as_text(self.rows, self.elapsed_s, self.ranks, encoding)
            with contextlib.suppress(OSError, ValueError):  # a stdout that is closed or full: the program goes on
                print(text, end="", flush=True)
        if self._trace is not None:
            self.save(self._trace)

    def table(self) -> str:
        """Return the table as text. Not collective."""
        return as_text(self.rows, self.elapsed_s, self.ranks)

    __str__ = table

    def to_dict(self) -> dict[str, Any]:
        """Return ``ranks``, ``elapsed_s`` and ``rows`` as plain data, for JSON. Not collective.

        Units are in the names: seconds (``_s``), bytes (``nbytes``); ``calls`` and ``messages`` are counts.
        """
        return as_data(self.rows, self.elapsed_s, self.ranks)

    def save(self, path: Path) -> None:
        """Write the trace, on rank 0 of the mesh. Collective, after the end.

        Rank 0 takes the ranks' spans one after the other, and holds those of one at a time.

        Parameters
        ----------
        path
            The file, of JSON; rank 0's counts. One that is there is replaced when the new one is whole.

        Raises
        ------
        FileError
            On every rank: it cannot be written.
        UnsupportedOperationError
            The profile has not ended, or ended with an error.
        """
        comm, own = self._group.comm, self._group.rank
        error: MpishardError | None = None
        if _running is self or self.ranks != self._group.size:
            error = UnsupportedOperationError(
                "profile.save: there is no trace of all ranks",
                expected="a profile that has ended well",
                got="one that is running" if _running is self else "one that did not begin, or ended with an error",
                fix="call it behind the with block",
            )
        elif own == 0:
            try:
                _writable(path)
            except FileError as e:
                error = e
        self._agree(error, "profile.save")
        mine = (f"rank {own}, {socket.gethostname()}", self._recorder.left_out, self._recorder.events)
        tag = hashed("profile.save")
        if own:
            with guard.waiting("profile.save", (0,), comm):
                comm.send(mine, 0, tag)
        else:
            error = self._collected(path, comm, tag, mine)
        self._agree(error, "profile.save: end")

    def _collected(self, path: Path, comm: Any, tag: int, mine: tuple[str, int, list[Event]]) -> FileError | None:
        failed: FileError | None = None
        writer: Writer | None = None
        try:
            writer = Writer(path, self.to_dict())
        except Exception as e:  # noqa: BLE001 (the others hand their spans over)
            failed = _not_written(path, e)
        for rank in range(self.ranks):
            label, left_out, events = mine
            if rank:
                with guard.waiting("profile.save", (rank,), comm):
                    label, left_out, events = comm.recv(None, rank, tag)
            try:
                if failed is None and writer is not None:
                    writer.add(rank, f"{label} (the last {left_out} left out)" if left_out else label, events)
            except Exception as e:  # noqa: BLE001 (the others hand their spans over)
                failed = _not_written(path, e)
        if writer is not None:
            try:
                writer.close() if failed is None else writer.drop()
            except Exception as e:  # noqa: BLE001 (the others hand their spans over)
                failed = failed or _not_written(path, e)
                with contextlib.suppress(OSError):
                    writer.drop()
        return failed


def _writable(path: Path) -> None:
    try:
        writable(path)
    except Exception as e:  # noqa: BLE001 (of any path)
        raise _not_written(path, e) from None


def _not_written(path: Any, error: Exception) -> FileError:
    return FileError(
        "profile: the trace cannot be written",
        expected="a path that rank 0 may write to",
        got=f"{path!r}: {error}",
        fix="name another file, in a folder that exists",
    )
