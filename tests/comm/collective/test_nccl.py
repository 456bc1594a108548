"""The calls to NCCL against MPI, with a library of the same interface that runs on host memory."""

import types

import pytest
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard.comm.collective import blocking, nonblocking
from mpishard.comm.transport import nccl
from tests.emulated import emulated

WORLD = MPI.COMM_WORLD
BYTE, FLOAT32, FLOAT64, INT64 = 1, 7, 8, 4


class Communicator:
    """NCCL's, as cupy shows it: addresses, counts, codes, a stream."""

    queued: list = []
    grouped = False

    def __init__(self, size, identity, rank):
        assert (size, rank, identity) == (WORLD.size, WORLD.rank, "the first rank's")

    def allReduce(self, source, target, count, dtype, op, stream):
        kind, size = {FLOAT64: (MPI.DOUBLE, 8), FLOAT32: (MPI.FLOAT, 4), INT64: (MPI.INT64_T, 8)}[dtype]
        send, recv = (MPI.buffer.fromaddress(a, count * size) for a in (source, target))
        give = MPI.IN_PLACE if source == target else (send, kind)
        WORLD.Allreduce(give, (recv, kind), {0: MPI.SUM, 1: MPI.PROD, 2: MPI.MAX, 3: MPI.MIN}[op])

    def broadcast(self, source, target, count, dtype, root, stream):
        assert dtype == BYTE
        assert source == target
        WORLD.Bcast(MPI.buffer.fromaddress(target, count), root)

    def send(self, at, count, dtype, peer, stream):
        assert self.grouped
        self.queued.append(WORLD.Isend(MPI.buffer.fromaddress(at, count), peer, 3))

    def recv(self, at, count, dtype, peer, stream):
        assert self.grouped
        self.queued.append(WORLD.Irecv(MPI.buffer.fromaddress(at, count), peer, 3))


def group_start():
    Communicator.grouped = True


def group_end():
    MPI.Request.Waitall(Communicator.queued)
    Communicator.queued.clear()
    Communicator.grouped = False


@pytest.fixture
def library(monkeypatch):
    found = types.SimpleNamespace(
        available=1,
        get_unique_id=lambda: "the first rank's",
        NcclCommunicator=Communicator,
        groupStart=group_start,
        groupEnd=group_end,
        NCCL_UINT8=BYTE,
        NCCL_INT8=0,
        NCCL_INT32=2,
        NCCL_INT64=INT64,
        NCCL_FLOAT32=FLOAT32,
        NCCL_FLOAT64=FLOAT64,
        NCCL_SUM=0,
        NCCL_PROD=1,
        NCCL_MAX=2,
        NCCL_MIN=3,
    )
    monkeypatch.setattr(nccl, "_library", lambda: found)
    monkeypatch.setattr(nccl.Link, "_stream", lambda self: 0)
    monkeypatch.setattr(nccl, "_identity", lambda device: f"GPU of rank {WORLD.rank}")
    monkeypatch.setattr(torch.cuda, "device", Nothing)
    return found


class Nothing:
    def __init__(self, device):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.fixture
def link(library):
    found = nccl.connect(blocking.world(), torch.device("cpu"))
    assert found is not None
    return found


def mine(rank, n=5):
    return torch.arange(n, dtype=torch.float64) + 10 * rank


def test_reductions(link):
    every = [mine(r) for r in range(WORLD.size)]
    x, y = mine(WORLD.rank), mine(0)
    link.all_reduce(x, y, "sum")
    assert torch.equal(y, sum(every))
    x = x.long()
    link.all_reduce(x, x, "prod")
    assert torch.equal(x, torch.stack(every).long().prod(0))
    x = mine(WORLD.rank).long()
    link.all_reduce(x, x, "max")
    assert torch.equal(x, every[-1].long())
    assert link.serves(torch.float64, "sum")
    assert link.serves(torch.int32, "max")
    assert not link.serves(torch.float64, "max")
    assert not link.serves(torch.bfloat16)


def test_what_moves(link):
    sizes = [r + 1 for r in range(WORLD.size)]
    whole = torch.empty(sum(sizes), dtype=torch.float64)
    link.all_gather(mine(WORLD.rank, WORLD.rank + 1), whole, sizes)
    assert torch.equal(whole, torch.cat([mine(r, r + 1) for r in range(WORLD.size)]))
    blocks = [mine(WORLD.rank, to) for to in range(WORLD.size)]  # one of them empty
    got = [torch.empty(WORLD.rank, dtype=torch.float64) for _ in range(WORLD.size)]
    link.all_to_all(blocks, got)
    assert torch.equal(torch.cat(got), torch.cat([mine(r, WORLD.rank) for r in range(WORLD.size)]))
    last = WORLD.size - 1
    x = mine(WORLD.rank)
    link.broadcast(x, last)
    assert torch.equal(x, mine(last))


def test_collectives_go_by_nccl_where_it_serves(link, monkeypatch):
    """The same values as by MPI; a stand-in for NCCL is asked on an emulated device."""
    monkeypatch.setattr(nccl, "link_of", lambda group, x, nbytes: link)
    group, size = blocking.world(), WORLD.size
    blocks = [mine(WORLD.rank, to) for to in range(size)]
    shapes = [(WORLD.rank,)] * size

    def results():
        x = mine(WORLD.rank)
        inside = x.clone()
        return [
            blocking.all_reduce(x, group),
            blocking.all_reduce(x.bfloat16(), group),
            blocking.all_reduce(x.long(), group, "min"),
            blocking.all_reduce(x, group, "max"),
            blocking.all_gather(mine(WORLD.rank, WORLD.rank + 1)[None], group, 1, [r + 1 for r in range(size)]),
            *blocking.all_to_all(blocks, shapes, group, 4096),
            blocking.broadcast(x, group, size - 1),
            nonblocking.iall_reduce(inside, group).wait(),
        ]

    expected = results()
    with emulated(kernel=True), ms.comm_counter() as count:
        for got, want in zip(results(), expected, strict=True):
            assert torch.equal(got, want)
    if size > 1:
        assert count.by_op["all_reduce"].messages == 5
        assert count.by_op["all_gather"].nbytes == 8 * (WORLD.rank + 1)


def test_ranks_that_share_a_gpu_do_without(library, monkeypatch):
    monkeypatch.setattr(nccl, "_identity", lambda device: "the only one")
    assert nccl.connect(blocking.world(), torch.device("cpu")) is None or WORLD.size == 1
    monkeypatch.setattr(nccl, "_identity", lambda device: None if WORLD.rank == 0 else str(WORLD.rank))
    assert nccl.connect(blocking.world(), torch.device("cpu")) is None


def test_one_rank_that_cannot_start_is_an_error_on_all(library, monkeypatch):
    class Broken(Communicator):
        def __init__(self, *arguments):
            if WORLD.rank == WORLD.size - 1:
                raise RuntimeError("unhandled system error")

    library.NcclCommunicator = Broken
    with pytest.raises(ms.MpishardError, match="MPISHARD_NCCL=0"):
        nccl.connect(blocking.world(), torch.device("cpu"))


def test_the_environment_turns_it_off(monkeypatch):
    monkeypatch.setenv("MPISHARD_NCCL", "0")
    assert not nccl.wanted()
    assert nccl._identity(torch.device("cpu")) is None


def test_a_switch_of_one_rank_that_says_nothing_is_an_error_on_all(monkeypatch):
    if WORLD.rank == WORLD.size - 1:
        monkeypatch.setenv("MPISHARD_NCCL", "maybe")
    with pytest.raises(ms.MpishardError, match="MPISHARD_NCCL: unknown value"):
        nccl.connect(blocking.world(), torch.device("cpu"))
