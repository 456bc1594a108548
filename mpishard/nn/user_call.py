"""What a user gave to a `Pipeline`, called so that what it raises on one rank comes to all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpishard.comm import guard
from mpishard.comm.interruption import litter
from mpishard.comm.mesh import Group
from mpishard.errors import MpishardError, UnsupportedOperationError

_LEFT = "Pipeline: left halfway"


class UserCalls:
    """Calls what a user gave until that fails; then the step goes on without, as other stages wait for its messages.

    Who leaves the body before `end`, while messages travel, leaves some that a later step would take for its own.

    Parameters
    ----------
    group
        The ranks of all stages.
    alone
        Whether nobody waits for this rank inside what the user gave. Then what ends programs (SystemExit,
        KeyboardInterrupt) is told to the others, too, and raised as it is where it rose.

    Attributes
    ----------
    travels : bool
        Whether messages of the stages may be under way.
    """

    def __init__(self, group: Group, *, alone: bool) -> None:
        self.error: BaseException | None = None
        self.travels = False
        self._group = group
        self._kinds: type[BaseException] = BaseException if alone else Exception

    def __call__(self, call: Callable[..., Any], inputs: tuple[Any, ...] | None) -> Any:
        """Return what the call returns, None after a failure, be it that of a stage before."""
        if self.error is None and inputs is not None:
            try:
                return call(*inputs)
            except self._kinds as e:
                self.error = e
                guard.hold(self, e)  # of this rank alone it may be: then others of the stage wait, and for ever
        return None

    def end(self, comm: Any, signature: str = "") -> None:
        """Raise on all ranks where one has failed. Collective."""
        guard.release(self)
        self.travels = False
        try:
            guard.agree(comm, self.error, signature)
        except MpishardError:
            if self.error is None or isinstance(self.error, Exception):
                raise
            raise self.error from None

    def __enter__(self) -> UserCalls:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        guard.release(self)
        if error is not None and self.travels and not guard.is_common(error):
            litter(self._group.comm)
            self._group.links[_LEFT] = f"{type(error).__name__} inside an earlier one"


def left_halfway(call: str, group: Group) -> UnsupportedOperationError | None:
    """Return the error of a rank that has left an earlier step before its end. Not collective."""
    if (got := group.links.get(_LEFT)) is None:
        return None
    return UnsupportedOperationError(
        f"{call}: an earlier step was interrupted, and the stages' messages are of no use any more",
        expected="steps that come to their end",
        got=got,
        fix="go on from a checkpoint; or make another mesh, and a Pipeline on it",
    )
