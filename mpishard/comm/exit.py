"""How a rank ends: by an uncaught exception, which ends the job, or with its program; and a forked child alone."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import io
import os
import socket
import stat
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

from mpishard.comm.environment import switch
from mpishard.errors import MeshError, UnsupportedOperationError

_PID = os.getpid()

# Before the abort, time for the other ranks to say where they wait: theirs run out at nearly the same moment.
GRACE_S = 2.0
_FORWARDED_S = 0.2
_SETTLED_S = 1.0


# uncaught exceptions

# to say the last words, while handlers of signals raise
_TRIES = 20
_installed = False


def install() -> None:
    """Have an uncaught exception print its rank's traceback and end the whole job, once.

    Not collective. Without it the other ranks would wait for this one for ever. ``MPISHARD_ABORT=0`` leaves
    `sys.excepthook` alone, for host programs that handle errors themselves. Exceptions in threads other
    than the main one, and those at an interactive prompt, end nothing.
    """
    global _installed  # noqa: PLW0603
    if _installed or switch("MPISHARD_ABORT") is False:
        return
    _installed = True
    previous, stderr = sys.excepthook, sys.stderr

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if alone() or hasattr(sys, "ps1"):
            _child.status = 1
            previous(kind, error, trace)
            return
        if isinstance(sys.stderr, io.StringIO):  # of torch.distributed, which writes it out when this has come back
            sys.stderr = stderr
        # whatever happens here, the job ends: a text may not be made of the error, and signal handlers may raise, as
        # torch's does over and over for a worker of a DataLoader that was killed
        try:
            _tell(kind, error, trace, previous)
        except BaseException:  # noqa: BLE001
            for _ in range(_TRIES):
                with contextlib.suppress(BaseException):
                    say(f"[{place()}] uncaught exception: {kind.__name__}, of which no more can be told\n")
                    break
        finally:
            abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None, previous: Any) -> None:
    told = getattr(error, "_told_by_rank_0", False)
    if told:
        # every rank has this error: time for the first to print it for all
        time.sleep(_SETTLED_S)
    if not _first_of_node(kind, trace):
        # time for the one that prints
        time.sleep(_SETTLED_S)
    elif told:
        say(f"[{place()}] {kind.__name__}: {error}\n")
    elif previous is sys.__excepthook__:
        say(f"[{place()}] uncaught exception:\n{''.join(traceback.format_exception(kind, error, trace))}")
    else:
        say(f"[{place()}] uncaught exception:\n")
        previous(kind, error, trace)


def _first_of_node(kind: type[BaseException], trace: TracebackType | None) -> bool:
    """Tell whether no other rank of this node has failed at this place. Not collective."""
    return _claims(kind.__name__, *(f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(trace)))


def _claims(*what: str) -> bool:
    """Tell whether no other rank of this node has claimed the same, and lives. Not collective."""
    # ranks of one job have one parent, mostly; where they have not, each is the first
    name = hashlib.blake2b(repr((os.getppid(), os.getuid(), what)).encode(), digest_size=16).hexdigest()
    if name in _claimed:
        return True
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        # a name in the kernel, given to one process until it ends
        claim.bind(f"\0mpishard-{name}")
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE
    claim.detach()  # open until the process ends
    _claimed.add(name)
    return True


_claimed: set[str] = set()


def abort(status: int) -> NoReturn:
    """End the job when the launcher has what was said. Not collective."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        # what a launcher has not yet read of a rank that it kills, it drops; and what it has, it must hand on
        limit = time.monotonic() + GRACE_S
        while any(map(_unread, (1, 2))) and time.monotonic() < limit:
            time.sleep(0.01)
        time.sleep(_FORWARDED_S)
    finally:
        end(status)


def _unread(file: int) -> bool:
    """Tell whether a pipe or socket holds what nobody has read. Not collective."""
    try:
        mode = os.fstat(file).st_mode
        if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode):
            return False
        request = termios.FIONREAD if stat.S_ISFIFO(mode) else termios.TIOCOUTQ
        (nbytes,) = struct.unpack("i", fcntl.ioctl(file, request, bytes(4)))
    except OSError:
        return False
    return bool(nbytes)


def end(status: int) -> NoReturn:
    """End the job. Not collective."""
    try:
        MPI.COMM_WORLD.Abort(status)
        # MPICH's abort may return before its launcher ends this process: the program must not go on
        time.sleep(GRACE_S)
    finally:
        os._exit(status)


def alive() -> bool:
    """Tell whether this process is a rank, and MPI is up. Not collective."""
    # a forked child, as of a data loader, is no rank
    return os.getpid() == _PID and MPI.Is_initialized() and not MPI.Is_finalized()


def alone() -> bool:
    """Tell whether no other rank can wait for this one. Not collective."""
    return not alive() or MPI.COMM_WORLD.Get_size() == 1


def first() -> bool:
    """Tell whether this process is rank 0 of its job, or no rank. Not collective."""
    return not alive() or MPI.COMM_WORLD.Get_rank() == 0


def require_mpi(what: str) -> None:
    """Raise where MPI is not up, its own calls would end the process; and where a child or thread must not call it.

    Not collective.
    """
    if os.getpid() != _PID:
        # what it sends would be taken for its parent's
        raise UnsupportedOperationError(
            f"{what}: a forked process communicates",
            expected="a call in a process that MPI has started",
            got=f"process {os.getpid()}, a child of {_PID}",
            fix="let children compute or read only, and communicate where MPI was started",
        )
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise MeshError(
            f"{what}: MPI is not up",
            expected="a call between MPI_Init and MPI_Finalize",
            got="MPI is finalized" if MPI.Is_initialized() else "MPI is not initialised",
            fix="let the host call MPI_Init_thread first; without a host, leave mpi4py.rc.initialize True",
        )
    from mpishard.comm.main_thread import require_allowed  # a file less for `import mpishard`

    require_allowed(what)


class _child:  # noqa: N801 (one of them)
    """A forked child that ends as programs do must not finalise the MPI of its parent, as mpi4py would."""

    status = 0

    @classmethod
    def forked(cls) -> None:
        leave = sys.exit

        def recorded(status: Any = None, /) -> NoReturn:
            cls.status = status if isinstance(status, int) else int(status is not None)
            leave(status)

        sys.exit = recorded


os.register_at_fork(after_in_child=_child.forked)

_fails = False


def fail_at_end() -> None:
    """Have this rank's program end with a status that is not 0, though no exception ends it. Not collective.

    Not where Python is but a part of a host program.
    """
    global _fails  # noqa: PLW0603
    _fails = True


def _end_program() -> None:
    if os.getpid() != _PID:
        _leave(_child.status & 0xFF)
    if not _fails or os.path.realpath(sys.executable) != os.path.realpath("/proc/self/exe"):
        return
    # what is still to be done after this is mpi4py's: the launcher must not take it for a crash
    if alive():
        MPI.Finalize()
    _leave(1)


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


# registered early, it runs late
atexit.register(_end_program)


def place() -> str:
    """Return where this rank is, for what it says. Not collective."""
    world = MPI.COMM_WORLD
    return f"rank {world.Get_rank()} of {world.Get_size()} on {socket.gethostname()}, pid {os.getpid()}"


def say(text: str) -> None:
    """Write to the standard error. Not collective."""
    # one write: lines of several ranks do not mix
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        # where it was closed before the program began, 2 may be a file that was opened since
        if sys.__stderr__ is not None:
            with contextlib.suppress(OSError):
                os.write(2, text.encode(errors="replace"))


# set by those that start ranks
_LAUNCHED = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PALS_RANKID")


def say_for_node(text: str, what: str | None = None) -> None:
    """Write to the standard error what all ranks of a node may say: one of them does. Not collective.

    ``what`` is the part of the text that is the same on all, if that is not all of it.
    """
    if not any(name in os.environ for name in _LAUNCHED):
        say(text)
        return
    if _claims("said", what or text):
        say(text)
    # the claim ends with this process, which may be over soon, and the others come a moment later
    time.sleep(_SETTLED_S)


# in place of a standard error that somebody captures and, when the job is aborted, never shows: a descriptor
uncaptured: int | None = None


def say_at_end(text: str) -> None:
    """Write to the standard error, past those who capture it where they have said how. Not collective."""
    say(text)
    if uncaptured is not None:
        with contextlib.suppress(OSError):
            os.write(uncaptured, text.encode(errors="replace"))


# the end of the program

_finalizers: list[Callable[[], object]] = []
_finalize_keyval: list[int] = []


def on_finalize(release: Callable[[], object]) -> None:
    """Have ``release`` called before MPI finalises, last registered first, once.

    Not collective, and ``release`` must not be: ranks may leave for different reasons.
    """
    if not _finalize_keyval:
        # MPI deletes the attributes of COMM_SELF first of all when it finalises; at the end of Python,
        # `atexit` comes before that
        _finalize_keyval.append(MPI.Comm.Create_keyval(delete_fn=_on_delete))
        MPI.COMM_SELF.Set_attr(_finalize_keyval[0], None)
        atexit.register(_at_exit)
    _finalizers.append(release)


def _on_delete(comm: Any, keyval: int, value: Any) -> None:  # noqa: ARG001
    _run_finalizers()


def _at_exit() -> None:
    if alive():
        _run_finalizers()
        # a host program may finalise MPI when there is no Python any more to be called back
        MPI.COMM_SELF.Delete_attr(_finalize_keyval[0])


def _run_finalizers() -> None:
    while _finalizers:
        release = _finalizers.pop()
        try:
            release()
        except Exception:  # noqa: BLE001 (the others must still run)
            say(f"[{place()}] while the program ends:\n{traceback.format_exc()}")
