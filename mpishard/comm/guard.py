"""What keeps a job from hanging: agreement on errors, abort on uncaught ones, a watchdog, a call check.

Everything here works on communicators of mpi4py and knows nothing of meshes or tensors.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpishard import errors
from mpishard.comm import caller, disagreement, in_flight
from mpishard.comm.environment import switch
from mpishard.comm.exit import GRACE_S, end, place, say_at_end, say_for_node
from mpishard.comm.interruption import cuts, wait_interrupted
from mpishard.comm.interruption import waits as _live
from mpishard.comm.lookout import Peers, lookouts, wait_watchfully
from mpishard.comm.null import NullComm
from mpishard.comm.thread import owner_of
from mpishard.comm.wait_meter import meters
from mpishard.errors import DesyncError, MpishardError, alike, ranges_of, ranks_text, text_of, typed_text

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")
Pair = tuple[int, int]
# of a wait that an interruption inside it has ended
_LEFT: tuple[str, Peers, MPI.Comm | None] = ("", (), None)


def _timeout_s() -> float:
    text = os.environ.get("MPISHARD_TIMEOUT") or "300"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value >= 0:
        return value
    raise MpishardError(
        "MPISHARD_TIMEOUT", expected="seconds, 0 for no watchdog", got=repr(text), fix="set a number >= 0"
    )


DEBUG = bool(switch("MPISHARD_DEBUG"))
TIMEOUT_S = _timeout_s()

# agreement

# of the small reductions of a mesh, all of one length: where two of them meet, their marks tell. A power of two:
# libraries cut a message among the ranks by its numbers, and parts must have one length whatever their dtype
SLOT_NBYTES, MARK_NBYTES = 512, 16


def extreme_mark(digest: int) -> tuple[int, int]:
    """Return what a rank adds to maxima of 64-bit integers, of 32 bits that say what they are of. Not collective.

    All of one mark have that, and any other mark a larger number; so have sums, which are not so small.
    """
    least = -(1 << 63)
    return least + digest, least + 0xFFFFFFFF - digest


_MARK = extreme_mark(0x6D707368)


def agree(
    comm: MPI.Intracomm, error: BaseException | None, signature: str = "", numbers: Pair = (0, 0), first: bool = False
) -> Pair:
    """Raise on every rank where any rank has an error, or where the ranks' signatures differ.

    Collective. One reduction of 512 bytes where all is well; else some kilobytes, whatever the number of ranks.

    Parameters
    ----------
    comm
        The ranks that must agree.
    error
        What this rank found wrong, or None.
    signature
        What the ranks must have in common; compared by hash.
    numbers
        What every rank is to know the largest of.
    first
        Whether ``MPISHARD_DEBUG`` may differ yet.

    Returns
    -------
    tuple of int
        The largest of the ranks' ``numbers``.

    Raises
    ------
    MpishardError
        The error of the lowest rank that has one: the same type and text on every rank.
    DesyncError
        No rank has an error, but the signatures differ.
    """
    if comm.Get_size() == 1:
        if error is not None:
            raise error
        return numbers
    # named for what is agreed on: where a rank never comes, this is all that is known of it
    op = f"agreement on {signature[:60]}" if signature else "agreement"
    return _agree(comm, error, "agree", signature, op, numbers, DEBUG and not first)


def check(comm: MPI.Intracomm, op: str, shape: Sequence[int] | None = None, dtype: object = None) -> None:
    """Compare this call with the other ranks' calls; for callers that have tested ``guard.DEBUG``.

    Collective.

    Parameters
    ----------
    comm
        The communicator that the operation runs on; its calls are counted.
    op
        Name of the operation.
    shape
        What must be the same on every rank, or None.
    dtype
        Likewise.

    Raises
    ------
    DesyncError
        On every rank, naming the rank that differs.
    """
    if comm.Get_size() == 1:
        return
    count = _calls(comm)
    call = f"call {count[0] + 1}: {op}"
    call += ("" if shape is None else f", shape {tuple(shape)}") + ("" if dtype is None else f", {dtype}")
    if caller.inside.call is not None:
        call += f", in {caller.inside.call()}"
    # a rank that is in `agree` instead sends the same
    _agree(comm, None, "check", call, call, (0, 0), DEBUG)
    # not what ended in an error: some ranks were in `agree`, which is not counted, and whoever catches it goes on
    count[0] += 1


_COUNT_KEYVAL: list[int] = []


def _calls(comm: MPI.Comm) -> list[int]:
    # an attribute of the communicator: handles are used again after a free, in another order on each rank
    if not _COUNT_KEYVAL:
        _COUNT_KEYVAL.append(MPI.Comm.Create_keyval())
    count: Any = comm.Get_attr(_COUNT_KEYVAL[0])
    if count is None:
        count = [0]
        comm.Set_attr(_COUNT_KEYVAL[0], count)
    return count  # type: ignore[no-any-return]


def _agree(
    comm: MPI.Intracomm, error: BaseException | None, kind: str, text: str, op: str, numbers: Pair, debug: bool
) -> Pair:
    """Return the largest of the ranks' numbers, or raise where one has failed or has another kind of call or text."""
    digest = disagreement.digest_of(f"{kind}|{text}")
    size = comm.Get_size()
    first = 0 if error is None else size - comm.Get_rank()
    wait = waiting(op if error is None else f"{op}, to tell of {_in_line(error)},", (), comm)
    if error is not None:
        _untold[wait] = error
    mine = np.zeros(SLOT_NBYTES // 8, np.int64)
    mine[:5], mine[-2:] = (first, digest, -digest, *numbers), _MARK
    most = np.empty_like(mine)
    with wait:
        if debug:
            _meet(comm.Iallreduce(mine, most, MPI.MAX), comm, op)
        else:
            comm.Allreduce(mine, most, MPI.MAX)
        met = most[-2] == _MARK[0] and most[-1] == _MARK[1]
        if met and not most[0] and most[1] == -most[2]:
            return int(most[3]), int(most[4])
        if met and most[0]:
            agreed = _failure(comm, error, size - int(most[0]))
        else:
            known = "" if error is None else f" (which raised {_in_line(error)})"
            agreed = _desync_of(disagreement.kinds(comm, text if met else op + known))
    raise common(agreed, comm) from None


def differing(comm: MPI.Intracomm, call: str) -> DesyncError:
    """Return the error of ranks whose small reductions, this rank's ``call``, are not the same. Collective."""
    return common(_desync_of(disagreement.kinds(comm, call)), comm)


def _failure(comm: MPI.Intracomm, error: BaseException | None, first: int) -> BaseException:
    """Return the error of the rank ``first``, the lowest one that has one, on every rank."""
    if error is not None and isinstance(comm, NullComm):
        return error  # of a plan, whose one rank speaks for all
    size = comm.Get_size()
    mine = None
    if error is not None:
        mine = (
            f"{_public_type(error)}|{text_of(error) if isinstance(error, MpishardError) else alike(typed_text(error))}"
        )
    same, others = disagreement.first_told(comm, first, mine)
    name, _, text = same.text.partition("|")
    if error is not None and same.number == size and type(error).__name__ == name:
        return error
    if same.number < size:
        text += f"\n  raised on: {same.ranks} of {size}"
    if others.number:
        text += f" (for other reasons on {others.ranks})"
    agreed: MpishardError = getattr(errors, name)(text)
    # not as its cause: the text would be printed twice
    agreed.__traceback__ = None if error is None else error.__traceback__
    return agreed


# of the text that goes before a message between single ranks where calls are compared
SINGLE = 33
# a rank that has left this call already may send the text of its next one before the others have noticed
_MEET_S = 5.0


def _meet(request: MPI.Request, comm: MPI.Intracomm, op: str) -> None:
    """Wait for all ranks; raise where one sends this rank a message instead."""
    status, since = MPI.Status(), 0.0
    patience_s = min(_MEET_S, TIMEOUT_S / 2) if TIMEOUT_S > 0 else _MEET_S
    try:
        while not request.Test():
            if comm.Iprobe(MPI.ANY_SOURCE, SINGLE, status):
                since = since or time.monotonic()
                if time.monotonic() - since > patience_s:
                    peer = status.Get_source()
                    told = [(op, comm.Get_rank()), (comm.recv(None, peer, SINGLE), peer)]
                    raise _desync_of([disagreement.Kind(text, 0, 1, [(rank, rank)]) for text, rank in told])
            os.sched_yield()
    except BaseException:
        in_flight.left.append(request)
        raise


def common(error: E, comm: MPI.Comm) -> E:
    """Mark an error that all ranks of ``comm`` raise, so that only the first prints it. Not collective."""
    error.__dict__["_told_by_rank_0"] = comm.Get_rank() != 0
    return error


def is_common(error: BaseException) -> bool:
    """Tell whether all ranks of a communicator raise this error. Not collective."""
    return "_told_by_rank_0" in error.__dict__


def _desync_of(found: Sequence[disagreement.Kind]) -> DesyncError:
    odd = disagreement.unlike(found)
    return desync("; ".join(map(str, found)), f" ({odd} differ{'s' * odd.startswith('rank ')})" if odd else "")


def desync(got: str, odd: str = "") -> DesyncError:
    """Return the error of ranks that ``got`` tells of. Not collective."""
    return DesyncError(
        f"ranks made different calls{odd}",
        expected="the same call, with the same arguments, on every rank",
        got=got,
        fix="look for code that depends on the rank before this call; MPISHARD_DEBUG=1 finds the first such call",
    )


def _in_line(error: BaseException) -> str:
    return "; ".join(map(str.strip, typed_text(error).splitlines()))


def _public_type(error: BaseException) -> str:
    for kind in type(error).__mro__:
        if getattr(errors, kind.__name__, None) is kind:
            return kind.__name__
    return MpishardError.__name__


# watchdog


class waiting:  # noqa: N801 (reads as a verb: `with waiting(...)`)
    """Bracket around a blocking MPI call, watched by a thread that ends the job past ``MPISHARD_TIMEOUT``.

    Not collective.

    Parameters
    ----------
    op
        What the rank is doing.
    peers
        Ranks of ``comm`` that it waits for (empty: all of them), or a function that returns them.
    comm
        The communicator, or None.

    Raises
    ------
    UnsupportedOperationError
        Another thread communicates on it, or this process is no rank.
    DesyncError
        Inside, MPI found messages of another length than they must have.
    """

    __slots__ = ()

    # some tenths of a microsecond in all: the watchdog looks at the clock, not we
    def __init__(self, op: str, peers: Peers = (), comm: MPI.Comm | None = None) -> None:
        owner = owner_of(id(comm))
        if owner is not None and owner.ident != get_ident():
            owner.change()
        if _watchdog is None:
            _start_watchdog()
        _live[self] = (op, peers, comm)

    def __enter__(self) -> None:
        if meters:
            for meter in meters:
                meter.enter()
        if lookouts and (check := lookouts.get(get_ident())) is not None:
            _, peers, comm = _live[self]
            try:
                wait_watchfully(check, peers, comm)
            except BaseException as error:
                self.__exit__(type(error), error, None)
                raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        op, peers, comm = _live.pop(self, _LEFT)
        if _untold:
            _untold.pop(self, None)
        if meters:
            for meter in meters:
                meter.leave()
        if error is not None:
            if isinstance(error, MPI.Exception):
                raise _failed(error, op, peers, comm) from None
            if cuts(error):
                wait_interrupted(op, error, peers, comm)


def _failed(error: MPI.Exception, op: str, peers: Peers, comm: MPI.Comm | None) -> DesyncError:
    return DesyncError(
        f"MPI failed on rank {MPI.COMM_WORLD.Get_rank()}, in {op}, with {_pending(peers, comm)}",
        expected="the same call, with the same shapes and dtypes, on every rank",
        got=str(error).strip(),
        fix="look for code that depends on the rank before this call; MPISHARD_DEBUG=1 finds the first such call. "
        "Or a rank has ended: look at what it said",
    )


def unfinished(requests: Sequence[MPI.Request], peers: Sequence[int], receives: int = 0) -> Callable[[], list[int]]:
    """Return a function that tells which peers' requests are not complete, for `waiting`. Not collective.

    The first ``receives`` requests are cancelled where a `lookout` ends the wait: their memory may go.
    """

    def pending() -> list[int]:
        return incomplete(requests, peers)

    pending.requests, pending.receives = requests, receives  # type: ignore[attr-defined]
    return pending


def incomplete(requests: Sequence[MPI.Request], peers: Sequence[int]) -> list[int]:
    """Return the peers whose requests are not complete, or all where only one thread may ask. Not collective."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return sorted(set(peers))
    return sorted({peer for request, peer in zip(requests, peers) if not request.Get_status()})


def hold(key: object, error: BaseException) -> None:
    """Note an error that this rank tells the others of later, by `agree`: they may never come. Not collective."""
    _untold[key] = error


def release(key: object) -> None:
    """Note that the error is about to be told. Not collective."""
    _untold.pop(key, None)


# errors that this rank waits to tell the others of: they may never come, and then nobody would know
_untold: dict[object, BaseException] = {}
_UNTOLD_S = 10.0
_watchdog: threading.Thread | None = None


def _start_watchdog() -> None:
    global _watchdog  # noqa: PLW0603
    _watchdog = threading.Thread(target=_watch, name="mpishard-watchdog", daemon=True)
    if TIMEOUT_S > 0:
        _watchdog.start()


def _watch() -> None:
    pause = min(1.0, TIMEOUT_S / 10)
    ages: dict[object, float] = {}
    last = time.monotonic()
    while True:
        time.sleep(pause)
        now = time.monotonic()
        # a process that was suspended did not wait all that time
        passed, last = min(now - last, 2 * pause), now
        ages = _looked_at(ages, passed)


def _looked_at(ages: dict[object, float], passed: float) -> dict[object, float]:
    """Return how long each wait, or error that is held, has lasted; end the job past the limit of waits.

    Nothing else is kept: of an error, the tensors and files of its frames would be.
    """
    # holding the objects, `ages` keeps their identities from being used again
    current = _live.copy()
    untold = _untold.copy()
    ages = {wait: ages.get(wait, -passed) + passed for wait in (*current, *untold)}
    for wait, error in untold.items():
        if ages.get(wait, 0.0) >= min(_UNTOLD_S, TIMEOUT_S / 4) and _untold.pop(wait, None) is not None:
            told = f"has an error, and waits to tell the other ranks of it:\n{typed_text(error)}\n"
            say_for_node(f"[{place()}] {told}", told)
    for wait, told_of in current.items():
        if (age := ages[wait]) >= TIMEOUT_S:
            try:
                say_at_end(_overdue(age, *told_of))
                time.sleep(GRACE_S)
            finally:
                end(1)
    return ages


def _overdue(age: float, op: str, peers: Peers, comm: MPI.Comm | None) -> str:
    lines = [
        f"[{place()}] MPISHARD_TIMEOUT: {op} has waited {age:.0f} s for {_pending(peers, comm)}.",
        *_sent(peers, comm),
        f"The job ends in {GRACE_S:.0f} s. Set MPISHARD_TIMEOUT to more seconds, or to 0 to wait for ever.",
        "Where this rank is:",
    ]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines.append(f"thread {names.get(ident, ident)}:")
            lines += [line.rstrip() for line in traceback.format_stack(frame)]
    return "\n".join(lines) + "\n"


def _pending(peers: Peers, comm: MPI.Comm | None) -> str:
    try:
        peers = list(_asked(peers) if callable(peers) else peers)
        if comm is None:
            return ranks_text(ranges_of(peers)) if peers else "other ranks"
        size = comm.Get_size()
        peers = peers or [rank for rank in range(size) if rank != comm.Get_rank()]
        if min(peers, default=0) < 0 or max(peers, default=0) >= size:
            raise ValueError(f"{peers} of {size}")  # MPI libraries crash at such a rank
        world = comm.Get_group().Translate_ranks(peers, MPI.COMM_WORLD.Get_group())
        return f"{ranks_text(ranges_of(world))} of {MPI.COMM_WORLD.Get_size()}"
    except Exception as error:  # noqa: BLE001 (the report and the abort must come, whatever the state)
        return f"other ranks ({error})"


def _sent(peers: Peers, comm: MPI.Comm | None) -> list[str]:
    """Say what the ranks that are waited for have sent instead."""
    if comm is None or unexpected is None or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return []
    tell = unexpected
    try:
        pending = list(_asked(peers) if callable(peers) else peers) or list(range(comm.Get_size()))
        pending = [rank for rank in pending if 0 <= rank < comm.Get_size() and rank != comm.Get_rank()]
        return list(_asked(lambda: tell(comm, pending)))
    except Exception:  # noqa: BLE001 (as above)
        return []


# set by those who know the tags: which messages of these ranks lie here, and nobody has asked for
unexpected: Callable[[MPI.Comm, Sequence[int]], list[str]] | None = None


def _asked(question: Callable[[], Sequence[T]]) -> Sequence[T]:
    # in a thread of its own: MPI may hold a lock, and the abort must come
    answer: list[Sequence[T]] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            answer.append(question())

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(1.0)
    if not answer:
        raise TimeoutError("no answer from MPI")
    return answer[0]
