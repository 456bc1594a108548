"""Ranks that are forked from one process which has imported everything: a job starts in half a second, not in ten.

`Ranks` starts that process. What a launcher starts is a small program, which hands its environment and descriptors
over and ends as its rank does; a rank whose small program was killed by the launcher is killed too.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

ROOT = os.fspath(Path(__file__).parents[2])
LOOK_S = 0.02  # between looks for ranks that have ended


class Ranks:
    """A context in which ``command(module, ...)`` starts the ``main(*texts)`` of a module, under any launcher.

    ``environment`` is what the library finds set when it is imported.
    """

    def __init__(self, **environment: str) -> None:
        self._environment = environment

    def __enter__(self) -> Ranks:
        self._folder = tempfile.TemporaryDirectory()
        self._path = os.path.join(self._folder.name, "ranks")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.failure.forked", "serve", self._path],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": ROOT, **self._environment},
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return self

    def command(self, module: str, *args: object) -> list[str]:
        return [sys.executable, "-S", "-E", __file__, "ask", self._path, module, *map(str, args)]

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def ask(path: str, module: str, *args: str) -> NoReturn:
    """Have a rank forked, and end as it does."""
    fds = [0, 1, 2, *([int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else [])]
    what = json.dumps([module, args, dict(os.environ)]).encode()
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        socket.send_fds(s, [len(what).to_bytes(4, "little")], fds)
        s.sendall(what)
        for fd in fds[3:]:
            os.close(fd)
        end = s.recv(4)
    code = int.from_bytes(end, "little", signed=True) if end else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(path: str) -> NoReturn:
    """Fork a rank for everyone who asks."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    import mpishard

    for module in pkgutil.walk_packages(mpishard.__path__, "mpishard."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as watched:
        listening.bind(path)
        listening.listen(64)
        watched.register(listening, selectors.EVENT_READ)
        ranks: dict[int, socket.socket] = {}
        parent = os.getppid()
        print("ready", flush=True)
        while ranks or os.getppid() == parent:
            for key, _ in watched.select(LOOK_S if ranks else 1.0):
                if key.fileobj is listening:
                    asker, _ = listening.accept()
                    ranks[pid := forked(asker)] = asker
                    watched.register(asker, selectors.EVENT_READ, pid)
                else:
                    os.kill(key.data, signal.SIGKILL)
                    watched.unregister(key.fileobj)
            while ranks and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with ranks.pop(ended[0]) as asker:
                    if asker in watched.get_map():
                        watched.unregister(asker)
                        asker.send(os.waitstatus_to_exitcode(ended[1]).to_bytes(4, "little", signed=True))
    os._exit(0)


def forked(asker: socket.socket) -> int:
    """Fork a rank; return its number."""
    head, fds, *_ = socket.recv_fds(asker, 4, 8)
    length, text = int.from_bytes(head, "little"), b""
    while len(text) < length:
        text += asker.recv(length - len(text))
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    try:
        be(fds, *json.loads(text))
    except BaseException as e:  # noqa: BLE001  the end of the process, whatever it was
        sys.excepthook(type(e), e, e.__traceback__)
    finally:
        os._exit(1)


def be(fds: list[int], module: str, args: list[str], environment: dict[str, str]) -> None:
    """Be a rank: as if this process had just imported the library."""
    for k, fd in enumerate(fds[:3]):
        os.dup2(fd, k)
    os.environ.clear()
    os.environ.update(environment)
    if fds[3:]:
        os.environ["PMI_FD"] = str(fds[3])
    from mpi4py import MPI

    from mpishard.comm import exit, thread

    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    exit._PID = thread._PID = os.getpid()
    importlib.import_module(module).main(*args)
    MPI.Finalize()
    os._exit(0)


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
