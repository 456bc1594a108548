"""A profile sees every kind of call, adds up, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import sys
import time
from contextlib import nullcontext
from io import BytesIO, StringIO, TextIOWrapper

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import mpishard as ms
from mpishard.comm import counter, guard
from mpishard.comm.exchange.window import WindowOp
from mpishard.profiling import Spread
from mpishard.profiling.recorder import COMMUNICATION, Recorder
from tests.compare import WORLD, mesh_of


@pytest.fixture
def folder(tmp_path_factory):
    return WORLD.bcast(tmp_path_factory.mktemp("profile") if WORLD.rank == 0 else None)


@pytest.fixture
def mesh():
    return mesh_of((WORLD.size,))


def shard(mesh, *shape):
    torch.manual_seed(1)
    return ms.distribute_tensor(torch.randn(shape), mesh, (ms.Shard(2),))


def even(value):
    return Spread(value, value, value)


def by_name(prof):
    return {(row.kind, row.name): row for row in prof.rows}


def test_a_training_step(mesh):
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 2, 3, padding=1))
    model = ms.distribute_module(net, mesh)
    x = shard(mesh, 1, 2, 4 * WORLD.size + 1, 8)
    steps = 3
    with ms.profile(mesh, quiet=True) as prof, ms.comm_counter() as count:
        for _ in range(steps):
            F.mse_loss(model(x), x).backward()
    rows = by_name(prof)
    assert prof.ranks == WORLD.size
    for name, calls in (("conv2d", 2 * steps), ("group_norm", steps), ("gelu", steps), ("mse_loss", steps)):
        for kind in ("operation", "backward"):
            assert rows[kind, name].calls == even(calls), (kind, name)
    assert rows["operation", "backward"].calls == even(steps)
    operations = [row for row in prof.rows if row.kind != COMMUNICATION]
    # every nanosecond of every rank once
    assert sum(row.time_s.mean for row in operations) == pytest.approx(prof.elapsed_s.mean, rel=1e-6)
    for row in prof.rows:
        assert 0 <= row.wait_s.min <= row.wait_s.mean <= row.wait_s.max <= row.time_s.max + 1e-9
        assert row.imbalance >= 1 - 1e-9
    # what the counter saw, in both ways of looking
    for rest in (operations, [row for row in prof.rows if row.kind == COMMUNICATION]):
        for metric in ("messages", "nbytes"):
            total = WORLD.allreduce(getattr(count, metric))
            assert round(sum(getattr(row, metric).mean for row in rest) * WORLD.size) == total
    if WORLD.size > 1:
        assert rows["operation", "conv2d"].nbytes.max > 0
        assert rows["backward", "conv2d"].nbytes.max > 0
        assert rows[COMMUNICATION, "conv2d"].wait_s.max > 0


def test_calls_that_are_no_function_of_torch(mesh, folder):
    pytest.importorskip("h5py")
    x = shard(mesh, 1, 2, 3 * WORLD.size, 4)
    plain = torch.ones(3, requires_grad=True)
    field = torch.zeros(6, 5)
    exchanger = ms.HaloExchanger(mesh, field.shape, (1, 0), field.dtype, dims={0: 0})
    with ms.profile(mesh, quiet=True) as prof:
        exchanger(field)
        exchanger.start(field)
        exchanger.finish()
        ms.halo_exchange(x, {2: (1, 1)})
        ms.all_reduce(plain, mesh).sum().backward()
        ms.all_gather(torch.ones(2), mesh)
        ms.shift(torch.ones(2), mesh, 0, 1)
        x.redistribute(placements=[ms.Shard(3)]).full_tensor()
        ms.io.write(folder / "x.h5", {"x": x}, backend="root")
        ms.io.read(folder / "x.h5", "x", mesh, x.placements)
    names = {row.name for row in prof.rows if row.kind == "operation"}
    expected = (
        "HaloExchanger HaloExchanger.start HaloExchanger.finish halo_exchange all_reduce redistribute full_tensor"
    )
    alone = {"halo_exchange", "all_reduce"} if WORLD.size == 1 else set()  # nothing travels, nobody waits
    assert names >= {*expected.split(), "io.write", "io.read"} - alone
    if WORLD.size > 1:
        rows = by_name(prof)
        assert names >= {"all_gather", "send_recv"}
        assert rows["operation", "redistribute"].nbytes.max > 0
        assert rows["operation", "HaloExchanger"].messages.max == 1 + (WORLD.size > 2)
        assert rows[COMMUNICATION, "halo_refresh"].wait_s.max > 0


def test_an_idle_rank_shows(mesh):
    x = shard(mesh, 1, 1, 2 * WORLD.size, 2)
    with ms.profile(mesh, quiet=True) as prof:
        if WORLD.rank == 0:
            torch.ones(300, 300).matmul(torch.ones(300, 300))
            time.sleep(0.5)  # others come to the sum in far less, on a busy machine too
        float(x.sum())
    outside = by_name(prof)["outside", "outside"]
    assert outside.time_s.max >= 0.5
    if WORLD.size > 1:
        assert outside.imbalance > 1.05
        waited = sum(row.wait_s.max for row in prof.rows if row.kind == "operation")
        assert waited > 0.02  # of the others


def test_checkpoints_and_autograd_grad(mesh):
    x = shard(mesh, 1, 1, 2 * WORLD.size, 2).requires_grad_()
    with ms.profile(mesh, quiet=True) as prof:
        y = checkpoint(lambda x: torch.tanh(x) * x, x, use_reentrant=False)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        g.square().sum().backward()
    rows = by_name(prof)
    assert ("operation", "grad") in rows
    assert ("backward", "tanh") in rows
    assert x.grad is not None


def test_trace_has_a_track_a_rank(mesh, folder):
    x = shard(mesh, 1, 2, 2 * WORLD.size, 4)
    with ms.profile(mesh, trace=folder / "a.json", quiet=True) as prof:
        F.avg_pool2d(x, 3, 1, 1)
        x.sum()
    prof.save(folder / "b.json")
    if WORLD.rank == 0:
        first, second = (json.loads((folder / name).read_text()) for name in ("a.json", "b.json"))
        assert first == second
        spans = [event for event in first["traceEvents"] if event["ph"] == "X"]
        assert {event["tid"] for event in spans} == set(range(WORLD.size))
        for rank in range(WORLD.size):
            assert [e["name"] for e in spans if e["tid"] == rank and e["cat"] == "operation"] == ["avg_pool2d", "sum"]
        assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
        assert first["otherData"] == json.loads(json.dumps(prof.to_dict()))
        assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json"]
    WORLD.Barrier()


def test_all_ranks_of_the_program_without_a_mesh(mesh, folder):
    path = folder / "trace.json"
    with ms.profile(trace=path, quiet=True) as prof:
        shard(mesh, 1, 2, 6, 4).sum()
    assert prof.ranks == WORLD.size
    assert by_name(prof)["operation", "sum"].calls == even(1)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["tid"] for e in events if e["ph"] == "X"} == set(range(WORLD.size))


def test_events_have_a_bound(mesh):
    x = shard(mesh, 1, 1, WORLD.size, 2)
    with ms.profile(mesh, quiet=True, most_events=3) as prof:
        for _ in range(5):
            x + 1
    assert by_name(prof)["operation", "add"].calls.max == 5
    assert len(prof._recorder.events) == 3
    assert prof._recorder.left_out == 2


def state():
    return (
        guard.waiting.__init__,
        guard.waiting.__exit__,
        counter.around,
        list(counter.active),
        vars(ms.HaloExchanger)["__call__"],
        vars(ms.ShardTensor)["redistribute"],
        vars(WindowOp)["__call__"],
        torch.overrides._get_current_function_mode_stack(),
    )


def fails(_x):
    raise KeyError


def test_nothing_stays(mesh):
    before = state()
    x = shard(mesh, 1, 1, 2 * WORLD.size, 2).requires_grad_()
    with ms.profile(mesh, quiet=True) as prof:
        y = x.exp().sum()
        assert state() != before
    assert state() == before
    rows = prof.rows
    y.backward()  # hooks of the profile are in the graph, and do nothing
    assert prof.rows == rows
    with pytest.raises(KeyError), ms.profile(mesh, quiet=True) as prof:
        fails(x.exp())
    assert state() == before
    assert prof.ranks == 1
    assert ("operation", "exp") in by_name(prof)
    if WORLD.size > 1:
        with pytest.raises(ms.UnsupportedOperationError, match="ended with an error"):
            prof.save("never.json")
    with ms.profile(mesh, quiet=True):
        pass


def test_table(mesh, capsys):
    x = shard(mesh, 1, 1, 2 * WORLD.size, 2)
    with ms.profile(mesh) as prof:
        x.cumsum(2)
    printed = capsys.readouterr().out
    assert printed == (str(prof) if WORLD.rank == 0 else "")
    assert "cumsum" in str(prof)
    assert f"{WORLD.size} rank" in str(prof)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "utf-16"])
def test_table_in_the_encoding_of_stdout(mesh, monkeypatch, encoding):
    out = TextIOWrapper(BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", out)
    with ms.profile(mesh) as prof:
        shard(mesh, 1, 2, 8, 4).sum().item()
    printed = out.buffer.getvalue().decode(encoding)
    assert ("item" in printed, "?" in printed) == (WORLD.rank == 0, False)
    assert (printed == str(prof)) == (WORLD.rank == 0 and encoding.startswith("utf"))


def test_stdout_that_takes_nothing(mesh, folder, monkeypatch):
    class Full(StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full() if WORLD.rank == 0 else None)
    path = folder / "full.json"
    with ms.profile(mesh, trace=path) as prof:
        shard(mesh, 1, 2, 8, 4).sum().item()
    monkeypatch.undo()
    assert prof.ranks == WORLD.size
    assert path.exists()


def test_misuse_on_all_ranks(mesh, folder):
    with (
        ms.profile(mesh, quiet=True),
        pytest.raises(ms.UnsupportedOperationError, match="profile within a profile"),
        ms.profile(mesh),
    ):
        pass
    with pytest.raises(ms.MeshError, match="expected: a mesh"), ms.profile("mesh"):
        pass
    for path in (folder / "none" / "t.json", folder):
        with pytest.raises(ms.errors.FileError, match="the trace cannot be written"), ms.profile(mesh, trace=path):
            pass
    with pytest.raises(ms.UnsupportedOperationError, match="most_events"), ms.profile(mesh, most_events=-1):
        pass
    prof = ms.profile(mesh)
    with pytest.raises(ms.UnsupportedOperationError, match="did not begin"):
        prof.save(folder / "t.json")
    own = ms.init_mesh((-1,), ("x",))
    own.free()
    with pytest.raises(ms.MeshError, match=r"after free\(\)"), ms.profile(own):
        pass


def test_whatever_rank_0_raises_all_raise(mesh, folder, monkeypatch):
    with ms.profile(mesh, trace=folder / "t.json", quiet=True) as prof:
        pass

    def fail(*_):
        raise AttributeError("of rank 0")

    for name in ("add", "close"):
        monkeypatch.setattr(f"mpishard.profiling.trace.Writer.{name}", fail)  # only rank 0 calls it
        with pytest.raises(ms.errors.FileError, match="of rank 0"):
            prof.save(folder / "again.json")
        monkeypatch.undo()
    mesh.comm.Barrier()
    assert [path.name for path in folder.iterdir()] == ["t.json"]


@pytest.mark.ranks(2, 3)
def test_arguments_that_differ(mesh):
    with pytest.raises(ms.DesyncError, match="different calls"), ms.profile(mesh, quiet=WORLD.rank == 0):
        pass
    with ms.profile(mesh, quiet=True) as prof:
        pass
    assert prof.ranks == WORLD.size


def test_nested_calls_count_once():
    recorder = Recorder(10)
    recorder.begin()
    with recorder.operation("a"):
        recorder.add("message", 1, 8)
        with recorder.operation("b"):
            recorder.add("message", 2, 8)
    recorder.wait_begins("adjoint of window of ('conv2d', 1)")
    recorder.wait_ends()
    recorder.wait_ends()  # of a wait that began before
    recorder.end()
    assert {key: total.calls for key, total in recorder.totals.items()} == {
        ("operation", "a"): 1,
        ("operation", "window"): 1,
        (COMMUNICATION, "message"): 2,
        (COMMUNICATION, "window"): 0,
    }
    assert recorder.totals["operation", "a"].messages == 3


def test_what_returns_its_input_has_no_backward(mesh):
    x = shard(mesh, 1, 2, 4 * WORLD.size, 8).requires_grad_()
    with ms.profile(mesh, quiet=True) as prof:
        y = F.conv2d(x, torch.ones(2, 2, 3, 3), padding=1).contiguous()
        F.dropout(y.to(torch.float32).float(), 0.5, training=False).sum().backward()
    names = {row.name for row in prof.rows if row.kind == "backward"}
    assert {"conv2d", "sum"} <= names
    assert not names & {"contiguous", "to", "float"}
    y = x.neg()
    with ms.profile(mesh, quiet=True) as prof:
        y.contiguous().mul_(2).sum().backward()
    rows = by_name(prof)
    # an operation in place has a backward, one before the profile has no name
    assert ("backward", "mul_") in rows
    assert not {("backward", "contiguous"), ("backward", "neg")} & {*rows}


def test_imports_are_not_measured(mesh, monkeypatch):
    """The first profile of a program imports what it looks at before its clock runs."""
    told = []
    # the class has the name of its module
    monkeypatch.setattr(sys.modules["mpishard.profiling.profile"], "load", lambda: told.append("load"))
    monkeypatch.setattr(Recorder, "begin", lambda self, begin=Recorder.begin: (told.append("begin"), begin(self)))
    with ms.profile(mesh, quiet=True):
        pass
    assert told == ["load", "begin"]


def test_a_compiled_call_is_one_operation_and_stays_compiled(mesh):
    made = []

    def backend(graph, examples):
        made.append(graph)
        return aot_eager(graph, examples)

    run = torch.compile(lambda x: x.sin().sum(), backend=backend, fullgraph=True)
    x = shard(mesh, 1, 2, 4 * WORLD.size + 1, 8).requires_grad_()
    for is_profiled in (True, False, True):
        with ms.profile(mesh, quiet=True) if is_profiled else nullcontext() as prof:
            run(x).backward()
        if is_profiled:
            rows = by_name(prof)
            assert rows["operation", "compiled"].calls == rows["backward", "compiled"].calls == even(1)
            assert ("operation", "sin") not in rows
    assert len(made) == 1
