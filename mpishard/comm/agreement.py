"""What ranks of a mesh agree on in a hot loop: errors, flags, and what each holds along a mesh dim."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
from mpi4py import MPI

from mpishard.comm import guard, thread
from mpishard.comm.adoption import leave, renew
from mpishard.comm.dissemination import Dissemination
from mpishard.comm.lifetime import made
from mpishard.comm.lookout import lookout
from mpishard.comm.mesh import CartMesh
from mpishard.comm.wait_meter import meters
from mpishard.errors import MeshError, MpishardError, typed_text

_FAILED, _CALLS, _HOOKS = 31, 32, 33  # tags
_PATIENCE_S = 0.05  # mostly all ranks fail alike
_LOOKS = 64  # for what is about to come; a wait that is watched takes longer to begin


class Abandoned(BaseException):
    """The model of another rank has raised, and this rank waited for it. Not for a model to handle."""


def on_all(mesh: CartMesh, flag: bool, op: str) -> bool:
    """Tell whether the flag is set on all ranks. Collective."""
    return not most_of(mesh, not flag, op)


def most_of(mesh: CartMesh, number: int, op: str) -> int:
    """Return the largest of the ranks' numbers. Collective."""
    return guard.agree(mesh.all_ranks.comm, None, op, (number, 0))[0]


def threads_may_communicate() -> bool:
    """Tell whether MPI was initialised for messages of several threads at a time. Not collective."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def _free(kept: list[Dissemination]) -> None:
    while kept:
        kept.pop().free()


class Agreement:
    """What the ranks of a simulation agree on, on a communicator of its own. Collective in every method.

    Made by all ranks of ``mesh`` together.

    Attributes
    ----------
    lost : MeshError or None
        Why the ranks can agree on nothing any more, on all of them.
    """

    def __init__(self, mesh: CartMesh) -> None:
        self._mesh = mesh
        self.comm = mesh.duplicate()
        # the host's thread comes here while the mesh is a model's
        self._owner = thread.Owner()
        thread.own(self.comm, self._owner)
        self._alone = mesh.size == 1
        self.lost: MeshError | None = None
        self._kept: list[Dissemination] = []
        # requests that nobody frees keep the communicator of a mesh that is dropped
        mesh.own(partial(_free, self._kept))
        self._meet()

    def _meet(self) -> None:
        # a hook's own: of what its model has begun, messages may be left
        self._calls, self._hooks = Dissemination(self.comm, _CALLS), Dissemination(self.comm, _HOOKS)
        self._kept[:] = self._calls, self._hooks

    def begin(self, digest: int, failed: bool = False) -> None:
        """Tell the others which call this is, and whether it is in vain; `together` ends it.

        What a rank does in between costs no time of the others, if it comes to `together` in any case.
        """
        self._tell_all(self._calls, digest, failed)

    def together(self, op: str) -> bool:
        """Tell whether all ranks made the same call, in vain on none."""
        return self._told(self._calls, op)[0]

    def _tell_all(self, rounds: Dissemination, digest: int, failed: bool, unsettled: bool = False) -> None:
        if self.lost is not None:
            raise self.lost
        thread.require(self.comm)
        rounds.start(digest, -digest, -failed, -unsettled)

    def _told(self, rounds: Dissemination, op: str) -> tuple[bool, bool, bool]:
        """Return whether all ranks are well and in the same call, whether any has failed, and left messages."""
        looks = 0
        while not rounds.done():
            looks += 1
            if looks < _LOOKS and not meters:
                continue
            requests, peers = rounds.waits_for()
            with guard.waiting(op, guard.unfinished(requests, peers, receives=1), self.comm):
                rounds.wait()
        least, most, failed, unsettled = rounds.least
        return least == -most and not failed, failed < 0, unsettled < 0

    def on(self, error: BaseException | None, op: str, signature: str | None = None) -> None:
        """Raise on every rank where any has an error, or where the signatures, if given, differ."""
        if signature is None:
            self.begin(zlib.crc32(op.encode()), error is not None)
            if self.together(op):
                return
            signature = op
        if error is None and self._alone:
            return
        try:
            guard.agree(self.comm, _public(error), signature)
        except MpishardError as agreed:
            if error is not None and agreed is not error:
                raise agreed from error
            raise

    def lookout(self) -> AbstractContextManager[None]:
        """Run a model, which raises `Abandoned` where it waits for a rank whose model has raised. Not collective."""
        return nullcontext() if self._alone else lookout(self._look)

    def _look(self) -> None:
        if self.comm.Iprobe(tag=_FAILED):
            raise Abandoned

    def after(self, error: BaseException | None, *, inside: bool) -> None:
        """Raise on every rank where the model of any has raised; ``inside``: not after its last message.

        What ends programs (SystemExit, KeyboardInterrupt) is raised as it is where it rose, once all have been told.
        The ranks that wait for this one in their models are told so, where they do not come by themselves: by one
        rank, in empty messages. What a model has left under way is left behind, with its communicators.
        """
        try:
            self._after(error, inside)
        except MpishardError:
            if error is None or isinstance(error, (Exception, Abandoned)):
                raise
            raise error from None

    def _after(self, error: BaseException | None, inside: bool) -> None:
        if self._alone:
            self.on(error, "hook")
            return
        # an error that ranks have agreed on leaves nothing under way
        unsettled = inside and error is not None and not guard.is_common(error)
        self._tell_all(self._hooks, _HOOKS, error is not None, unsettled)
        told: list[MPI.Request] = []
        if inside and not isinstance(error, Abandoned):
            deadline = time.monotonic() + _PATIENCE_S
            with guard.waiting("hook", (), self.comm):
                while not (done := self._hooks.done()) and time.monotonic() < deadline:
                    pass
                if not done:
                    told = self._tell()
        _, failed, renews = self._told(self._hooks, "hook")
        if not failed:
            return
        self._hear(told)
        try:
            self.on(None if isinstance(error, Abandoned) else error, "hook", "")
        finally:
            if renews:
                self._renew()

    def _renew(self) -> None:
        _free(self._kept)
        try:
            self.comm = made("hook", self.comm, self.comm.Dup)
            self._mesh._holding.comms.append(self.comm)
            thread.own(self.comm, self._owner)
            made("hook", self.comm, lambda: renew(self._mesh, self.comm))
        except MeshError as e:
            leave(self._mesh)
            self.lost = MeshError(
                "hook: models have raised so often that MPI makes no more communicators",
                expected="at most some hundred errors of models: each leaves its messages and communicators behind",
                got=str(e).partition("got:")[2].partition("fix:")[0].strip(),
                fix="end the program; a model that often cannot go on returns its inputs, or NaN, and does not raise",
            )
            raise guard.common(self.lost, self.comm) from e
        self._meet()

    def _tell(self) -> list[MPI.Request]:
        nothing = bytearray()
        others = [rank for rank in range(self.comm.Get_size()) if rank != self.comm.Get_rank()]
        return [self.comm.Isend([nothing, MPI.BYTE], rank, _FAILED) for rank in others]

    def _hear(self, told: list[MPI.Request]) -> None:
        """Receive what was told: nothing may be under way on a communicator that ends."""
        nothing, own, every = bytearray(), np.array([bool(told)], np.int64), np.empty(1, np.int64)
        with guard.waiting("hook", (), self.comm):
            # mpi4py makes a communicator of its own for sums of objects
            self.comm.Allreduce(own, every)
            for _ in range(int(every[0] - own[0])):
                self.comm.Recv([nothing, MPI.BYTE], MPI.ANY_SOURCE, _FAILED)
            # not before: MPI may let a send wait for its receive, and who is told may be in here already
            MPI.Request.Waitall(told)

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
    return MpishardError(typed_text(error))
