"""Ranks of jobs that tests start, forked from one process that has imported torch.

Most such jobs are over in less time than `import torch` takes each of their ranks, two seconds of a core. So the
launcher starts a stand-in (``python -IS tests/warm.py SOCKET program.py ...``) in milliseconds. It hands its words,
environment, folder and open files to a server, which forks a child that runs the program, and passes on to that child
the signals that it gets. It ends as the child ends, by a signal too; where it is killed, the server kills the child.

A child is unlike a process of its own in this: torch, with what it imports for the first optimizer, numpy, h5py and
matplotlib are imported (nothing that starts MPI is), strings have the same hashes on all ranks, what the
interpreter and libraries read from the environment when they are loaded is the server's, and what was imported is not
taken apart at the end, which takes longer than most programs. All that the program itself made is.
"""

from __future__ import annotations

import array
import contextlib
import marshal
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
KIND = socket.SOCK_SEQPACKET  # whole messages
REQUEST_NBYTES = 1 << 20
# the file at which a launcher talks to its rank, where it is not by an address
LAUNCHER_FILE = "PMI_FD"


def stand_in(path: str, words: list[str]) -> None:
    """Have the server run a program, and end as it ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    files = [0, 1, 2, *([int(os.environ[LAUNCHER_FILE])] if LAUNCHER_FILE in os.environ else [])]
    server = socket.socket(socket.AF_UNIX, KIND)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_NBYTES)
    server.connect(path)
    request = marshal.dumps((words, dict(os.environ), os.getcwd(), files))
    server.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    child = int(server.recv(64) or sys.exit("tests/warm.py: the server is gone"))

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = os.waitstatus_to_exitcode(int(server.recv(64) or sys.exit("tests/warm.py: the server is gone")))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(path: str) -> None:
    """Fork a child for every request, until standard input ends."""
    import atexit
    import ctypes
    import gc
    import selectors

    own = set(sys.modules)
    shared: list[str] = []
    # before what is imported has handlers of its own: the last of all
    atexit.register(keep, shared)
    import numpy as np  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401

    # no destructors of what is loaded by now; HDF5 below ends in order, and MPI
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)
    import h5py  # noqa: F401

    with contextlib.suppress(ImportError):
        import matplotlib.figure  # noqa: F401

    shared += set(sys.modules) - own
    # what children share stays shared
    gc.collect()
    gc.freeze()
    door = socket.socket(socket.AF_UNIX, KIND)
    door.bind(path)
    door.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(door, selectors.EVENT_READ)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                return
            if key.fileobj is door:
                caller, _ = door.accept()
                request, files, *_ = socket.recv_fds(caller, REQUEST_NBYTES, 8)
                if not request:  # killed as soon as it was there
                    caller.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    mine = [k.fd for k in selector.get_map().values() if k.fd != 0]
                    for file in (*mine, selector.fileno(), caller.fileno()):  # type: ignore[attr-defined]
                        os.close(file)
                    run(request, files)
                for file in files:
                    os.close(file)
                tell(caller, pid)
                end = os.pidfd_open(pid)
                for source in (caller, end):
                    selector.register(source, selectors.EVENT_READ, (pid, end, caller))
            else:
                pid, end, caller = key.data
                if key.fileobj is caller:
                    # the stand-in was killed, or is done
                    signal.pidfd_send_signal(end, signal.SIGKILL)
                tell(caller, os.waitpid(pid, 0)[1])
                selector.unregister(end)
                selector.unregister(caller)
                os.close(end)
                caller.close()
                break  # other events may be of what is closed now


def keep(shared: list[str]) -> None:
    """Let the end of the interpreter leave some modules as they are, whose memory the children share."""
    import ctypes

    modules = [sys.modules.pop(name, None) for name in shared]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))


def tell(caller: socket.socket, number: int) -> None:
    """Send a stand-in a number, if it is still there."""
    with contextlib.suppress(OSError):
        caller.send(b"%d" % number)


def run(request: bytes, files: list[int]) -> None:
    """Become the program that was asked for. Does not return."""
    import ctypes
    import types

    import numpy as np

    words, environment, folder, numbers = marshal.loads(request)
    aside = [os.dup2(file, 200 + i) for i, file in enumerate(files)]
    for file, number in zip(aside, numbers):
        os.dup2(file, number)
    for file in {*aside, *files} - set(numbers):
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    np.random.seed()  # noqa: NPY002  else every rank draws the same numbers
    sys.modules["__main__"] = types.ModuleType("__main__")
    first, *rest = words
    beside = {"-c": "", "-m": folder}.get(first, os.path.dirname(os.path.abspath(first)))
    sys.path[:1] = [beside, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = words if first[0] != "-" else [first, *rest[1:]]
    # by the interpreter's own entries: no line of this file stands in a traceback
    python = ctypes.pythonapi
    if first[0] != "-":
        sys.modules["__main__"].__file__ = first
        fopen = ctypes.CDLL(None).fopen
        fopen.restype = ctypes.c_void_p
        name = first.encode()
        failed = python.PyRun_SimpleFileExFlags(ctypes.c_void_p(fopen(name, b"rb")), name, 1, None)
    else:
        text = rest[0] if first == "-c" else f"import runpy\nrunpy._run_module_as_main({rest[0]!r})"
        failed = python.PyRun_SimpleStringFlags(text.encode(), None)
    python.Py_Exit(int(failed != 0))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        stand_in(sys.argv[1], sys.argv[2:])
    serve(sys.argv[1])
