"""Agreement on errors, the check of calls, the wait bracket, and what runs at the end of the program."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import weakref

import pytest
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard import errors
from mpishard.comm import exit, guard
from mpishard.errors import (
    DesyncError,
    LayoutError,
    MeshError,
    MpishardError,
    UnsupportedDtypeError,
    ranges_of,
    ranks_text,
)

WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1
several = pytest.mark.ranks(2, 3, 4)
KINDS = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, MpishardError)]


@pytest.fixture
def comm():
    comm = WORLD.Dup()
    yield comm
    comm.Free()


def same_everywhere(error: BaseException) -> bool:
    return len(set(WORLD.allgather((type(error).__name__, str(error))))) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_makes_its_text(kind):
    told = {"expected": "a", "got": ("b",), "fix": "c"}
    text = errors.described("what", **told)
    for error in (kind("what", **told), kind(text), pickle.loads(pickle.dumps(kind("what", **told)))):
        assert str(error) == text
        assert error.args == (text,)


@several
def test_a_text_says_nothing_of_one_rank_alone():
    """Else the others would be said to have other reasons."""
    mesh = ms.init_mesh((-1,), ("y",))
    x = ms.zeros(5, 3, mesh=mesh, placements=(ms.Shard(0),))
    for given in (mesh, x, [x[0]], {"x": mesh}, lambda: None, object()):
        error = errors.LayoutError("wrong", expected=mesh, got=given, fix="give another")
        assert same_everywhere(error)
        assert "y=" in str(error)
        error = TypeError(f"no number: {given!r}")
        with pytest.raises(MpishardError) as info:
            guard.agree(mesh.comm, error)
        assert same_everywhere(info.value)
        assert "other reasons" not in str(info.value)


def test_a_long_part_of_a_text_is_cut():
    """As a path of a megabyte: every rank of a job says it."""
    text = str(errors.FileError("cannot open " + "n" * 10**6, expected="e" * 10**6, got="first" + "g" * 10**6, fix="f"))
    assert len(text) < 10_000
    assert "1000012 characters" in text
    assert "got:      first" in text
    assert text.endswith("fix:      f")


def test_agreement(comm):
    guard.agree(comm, None)
    guard.agree(comm, None, "signature")
    guard.agree(comm, None, "é" * 10000)


def test_agreement_is_one_reduction(comm, monkeypatch):
    class Counted:
        """The communicator, with nothing but what the good case may use."""

        calls = 0

        def Allreduce(self, *args):
            Counted.calls += 1
            comm.Allreduce(*args)

        def Get_size(self):
            return comm.Get_size()

    guard.agree(Counted(), None, "signature")
    assert Counted.calls == (1 if WORLD.size > 1 else 0)


@pytest.mark.parametrize("kind", [MpishardError, LayoutError, MeshError, UnsupportedDtypeError, DesyncError])
def test_error_on_every_rank_keeps_its_text(comm, kind):
    mine = kind("expected this, got that")
    with pytest.raises(kind, match=r"^expected this, got that$") as info:
        guard.agree(comm, mine)
    assert type(info.value) is kind
    assert info.value is mine  # with the traceback of the place that found it


@several
@pytest.mark.parametrize("culprit", [0, LAST])
def test_error_of_one_rank(comm, culprit):
    with pytest.raises(LayoutError) as info:
        guard.agree(comm, LayoutError("does not fit") if WORLD.rank == culprit else None)
    assert str(info.value) == f"does not fit\n  raised on: rank {culprit} of {WORLD.size}"
    assert same_everywhere(info.value)


@several
def test_traceback_of_the_rank_that_failed(comm):
    def fails_here():
        raise LayoutError("does not fit")

    error = None
    if WORLD.rank == LAST:
        try:
            fails_here()
        except LayoutError as e:
            error = e
    with pytest.raises(LayoutError) as info:
        guard.agree(comm, error)
    assert any(entry.name == "fails_here" for entry in info.traceback) == (WORLD.rank == LAST)
    # printed, the text would appear twice with either of them
    assert info.value.__cause__ is None
    assert info.value.__context__ is None or info.value.__suppress_context__


@pytest.mark.ranks(3, 4)
def test_error_of_the_lowest_rank_wins(comm):
    mine = [None, LayoutError("one"), MeshError("two"), LayoutError("one")][WORLD.rank]
    with pytest.raises(LayoutError) as info:
        guard.agree(comm, mine, f"signatures do not matter then {WORLD.rank}")
    assert same_everywhere(info.value)
    ranks = {3: "rank 1", 4: "ranks 1 and 3"}[WORLD.size]
    assert str(info.value) == f"one\n  raised on: {ranks} of {WORLD.size} (for other reasons on rank 2)"


@several
def test_classes_that_are_not_ours_arrive_as_ours(comm):
    class Special(MeshError):
        pass

    for mine, expected in ((Special("special"), MeshError), (KeyError("key"), MpishardError)):
        with pytest.raises(expected) as info:
            guard.agree(comm, mine)
        assert type(info.value) is expected
        assert same_everywhere(info.value)


@several
def test_an_error_whose_text_does_not_come_about_arrives(comm):
    class Untold(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    for own in (0, WORLD.size - 1, WORLD.rank):
        with pytest.raises(MpishardError, match=r"^Untold: \(no text: its __str__ raised RuntimeError\)") as info:
            guard.agree(comm, Untold() if WORLD.rank == own else None)
        assert same_everywhere(info.value)


def test_every_public_error_travels(comm):
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, MpishardError)]
    assert len(kinds) >= 7
    for kind in kinds:
        with pytest.raises(kind) as info:
            guard.agree(comm, kind("text") if WORLD.rank == LAST else None)
        assert type(info.value) is kind


@several
def test_signatures_that_differ(comm):
    with pytest.raises(DesyncError) as info:
        guard.agree(comm, None, "conv" if WORLD.rank < LAST else "pool")
    assert same_everywhere(info.value)
    assert "conv" in str(info.value)
    assert f"rank {LAST}: pool" in str(info.value)
    assert (f"(rank {LAST} differs)" in str(info.value)) == (WORLD.size > 2)


@several
def test_agreement_after_a_failure(comm):
    for _ in range(3):
        with pytest.raises(MeshError):
            guard.agree(comm, MeshError("no") if WORLD.rank == 0 else None)
        guard.agree(comm, None, "signature")


# calls


def test_equal_calls(comm):
    for _ in range(3):
        guard.check(comm, "conv", (1, 2), torch.float32)
        guard.check(comm, "sum", None, torch.float32)
    guard.agree(comm, None)


@several
@pytest.mark.parametrize(
    ("usual", "odd", "says"),
    [
        (("conv", (4,), torch.float32), ("pool", (4,), torch.float32), "pool"),
        (("conv", (4,), torch.float32), ("conv", (5,), torch.float32), "(5,)"),
        (("conv", (4,), torch.float32), ("conv", (4,), torch.float64), "torch.float64"),
    ],
)
def test_calls_that_differ(comm, usual, odd, says):
    guard.check(comm, *usual)
    with pytest.raises(DesyncError) as info:
        guard.check(comm, *(odd if WORLD.rank == LAST else usual))
    assert same_everywhere(info.value)
    text = str(info.value)
    assert f"rank {LAST}: call 2: {odd[0]}" in text
    assert says in text.split(f"rank {LAST}: call 2")[1]
    assert (f"(rank {LAST} differs)" in text) == (WORLD.size > 2)


@several
def test_call_that_one_rank_left_out(comm):
    other = WORLD.Dup()
    if WORLD.rank != 0:
        guard._calls(comm)[0] += 1
    with pytest.raises(DesyncError) as info:
        guard.check(comm, "conv", (4,), torch.float32)
    assert "rank 0: call 1: conv" in str(info.value)
    assert "call 2: conv" in str(info.value)
    guard.check(other, "conv", (4,), torch.float32)  # counted apart
    other.Free()


@several
def test_check_against_agreement(comm):
    call = (guard.agree, None, "a plan") if WORLD.rank == 0 else (guard.check, "conv", (4,), torch.float32)
    with pytest.raises(DesyncError) as info:
        call[0](comm, *call[1:])
    assert "rank 0: a plan" in str(info.value)
    assert "call 1: conv" in str(info.value)
    # who catches it goes on: only some ranks would have counted the call
    guard.check(comm, "conv", (4,), torch.float32)


# waiting


def test_bracket_is_entered_and_left(comm):
    before = len(guard._live)
    with guard.waiting("outer", (0,), comm):
        with guard.waiting("inner"):
            assert [entry[0] for entry in list(guard._live.values())[before:]] == ["outer", "inner"]
        with pytest.raises(KeyError), guard.waiting("raises"):
            raise KeyError
        assert len(guard._live) == before + 1
    assert len(guard._live) == before


def test_one_daemon_watches():
    with guard.waiting("once"):
        pass
    with guard.waiting("twice"):
        pass
    watching = [t for t in threading.enumerate() if t.name == "mpishard-watchdog"]
    assert len(watching) == (1 if guard.TIMEOUT_S > 0 else 0)
    assert all(t.daemon for t in watching)


@pytest.mark.skipif(guard.TIMEOUT_S <= 0, reason="nothing is watched")
def test_the_watchdog_keeps_no_error():
    """With its frames it would keep their tensors and open files, until another error waits to be told."""
    wait, error = guard.waiting("telling"), MpishardError("x", expected="", got="", fix="")
    seen = weakref.ref(error)
    guard._untold[wait] = error
    time.sleep(2.5 * min(1.0, guard.TIMEOUT_S / 10))
    wait.__exit__(None, None, None)
    del error
    gc.collect()
    assert not guard._untold
    assert seen() is None


def test_an_error_that_is_told_later_is_printed(monkeypatch):
    """The ranks that it is for may wait for this one, and never come."""
    said = []
    monkeypatch.setattr(guard, "say_for_node", lambda *texts: said.append(texts[0]))
    error = ValueError("of one rank alone")
    guard.hold("key", error)
    ages = guard._looked_at({}, 1.0)
    assert not said
    for _ in range(40):
        ages = guard._looked_at(ages, 1.0)
    assert len(said) == 1
    assert "ValueError: of one rank alone" in said[0]
    guard.hold("key", error)
    guard.release("key")
    assert not guard._looked_at(ages, 60.0)


def test_report_names_world_ranks():
    reverse = WORLD.Split(0, -WORLD.rank)
    text = guard._overdue(12.3, "halo_exchange", (0,), reverse)
    assert f"[rank {WORLD.rank} of {WORLD.size} on " in text
    assert f"halo_exchange has waited 12 s for rank {LAST} of {WORLD.size}." in text
    assert "thread MainThread:" not in text  # it does not list the thread that asks
    others = [r for r in range(WORLD.size) if r != WORLD.rank]
    everyone = guard._overdue(1, "all_reduce", (), WORLD)
    assert f" waited 1 s for {ranks_text(ranges_of(others)) if others else ''}" in everyone
    pending = guard._overdue(1, "send", lambda: [LAST], WORLD)
    assert f"for rank {LAST} of" in pending
    reverse.Free()


def test_report_comes_also_where_mpi_does_not_answer(monkeypatch):
    stuck = threading.Event()
    text = guard._overdue(1, "send", lambda: stuck.wait(30) and [], WORLD)
    stuck.set()
    assert "send has waited 1 s for other ranks (no answer from MPI)." in text
    assert "other ranks" in guard._overdue(1, "send", (WORLD.size + 5,), WORLD)


@pytest.mark.ranks(3, 4)
def test_only_unfinished_peers_are_named(comm):
    buffers = {r: bytearray(4) for r in range(WORLD.size) if r != WORLD.rank}
    requests = [comm.Recv_init(b, r, 5) for r, b in buffers.items()]
    pending = guard.unfinished(requests, list(buffers))
    assert pending() == []  # not started
    MPI.Prequest.Startall(requests)
    comm.Barrier()
    if WORLD.rank == 2:
        for r in range(2):
            comm.Send(bytearray(4), r, 5)
    if WORLD.rank < 2:
        requests[list(buffers).index(2)].Wait()
        assert pending() == [r for r in buffers if r != 2]
        assert guard._pending(pending, comm).startswith("rank")
    comm.Barrier()
    for r in buffers:
        if WORLD.rank != 2 or r > 2:
            comm.Send(bytearray(4), r, 5)
    MPI.Request.Waitall(requests)
    assert pending() == []
    for request in requests:
        request.Free()


# the end of the program


def test_finalizers_run_once_last_first(monkeypatch, capsys):
    order = []
    monkeypatch.setattr(exit, "_finalizers", [])
    exit.on_finalize(lambda: order.append(1))
    exit.on_finalize(lambda: 1 / 0)
    exit.on_finalize(lambda: order.append(3))
    exit._run_finalizers()
    assert order == [3, 1]  # one that fails stops none
    assert "ZeroDivisionError" in capsys.readouterr().err
    exit._run_finalizers()
    assert order == [3, 1]


def test_last_words_pass_a_capture(capfd, monkeypatch):
    read, write = os.pipe()
    monkeypatch.setattr(exit, "uncaptured", write)
    exit.say_at_end("words\n")
    assert os.read(read, 100) == b"words\n"
    assert "words\n" in capfd.readouterr().err
    os.close(read)
    os.close(write)
    # a descriptor that is gone is no error
    exit.say_at_end("more\n")
