"""Who holds a folder: its name is told though it comes a moment after the lock, and never that of the one before."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time

import pytest

from mpishard.errors import FileError
from mpishard.io.file import lock


@pytest.mark.parametrize("before", [b"", b'{"host": "%s", "pid": 1, "started": "0", "job": null}\n'])
def test_a_name_that_comes_after_the_lock(tmp_path, before):
    me = lock._me()
    path = tmp_path / lock.LOCK
    path.write_bytes(before % me["host"].encode() if before else before)
    holder = os.open(path, os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)

    def name_it() -> None:
        time.sleep(0.1)
        os.ftruncate(holder, 0)
        os.pwrite(holder, json.dumps(me).encode(), 0)

    naming = threading.Thread(target=name_it)
    naming.start()
    with pytest.raises(FileError, match=f"process '{os.getpid()}' on"):
        lock.hold(tmp_path)
    naming.join()
    os.close(holder)
    lock.hold(tmp_path)
    lock._forget()


def test_a_holder_without_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_NAMING_S", 0.05)
    holder = os.open(tmp_path / lock.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(FileError, match="has not told its name"):
        lock.hold(tmp_path)
    os.close(holder)
