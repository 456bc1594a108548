"""Raw collectives against what numpy makes of all ranks' data, which every rank can compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mpishard.comm import guard
from mpishard.comm.collective import blocking, nonblocking
from mpishard.comm.counter import comm_counter
from mpishard.comm.device import staging
from mpishard.comm.memory import buffer
from mpishard.comm.point_to_point import ring, send_recv
from mpishard.comm.tag import Label
from mpishard.comm.transport import nccl
from mpishard.errors import DesyncError, LayoutError, UnsupportedDtypeError
from tests.emulated import emulated

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
MOVED = [*FLOATS, *COMPLEX, *INTEGERS, torch.bool, torch.float8_e4m3fn]


@pytest.fixture
def group():
    return blocking.world()


@pytest.fixture(params=["whole", "pieces", "staged", "aware"])
def pieces(request, monkeypatch):
    """Payloads beyond MPI's counts, which no test machine holds: the limit comes down instead.

    Also over the emulated device, through the host in pieces or as messages from device to device.
    """
    if request.param == "whole":
        yield
        return
    monkeypatch.setattr(buffer, "MESSAGE_NBYTES", 48)
    if request.param == "pieces":
        yield
        return
    own = blocking.world()._replace(aware=request.param == "aware")
    monkeypatch.setattr(blocking, "world", lambda: own)
    with emulated(kernel=True) as driver:
        yield
        driver.wait_all()
        assert not driver.lent
        assert not driver.allocated


def block(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17 + rank)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 4, shape, generator=generator).to(dtype)


def as_numpy(x: torch.Tensor) -> np.ndarray:
    return (x.double() if x.dtype in FLOATS else x).numpy()


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().view(-1).view(torch.uint8).tolist()


def expect(y: torch.Tensor, wanted: np.ndarray, dtype: torch.dtype) -> None:
    assert y.dtype == dtype
    assert y.is_contiguous()
    eps = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0
    np.testing.assert_allclose(as_numpy(y), wanted, rtol=4 * eps, atol=4 * eps)


REDUCED = {
    "sum": (np.sum, [*FLOATS, *COMPLEX, *INTEGERS]),
    "prod": (np.prod, [*FLOATS, *COMPLEX, *INTEGERS]),
    "max": (np.max, [*FLOATS, *INTEGERS, torch.bool]),
    "min": (np.min, [*FLOATS, *INTEGERS, torch.bool]),
}


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("op", REDUCED)
def test_all_reduce(group, op, deterministic):
    reduction, dtypes = REDUCED[op]
    for dtype in dtypes:
        blocks = [block(r, (5, 7), dtype) for r in range(group.size)]
        stack = np.stack([as_numpy(b) for b in blocks])
        wanted = reduction(stack, axis=0).astype(stack.dtype)
        x = blocks[group.rank].clone()
        y = blocking.all_reduce(x, group, op, deterministic=deterministic)
        expect(y, wanted, dtype)
        assert torch.equal(x, blocks[group.rank])
        expect(blocking.all_reduce(x.t(), group, op, deterministic=deterministic), wanted.T, dtype)
        inside = blocking.all_reduce(x, group, op, deterministic=deterministic, in_place=True)
        assert inside is x
        assert torch.equal(x, y)


def test_all_reduce_in_place_of_strided(group):
    x = torch.arange(12.0).view(3, 4).t()
    wanted = x * group.size
    assert blocking.all_reduce(x, group, in_place=True) is x
    assert torch.equal(x, wanted)


def by_halves(blocks):
    """Sum as the ranks of a tree do: what is beyond a power of two first, then the halves with each other."""
    most = 1 << (len(blocks).bit_length() - 1)
    sums = [b + blocks[r + most] if r + most < len(blocks) else b for r, b in enumerate(blocks[:most])]
    while len(sums) > 1:
        sums = [low + high for low, high in zip(sums[: len(sums) // 2], sums[len(sums) // 2 :])]
    return sums[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_small_ordered_sums_are_those_of_a_tree(group, dtype):
    blocks = [block(r, (3, 5), dtype) * 10.0 ** (r % 3) for r in range(group.size)]
    carried = torch.float32 if dtype == torch.float16 else dtype
    wanted = by_halves([b.to(carried) for b in blocks]).to(dtype)
    for x in (blocks[group.rank].clone(), blocks[group.rank].t().contiguous().t()):
        assert bits(blocking.all_reduce(x, group, deterministic=True)) == bits(wanted)
    with comm_counter() as count:
        blocking.all_reduce(blocks[group.rank], group, deterministic=True)
    assert count.messages <= group.size.bit_length()
    assert count.nbytes <= group.size.bit_length() * wanted.numel() * carried.itemsize


@pytest.mark.parametrize("n", [3, 5000])
def test_ordered_sums_have_a_fixed_order(group, n, monkeypatch):
    # magnitudes that no other order sums to the same bits
    blocks = [block(r, (n,), torch.float32) * 10.0 ** (3 * r) for r in range(group.size)]
    whole = by_halves(blocks) if n < 1000 else sum(blocks[1:], blocks[0])
    wanted = sum(blocks[1:], blocks[0])
    assert bits(blocking.all_reduce(blocks[group.rank], group, deterministic=True)) == bits(whole)
    assert bits(blocking.reduce(blocks[group.rank], group, 0, deterministic=True)) == bits(
        whole if group.rank == 0 else torch.zeros(n)
    )
    sizes = blocking.even(n, group.size)
    mine = blocking.reduce_scatter(blocks[group.rank], group, 0, sizes, deterministic=True)
    assert bits(mine) == bits(wanted.split(sizes)[group.rank])
    later = blocks[group.rank].clone()
    assert bits(nonblocking.iall_reduce(later, group, deterministic=True).wait()) == bits(wanted)
    monkeypatch.setattr(blocking, "DETERMINISTIC", True)
    assert bits(blocking.all_reduce(blocks[group.rank], group)) == bits(whole)


def test_extrema_of_special_values(group):
    for dtype in FLOATS:
        inf, nan = float("inf"), float("nan")
        first, last = [1.0, nan, -0.5, inf, -inf, -3.0, 0.0], [2.0, 3.0, -1.0, -inf, -inf, nan, -0.0]
        rows = [first, *[last] * (group.size - 1)]
        x = torch.tensor(rows[group.rank], dtype=dtype)
        stack = np.array(rows)
        for op, reduction in (("max", np.max), ("min", np.min)):
            np.testing.assert_array_equal(as_numpy(blocking.all_reduce(x, group, op)), reduction(stack, axis=0))


def test_half_sums_are_accumulated_in_float32(group):
    # in float16, 2048 + 1 is 2048 again
    x = torch.full((4,), 2048.0 if group.rank == 0 else 1.0, dtype=torch.float16)
    wanted = torch.tensor(2048.0 + group.size - 1).half()
    for deterministic in (False, True):
        assert (blocking.all_reduce(x, group, deterministic=deterministic) == wanted).all()
        mine = blocking.reduce_scatter(x, group, 0, blocking.even(4, group.size), deterministic=deterministic)
        assert (mine == wanted).all()


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("sum", torch.bool), ("prod", torch.bool), ("max", torch.complex64), ("sum", torch.float8_e4m3fn)],
)
def test_unsupported_reductions(group, op, dtype):
    with pytest.raises(UnsupportedDtypeError, match=str(dtype)):
        blocking.all_reduce(block(0, (3,), dtype), group, op)


def test_unknown_reduction(group):
    with pytest.raises(UnsupportedDtypeError, match="sum, prod, max, min"):
        blocking.all_reduce(torch.ones(3), group, "median")


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("extents", [(2, 2, 2, 2), (3, 0, 1, 4), (0, 0, 0, 0)])
def test_all_gather(group, dim, extents):
    for dtype in MOVED:
        sizes = (extents * 2)[: group.size]
        blocks = []
        for r, n in enumerate(sizes):
            shape = [3, 1, 2]
            shape[dim] = n
            blocks.append(block(r, tuple(shape), dtype))
        y = blocking.all_gather(blocks[group.rank], group, dim, sizes)
        assert y.is_contiguous()
        assert y.dtype == dtype
        wanted = torch.cat([b.view(torch.uint8) if dtype == torch.float8_e4m3fn else b for b in blocks], dim)
        assert torch.equal(y.view(torch.uint8) if dtype == torch.float8_e4m3fn else y, wanted)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("extents", [(2, 2, 2, 2), (3, 0, 1, 4), (0, 0, 0, 0)])
def test_reduce_scatter(group, dim, extents, deterministic):
    for dtype in (*FLOATS, *COMPLEX, torch.int64, torch.uint8):
        sizes = (extents * 2)[: group.size]
        shape = (sum(sizes), 3) if dim == 0 else (3, sum(sizes))
        blocks = [block(r, shape, dtype) for r in range(group.size)]
        total = np.stack([as_numpy(b) for b in blocks]).sum(axis=0, dtype=as_numpy(blocks[0]).dtype)
        wanted = np.split(total, np.cumsum(sizes)[:-1], axis=dim)[group.rank]
        expect(
            blocking.reduce_scatter(blocks[group.rank], group, dim, sizes, deterministic=deterministic), wanted, dtype
        )


@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_go_around(group, op, dtype):
    """Many enough that a library takes them in vectors, where some end at the largest number instead."""
    n = 100 * group.size
    x = torch.full((n,), torch.iinfo(dtype).max - 3, dtype=dtype)
    with np.errstate(over="ignore"):
        wanted = getattr(np, op)(np.stack([x.numpy()] * group.size), axis=0, dtype=x.numpy().dtype)
    expect(blocking.all_reduce(x, group, op), wanted, dtype)
    expect(blocking.all_reduce(x[:5], group, op), wanted[:5], dtype)
    if op == "sum":
        expect(nonblocking.iall_reduce(x.clone(), group).wait(), wanted, dtype)
        part = slice(100 * group.rank, 100 * group.rank + 100)
        expect(blocking.reduce_scatter(x, group, 0, [100] * group.size), wanted[part], dtype)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool], ids=str)
def test_all_to_all(group, dtype):
    def sent(source: int, dest: int) -> torch.Tensor:
        return block(10 * source + dest, (source, 2, dest + 1), dtype)

    blocks = [sent(group.rank, d) for d in range(group.size)]
    shapes = [(s, 2, group.rank + 1) for s in range(group.size)]
    came = blocking.all_to_all(blocks, shapes, group, 4096)
    for source, y in enumerate(came):
        assert torch.equal(y, sent(source, group.rank))


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("shape", [(5, 3), (0, 3), ()])
def test_broadcast_and_reduce(group, shape):
    for dtype in (torch.float32, torch.bfloat16, torch.complex128, torch.bool):
        root = group.size - 1
        blocks = [block(r, shape, dtype) for r in range(group.size)]
        assert torch.equal(blocking.broadcast(blocks[group.rank], group, root), blocks[root])
        if dtype == torch.bool:
            continue
        y = blocking.reduce(blocks[group.rank], group, root)
        wanted = np.stack([as_numpy(b) for b in blocks]).sum(axis=0)
        expect(y, wanted if group.rank == root else np.zeros_like(wanted), dtype)
        x = blocks[group.rank].clone()
        assert blocking.broadcast(x, group, root, in_place=True) is x
        assert torch.equal(x, blocks[root])


@pytest.mark.usefixtures("pieces")
def test_send_recv_around_a_ring(group):
    for dtype in MOVED:
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        y = send_recv.send_recv(block(group.rank, (5, group.rank), dtype), group, after, before, (5, before))
        assert bits(y) == bits(block(before, (5, before), dtype))
        nothing = send_recv.send_recv(torch.ones(2), group, None, None, (3,))
        assert torch.equal(nothing, torch.zeros(3))


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("n", [1, 5, 64])
def test_blocks_go_round(group, n):
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    label = Label("probe", [group.comm])
    label.number = 1
    for dtype in (torch.float32, torch.bfloat16, torch.complex128, torch.bool):
        x = block(group.rank, (n + group.rank,), dtype)
        coming = ring.receive(n + before, dtype, x.device, group, before, ring.ONWARD, label)
        going = ring.send(x, group, after, ring.ONWARD, label)
        coming.poke()
        assert bits(coming.wait()) == bits(block(before, (n + before,), dtype))
        assert torch.equal(going.wait(), x)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usefixtures("pieces")
def test_a_message_that_does_not_fit_leaves_nothing_behind(group):
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x = torch.arange(3.0) + group.rank
    wrong = 5 if group.rank == 0 else 3
    if group.rank == 0:
        with pytest.raises(LayoutError, match="does not fit"):
            send_recv.send_recv(x, group, after, before, (wrong,))
    else:
        send_recv.send_recv(x, group, after, before, (wrong,))
    assert torch.equal(send_recv.send_recv(x + 10, group, after, before, (3,)), torch.arange(3.0) + before + 10)


def test_in_place_on_lazy_conjugates(group):
    """What one rank has resolved, another may hold lazily."""
    z = torch.tensor([1 + 2j, 3 - 4j])
    lazy = z.conj() if group.rank % 2 else z.conj().resolve_conj()
    assert torch.equal(
        blocking.broadcast(lazy.clone() if group.rank % 2 == 0 else lazy, group, 0, in_place=True), z.conj()
    )
    mine = z.clone().conj() if group.rank % 2 else z.conj().resolve_conj()
    blocking.all_reduce(mine, group, in_place=True)
    assert torch.equal(mine, z.conj().resolve_conj() * group.size)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("deterministic", [False, True])
def test_pending_reductions_overlap(group, deterministic):
    for dtype in (*FLOATS, *COMPLEX, torch.int32):
        blocks = [[block(10 * r + i, (4, i), dtype) for i in range(3)] for r in range(group.size)]
        mine = [b.clone() for b in blocks[group.rank]]
        handles = [nonblocking.iall_reduce(x, group, deterministic=deterministic) for x in mine]
        handles[0].poke()
        for i, (handle, x) in enumerate(zip(handles, mine, strict=True)):
            assert handle.wait() is x
            expect(x, np.stack([as_numpy(b[i]) for b in blocks]).sum(axis=0), dtype)


def test_lazy_conjugates_and_symbolic_zeros_have_values(group):
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(blocking.all_reduce(z.conj(), group), z.conj().resolve_conj() * group.size)
    assert torch.equal(blocking.all_reduce(z.conj().imag, group), torch.tensor([-2.0, 4.0]) * group.size)
    sizes = (2,) * group.size
    assert torch.equal(blocking.all_gather(z.conj(), group, 0, sizes), z.conj().resolve_conj().repeat(group.size))
    zero = torch._efficientzerotensor((3,), dtype=torch.float32)
    assert torch.equal(blocking.all_reduce(zero, group), torch.zeros(3))


def test_pieces_of_many_blocks(monkeypatch):
    monkeypatch.setattr(staging, "PIECE_NBYTES", 64)
    monkeypatch.setattr(staging, "LEAST_NBYTES", 8)
    assert staging.cut_blocks([0, 0]) == []
    assert staging.cut(100, 8) == [((0, 64),), ((64, 100),)]
    blocks = [40, 0, 100, 8]
    for itemsize in (1, 4):
        pieces = staging.cut_blocks(blocks, itemsize)
        for k, (lo, hi) in enumerate(buffer.spans(blocks)):
            own = [piece[k] for piece in pieces]
            assert [a for a, _ in own] == [min(a, hi) for a in [lo, *[b for _, b in own]][:-1]]
            assert own[-1][1] == hi
            assert all((b - a) % itemsize == 0 for a, b in own)
        assert all(sum(b - a for a, b in piece) <= 64 for piece in pieces)
    # one long block among many short ones, and many blocks at all
    assert len(staging.cut_blocks([1000, *[1] * 63])) == 17
    assert len(staging.cut_blocks([16] * 64)) == 2


@pytest.mark.ranks(2, 3, 4)
def test_counters_see_the_bytes(group):
    x = torch.ones(6 * group.size)
    with comm_counter() as count:
        blocking.all_reduce(x, group, deterministic=False)
        blocking.all_gather(x, group, 0, (x.numel(),) * group.size)
        blocking.reduce_scatter(x, group, 0, (6,) * group.size, deterministic=False)
        blocking.broadcast(x, group, 0)
        nonblocking.iall_reduce(x.clone(), group, deterministic=False).wait()
    assert {op: (c.calls, c.nbytes) for op, c in count.by_op.items()} == {
        "all_reduce": (2, 2 * x.nbytes),
        "all_gather": (1, x.nbytes),
        "reduce_scatter": (1, x.nbytes),
        "broadcast": (1, x.nbytes if group.rank == 0 else 0),
    }


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    "call",
    [
        lambda x, group: blocking.all_gather(x, group, 0, (3,) * group.size),
        lambda x, group: blocking.all_to_all([x] * group.size, [(3,)] * group.size, group, 12 * group.size),
        lambda x, group: blocking.broadcast(x, group, 0),
    ],
    ids=["all_gather", "all_to_all", "broadcast"],
)
def test_calls_on_a_device_are_compared_before_anything_moves(group, monkeypatch, call):
    monkeypatch.setattr(guard, "DEBUG", True)
    monkeypatch.setattr(nccl, "link_of", lambda *_: pytest.fail("not compared"))
    odd = torch.float64 if group.rank == 1 else torch.float32
    with pytest.raises(DesyncError, match="rank 1"):
        call(torch.empty(3, dtype=odd, device="meta"), group)


def test_counters_of_the_same_counts_are_two(group):
    x = torch.ones(group.size)
    with comm_counter() as outer:
        with comm_counter() as inner:
            blocking.all_reduce(x, group, deterministic=False)
        assert inner == outer
        blocking.all_reduce(x, group, deterministic=False)
    assert (inner.calls, outer.calls) == ((1, 2) if group.size > 1 else (0, 0))
