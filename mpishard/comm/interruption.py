"""What interrupts a call leaves messages under way, which would meet those of later calls, and silently.

Ctrl-C comes to all ranks, and finds them in different calls: one waits for a message of a call that another has not
reached yet. Where both catch it and go on, each later call would take the message of the one before. So no rank
communicates on a mesh again once it was interrupted inside a call that communicates on it: in a wait, before the first
message, or between two.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from types import FrameType
from typing import Any, TypeVar

from mpi4py import MPI

from mpishard.comm import in_flight
from mpishard.comm.lookout import Peers, cancel, lookouts
from mpishard.comm.thread import owner_of

F = TypeVar("F", bound=Callable[..., Any])

# what is waited for, as `guard.waiting` has it, for the watchdog
waits: dict[Any, tuple[str, Peers, MPI.Comm | None]] = {}


def cuts(error: BaseException) -> bool:
    """Tell whether an error comes at any place of a program, and on one rank alone. Not collective.

    What ends programs does, and what a handler of signals raises, as those of time limits. Others come of a call, and
    its ranks agree on them; and who looks out for other ranks' errors goes on with other communicators.
    """
    if get_ident() in lookouts:
        return False
    return not isinstance(error, Exception) or any(map(_is_handler, _frames(error)))


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _is_handler(frame: FrameType) -> bool:
    """Tell whether Python has called a function between two lines of another, whose frame it was given."""
    # Dynamo hands frames on, too; but torch's loader of data has a handler, which tells of a worker that died
    if str(frame.f_globals.get("__name__")).startswith(("mpishard.", "torch._", "torch.fx.")):
        return False
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS)
    values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    values += [v for value in values if isinstance(value, tuple) for v in value[:2]]
    return any(isinstance(value, FrameType) for value in values)


def halfway(call: str, error: BaseException, *given: object) -> bool:
    """Let nobody on this rank use the meshes of what a call was given any more, where an error cuts it short.

    Not collective. Returns whether it does. ``given``: its arguments, in sequences and dicts too.
    """
    if not cuts(error):
        return False
    comms = list(_comms(given))
    if any(comm.Get_size() > 1 for comm in comms):
        # what was posted, and nobody has waited for: MPI still writes to memory of these frames
        in_flight.left.append(error.__traceback__)
    for comm in comms:
        interrupted(call, error, comm)
    return True


def _comms(given: Iterable[object]) -> Iterator[MPI.Comm]:
    for x in given:
        if isinstance(x, (tuple, list, dict)):
            yield from _comms(x.values() if isinstance(x, dict) else x)
        elif (holding := getattr(getattr(x, "mesh", x), "_holding", None)) is not None:
            yield from holding.comms[:1]  # none of a mesh that is freed


def whole(function: F) -> F:
    """Let a function of meshes be made as a whole, or be the last one on them; it costs a tenth of a microsecond."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            halfway(function.__name__, error, args, kwargs)
            raise

    return call  # type: ignore[return-value]


def interrupted(call: str, error: BaseException, comm: MPI.Comm | None) -> None:
    """Let nobody on this rank use the mesh of ``comm`` any more. Not collective."""
    owner = owner_of(id(comm))
    if owner is None:
        return
    # one may have been cut off before its end could be seen
    for wait in [wait for wait, (*_, of) in list(waits.items()) if owner_of(id(of)) is owner]:
        waits.pop(wait, None)
    if comm.Get_size() > 1:  # type: ignore[union-attr]
        owner.leave(f"{type(error).__name__} inside {call}")


def wait_interrupted(call: str, error: BaseException, peers: Peers, comm: MPI.Comm | None) -> None:
    """Leave a wait that ended without its messages; arguments as `guard.waiting` has them. Not collective."""
    if callable(peers):
        requests: Any = peers
        in_flight.left.append(requests)
        cancel(requests.requests[: requests.receives])
    interrupted(call, error, comm)


def litter(comm: MPI.Comm) -> None:
    """Never free the communicators of a mesh: messages lie there that nobody will take. Not collective."""
    if (owner := owner_of(id(comm))) is not None:
        owner.littered = True


class under_way:  # noqa: N801 (reads as a state: `with under_way(...)`)
    """Bracket what a rank computes while messages are under way.

    An error of this rank is none of the messages', which still come to their end, in memory that is this call's. Where
    it is interrupted, its peers may be, too, before they have sent.

    Parameters
    ----------
    call, comm
        What is interrupted.
    ends
        Wait for the messages, at the end of the bracket.
    """

    __slots__ = ("_call", "_comm", "_ends")

    def __init__(self, call: str, comm: MPI.Comm | None, *ends: Callable[[], object]) -> None:
        self._call, self._comm, self._ends = call, comm, ends

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            for end in self._ends:
                end()
        finally:
            if error is not None and cuts(error):
                interrupted(self._call, error, self._comm)
