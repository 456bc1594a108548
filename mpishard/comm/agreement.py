"""What ranks of a mesh agree on in a hot loop: errors, flags, and what each holds along a mesh dim."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from mpi4py import MPI

from mpishard.comm import guard
from mpishard.comm.adoption import renew
from mpishard.comm.mesh import CartMesh
from mpishard.errors import MpishardError

_FAILED = 31  # tag
_PATIENCE_S = 0.05  # mostly all ranks fail alike


class Abandoned(BaseException):
    """The model of another rank has raised, and this rank waited for it. Not for a model to handle."""


def on_all(mesh: CartMesh, flag: bool, op: str) -> bool:
    """Tell whether the flag is set on all ranks. Collective."""
    return not most_of(mesh, not flag, op)


def most_of(mesh: CartMesh, number: int, op: str) -> int:
    """Return the largest of the ranks' numbers. Collective."""
    if mesh.size == 1:
        return number
    mine, most = np.array([number], np.int32), np.empty(1, np.int32)
    comm = mesh.group(tuple(range(mesh.ndim))).comm
    with guard.waiting(op, (), comm):
        comm.Allreduce(mine, most, MPI.MAX)
    return int(most[0])


def threads_may_communicate() -> bool:
    """Tell whether MPI was initialised for messages of several threads at a time. Not collective."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


class Agreement:
    """What the ranks of a simulation agree on, on a communicator of its own. Collective in every method.

    Made by all ranks of ``mesh`` together.
    """

    def __init__(self, mesh: CartMesh) -> None:
        self._mesh = mesh
        self.comm = mesh.duplicate()
        self._alone = mesh.size == 1
        self._flag = np.zeros(1, np.int32)
        self._any = np.zeros(1, np.int32)
        self._digests, self._most = np.zeros(2, np.int64), np.zeros(2, np.int64)
        self._ends, self._any_end = np.zeros(2, np.int32), np.zeros(2, np.int32)

    def on(self, error: BaseException | None, op: str, signature: str | None = None) -> None:
        """Raise on every rank where any has an error, or where the signatures, if given, differ."""
        if signature is None and not self._alone:
            self._flag[0] = error is not None
            with guard.waiting(op, (), self.comm):
                self.comm.Allreduce(self._flag, self._any, MPI.MAX)
            if not self._any[0]:
                return
        if error is None and self._alone:
            return
        try:
            guard.agree(self.comm, _public(error), signature or "")
        except MpishardError as agreed:
            if error is not None and agreed is not error:
                raise agreed from error
            raise

    def alike(self, digest: int) -> bool:
        """Tell whether all ranks have the same number, 0 or more."""
        if self._alone:
            return digest >= 0
        self._digests[0], self._digests[1] = digest, -digest
        with guard.waiting("field", (), self.comm):
            self.comm.Allreduce(self._digests, self._most, MPI.MAX)
        most, least = self._most.tolist()
        return most == -least and digest >= 0

    def lookout(self) -> AbstractContextManager[None]:
        """Run a model, which raises `Abandoned` where it waits for a rank whose model has raised. Not collective."""
        return nullcontext() if self._alone else guard.lookout(self._look)

    def _look(self) -> None:
        if self.comm.Iprobe(tag=_FAILED):
            raise Abandoned

    def after(self, error: BaseException | None, *, inside: bool) -> None:
        """Raise on every rank where the model of any has raised; ``inside``: not after its last message.

        The ranks that wait for this one in their models are told so, where they do not come by themselves: by one
        rank, in empty messages. What a model has left under way is left behind, with its communicators.
        """
        if self._alone:
            self.on(error, "hook")
            return
        # an error that ranks have agreed on leaves nothing under way
        unsettled = inside and "_told_by_rank_0" not in error.__dict__
        self._ends[0], self._ends[1] = error is not None, unsettled
        told = 0
        with guard.waiting("hook", (), self.comm):
            request = self.comm.Iallreduce(self._ends, self._any_end, MPI.MAX)
            if inside and not isinstance(error, Abandoned):
                deadline = time.monotonic() + _PATIENCE_S
                while not (done := request.Test()) and time.monotonic() < deadline:
                    pass
                if not done:
                    self._tell()
                    told = 1
            request.Wait()
        failed, renews = self._any_end.tolist()
        if not failed:
            return
        self._hear(told)
        try:
            self.on(None if isinstance(error, Abandoned) else error, "hook", "")
        finally:
            if renews:
                old = self.comm
                with guard.waiting("hook", (), old):
                    self.comm = old.Dup()
                self._mesh._holding.comms.append(self.comm)
                renew(self._mesh, self.comm)

    def _tell(self) -> None:
        nothing = bytearray()
        others = [rank for rank in range(self.comm.Get_size()) if rank != self.comm.Get_rank()]
        MPI.Request.Waitall([self.comm.Isend([nothing, MPI.BYTE], rank, _FAILED) for rank in others])

    def _hear(self, told: int) -> None:
        """Receive what was told: nothing may be under way on a communicator that ends."""
        nothing = bytearray()
        with guard.waiting("hook", (), self.comm):
            for _ in range(self.comm.allreduce(told) - told):
                self.comm.Recv([nothing, MPI.BYTE], MPI.ANY_SOURCE, _FAILED)

    def along(self, mesh_dim: int, own: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], bool]:
        """Return what each position along a mesh dim has, and whether this rank has what others at its position do.

        What a rank learns is as long as the mesh dim; ranks elsewhere are compared by a reduction.
        """
        mesh = self._mesh
        line = mesh.group((mesh_dim,))
        mine = np.array(own, np.int64)
        every = np.empty((line.size, len(mine)), np.int64)
        others = tuple(m for m in range(mesh.ndim) if m != mesh_dim)
        with guard.waiting("adopt", (), line.comm):
            line.comm.Allgather(mine, every)
            common = True
            if others:
                both = np.concatenate((mine, -mine))
                most = np.empty_like(both)
                mesh.group(others).comm.Allreduce(both, most, MPI.MAX)
                common = bool((most == both).all())
        return tuple(tuple(int(n) for n in row) for row in every), common

    def same(self, flag: bool) -> bool | None:
        """Return the flag where all ranks have the same one, else None."""
        mine = np.array([flag, not flag], np.int32)
        most = np.empty_like(mine)
        with guard.waiting("adopt", (), self.comm):
            self.comm.Allreduce(mine, most, MPI.MAX)
        return None if most.all() else flag


def _public(error: BaseException | None) -> MpishardError | None:
    if error is None or isinstance(error, MpishardError):
        return error
    return MpishardError(f"{type(error).__name__}: {error}")
