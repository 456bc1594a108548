"""Signals that announce the end of a job: all ranks learn of one together, at a point where they can save."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from mpishard.autograd.argument import require_mesh
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh
from mpishard.comm.setting import first_agreement
from mpishard.errors import MpishardError

REQUEUE_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again


class preemption:  # noqa: N801 (reads as a statement: `with preemption(mesh) as stop`)
    """Notice SIGUSR1 and SIGTERM, and have every rank stop after the same step.

    Not collective. A scheduler may signal one rank or all of them, at any time; `should_stop` is where they
    agree. While the block is entered the signals have no other effect; their former handlers are then put back,
    unless the ranks have agreed to stop: then the signals are ignored until the program ends, as launchers send
    them to ranks that end a moment later than the first one, whose exit code would be lost. Of blocks in blocks all
    notice a signal.

    Parameters
    ----------
    mesh
        Ranks that agree; all ranks of the program, if not given.
    signals
        What to notice.
    exit_code
        For `sys.exit`, after the checkpoint: what a job script takes as "submit me again". Up to 255.

    Attributes
    ----------
    exit_code : int
        75 (``EX_TEMPFAIL``), unless another one is given.

    Examples
    --------
    >>> with ms.io.preemption(mesh) as stop:
    ...     for step in range(first, last):
    ...         train(step)
    ...         if stop.should_stop():
    ...             ms.io.save_checkpoint("checkpoints", step + 1, model=model, optimizer=optimizer, mesh=mesh)
    ...             sys.exit(stop.exit_code)

    ``mpishard slurm render --checkpoints DIR -- python train.py`` writes a job script that has Slurm tell the ranks
    two minutes before their time is over, and starts the job again, a bounded number of times.
    """

    def __init__(
        self,
        mesh: CartMesh | None = None,
        *,
        signals: Sequence[signal.Signals] = (signal.SIGUSR1, signal.SIGTERM),
        exit_code: int = REQUEUE_CODE,
    ) -> None:
        if mesh is not None:
            require_mesh("preemption", mesh)
        self.exit_code = exit_code
        self._group = blocking.world() if mesh is None else mesh.all_ranks
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._received = self._agreed = False

    def __enter__(self) -> preemption:
        error: MpishardError | None = None
        try:
            for s in self._signals:
                # of one that is named twice, that before the first
                self._before.setdefault(s, signal.signal(s, self._note))
        except Exception as e:  # noqa: BLE001 (the others wait for this rank)
            error = MpishardError(
                "preemption: signals cannot be noticed here",
                expected="the main thread, and a sequence of signals that can be caught",
                got=f"{self._signals!r} ({e})",
                fix="enter it in the main thread; signals=(signal.SIGUSR1,)",
            )
        if error is None and (
            not isinstance(self.exit_code, int) or type(self.exit_code) is bool or not 0 <= self.exit_code <= 255
        ):
            error = MpishardError(
                "preemption: exit_code is none",
                expected="an integer from 0 to 255, of which a system keeps 8 bits",
                got=repr(self.exit_code),
                fix="leave it out for 75, which job scripts of mpishard take as: again",
            )
        try:
            first_agreement(self._group.comm, error)
        except MpishardError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for s, handler in self._before.items():
            # None: set by other than Python, which cannot set it again
            before = signal.SIG_DFL if handler is None else handler
            signal.signal(s, signal.SIG_IGN if self._agreed else before)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        # a block around this one stops, too
        around = self._before.get(number)
        if around is not None and isinstance(getattr(around, "__self__", None), preemption):
            around(number, frame)

    def should_stop(self) -> bool:
        """Tell whether any rank was signalled: the same answer on every rank.

        Collective: one reduction of 8 bytes, until the answer is yes.
        """
        if not self._agreed:
            mine = torch.tensor(int(self._received), device="cpu")
            self._agreed = bool(blocking.all_reduce(mine, self._group, "max"))
        return self._agreed
