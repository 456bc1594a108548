"""Marks of small all-reduces: what equal calls give is known before, what others give is another."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.comm import guard
from mpishard.comm.collective import blocking, nonblocking
from mpishard.comm.memory.reduction_type import rule_of
from mpishard.comm.transport import nccl
from mpishard.comm.transport.choice import transport_of
from mpishard.comm.transport.slot import marks
from tests.compare import WORLD, mesh_of
from tests.emulated import emulated

DTYPES = "uint8 int8 int16 int32 int64 float32 float64 complex64 complex128 float16 bfloat16 bool".split()


def calls():
    """Give operations, each with the dtype of what is reduced and that which travels."""
    for op, dtype in itertools.product(("sum", "max", "min"), map(torch.__dict__.get, DTYPES)):
        if not (op != "sum" and dtype.is_complex) and not (op == "sum" and dtype is torch.bool):
            yield op, dtype, (rule_of(op, dtype).carrier or dtype) if op == "sum" else torch.int64


def marks_of(call, size):
    op, _, travels = call
    return marks(str(call), travels, size, summed=op == "sum")


def combined(call, a, b):
    """As MPI reduces them, in the type of the numbers."""
    op, _, travels = call
    a, b = (np.frombuffer(x, str(travels).removeprefix("torch.")) for x in (a, b))
    return (a + b if op == "sum" else np.maximum(a, b)).tobytes()


@pytest.mark.parametrize("size", [1, 2, 7, 255, 65536, 10**7])
def test_marks_of_any_number_of_ranks(size):
    found = set()
    for call in calls():
        mine, expected = marks_of(call, size)
        assert len(mine) == len(expected) == 16
        total, power, left = None, mine, size
        while left:
            if left & 1:
                total = power if total is None else combined(call, total, power)
            power, left = combined(call, power, power), left >> 1
        assert total == expected
        found.add(mine)
    # fewer bits are left where ranks are very many
    assert size > 10**6 or len(found) == len([*calls()])


@pytest.mark.parametrize("odd_rank", range(4))
def test_no_rank_takes_a_mixture_for_its_own(odd_rank):
    """Four ranks, one of which reduces otherwise, each in its own way: halves that exchange what they have."""
    with np.errstate(all="ignore"):
        for most, odd in itertools.permutations(calls(), 2):
            own = [odd if r == odd_rank else most for r in range(4)]
            told = [marks_of(call, 4) for call in own]
            have = [mine for mine, _ in told]
            for half in (1, 2):
                have = [combined(call, have[r], have[r ^ half]) for r, call in enumerate(own)]
            assert all(came != expected for came, (_, expected) in zip(have, told)), (most, odd)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("most", "odd"),
    [
        (ms.all_reduce, lambda x, mesh: ms.all_reduce(x.double(), mesh)),
        (ms.all_reduce, lambda x, mesh: ms.all_reduce(x.view(torch.int32), mesh)),
        (ms.all_reduce, lambda x, mesh: ms.all_reduce(x[1:], mesh)),
        (ms.all_reduce, lambda x, mesh: ms.all_reduce(x, mesh, op="max")),
        (lambda x, mesh: ms.all_reduce(x, mesh, op="min"), lambda x, mesh: ms.all_reduce(x, mesh, op="max")),
        (ms.all_reduce, lambda x, mesh: ms.all_reduce(x.repeat(2, 3), mesh)),
    ],
    ids="dtype bytes length op extremum new".split(),
)
def test_reductions_that_differ(most, odd, request):
    """Without a comparison of calls, and with plans that are there."""
    mesh, x = mesh_of((WORLD.size,)), torch.arange(5.0)
    calls = [most] if "new" in request.node.name else [most, odd]
    for call in calls:
        call(x, mesh)
    last = WORLD.size - 1
    with pytest.raises(ms.DesyncError, match="different calls") as e:
        (odd if last == WORLD.rank else most)(x, mesh)
    assert len(set(WORLD.allgather(str(e.value)))) == 1
    if WORLD.size > 2:
        assert f"rank {last} differs" in str(e.value)


def with_plans():
    """A mesh that has what is agreed on once."""
    mesh = mesh_of((WORLD.size,))
    for op, dtype in itertools.product(("sum", "max"), (torch.int32, torch.float32)):
        for n in (256, 2):
            ms.all_reduce(torch.ones(n, dtype=dtype), mesh, op=op)
    return mesh


@pytest.fixture(params=["host", "device", "nccl"])
def kind(request):
    """Where tensors lie: on the host, or they travel as those on a device do."""
    return request.param


@pytest.fixture
def group(kind, monkeypatch):
    """All ranks."""
    ranks = with_plans().group((0,))
    with emulated(kernel=True) if kind != "host" else contextlib.nullcontext():
        if kind == "nccl":
            monkeypatch.setattr(nccl, "link_of", lambda group, x, nbytes: None if nbytes < 512 else Silent())
        yield ranks


COUNTS = {2: [200, 56], 3: [200, 0, 56]}
# what has no mark of its own, called by a tensor and a group
UNMARKED = {
    "all_reduce sum": blocking.all_reduce,
    "all_reduce max": lambda x, group: blocking.all_reduce(x, group, "max"),
    "all_reduce prod": lambda x, group: blocking.all_reduce(x[:2], group, "prod"),
    "reduce": lambda x, group: blocking.reduce(x, group, 0),
    "broadcast": lambda x, group: blocking.broadcast(x, group, 0),
    "reduce_scatter": lambda x, group: blocking.reduce_scatter(x, group, 0, COUNTS[group.size]),
    "all_gather": lambda x, group: blocking.all_gather(x, group, 0, [256] * group.size),
    "all_to_all": lambda x, group: blocking.all_to_all_flat(
        x[: 16 * group.size], [16] * group.size, [16] * group.size, group, 1 << 20
    ),
    "reduce_scatter in the background": lambda x, group: nonblocking.ireduce_scatter(
        x.expand(group.size, 256).contiguous(), group
    ).wait(),
    "all_gather in the background": lambda x, group: nonblocking.iall_gather([x], group).wait(),
}
# compared at the next mark: on the host, what goes on in the background, else what NCCL carries
NOTED = {
    "host": [op for op in UNMARKED if "background" in op],
    "device": [],
    "nccl": ["all_reduce sum", "all_reduce max", "all_gather", "all_gather in the background", "all_to_all"],
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("odd", [torch.int32, torch.float32])
@pytest.mark.parametrize("op", UNMARKED)
def test_what_has_no_mark_is_named_at_once_or_at_the_next(group, kind, op, odd):
    """Equal bytes of another dtype: MPI moves and adds them in silence."""
    for _ in range(2):
        x = torch.ones(256, dtype=odd if WORLD.rank == WORLD.size - 1 else torch.float32)
        noted, name = op in NOTED[kind], op.partition(" in")[0]
        if noted or odd is torch.float32:
            UNMARKED[op](x, group)
        if odd is not torch.float32:
            call, y = (blocking.all_reduce, x[:2].float()) if noted else (UNMARKED[op], x)
            with pytest.raises(ms.errors.DesyncError, match=f"after {name}" if noted else name) as e:
                call(y, group)
            assert len(set(WORLD.allgather(str(e.value)))) == 1
            assert "int32" in str(e.value)
        # what was told is over
        assert torch.equal(blocking.all_reduce(torch.ones(3), group), torch.full((3,), float(WORLD.size)))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("other", [(5,), (0,), (300, 1), (1, 300)], ids=str)
def test_gathers_of_other_shapes_are_named_before_they_meet(group, other):
    """Of other lengths MPI libraries let some pass, where they do not end the process; equal bytes are one to them."""
    shapes = {False: (300,), True: other}
    for _ in range(2):
        x = torch.ones(shapes[WORLD.rank == WORLD.size - 1])
        whole = (len(x) * WORLD.size, *x.shape[1:])
        with pytest.raises(ms.errors.DesyncError, match=r"all_gather to \(\d+"):
            transport_of(group, x).all_gather(x, x.new_empty(whole), [x.nbytes] * WORLD.size, (whole, 0))
        assert torch.equal(blocking.all_reduce(torch.ones(3), group), torch.full((3,), float(WORLD.size)))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("call", ["full_tensor", "unique", "nonzero"])
def test_tensors_of_other_shapes_do_not_cross(call, monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", False)
    mesh = mesh_of((WORLD.size,))
    one, other = (
        ms.distribute_tensor(torch.arange(24.0).view(shape) % 5, mesh, [ms.Shard(0)]) for shape in ((12, 2), (6, 4))
    )
    for x in (one, other):
        getattr(x, call)()
    with pytest.raises(ms.errors.DesyncError, match="all_gather to"):
        getattr(other if WORLD.rank == 0 else one, call)()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["host"])
@pytest.mark.parametrize("op", NOTED["host"])
def test_what_is_noted_is_named_by_a_sum_in_the_background(group, op):
    last = WORLD.rank == WORLD.size - 1
    UNMARKED[op](torch.ones(256, dtype=torch.int32 if last else torch.float32), group)
    pending = nonblocking.iall_reduce(torch.ones(2), group)
    text = r"sum in the background, 8 bytes for torch\.float32, after"
    with pytest.raises(ms.errors.DesyncError, match=text) as e:
        pending.wait()
    assert ("int32" in str(e.value)) == last
    # what waits compares all ranks' calls, those in the background among them: they were the same
    assert torch.equal(blocking.all_reduce(torch.ones(3), group), torch.full((3,), float(WORLD.size)))


SUMS = {
    "same": torch.ones(5),
    "dtype": torch.ones(5, dtype=torch.int32),
    "bytes": torch.ones(5, dtype=torch.float64),
    "length": torch.ones(1),
    "half": torch.ones(5, dtype=torch.float16),
    "large": torch.ones(256),
    "large dtype": torch.ones(256, dtype=torch.int32),
}


def compare_sums(group, most, odd):
    for _ in range(3):
        x = SUMS[odd if WORLD.rank == WORLD.size - 1 else most].clone()
        pending = nonblocking.iall_reduce(x, group)
        if odd == most:
            assert torch.equal(pending.wait(), torch.full_like(x, WORLD.size))
        else:
            for _ in range(2):
                with pytest.raises(ms.errors.DesyncError, match=f"rank {WORLD.rank}: all_reduce sum in the background"):
                    pending.wait()
            with pytest.raises(ms.errors.DesyncError, match="after all_reduce in the background"):
                blocking.all_reduce(torch.ones(2), group)
        assert torch.equal(blocking.all_reduce(torch.ones(3), group), torch.full((3,), float(WORLD.size)))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("odd", [odd for odd in SUMS if "large" not in odd])
def test_small_sums_in_the_background_have_marks(group, odd):
    """Whatever MPI makes of other lengths and types, nobody reads it."""
    compare_sums(group, "same", odd)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("odd", ["large", "large dtype"])
def test_sums_in_the_background_have_marks(group, odd):
    compare_sums(group, "large", odd)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["nccl"])
def test_sums_in_the_background_by_nccl_are_noted(group):
    x = SUMS["large dtype" if WORLD.rank == WORLD.size - 1 else "large"].clone()
    nonblocking.iall_reduce(x, group).wait()
    with pytest.raises(ms.errors.DesyncError, match="after all_reduce in the background"):
        blocking.all_reduce(torch.ones(2), group)


@pytest.mark.ranks(2, 3)
def test_a_sum_that_differs_is_no_value(monkeypatch):
    """As a user meets it: on whichever ranks ask, and as often as they ask."""
    monkeypatch.setattr(guard, "DEBUG", False)
    x = ms.distribute_tensor(torch.arange(12.0).view(6, 2), mesh_of((WORLD.size,)), [ms.Shard(0)])
    total = x.double().sum() if WORLD.rank == 0 else x.sum(0)
    if WORLD.rank != 1:
        for _ in range(2):
            with pytest.raises(ms.errors.DesyncError, match="in the background"):
                print(total.to_local())
    with pytest.raises(ms.errors.DesyncError):
        x.max()


@pytest.mark.ranks(2, 3)
def test_small_sums_in_the_background_are_asked_for_in_any_order(group):
    draw = np.random.default_rng(3)
    for _ in range(20):
        sizes = draw.integers(1, 90, 9).tolist()
        given = [torch.arange(n, dtype=torch.float32) + k for k, n in enumerate(sizes)]
        pending = [nonblocking.iall_reduce(x.clone(), group) for x in given]
        for k in np.random.default_rng(WORLD.rank).permutation(9)[:6]:
            assert torch.equal(pending[k].wait(), given[k] * WORLD.size)
        for left in pending:
            left.land()


class Silent:
    """Stands in for NCCL, which moves bytes whatever they are."""

    def serves(self, dtype, op="sum"):
        return True

    def all_reduce(self, *args):
        pass

    all_gather = all_to_all = broadcast = all_reduce


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("reduced", ["max", "min", "sum"])
@pytest.mark.parametrize(("most", "odd"), [(torch.bfloat16, torch.float16), (torch.int8, torch.uint8)], ids=str)
@pytest.mark.parametrize("device", ["host", "device"])
def test_what_travels_as_another_dtype_is_named_by_its_own(device, most, odd, reduced):
    """Both half types travel as the same integers."""
    mesh = with_plans()
    for n in (2, 256):
        for dtype in (most, odd):
            ms.all_reduce(torch.ones(n, dtype=dtype), mesh, op=reduced)
    dtype = odd if WORLD.rank == 0 else most
    with emulated(kernel=True) if device == "device" else contextlib.nullcontext():
        for n in (2, 256):
            x, group = torch.ones(n, dtype=dtype), mesh.group((0,))
            with pytest.raises(ms.DesyncError) as e:
                blocking.all_reduce(x, group, reduced)
            assert len(set(WORLD.allgather(str(e.value)))) == 1
            assert str(odd) in str(e.value)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("odd", [0, 1, 150])
def test_one_of_many_that_differed_is_found(odd):
    mesh = with_plans()
    for i in range(200):
        is_odd = i == odd and WORLD.rank == 0
        x = torch.ones(256, dtype=torch.int32 if is_odd else torch.float32)
        nonblocking.iall_gather([x], mesh.group((0,))).wait()
    with pytest.raises(ms.errors.DesyncError):
        ms.all_reduce(torch.ones(2), mesh)
    assert ms.all_reduce(torch.ones(3), mesh).tolist() == [WORLD.size] * 3


OF_TENSORS = {
    "sum": torch.sum,
    "mean": torch.mean,
    "norm": torch.linalg.vector_norm,
    "var": torch.var,
    "amax": torch.amax,
    "any": torch.any,
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "softmax": lambda x: x.softmax(0),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape),
    "mse_loss": lambda x: torch.nn.functional.mse_loss(x, 2 * x),
    "count_nonzero": torch.count_nonzero,
    "histc": lambda x: torch.histc(x, 4),
}


def on(shape, dim, call):
    """The result, which is there."""
    mesh = mesh_of((WORLD.size,))
    x = ms.distribute_tensor(torch.arange(24, dtype=torch.float64).view(shape), mesh, [ms.Shard(dim)])
    return call(x).to_local()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", OF_TENSORS)
@pytest.mark.parametrize("other", [((8, 3), 0), ((6, 4), 1)], ids=str)
def test_reductions_of_other_tensors_do_not_cross(op, other, monkeypatch):
    """Of one length: a number each."""
    monkeypatch.setattr(guard, "DEBUG", False)
    call = OF_TENSORS[op] if op != "softmax" else lambda x: x.softmax(x.placements[0].dim).sum((0, 1))
    for made in (((6, 4), 0), other):
        on(*made, call)
    with pytest.raises(ms.errors.DesyncError, match=r"\((6, 4|8, 3)\) by Shard"):
        on(*(other if WORLD.rank == 0 else ((6, 4), 0)), call)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("pair", [("sum", "mean"), ("amax", "amin"), ("var", "std"), ("any", "all")], ids=str)
def test_reductions_by_other_functions_do_not_cross(pair, monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", False)
    names = [pair[WORLD.rank == 0], *pair]
    for name in names[1:]:
        on((6, 4), 0, getattr(torch, name))
    with pytest.raises(ms.errors.DesyncError, match=f" in {names[0]} of"):
        on((6, 4), 0, getattr(torch, names[0]))
