"""Dims reordered, added, dropped, split, merged and repeated; views share memory and do not communicate."""

from __future__ import annotations

import copy

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, gathered, layouts, mesh_of, shard
from tests.release import RELEASE

SHAPE = (3, 6, 4)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def check(f, shape, dims, what, step=1, first=0, second=False):
    x = values(*shape)
    ran = 0
    for mesh, placements, sizes in list(layouts(shape, dims))[first::step]:
        compare(f, [(x, mesh, placements, sizes)], what=f"{what} {placements} {sizes}", second=second)
        ran += 1
    assert ran


VIEWS = {
    "permute": lambda x: x.permute(2, 0, 1),
    "permute sequence": lambda x: torch.permute(x, dims=(-1, 1, 0)),
    "transpose": lambda x: x.transpose(-1, 0),
    "swapaxes": lambda x: torch.swapaxes(x, 0, 1),
    "swapdims": lambda x: x.swapdims(axis0=1, axis1=2) if False else x.swapdims(1, 2),
    "mT": lambda x: x.mT,
    "mH": lambda x: x.mH,
    "adjoint": torch.adjoint,
    "movedim": lambda x: x.movedim((0, 1), (2, 0)),
    "moveaxis": lambda x: torch.moveaxis(x, -1, 0),
    "unsqueeze": lambda x: x.unsqueeze(-1).unsqueeze(0),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "squeeze none": lambda x: x.squeeze(),
    "expand": lambda x: x.expand(2, -1, 6, 4),
    "expand size": lambda x: x.expand((5, 3, 6, 4)),
    "broadcast_to": lambda x: torch.broadcast_to(x, (6, 3, 6, 4)),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.zeros(2, 1, 6, 1))[0],
    "atleast": lambda x: torch.atleast_3d(x[0, 0], x[0], x),
    "view same": lambda x: x.view(3, 6, 4),
    "view ones": lambda x: x.view(3, 1, 6, -1, 1),
    "view_as": lambda x: x.view_as(torch.empty(3, 6, 1, 4)),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "ravel of a vector": lambda x: x[0, :, 0].ravel(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view(name):
    check(VIEWS[name], SHAPE, (0, 1, 2), name, step=3, first=len(name) % 3)


@pytest.mark.parametrize("f", [lambda x: x.T, lambda x: x.H, torch.t, lambda x: x.t().unsqueeze(1).squeeze()])
def test_matrices(f):
    check(f, (5, 4), (0, 1), "matrix", step=2)


def test_vectors_and_scalars():
    check(lambda x: x.t(), (5,), (0,), "t")
    check(lambda x: x.sum().unsqueeze(0).expand(4), (5,), (0,), "scalar")
    check(torch.atleast_2d, (5,), (0,), "atleast")
    check(lambda x: x.sum().view(1, 1), (5,), (0,), "view of a scalar")
    check(lambda x: x.sum().flatten().squeeze(), (5,), (0,), "flatten of a scalar")


ONE_CELL = {
    "squeeze": lambda x: x.squeeze(),
    "squeeze dim": lambda x: x.squeeze(0) * 2,
    "squeeze in place": lambda x: (x * 1).squeeze_(),
    "squeeze dim in place": lambda x: (x * 1).squeeze_(-1).mul_(3),
    "squeeze dims in place": lambda x: (x * 1).squeeze_((0, 2)).exp(),
    "squeeze dims": lambda x: torch.squeeze(x, (0, 2)),
    "expand": lambda x: x.expand(3, 5, 4),
    "expand_as": lambda x: x.expand_as(torch.empty(2, 3, 5, 2)),
    "view": lambda x: x.view(5),
    "reshape": lambda x: x.reshape(1, 5, 1, 1),
}


@pytest.mark.parametrize("name", ONE_CELL)
def test_dims_of_one_cell_that_are_sharded(name):
    check(ONE_CELL[name], (1, 5, 1), (0, 1, 2), name, step=2)


def test_writes_after_squeezing_in_place_reach_other_views():
    def f(x):
        y = x * 1
        view = y[:, 1:3]
        y.squeeze_(0)
        y.mul_(2)
        y[2] = 7
        return y, view

    check(f, (1, 5, 2), (0, 1, 2), "squeeze_")


# shape, dims that may be sharded, the reshape
RESHAPES = {
    "merge after": ((4, 6, 5), (0,), lambda x: x.view(24, 5)),
    "merge behind": ((4, 6, 5), (0, 1), lambda x: x.reshape(4, -1)),
    "merge all": ((4, 6, 5), (0,), lambda x: x.view(-1)),
    "flatten": ((4, 6, 5), (0, 1), lambda x: x.flatten(1)),
    "flatten some": ((4, 6, 5, 2), (0, 1, 3), lambda x: torch.flatten(x, 1, 2)),
    "unflatten whole": ((4, 6, 5), (0, 2), lambda x: x.unflatten(1, (-1, 3))),
    "reshape_as": ((4, 6, 5), (0, 1), lambda x: x.reshape_as(torch.empty(4, 30))),
    "transposed": ((4, 6, 5), (1,), lambda x: x.permute(1, 0, 2).reshape(6, 20)),
    "empty": ((0, 5), (0, 1), lambda x: x.view(5, 0)),
    "one cell first": ((1, 4, 6), (1,), lambda x: x.view(24)),
    "split in front": ((4, 6), (0, 1), lambda x: x.view(1, 4, 1, 6)),
    "ravel": ((4, 6), (0,), torch.ravel),
}


@pytest.mark.parametrize("name", RESHAPES)
def test_reshape(name):
    shape, dims, f = RESHAPES[name]
    check(f, shape, dims, name, step=2 if len(dims) > 1 else 1)


def test_split_of_a_sharded_dim():
    """Where block borders fall on the outer part: uneven blocks and empty ones too."""
    n = WORLD.size
    mesh = mesh_of((n,))
    for rows in ([2] * n, [0, *[3] * (n - 1)], [i + 1 for i in range(n)]):
        x = values(6 * sum(rows), 2)
        sizes = {0: [6 * r for r in rows]}
        for f in (lambda t: t.view(-1, 6, 2), lambda t: t.unflatten(0, (-1, 3, 2)), lambda t: t.view(-1, 4, 3)):
            compare(f, [(x, mesh, (ms.Shard(0),), sizes)], what=f"{rows}")
        back = shard(x, mesh, (ms.Shard(0),), sizes).view(-1, 6, 2).view(-1, 2)
        if n > 1:  # one rank's only block is as good as whole
            assert back.sharding == shard(x, mesh, (ms.Shard(0),), sizes).sharding


# shape, the reshape: cells of any sharded dim may have to move
MOVES = {
    "merge behind": ((4, 6, 5), lambda x: x.view(24, 5)),
    "tokens": ((2, 3, 5, 7), lambda x: x.flatten(2)),
    "batch and rows": ((2, 5, 3), lambda x: x.flatten(0, 1)),
    "all": ((3, 4, 5), lambda x: x.reshape(-1)),
    "split": ((24, 3), lambda x: x.view(2, 3, 4, 3)),
    "split into few": ((2, 12), lambda x: x.view(2, 2, 2, 3)),
    "other groups": ((6, 10), lambda x: x.view(4, 15)),
    "two groups": ((4, 6, 10, 3), lambda x: x.reshape(24, 2, 15)),
    "windows": ((2, 6, 4, 2), lambda x: x.view(2, 3, 2, 2, 2, 2).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 2)),
    "and back": ((12, 4, 2), lambda x: x.view(2, 3, 2, 2, 2, 2).permute(0, 1, 3, 2, 4, 5).reshape(2, 6, 4, 2)),
    "ones between": ((4, 1, 6), lambda x: x.reshape(1, 24, 1)),
}


@pytest.mark.parametrize("name", MOVES)
def test_reshape_that_moves_cells(name):
    shape, f = MOVES[name]
    check(f, shape, range(len(shape)), name, step=2 if len(shape) < 4 else 3)


@pytest.mark.ranks(2, 3, 4)
def test_merged_shards_stay_sharded():
    x = shard(values(2, 3, 16, 17), mesh_of((WORLD.size,)), (ms.Shard(3),))
    with ms.comm_counter() as count:
        y = x.flatten(2)
        z = y.view(2, 3, 16, 17)
    # the way back moves nothing where the merged blocks are whole rows
    assert count.by_op["reshape"].calls == count.calls <= 2
    assert y.placements == z.placements == (ms.Shard(2),)
    assert y.to_local().numel() <= 6 * -(-16 // WORLD.size) * 17
    y[1].zero_()
    assert not gathered(x)[1].any()
    assert gathered(x)[0].all()


def test_errors_are_torchs():
    mesh = mesh_of((WORLD.size,))
    x = shard(values(*SHAPE), mesh, (ms.Shard(1),))
    for f, error in [
        (lambda t: t.view(7, -1), RuntimeError),
        (lambda t: t.view(-1, -1), RuntimeError),
        (lambda t: t.permute(0, 1), RuntimeError),
        (lambda t: t.permute(0, 0, 1), RuntimeError),
        (lambda t: t.transpose(0, 3), IndexError),
        (lambda t: t.unsqueeze(5), IndexError),
        (lambda t: t.squeeze(4), IndexError),
        (lambda t: t.expand(3, 5, 4), RuntimeError),
        (lambda t: t.expand(6, 4), RuntimeError),
        (lambda t: t.expand(-1, 3, 6, 4), RuntimeError),
        (lambda t: t.t(), RuntimeError),
        (lambda t: t.flatten(2, 1), RuntimeError),
        (lambda t: t.movedim((0, 1), (0,)), RuntimeError),
    ]:
        with pytest.raises(error):
            f(values(*SHAPE))
        with pytest.raises(error):
            f(x)


def test_views_do_not_communicate_and_share_memory():
    mesh = mesh_of((WORLD.size,))
    x = shard(values(4, 6, 5), mesh, (ms.Shard(1),))
    with ms.comm_counter() as count:
        views = [
            x.permute(2, 0, 1),
            x.transpose(0, 1),
            x.T if x.ndim == 2 else x.mT,
            x.unsqueeze(0),
            x.view(4, -1),
            x.expand(2, 4, 6, 5),
            x.narrow(0, 1, 2),
            x[:, 2:5],
            x[1],
            x[..., ::2],
            x.flatten(1),
            x.movedim(0, 2),
            x.detach(),
            x.diagonal(0, 0, 2),
            x.diagonal(0, 1, 2),
            *x.unbind(0),
            *x.split(2, 2),
            *x.chunk(2, 0),
        ]
    assert not count.calls
    own = x.to_local().untyped_storage().data_ptr()
    for view in views:
        assert view.to_local().untyped_storage().data_ptr() == own or not view.to_local().numel()


def test_writes_through_views_reach_the_tensor():
    def f(x):
        y = x * 2
        y[..., :1].fill_(1)
        y[:, 1:3].mul_(3)
        y.transpose(0, 1)[2:].add_(1)
        y.view(3, -1)[1].zero_()
        y.unsqueeze(0).squeeze(0)[0].sub_(2)
        return y

    check(f, SHAPE, (1,), "writes")


def test_writes_through_a_view_of_a_cropped_block_reach_it():
    """A block that is cut out of a larger array is no contiguous memory, where torch's result would be."""
    mesh = mesh_of((WORLD.size,))
    local = torch.zeros(4, 5, dtype=torch.float64)[:, 1:4]
    x = ms.ShardTensor.from_local(local, mesh, ms.Shard(0))
    x.view(-1).add_(2)
    assert gathered(x).eq(2).all()


def test_writes_through_one_cell_of_a_sharded_dim_reach_it():
    def rows(x):
        y = x * 2
        y[0] -= y[1]
        y[:, 1] *= 3
        y[..., -1] /= 2
        y[1, 2] += y[0, 0]
        y[2][1:3] += 4
        y.select(1, 0).copy_(y[:, 3])
        y[1][y[1] > 0] = 7
        last = y[-1]
        last.mul_(2).add_(1)
        y[0][1:].zero_()
        return y, last

    def recurrence(x):
        y = x.new_zeros(x.shape)
        y[0] = x[0]
        for i in range(1, 3):
            y[i] = y[i - 1] * 0.5 + x[i]
            y[:, i] += y[:, i - 1]
        return y

    def bordered(x):
        y = x * 1
        y[0] = 0
        y[-1] = y[-2]
        y[:, 0], y[:, -1] = y[:, -2], y[:, 1]
        y[1:-1, 1:-1] += 0.1 * (x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2] - 4 * x[1:-1, 1:-1])
        return y

    for i, f in enumerate((rows, recurrence, bordered)):
        check(f, SHAPE, (0, 1, 2), f"write {i}")
    mesh = mesh_of((WORLD.size,))
    leaf = shard(values(5, 4), mesh, (ms.Shard(1),), None, True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        leaf[:, 0].zero_()
    with torch.no_grad():
        leaf[:, 0].zero_()
    assert gathered(leaf)[:, 0].eq(0).all()


def test_writes_through_an_old_view_change_only_what_is_written():
    def late(x):
        y = x * 1
        top, last = y[0], y[:, -1]
        y.add_(10)
        top[0] = 0
        last[1:].mul_(2)
        return y, top

    def twice(x):
        y = x * 1
        p, q = y[0], y[0]
        p.add_(1)
        q.add_(1)
        part = y[:, 0][1:]
        y.zero_()
        part += 1
        return y

    for f in (late, twice):
        check(f, SHAPE, (0, 1, 2), f.__name__)


@pytest.mark.ranks(2, 3, 4)
def test_writes_that_would_be_lost_are_refused():
    mesh = mesh_of((WORLD.size,))
    x = shard(values(5, 4), mesh, (ms.Shard(1),))
    for write in (copy.copy(x[:, 0]).zero_, x[:, :1].expand(5, 3)[:, 1].zero_, x.unfold(1, 2, 1).zero_):
        with pytest.raises(ms.UnsupportedOperationError, match="would not reach"):
            write()
    x[:, 0].clone().fill_(1)
    y = x[:, 0] + 0
    y += 1
    torch.testing.assert_close(gathered(x), values(5, 4))
    z = shard(values(5, 8), mesh, (ms.Shard(1),))
    z[:, 0].contiguous().fill_(1)  # a copy, in torch too
    torch.testing.assert_close(gathered(z), values(5, 8))
    x[:, 0].double().real.zero_()
    x[:, 1].uniform_(2, 3)
    torch.nn.functional.dropout(x[:, 2], 1.0, inplace=True)
    torch.nn.functional.dropout(x[3], 1.0, inplace=True)
    full = gathered(x)
    assert full[:3, [0, 2]].eq(0).all()
    assert full[3].eq(0).all()
    assert full[:3, 1].ge(2).all()


WRITES = [
    lambda x: x[:, 0].view(1, 5).T.add_(1),
    lambda x: x.unbind(1)[0].zero_(),
    lambda x: x[:, :1].squeeze(1).mul_(2),
    lambda x: x.select(1, 2).unsqueeze(0).copy_(torch.zeros(5)),
    lambda x: x[:, 0].detach().zero_(),
    lambda x: x[:, 0].data.zero_(),
    lambda x: x.unbind(1)[0].double().zero_(),
    lambda x: x.unbind(1)[0].uniform_(7, 7),
    lambda x: torch.nn.functional.dropout(x.unbind(1)[0], 1.0, inplace=True),
    lambda x: torch.nn.functional.rrelu(x.unbind(1)[0], 0.5, 0.5, training=True, inplace=True),
]


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_into_a_gathered_cell_is_in_the_tensor(write):
    full = values(5, 4)
    x = shard(full, mesh_of((WORLD.size,)), (ms.Shard(1),))
    write(x)
    write(full)
    torch.testing.assert_close(gathered(x), full)


def test_writes_through_aliases_reach_the_tensor():
    for cast in ("detach", "contiguous", "double", "resolve_conj", "positive"):

        def f(x, cast=cast):
            y = x * 2
            getattr(y, cast)().detach()[1].mul_(3)
            return y

        check(f, SHAPE, (0, 1, 2), cast)
    mesh = mesh_of((WORLD.size,))
    ones = torch.ones(2, 3, dtype=torch.float64)
    for alias in (lambda x: x.detach(), lambda x: x.double(), lambda x: x.contiguous()):
        x = ms.ShardTensor.from_local(ones.clone(), mesh, ms.Partial())
        alias(x).add_(1)
        torch.testing.assert_close(gathered(x), WORLD.size * ones + 1)
    x = ms.ShardTensor.from_local(ones, mesh, ms.Partial())
    for twin in (x.data, copy.copy(x)):
        with pytest.raises(ms.UnsupportedOperationError, match="would not reach"):
            twin.zero_()
        torch.testing.assert_close(gathered(twin), WORLD.size * ones)


@pytest.mark.ranks(2, 3, 4)  # of one row torch makes no copy
def test_a_copy_is_a_copy_on_every_rank():
    # one column a rank: its block is contiguous both ways
    x = shard(values(WORLD.size, 2), mesh_of((WORLD.size,)), [ms.Shard(0)]).T
    x.contiguous().zero_()
    torch.testing.assert_close(gathered(x), values(WORLD.size, 2).T)


WRITES = {
    "add_": lambda y: y.add_(1),
    "zero_": lambda y: y.zero_(),
    "clamp_": lambda y: y.clamp_(max=0.5),
    "out": lambda y: torch.mul(y.detach().clone(), 2, out=y),
    "one row": lambda y: y.__setitem__(0, 5.0),
    "rows": lambda y: y.__setitem__(torch.tensor([0, 1]), 5.0),
    "a mask": lambda y: y.__setitem__(y > 0, 5.0),
    "fill_diagonal_": lambda y: y.fill_diagonal_(2.0),
    "masked_scatter_": lambda y: y.masked_scatter_(torch.eye(3, dtype=torch.bool), torch.arange(3.0).double()),
    "index_fill_": lambda y: y.index_fill_(0, torch.tensor([1]), 2.0),
    "scatter_": lambda y: y.scatter_(0, torch.tensor([[1, 0, 1]]), 2.0),
    "dropout": lambda y: torch.nn.functional.dropout(y, 1.0, inplace=True),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("retain", [False, True])
def test_writes_into_a_partial(name, retain):
    """It is summed first; the gradient that it retains is that of what is written, as torch has it."""
    a, b, cotangent = values(3, 4).requires_grad_(), values(4, 3).flip(0), values(3, 3)

    def written(a, b):
        y = a @ b
        if retain:
            y.retain_grad()
        if name == "out":
            with torch.no_grad():
                WRITES[name](y)
        else:
            WRITES[name](y)
        (y * cotangent).sum().backward()
        return [y, a.grad, *([y.grad] if retain else [])]

    mesh = mesh_of((WORLD.size,))
    x = shard(a, mesh, [ms.Shard(1)], requires_grad=True)
    assert WORLD.size == 1 or (x @ shard(b, mesh, [ms.Shard(0)])).sharding.partial_dims
    for got, expected in zip(written(x, shard(b, mesh, [ms.Shard(0)])), written(a, b), strict=True):
        torch.testing.assert_close(gathered(got), gathered(expected))


def test_views_of_a_partial_settle_it():
    mesh = mesh_of((WORLD.size,))
    total = float(sum(range(1, WORLD.size + 1)))
    local = torch.full((2, 3), 1.0 + mesh.rank, dtype=torch.float64, requires_grad=True)
    x = ms.ShardTensor.from_local(local, mesh, ms.Partial())
    with torch.no_grad():
        y = x.T
    assert not y.sharding.partial_dims
    assert not x.sharding.partial_dims
    torch.testing.assert_close(gathered(y), torch.full((3, 2), total, dtype=torch.float64))
    x.view(-1).sum().backward()
    torch.testing.assert_close(local.grad, torch.ones(2, 3, dtype=torch.float64))


REPEATS = {
    "repeat": lambda x: x.repeat(2, 1, 1, 3),
    "repeat sharded": lambda x: x.repeat(1, 2, 1),
    "repeat none": lambda x: x.repeat(1, 0, 1),
    "tile": lambda x: x.tile((2, 2)),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "repeat_interleave counts": lambda x: torch.repeat_interleave(x, torch.tensor([1, 0, 2, 3, 0, 1]), dim=1),
    "roll": lambda x: x.roll(2, 1),
    "roll far": lambda x: torch.roll(x, (-1, 5, 9), (0, 1, 2)),
    "flip": lambda x: x.flip(1),
    "flip two": lambda x: torch.flip(x, (0, 2)),
    "fliplr": torch.fliplr,
    "flipud": lambda x: x.flipud(),
    "rot90": lambda x: x.rot90(1, (1, 2)),
    "rot90 twice": lambda x: torch.rot90(x, 2, (0, 2)),
    "rot90 back": lambda x: torch.rot90(x, -1, (0, 1)),
    "tril": lambda x: x.tril(),
    "triu": lambda x: torch.triu(x, diagonal=1),
    "triu_": lambda x: (x * 1).triu_(-2),
    # torch 2.8 gives a matrix that is taller than wide a gradient beside its diagonal, too
    "trace": lambda x: (x[0] if RELEASE >= (2, 13) else x[0, :4]).trace(),
}


@pytest.mark.parametrize("name", REPEATS)
def test_repeats_and_other_orders(name):
    check(REPEATS[name], SHAPE, (0, 1, 2), name, step=3, first=len(name) % 3, second=name == "roll")


def test_roll_of_the_flattened_tensor():
    check(lambda x: x.roll(5), SHAPE, (0,), "roll")


@pytest.mark.ranks(2, 3, 4)
def test_meshgrid():
    n = WORLD.size
    mesh = mesh_of((n, 1))
    for placements in [(ms.Shard(0), ms.Replicate()), (ms.Replicate(), ms.Shard(0)), (ms.Replicate(),) * 2]:
        where = (mesh, (placements[1], placements[0]), None)
        for indexing in ("ij", "xy"):
            compare(
                lambda a, b, indexing=indexing: torch.meshgrid(a, b, values(2), indexing=indexing),
                [(values(4), mesh, placements, None), (values(3), *where)],
                what=f"{placements} {indexing}",
            )


def test_complex_views():
    z = torch.view_as_complex(values(4, 3, 2))
    for mesh, p, s in list(layouts((4, 3), (0, 1)))[::2]:
        compare(lambda t: torch.view_as_complex(torch.view_as_real(t * 2) + 1), [(z, mesh, p, s)], what=f"{p}")


def test_a_complex_view_takes_an_expanded_cotangent():
    z = torch.view_as_complex(values(4, 3, 2))
    for mesh, p, s in layouts((4, 3), (0, 1)):
        compare(torch.view_as_real, [(z, mesh, p, s)], summed=True, what=f"{p} {s}")


def test_a_complex_view_whose_cotangent_is_none():
    """Of no other rank than the empty ones: those raised alone."""
    x = torch.eye(2, dtype=torch.float64).repeat(4, 1, 1)
    for mesh, p, s in layouts(x.shape, [0]):
        z = shard(x, mesh, p, s, requires_grad=True)
        pairs = torch.view_as_real(torch.complex(z, z))
        torch.linalg.slogdet(pairs[..., 0])[0].sum().backward()
        assert z.grad is None, f"{p} {s}"


def test_view_as_another_dtype():
    mesh = mesh_of((WORLD.size,))
    x = values(6, 4)
    for dim in (0, 1):
        part = shard(x, mesh, (ms.Shard(dim),))
        assert gathered(part.view(torch.int64)).equal(x.view(torch.int64))
    for mesh, placements, sizes in layouts((6, 4), (0, 1)):
        part = shard(x, mesh, placements, sizes)
        for dtype in (torch.float32, torch.complex128, torch.uint8):
            assert gathered(part.view(dtype)).equal(x.view(dtype))


@pytest.mark.ranks(2, 4)
def test_roll_moves_only_what_crosses_borders():
    mesh = mesh_of((WORLD.size,))
    x = shard(values(8, 3), mesh, (ms.Shard(0),))
    x.roll(1, 0)
    with ms.comm_counter() as count:
        x.roll(1, 0)
    assert count.nbytes == 3 * 8


# what is written, and what it is read from
OVERLAPPING = {
    "add_": lambda y, read: y[1:5].add_(read[:4]),
    "addcmul_": lambda y, read: y[1:5].addcmul_(read[:4], read[2:6]),
    "copy_": lambda y, read: y[2:].copy_(read[:-2]),
    "set": lambda y, read: y.__setitem__(slice(1, 5), read[:4]),
    "out": lambda y, read: torch.add(read[:4], 1, out=y[1:5]),
    "itself": lambda y, read: y[1:5].mul_(read[1:5]),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_operands_that_overlap_what_is_written_are_read_before(name):
    """Torch refuses them in one memory; here they lie in one on some ranks alone, and none refuses."""
    full = values(8, 3)
    expected = full.clone()
    OVERLAPPING[name](expected, full)
    mesh = mesh_of((WORLD.size,))
    for sizes in (None, {0: (8, *(0,) * (WORLD.size - 1))}, {0: (*(0,) * (WORLD.size - 1), 8)}):
        y = shard(full.clone(), mesh, (ms.Shard(0),), sizes)
        OVERLAPPING[name](y, y)
        torch.testing.assert_close(gathered(y), expected)
