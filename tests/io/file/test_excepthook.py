"""What h5py finds wrong where it lets objects go is kept; what the program's own objects do then is not."""

from __future__ import annotations

import gc
import sys
import threading

import h5py
import pytest

import mpishard as ms
from mpishard.io.file.excepthook import noted
from tests.io.files import BACKENDS, sharded, values

_CLASS = """
class Object:
    def __del__(self):
        raise OSError("no room")
"""


def let_go(module):
    """Let an object go, of a class of a module, which finds something wrong."""
    space = {"__name__": module}
    exec(_CLASS, space)
    space["Object"]()


@pytest.fixture
def seen(monkeypatch):
    """What comes to the program's own hooks."""
    errors = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: errors.append(str(info.exc_value)))
    monkeypatch.setattr(sys, "excepthook", lambda _, error, __: errors.append(str(error)))
    return errors


def in_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_h5pys_errors_of_this_thread_are_kept(seen):
    with noted() as lost:
        let_go("h5py._objects")
        try:
            h5py.h5f.open(b"/no/such/file")
        except OSError as e:
            sys.excepthook(type(e), e, e.__traceback__.tb_next)
        assert len(lost) == 2
        assert not seen
        let_go("program")
        in_thread(lambda: let_go("h5py._objects"))
        sys.excepthook(ValueError, ValueError("of the program"), None)
    assert len(lost) == 2
    assert seen == ["no room", "no room", "of the program"]


def test_hooks_of_two_threads_and_of_the_program(seen):
    before = sys.excepthook, sys.unraisablehook
    began, ended = threading.Event(), threading.Event()
    kept = []

    def other():
        with noted() as lost:
            began.set()
            ended.wait()
            let_go("h5py._objects")
            kept.extend(map(str, lost))

    thread = threading.Thread(target=other)
    with noted() as lost:
        thread.start()
        began.wait()
        with noted() as inner:
            let_go("h5py._objects")
        let_go("h5py._objects")
    ended.set()
    thread.join()
    assert (len(inner), len(lost), kept, seen) == (1, 1, ["no room"], [])
    assert (sys.excepthook, sys.unraisablehook) == before
    with noted():
        sys.excepthook = own = lambda *_: None
    assert sys.excepthook is own
    assert sys.unraisablehook is before[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_write_does_not_fail_for_the_programs_own_objects(mesh, folder, seen, backend):
    class Bad:
        def __del__(self):
            raise RuntimeError("of the program")

    bad = Bad()
    bad.own = bad
    del bad
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        ms.io.write(folder / "a.h5", {"x": sharded(values((16, 16)), mesh)}, backend=backend)
    finally:
        gc.set_threshold(*threshold)
    assert seen == ["of the program"]
