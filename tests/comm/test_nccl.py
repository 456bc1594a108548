"""The calls to NCCL against MPI, with a library of the same interface that runs on host memory."""

import types

import pytest
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard.comm import collective, nccl, staging
from tests.emulated import emulated

WORLD = MPI.COMM_WORLD
BYTE, FLOAT64, INT64 = 1, 8, 4


class Communicator:
    """NCCL's, as cupy shows it: addresses, counts, codes, a stream."""

    queued: list = []
    grouped = False

    def __init__(self, size, identity, rank):
        assert (size, rank, identity) == (WORLD.size, WORLD.rank, "the first rank's")

    def allReduce(self, source, target, count, dtype, op, stream):
        kind = {FLOAT64: MPI.DOUBLE, INT64: MPI.INT64_T}[dtype]
        send, recv = (MPI.buffer.fromaddress(a, count * 8) for a in (source, target))
        WORLD.Allreduce((send, kind), (recv, kind), {0: MPI.SUM, 1: MPI.PROD}[op])

    def broadcast(self, source, target, count, dtype, root, stream):
        assert dtype == BYTE
        if WORLD.rank == root:
            MPI.buffer.fromaddress(target, count)[:] = MPI.buffer.fromaddress(source, count)
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
        NCCL_FLOAT32=7,
        NCCL_FLOAT64=FLOAT64,
        NCCL_SUM=0,
        NCCL_PROD=1,
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
    found = nccl.connect(collective.world(), torch.device("cpu"))
    assert found is not None
    return found


def mine(rank, n=5):
    return torch.arange(n, dtype=torch.float64) + 10 * rank


def test_reductions(link):
    every = [mine(r) for r in range(WORLD.size)]
    assert torch.equal(link.all_reduce(mine(WORLD.rank), "sum"), sum(every))
    assert torch.equal(link.all_reduce(mine(WORLD.rank).long(), "prod"), torch.stack(every).long().prod(0))
    assert link.serves(torch.float64, "sum")
    assert not link.serves(torch.float64, "max")
    assert not link.serves(torch.bfloat16)


def test_what_moves(link):
    sizes = [r + 1 for r in range(WORLD.size)]
    whole = link.all_gather(mine(WORLD.rank, WORLD.rank + 1), sizes)
    assert torch.equal(whole, torch.cat([mine(r, r + 1) for r in range(WORLD.size)]))
    blocks = [mine(WORLD.rank, to) for to in range(WORLD.size)]  # one of them empty
    got = link.all_to_all(blocks, [WORLD.rank] * WORLD.size)
    assert torch.equal(got, torch.cat([mine(r, WORLD.rank) for r in range(WORLD.size)]))
    last = WORLD.size - 1
    assert torch.equal(link.broadcast(mine(WORLD.rank), last), mine(last))
    with ms.comm_counter() as count:
        link.all_reduce(mine(0), "sum")
        link.all_gather(mine(0), [5] * WORLD.size)
    assert count.by_op["all_reduce"].nbytes == count.by_op["all_gather"].nbytes == 40


def test_ranks_that_share_a_gpu_do_without(library, monkeypatch):
    monkeypatch.setattr(nccl, "_identity", lambda device: "the only one")
    assert nccl.connect(collective.world(), torch.device("cpu")) is None or WORLD.size == 1
    monkeypatch.setattr(nccl, "_identity", lambda device: None if WORLD.rank == 0 else str(WORLD.rank))
    assert nccl.connect(collective.world(), torch.device("cpu")) is None


def test_one_rank_that_cannot_start_is_an_error_on_all(library, monkeypatch):
    class Broken(Communicator):
        def __init__(self, *arguments):
            if WORLD.rank == WORLD.size - 1:
                raise RuntimeError("unhandled system error")

    library.NcclCommunicator = Broken
    with pytest.raises(ms.MpishardError, match="MPISHARD_NCCL=0"):
        nccl.connect(collective.world(), torch.device("cpu"))


def test_the_environment_turns_it_off(monkeypatch):
    monkeypatch.setenv("MPISHARD_NCCL", "0")
    assert not nccl.wanted()
    assert nccl._identity(torch.device("cpu")) is None


@pytest.mark.parametrize("nbytes", [1, 24, 1 << 20])
def test_reductions_through_the_host_in_pieces(monkeypatch, nbytes):
    monkeypatch.setattr(staging, "PIECE_NBYTES", nbytes)
    with emulated(kernel=True) as driver:
        for n in (0, 1, 7):
            x = mine(WORLD.rank, n)
            pieces = []

            def reduce(piece, pieces=pieces):
                pieces.append(piece.numel())
                memory = MPI.buffer.fromaddress(piece.data_ptr(), piece.nbytes)
                WORLD.Allreduce(MPI.IN_PLACE, (memory, MPI.DOUBLE))

            y = staging.reduced(x, driver, reduce)
            assert torch.equal(y, sum(mine(r, n) for r in range(WORLD.size)))
            assert torch.equal(x, mine(WORLD.rank, n))
            assert len(pieces) == -(-n * 8 // max(8, nbytes // 8 * 8))
        assert not driver.lent
