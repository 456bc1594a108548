from __future__ import annotations

import os
import signal
import threading

import pytest
from mpi4py import MPI

import mpishard as ms
from mpishard.errors import MpishardError
from tests.compare import mesh_of, mesh_shapes

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=str)
@pytest.mark.parametrize("who", [0, SIZE - 1])
@pytest.mark.parametrize("of_mesh", [True, False])
def test_a_signal_to_one_rank_stops_all(number, who, of_mesh):
    before = [signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGTERM)]
    mesh = mesh_of(mesh_shapes(2)[-1]) if of_mesh else None
    with ms.io.preemption(mesh) as stop:
        assert not stop.should_stop()
        if WORLD.rank == who:
            os.kill(os.getpid(), number)
        WORLD.Barrier()
        with ms.comm_counter() as counted:
            assert stop.should_stop()
            assert stop.should_stop()  # known by now
        assert counted.messages == (SIZE > 1), counted
        assert stop.exit_code == 75
    # a launcher may send them to the ranks that end last
    assert signal.getsignal(number) == signal.SIG_IGN
    for each, handler in zip((signal.SIGUSR1, signal.SIGTERM), before, strict=True):
        signal.signal(each, handler)


def test_other_signals_and_codes():
    before = signal.getsignal(signal.SIGUSR1)
    hang_up = signal.getsignal(signal.SIGHUP)
    with ms.io.preemption(signals=[signal.SIGHUP]) as stop:
        assert not stop.should_stop()
    assert signal.getsignal(signal.SIGHUP) == hang_up
    with ms.io.preemption(signals=[signal.SIGHUP], exit_code=3) as stop:
        assert signal.getsignal(signal.SIGUSR1) == before
        if WORLD.rank == 0:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.should_stop()
        assert stop.exit_code == 3
    signal.signal(signal.SIGHUP, hang_up)


def test_blocks_in_blocks_stop_together():
    before = [signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGTERM)]
    with ms.io.preemption() as outer:
        with ms.io.preemption() as inner:
            assert not inner.should_stop()
            if WORLD.rank == SIZE - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            # it ends before it looks once more
        assert outer.should_stop()
    for each, handler in zip((signal.SIGUSR1, signal.SIGTERM), before, strict=True):
        signal.signal(each, handler)


def test_handlers_come_back():
    """Also where a signal is named twice, has no name, or the one behind it cannot be noticed."""
    unnamed = signal.SIGRTMIN + 3
    before = [signal.getsignal(each) for each in (signal.SIGUSR1, unnamed)]
    with ms.io.preemption(signals=[signal.SIGUSR1, unnamed, signal.SIGUSR1]) as stop:
        if WORLD.rank == 0:
            os.kill(os.getpid(), unnamed)
        WORLD.Barrier()
    assert stop._received == (WORLD.rank == 0)
    with pytest.raises(MpishardError, match="signals cannot be noticed"), ms.io.preemption(signals=[signal.SIGUSR1, 9]):
        pass
    assert [signal.getsignal(each) for each in (signal.SIGUSR1, unnamed)] == before
    for odd in (signal.SIGUSR1, None, ["USR1"]):  # on one rank alone
        signals = odd if WORLD.rank == SIZE - 1 else [signal.SIGUSR1]
        with pytest.raises(MpishardError, match="a sequence of signals"), ms.io.preemption(signals=signals):
            pass
    assert [signal.getsignal(each) for each in (signal.SIGUSR1, unnamed)] == before


def test_not_in_another_thread():
    errors = []

    def enter():
        try:
            with ms.io.preemption():
                pass
        except MpishardError as e:
            errors.append(str(e))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "main thread" in errors[0]
    assert len(set(WORLD.allgather(errors[0]))) == 1


def test_no_mesh():
    for wrong in (5, "mesh", WORLD):
        with pytest.raises(ms.MeshError, match="preemption: mesh= is no mesh"):
            ms.io.preemption(wrong)


@pytest.mark.parametrize("code", ["75", 256, -1, True], ids=repr)
def test_codes_that_no_program_ends_with(code):
    """256 would be 0 to the job script, which takes that for done."""
    before = signal.getsignal(signal.SIGUSR1)
    with (
        pytest.raises(MpishardError, match="exit_code"),
        ms.io.preemption(exit_code=code if WORLD.rank == SIZE - 1 else 75),
    ):
        pass
    assert signal.getsignal(signal.SIGUSR1) == before
