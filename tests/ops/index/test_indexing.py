"""Indexing, gathers and writes by index, against torch on the whole tensor."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, compare_penalties, gathered, layouts, mesh_of, shard
from tests.ops.windows import check, field, same, sampled

SHAPE = (5, 7, 6)
PICKED = torch.tensor([4, 0, 6, 2, 2])
WHERE = field(5, 7, 6) > 0.3

# single booleans, among others: a dim of one cell, or of none
BOOLEANS = [
    (True, 0),
    (2, True),
    (None, True),
    (False, slice(1, 3)),
    (slice(None), True),
    (..., torch.tensor(True)),
    (True, [0, 3]),
    ([0, 3], slice(1, None), True),
    (slice(None), PICKED, torch.tensor(1, dtype=torch.uint8)),
    (True, torch.tensor([True, False, True, True, False])),
    (slice(None), False, 2),
    (True, False),
]

READS = [
    lambda x: x[2],
    lambda x: x[-1, 3],
    lambda x: x[:, 5, ..., -2],
    lambda x: x[1:4, ::2],
    lambda x: x[..., 1::3],
    lambda x: x[:, 6:2],  # no cells
    lambda x: x[None, :, 3:],
    lambda x: x[:, PICKED],
    lambda x: x[:, [0, 6]],
    lambda x: x[torch.tensor([1, 3]), torch.tensor([2, 6])],
    lambda x: x[torch.tensor([[1], [3]]), torch.tensor([2, 6, 0])],
    lambda x: x[1, PICKED, 2:4],
    lambda x: x[:, PICKED - 7],
    lambda x: x.select(1, 4),
    lambda x: x.narrow(1, 2, 3),
    lambda x: x.index_select(1, PICKED),
    lambda x: torch.index_select(x, 0, torch.tensor([3, 3])),
    lambda x: x.gather(1, PICKED.view(1, 5, 1).expand(5, 5, 6)),
    lambda x: torch.take_along_dim(x, PICKED.view(1, 5, 1), 1),
    lambda x: torch.take_along_dim(x, torch.arange(4)),
    lambda x: x.masked_fill(WHERE, 2.0),
    lambda x: torch.where(WHERE, x, -x),
    lambda x: x[True] + x[torch.tensor(True)],
    lambda x: x[False],
    *[lambda x, index=index: x[index] for index in BOOLEANS],
]


@pytest.mark.parametrize("case", range(len(READS)))
def test_reads(case):
    check(READS[case], field(*SHAPE), range(3), case, count=6, second=case % 4 == 0)


SOURCE = field(5, 5, 6)
INDEX = PICKED.view(1, 5, 1).expand(5, 5, 6)

WRITES = [
    lambda x: x.index_add(1, PICKED, SOURCE),
    lambda x: x.index_copy(1, torch.tensor([4, 0, 6, 2, 1]), SOURCE),
    lambda x: x.index_fill(1, PICKED, 3.0),
    lambda x: x.scatter(1, torch.tensor([4, 0, 6, 2, 1]).view(1, 5, 1).expand(5, 5, 6), SOURCE),
    lambda x: x.scatter_add(1, INDEX, SOURCE),
    lambda x: x.scatter_reduce(1, INDEX, SOURCE, "amax"),
    lambda x: x.scatter_reduce(1, INDEX, SOURCE, "sum", include_self=False),
]


@pytest.mark.parametrize("case", range(len(WRITES)))
def test_writes_by_index(case):
    check(WRITES[case], field(*SHAPE), range(3), case, count=6)


ASSIGNMENTS = [
    (lambda x, v: x.__setitem__(2, v), (7, 6)),
    (lambda x, v: x.__setitem__((slice(None), 5), v), (5, 6)),
    (lambda x, v: x.__setitem__((slice(1, 4), slice(None, None, 2)), v), (3, 4, 6)),
    (lambda x, v: x.__setitem__((Ellipsis, slice(2, 5)), v), (3,)),
    (lambda x, v: x.__setitem__((slice(None), torch.tensor([4, 0, 6])), v), (5, 3, 6)),
    (lambda x, v: x.__setitem__(WHERE, 7.0), ()),
    (lambda x, v: x.__setitem__((0, 0, 0), 1.5), ()),
    (lambda x, v: x.__setitem__((2, [6, 0, 3]), v), (3, 6)),
    (lambda x, v: x.__setitem__(([3, 0], slice(1, 5), -1), v), (2, 4)),
    (lambda x, v: x.__setitem__((slice(None), 5, torch.tensor([4, 0])), 2.5), ()),
    (lambda x, v: x.__setitem__(True, v), (7, 6)),
    (lambda x, v: x.__setitem__(False, v), (7, 6)),
]


@pytest.mark.parametrize("case", range(len(ASSIGNMENTS)))
def test_assignments(case):
    assign, shape = ASSIGNMENTS[case]
    value = field(*shape) if shape else torch.tensor(0.0, dtype=torch.float64)

    def written(x):
        y = x * 1
        assign(y, value)
        return y

    check(written, field(*SHAPE), range(3), case, count=6)


def test_a_sharded_value_is_assigned():
    mesh = mesh_of((WORLD.size,))
    for placement in (ms.Shard(0), ms.Shard(1), ms.Replicate()):

        def written(x, v):
            y = x * 1
            y[1:4, ::2] = v
            return y

        x = (field(*SHAPE), mesh, (ms.Shard(1),), None)
        compare(written, [x, (field(3, 4, 6), mesh, (placement,), None)])


def changed(write):
    """Return a function that writes into a copy."""

    def f(x):
        y = x.clone()
        write(y)
        return y

    return f


CONSTANTS = {
    "number": changed(lambda y: y.__setitem__((Ellipsis, slice(2, None)), 0)),
    "first": changed(lambda y: y.__setitem__((Ellipsis, slice(2)), 0)),
    "row": changed(lambda y: y.__setitem__((Ellipsis, slice(2, None)), torch.zeros(5).double())),
    "none": changed(lambda y: y.__setitem__((Ellipsis, slice(7, None)), 0)),
    "cell": changed(lambda y: y.__setitem__((Ellipsis, -1), 0)),
    "scaled": changed(lambda y: y[..., 2:].mul_(0)),
    "scaled and set": changed(lambda y: y.__setitem__((Ellipsis, slice(2, None)), y[..., 2:].mul_(0))),
    "filled": changed(lambda y: y[..., 2:].fill_(1)),
    "shifted": changed(lambda y: y.__setitem__((Ellipsis, slice(2, None)), y[..., :-2].clone())),
    "scattered": lambda x: torch.slice_scatter(x, torch.zeros(5, 6, 5).double(), 2, 2),
    "selected": lambda x: torch.select_scatter(x, torch.zeros(5, 6).double(), 2, 0),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_second_derivatives_where_a_block_is_overwritten(name):
    """A rank whose whole block is set, or which has none, waits for the others as they for it."""
    compare_penalties(lambda x: CONSTANTS[name](x).cumsum(2), field(5, 6, 7), (1, 2))


def written(write, take):
    """Return a function that takes a view, writes into it, and goes on with the view."""

    def f(y):
        v = take(y)
        write(v, y)
        return v

    return f


VIEWS = {
    "scaled": written(lambda v, _: v.mul_(3), lambda y: y[..., :2]),
    "added": written(lambda v, _: v.add_(1), lambda y: y[..., 5:]),
    "set": written(lambda v, _: v.__setitem__(slice(None), 2 * v), lambda y: y[..., :2]),
    "clamped": written(lambda v, _: v.clamp_(min=0), lambda y: y.narrow(2, 0, 2)),
    "filled": written(lambda v, _: v.fill_(2) + v.sum(), lambda y: y[..., :2]),
    "deep": written(lambda v, _: v.unsqueeze_(0).mul_(3), lambda y: y[..., :2].transpose(0, 1)),
    "of the base": lambda y: (v := y[..., :2], y.mul_(3), v)[-1],
    "from beside": written(lambda v, y: v.copy_(3 * y[..., -2:]), lambda y: y[..., :2]),
    "turned": lambda y: y.clone().transpose_(0, 2)[:2].mul_(2),
    "all": lambda y: (y.__setitem__(slice(None), y[:].add_(1)), y)[-1],
    "summed": written(lambda v, _: v.cumsum_(2), lambda y: y[..., 5:]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_second_derivatives_of_views_that_are_written_into(name):
    """Also where the view has no cells on a rank: torch, left to itself, ends its graph there."""
    compare_penalties(lambda x: VIEWS[name]((x * x).roll(1, 2)), field(4, 6, 7), (1, 2))


def test_a_plain_tensor_is_scattered_into_where_the_index_lies():
    mesh = mesh_of((WORLD.size,))
    index = torch.arange(24).reshape(6, 4) * 7 % 5
    zeros = torch.zeros(6, 5, dtype=torch.float64)
    for own in (ms.Shard(0), ms.Shard(1)):
        i = (index, mesh, (own,), None)
        for f in (lambda i: zeros.scatter(1, i, 2.0), lambda i: zeros.scatter_add(1, i, torch.ones(6, 4).double())):
            assert compare(f, [i]).placements == ((ms.Shard(0),) if own.dim == 0 else (ms.Replicate(),))


def test_sharded_indices():
    mesh = mesh_of((WORLD.size,))
    index = torch.randint(7, (5, 4, 6), generator=torch.Generator().manual_seed(0))
    for dim in range(3):
        for own in (ms.Shard(dim), ms.Replicate()):
            x, i = (field(*SHAPE), mesh, (ms.Shard(dim),), None), (index, mesh, (own,), None)
            compare(lambda x, i: x.gather(1, i), [x, i], what=f"gather of {dim} by {own}")


def test_masks_pick_in_torchs_order():
    for case, f in enumerate(
        (
            lambda x: x[x > 0.3] ** 2,
            lambda x: x[x[:, :, 0] > 0.3] * 2,
            lambda x: x[WHERE],
            lambda x: torch.masked_select(x, x > 0.3),
            lambda x: torch.masked_select(x, WHERE[0]),
            lambda x: x[x > 9],  # nothing
        )
    ):
        check(f, field(*SHAPE), range(3), case, count=6)
    same(lambda x: torch.nonzero(x > 0.3), field(*SHAPE), range(3), 2)
    same(lambda x: torch.argwhere(x > 0.3), field(*SHAPE), range(3), 3)
    for found in (lambda x: x.nonzero(as_tuple=True), torch.where):
        same(lambda x, found=found: found(x[0, 0, 0] > -9)[0], field(*SHAPE), range(3), 3)
    same(lambda x: torch.stack(torch.where(x > 0.3)), field(*SHAPE), range(3), 4)


def test_several_masks():
    draw, mesh = torch.Generator().manual_seed(5), mesh_of((WORLD.size,))
    n, full = 12, field(12, 12, 12, 3)
    for case in range(20):
        # of equal counts, so that the cells of one for those of another would be no error
        few = [torch.zeros(n, dtype=torch.bool).index_fill(0, torch.randperm(n, generator=draw)[:4], 1) for _ in "123"]
        x = shard(full, mesh, (ms.Shard(case % 4),))
        masks = [shard(m, mesh, (ms.Shard(0),)) for m in few]
        assert torch.equal(gathered(x[tuple(masks)]), full[tuple(few)])
        assert torch.equal(gathered(x[:, masks[1], masks[2]]), full[:, few[1], few[2]])
        x[tuple(masks)] = 5.0
        want = full.clone()
        want[tuple(few)] = 5.0
        assert torch.equal(gathered(x), want)


def test_a_mask_of_two_dims_is_gathered_once():
    x, mesh = field(6, 6, 6), mesh_of((WORLD.size,))
    where, other = x[..., 0] > 0.3, torch.tensor([2])
    own = shard(where, mesh, (ms.Shard(0),))
    with ms.comm_counter() as count:
        y = shard(x, mesh, (ms.Replicate(),))[own, other]
    assert torch.equal(gathered(y), x[where, other])
    assert sum(c.calls for op, c in count.by_op.items() if op == "all_gather") <= 1


def test_what_a_mask_picks_stays_sharded():
    x = shard(field(*SHAPE), mesh_of((WORLD.size,)), (ms.Shard(1),))
    assert x[x > 0.3].placements == (ms.Shard(0),)


@pytest.mark.parametrize("size", [0, 3, 400])
def test_so_many_places(size):
    for mesh, placements, sizes in list(layouts((5, 7, 6), (0, 1, 2)))[::2]:
        x = shard(WHERE, mesh, placements, sizes)
        expected = torch.nonzero_static(WHERE, size=size, fill_value=-3)
        assert torch.equal(gathered(torch.nonzero_static(x, size=size, fill_value=-3)), expected)


class Name(IntEnum):
    """Components by name, as codes with many fields in one array have them."""

    P = 1
    Q = 4


def written_by_name(x):
    y = x.clone()
    y[Name.P] = 7.0
    y[:, Name.Q] += 1
    return y


@pytest.mark.parametrize(
    "f",
    [lambda x: x[Name.Q], lambda x: x[:, Name.Q, Name.P], lambda x: x[Name.P : Name.Q], written_by_name],
    ids=["one", "two", "slice", "written"],
)
def test_named_components(f):
    same(f, field(*SHAPE), [0, 1], 0)


def test_out_of_range():
    for mesh, placements, sizes in sampled(SHAPE, [1], 0):
        x = shard(field(*SHAPE), mesh, placements, sizes)
        for wrong in (
            lambda x=x: x[:, 7],
            lambda x=x: x[:, [0, -8]],
            lambda x=x: x[0, 0, 0, 0],
            lambda x=x: x.index_select(1, torch.tensor([[1]])),
        ):
            with pytest.raises(IndexError):
                wrong()
        with pytest.raises(RuntimeError, match="same number of dimensions"):
            torch.take_along_dim(x, torch.tensor([[1]]), 1)


NUMBERS = {"any": torch.tensor([4, 0, -1, 2, 2, 6, 3, -7]), "none": torch.zeros(0, dtype=torch.int64)}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dim", [0, 1])
def test_an_index_that_is_sharded_as_the_rows(name, dim):
    """No rank has the whole index, and the result is cut as it is."""
    full, numbers = field(7, 5) if dim == 0 else field(5, 7), NUMBERS[name]
    whole = full.clone().requires_grad_()
    expected = whole[numbers] if dim == 0 else whole[:, numbers]
    (wanted,) = torch.autograd.grad(expected.sin().sum(), whole)
    for mesh, placements, sizes in layouts(full.shape, (dim,)):
        x = shard(full, mesh, placements, sizes, True)
        along = [ms.Shard(0) if p == ms.Shard(dim) else p for p in placements]
        index = shard(numbers, mesh, along)
        with ms.comm_counter() as count:
            y = x[index] if dim == 0 else x[:, index]
        assert "all_gather" not in count.by_op
        assert torch.equal(gathered(y), expected.detach())
        assert y.sharding.interval(dim, mesh.coords) == index.sharding.interval(0, mesh.coords)
        (g,) = torch.autograd.grad(y.sin().sum(), x)
        assert g.sharding == x.sharding
        torch.testing.assert_close(g.full_tensor(), wanted)
        if len(numbers):
            far = index.new_full(index.shape, 7 if dim == 0 else -8)
            with pytest.raises(IndexError, match=r"out of (range|bounds)"):
                _ = x[far] if dim == 0 else x[:, far]


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[:, PICKED].mul_(3),
        lambda x: x.index_select(1, PICKED).relu_(),
        lambda x: x.take(PICKED).mul_(2),
        lambda x: x[PICKED[:2].clamp(max=4), PICKED[:2]].add_(1),
        lambda x: x[x > 0.1].sub_(1),
        lambda x: x[True].mul_(2),
    ],
)
def test_what_an_index_took_can_be_written_into(write):
    for mesh, placements, sizes in layouts(SHAPE, (0, 1)):
        compare(lambda x: [write(x), x], [(field(*SHAPE), mesh, placements, sizes)], what=f"{placements} {sizes}")


@pytest.mark.parametrize("index", [PICKED[:3], torch.tensor([True, False] * 3 + [True])])
def test_augmented_assignment_to_what_an_index_takes(index):
    def f(x):
        y = x * 1
        y[:, index] *= 3.0
        return y

    for mesh, placements, sizes in layouts(SHAPE, (0, 1)):
        compare(f, [(field(*SHAPE), mesh, placements, sizes)], what=f"{placements} {sizes}")


LISTS = [
    [[0, 1]],
    [[0, 1], [1, 2]],
    [(4, 1), (2, 2), [0, 0]],
    [slice(0, 2)],
    [None],
    [Ellipsis, 0],
    [PICKED[:3] % 5],
    [torch.tensor([0, 1]), torch.tensor([0, 1])],
    [0, slice(None)],
    [range(2)],
    [[0, 1], 0],
    [0, 3, 3],
    [True, False, True, True, False],
]


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:a list of indices is taken as a tuple")
@pytest.mark.parametrize("index", LISTS)
def test_lists_are_tuples_where_torch_takes_them_so(index):
    def read_and_written(x):
        y = x * 1
        y[index] = 3.0
        return x[index], y

    check(read_and_written, field(*SHAPE), range(3), len(index), count=3)


@pytest.mark.parametrize(
    ("index", "value", "said"),
    [
        ([0, 3], [1], "can't assign a list"),
        ((slice(None), [0, 3]), "text", "can't assign a str"),
        ([0, 3], torch.tensor(2.0), "dtypes match"),
        (([0, 1], [1, 2]), torch.ones(2, 6), "dtypes match"),
        (torch.arange(5) > 2, torch.ones(2, 7, 6), "dtypes match"),
        ([], torch.tensor(2.0), "dtypes match"),
    ],
)
def test_values_that_torch_does_not_assign(index, value, said):
    whole = field(*SHAPE).long()
    for mesh_shape, placements in (((WORLD.size,), (ms.Shard(0),)), ((1, WORLD.size), (ms.Shard(1), ms.Replicate()))):
        x = shard(whole, mesh_of(mesh_shape), placements)
        for y in (whole.clone(), x):
            with pytest.raises((RuntimeError, TypeError), match=said):
                y[index] = value
        torch.testing.assert_close(gathered(x), whole)
    y = shard(whole, mesh_of((WORLD.size,)), (ms.Shard(0),))
    for place in (whole, y):
        place[WHERE] = torch.tensor(2.5)  # one for a mask is converted
    torch.testing.assert_close(gathered(y), whole)


@pytest.mark.parametrize(
    "index",
    [
        (1.5, torch.tensor([0, 2])),
        (torch.tensor(1.5), torch.tensor([0, 2])),
        ("1", torch.tensor([0, 2])),
        torch.tensor([0, 2], dtype=torch.int16),
        (slice(None), torch.tensor([0, 2], dtype=torch.int8)),
    ],
    ids=str,
)
def test_what_is_no_index_is_refused(index):
    full = field(5, 7)
    with pytest.raises((IndexError, TypeError)):
        full[index]
    for dim in range(2):
        x = shard(full, mesh_of((WORLD.size,)), [ms.Shard(dim)])
        with pytest.raises((IndexError, TypeError)):
            x[index]
        with pytest.raises((IndexError, TypeError)):
            x[index] = 2.0


@pytest.mark.parametrize("case", range(len(BOOLEANS)))
def test_writes_at_single_booleans(case):
    index, full = BOOLEANS[case], field(*SHAPE)
    for dim in range(3):
        for value in (2.0, torch.tensor(3.0, dtype=full.dtype), field(1)):
            whole, x = full.clone(), shard(full, mesh_of((WORLD.size,)), [ms.Shard(dim)])
            for y in (whole, x):
                y[index] = value
            torch.testing.assert_close(gathered(x), whole)


KINDS = [lambda n, t=t: torch.tensor(n, dtype=t) for t in (torch.uint8, torch.int8, torch.int32, torch.int64)]


@pytest.mark.parametrize("number", [*KINDS, np.int32, np.int64, np.array])
def test_cuts_by_numbers_of_every_kind(number):
    full = torch.arange(520.0).reshape(260, 2)
    cuts = [lambda x: x.vsplit(number(2)), lambda x: x.hsplit(number(2))]
    counts = not isinstance(number(2), np.ndarray)  # of an array torch takes the number for a place
    if counts:
        cuts += [lambda x: x.chunk(number(2)), lambda x: x.chunk(number(100)), lambda x: (x.narrow(0, number(2), 5),)]
    for dim in range(2):
        x = shard(full, mesh_of((WORLD.size,)), [ms.Shard(dim)])
        for cut in cuts:
            for g, e in zip(cut(x), cut(full), strict=True):
                torch.testing.assert_close(gathered(g), e)
        for y in (x, full) if counts else ():
            with pytest.raises(RuntimeError, match=r"divisible|equal division"):
                y.vsplit(number(3))


@pytest.mark.parametrize("shape", [(1,), (6,), (5, 1), (1, 7)], ids=str)
def test_a_mask_of_another_shape_is_refused(shape):
    full, mask = field(5, 7), torch.ones(shape, dtype=torch.bool)
    for dim in range(2):
        x = shard(full, mesh_of((WORLD.size,)), [ms.Shard(dim)])
        for value in (2.0, torch.tensor(3.0), field(7)):
            for y in (full.clone(), x):
                with pytest.raises(IndexError, match="shape of the mask"):
                    y[mask] = value
                with pytest.raises(IndexError, match="shape of the mask"):
                    y.index_put_((mask,), torch.as_tensor(value, dtype=y.dtype))
        torch.testing.assert_close(gathered(x), full)


def test_a_part_that_begins_at_no_whole_number():
    x = shard(torch.arange(12.0).view(4, 3), mesh_of((WORLD.size,)), (ms.Shard(0),))
    for args in ((0, 0.5, 1), (1, 0, 1.0)):
        with pytest.raises(TypeError):
            torch.ones(4, 3).narrow(*args)
        with pytest.raises(TypeError, match="float"):
            x.narrow(*args)


@pytest.mark.parametrize("placement", [ms.Replicate(), ms.Shard(0)], ids=str)
def test_index_select_of_a_number_is_no_view(placement):
    mesh = mesh_of((WORLD.size,))
    x = ms.full((), 2.0, mesh=mesh, placements=[ms.Replicate()])
    index = ms.distribute_tensor(torch.tensor([0]), mesh, [placement])
    assert float(torch.index_select(x, 0, index).mul_(3)) == 6
    assert float(x) == 2
