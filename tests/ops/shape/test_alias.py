"""What torch copies is a copy on every rank, and what lies in somebody's memory stays there.

A block of one row is contiguous in every order, one without cells too: torch's own answer differs between ranks.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from mpishard.errors import UnsupportedOperationError
from tests.compare import WORLD, compare, gathered, layouts, mesh_of, shard

P = WORLD.size


def rows(full, sizes=None, dim=0, **options):
    return shard(full, mesh_of((P,)), (ms.Shard(dim),), None if sizes is None else {dim: sizes}, **options)


def uneven():
    """Three rows on the first rank, one on the others; and of one rank's cells all, of the others' none."""
    return [(3, *(1,) * (P - 1)), (*(0,) * (P - 1), 4), (4, *(0,) * (P - 1))]


COPIES = {
    "pad at one side": lambda x: F.pad(x, (0, 0, 1, 0)),
    "pad at both": lambda x: F.pad(x, (0, 0, 1, 2)),
    "pad by nothing": lambda x: F.pad(x, (0, 0, 0, 0)),
    "pad, circular": lambda x: F.pad(x[None], (0, 0, 1, 1), mode="circular"),
    "crop": lambda x: F.pad(x, (0, 0, -1, 0)),
    "constant_pad_nd": lambda x: torch.constant_pad_nd(x, (0, 0, 0, 1), 2.0),
    "roll by nothing": lambda x: x.roll(0, 0),
    "roll by all": lambda x: x.roll(len(x), 0),
    "flip": lambda x: x.flip(0),
    "narrow_copy": lambda x: torch.narrow_copy(x, 0, 0, 2),
    "method narrow_copy": lambda x: x.narrow_copy(0, 0, 2),
    "contiguous, turned": lambda x: x.t().contiguous(),
    "contiguous, turned and cut": lambda x: x.t()[:, 0:3].contiguous(),
    "contiguous, turned and chunked": lambda x: x.t().chunk(2, 1)[0].contiguous(),
    "contiguous, unflattened": lambda x: x.unflatten(1, (2, 2)).permute(1, 0, 2)[:, 1:].contiguous(),
    "reshape, in steps": lambda x: x[::2].reshape(-1),
    "reshape, turned": lambda x: x.t().reshape(-1),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_one_on_every_rank(name, graph):
    f = COPIES[name]
    for sizes in uneven():
        n = sum(sizes)
        full = torch.arange(4.0 * n).view(n, 4)
        results = []
        for x in (full.clone(), rows(full, sizes)):
            h = x.requires_grad_() * 1 if graph else x
            y = f(h)
            with torch.no_grad():
                h.zero_()
            results.append(y.detach())
        torch.testing.assert_close(gathered(results[1]), results[0], msg=f"{sizes}")


@pytest.mark.parametrize("graph", [False, True])
def test_a_padded_tensor_is_written_into(graph):
    for sizes in uneven():
        n = sum(sizes)
        full = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
        h = rows(full, sizes).requires_grad_(graph) * 1
        y = F.relu(F.pad(h, (0, 0, 1, 0)), inplace=True)
        torch.testing.assert_close(gathered(y), F.pad(full, (0, 0, 1, 0)).relu())
        torch.testing.assert_close(gathered(h), full)


RESULTS = {
    "roll of all": lambda x: x.roll(3),
    "var_mean": lambda x: torch.var_mean(x, 0)[1],
    "std_mean": lambda x: torch.std_mean(x, 0)[1],
    "pad": lambda x: F.pad(x, (0, 0, 1, 1)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_written_into(name):
    for sizes in uneven():
        n = sum(sizes)
        full = torch.randn(n, 4, generator=torch.Generator().manual_seed(0)).double()
        found = []
        for x in (full.clone().requires_grad_(), rows(full, sizes, requires_grad=True)):
            y = RESULTS[name](x * 1).mul_(2)
            y.square().sum().backward()
            found.append((y.detach(), x.grad))
        for ours, torchs in zip(found[1], found[0]):
            torch.testing.assert_close(gathered(ours), torchs, msg=f"{sizes}")


GATHERED = {
    "the last cells of windows": lambda x: x.unfold(1, 4, 2).select(2, 3).contiguous(),
    "some cells of windows": lambda x: x.unfold(1, 2, 2)[..., :1].contiguous(),
    "windows": lambda x: x.unfold(1, 2, 2).contiguous(),
}


@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.parametrize("columns", [4, 6])
def test_ranks_without_cells_know_whether_others_copy(name, columns):
    """They write into the copy, as all do, or refuse it with them."""
    full = torch.arange(3.0 * columns).view(3, columns)
    for sizes in [None, (*(0,) * (P - 1), columns), (columns, *(0,) * (P - 1))]:
        x, refused = rows(full, sizes, dim=1), False
        torchs = GATHERED[name](full.clone()).add_(1)
        try:
            y = GATHERED[name](x).add_(1)
        except UnsupportedOperationError:
            refused = True
        assert len(set(WORLD.allgather(refused))) == 1
        if not refused:
            torch.testing.assert_close(gathered(y), torchs)


def test_the_reshape_of_a_turned_block_is_a_copy():
    full = torch.arange(4.0 * P).view(2 * P, 2)
    block = rows(full).to_local()
    x = ms.ShardTensor.from_local(block.t().contiguous().t(), mesh_of((P,)), (ms.Shard(0),))
    for change in (lambda y: y.mul_(2), lambda y: y.__setitem__(slice(1, 3), -1.0)):
        change(x.reshape(-1))
    torch.testing.assert_close(gathered(x), full)
    x.view(-1)[1:3] = -1.0
    assert gathered(x).eq(-1).sum() == 2


PARTS = {
    "columns of a transposed result": ((8, 3), 0, lambda x: (y := x.t() * 2, y[:, :1])),
    "rows of one": ((8, 3), 0, lambda x: (y := x.t() * 2, y[:1])),
    "cells of one": ((8, 12), 1, lambda x: (y := x.t().clone(), y[:, 1])),
    "planes in channels-last": (
        (1, 3, 8, 1),
        2,
        lambda x: (y := x.contiguous(memory_format=torch.channels_last) * 1, y[:, :, :1]),
    ),
    "as another": ((8, 3), 0, lambda x: (y := torch.empty_like(x.t()).fill_(1), y[:, :2])),
    "a channel of a crop": ((2, 3, 6, 6), 2, lambda x: (x, x[:, :, 1:-1, 1:-1][:, 0])),
    "a row of a crop": ((8, 6), 0, lambda x: (x, x[1:-1, 1:-1][0])),
    "a row of rows": ((8, 6), 0, lambda x: (x, x[1:-1][2])),
    "a part of a part": ((4, 8), 1, lambda x: (x, x[:1][:, 2:6])),
    "the real part": ((4, 8), 1, lambda x: (y := torch.view_as_complex(x.view(4, 4, 2)), y.real)),
    "cells of windows": ((8, 8), 0, lambda x: (x, x.unfold(1, 3, 1)[2, :, 1])),
    "a column, expanded": ((6, 1), 0, lambda x: (x, x.expand(6, 4)[1:2, :1])),
}


@pytest.mark.ranks(1, 2, 3, 4)  # a block of one row does not tell in which order a result lies
@pytest.mark.parametrize("name", PARTS)
def test_contiguous_copies_where_torch_does(name):
    shape, dim, part = PARTS[name]
    found = []
    for x in (torch.ones(shape), rows(torch.ones(shape), dim=dim)):
        base, view = part(x)
        assert view.is_contiguous() == part(torch.ones(shape))[1].is_contiguous()
        y = view.contiguous().add_(1)
        found.append((base, view, y))
    for ours, torchs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(gathered(ours), torchs)


@pytest.mark.parametrize("change", [lambda x, f: x.contiguous(memory_format=f), lambda x, f: x.to(memory_format=f)])
def test_channels_last(change):
    full = torch.ones(1, P + 1, 2, 2)
    for dim in (1, 2):
        x = rows(full, dim=dim) if full.shape[dim] >= P else None
        if x is not None:
            y = change(x, torch.channels_last)
            x.zero_()
            torch.testing.assert_close(gathered(y), full)
            again = change(y, torch.channels_last)
            y.zero_()
            assert not gathered(again).any()


def test_a_leaf_without_cells_is_turned_as_others_are():
    sizes = (2, *(0,) * (P - 1))
    local = torch.ones(4, sizes[WORLD.rank]).t()
    for how in ("infer", {0: sizes}):
        z = ms.ShardTensor.from_local(local.detach(), mesh_of((P,)), (ms.Shard(0),), how).requires_grad_()
        y = z.contiguous().mul_(2)
        assert gathered(y.detach()).eq(2).all()
        assert gathered(z.detach()).eq(1).all()


def test_a_view_leaves_a_block_in_the_array_that_it_was_cut_from():
    big = torch.ones(4, 6)
    x = ms.ShardTensor.from_local(big[1:-1, 1:-1], mesh_of((P,)), (ms.Shard(0),))
    y = x.view(-1)
    x.mul_(10)
    assert big.sum() == 16 + 8 * 10
    y.add_(1)
    y[3:5] = 4
    assert big.sum() == 16 + 8 * 11 - 7 * big[1:-1, 1:-1].eq(4).sum()
    assert gathered(x).eq(4).sum() == 2
    torch.testing.assert_close(gathered(y), gathered(x).view(-1))
    with pytest.raises(UnsupportedOperationError, match="view"):
        x.view(torch.int16).mul_(3)
    x.fill_(1)
    x.reshape(-1).mul_(3)  # a copy, as of a part of a tensor in torch
    assert x.contiguous().mul_(2).sum().item() == 8 * 2 * P
    assert big.sum() == 24


def test_a_view_of_some_ranks_gaps_is_a_copy_on_all():
    """One row of a larger array has no gap."""
    sizes = uneven()[0]
    big = torch.ones(sizes[WORLD.rank], 6)
    x = ms.ShardTensor.from_local(big[:, 1:-1], mesh_of((P,)), (ms.Shard(0),))
    y = x.view(-1)
    x.zero_()
    assert gathered(y).all()
    y.add_(3)
    assert big.sum() == 3 * 4 * len(big) + 2 * len(big)


def test_a_view_of_a_tensor_with_room_for_its_halo_leaves_it_there():
    x = ms.zeros((P + 1, 4), mesh=mesh_of((P, 1)), placements=(ms.Shard(0), ms.Shard(1)), ghost=1)
    y = x.view(-1)
    assert x._halo is not None
    x.fill_(1)
    full = torch.ones(1, 1, P + 1, 4)
    kernel = torch.ones(1, 1, 3, 3)
    torch.testing.assert_close(gathered(F.conv2d(x[None, None], kernel, padding=1)), F.conv2d(full, kernel, padding=1))
    assert not gathered(y).any()


def test_a_cropped_leaf_is_written_through_its_view():
    """The package's own blocks may be cut out of larger ones, where torch's tensor is dense."""
    w = torch.ones(1, 1, 3)
    full = torch.arange(1.0, 2 * P + 2).view(1, 1, -1)
    for x in (full, rows(full, dim=2)):
        leaf = F.conv1d(x, w, stride=1)[..., :].detach().requires_grad_()
        with torch.no_grad():
            leaf.view(-1).mul_(10)
        torch.testing.assert_close(gathered(leaf.detach()), F.conv1d(full, w) * 10)


@pytest.mark.parametrize("name", ["t_", "transpose_", "swapaxes_", "swapdims_", "unsqueeze_", "squeeze_"])
def test_a_gathered_view_turned_in_place_is_written_through(name):
    args = {"t_": (), "unsqueeze_": (0,), "squeeze_": ()}.get(name, (0, 1))
    found = []
    for base in (full := torch.arange(4.0 * (P + 2)).view(P + 2, 2, 2), rows(full)):
        v = base[P]
        getattr(v, name)(*args)
        v.add_(torch.tensor([0.0, 100.0]))
        found.append((v, base))
    for ours, torchs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(gathered(ours), torchs)


WRITES = {
    "a diagonal by its steps": lambda x: x.view(-1, 16)[:, ::5].add_(1),
    "the same, by an index": lambda x: x.view(-1, 16).__setitem__((slice(None), slice(None, None, 5)), 1.0),
    "merged dims": lambda x: F.relu_(x.view(3, -1)),
    "all cells": lambda x: x.view(-1).mul_(2),
    "a row of a turned one": lambda x: x.view(6, 8).t().__setitem__(2, 1.0),
    "cells of a part": lambda x: x[1].view(-1).index_fill_(0, torch.tensor([3, 5]), 7.0),
    "data": lambda x: x.view(-1).data[5:].mul_(3),
    "halves": lambda x: x.view(-1)[24:].view(4, 6)[:, 1:3].zero_(),
    "complex numbers": lambda x: torch.view_as_complex(x.view(-1, 2)).imag.add_(1),
    "conjugate ones": lambda x: torch.view_as_complex(x.view(-1, 2)).conj()[1:].mul_(1j),
    "as pairs": lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 2)))[:, 1].copy_(torch.arange(24.0)),
    "another dtype": lambda x: x.detach().view(-1).view(torch.int64)[:3].zero_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_merged_dim_is_written_through(name):
    full = torch.linspace(-1, 2, 48, dtype=torch.float64).view(3, 4, 4)

    def write(x):
        y = x * 1
        view = WRITES[name](y)
        return y if view is None else (y, view)

    for mesh, placements, sizes in layouts(full.shape, (0, 1, 2)):
        compare(write, [(full, mesh, placements, sizes)], what=f"{placements} {sizes}")
    leaf = rows(full, dim=1, requires_grad=True)
    if name not in ("data", "another dtype"):
        with pytest.raises(RuntimeError, match="leaf Variable"):
            WRITES[name](leaf)


@pytest.mark.ranks(2, 3, 4)
def test_nothing_is_written_into_a_grid():
    for grid in torch.meshgrid(rows(torch.arange(2.0 * P - 1)), torch.arange(3.0), indexing="ij"):
        with pytest.raises(UnsupportedOperationError, match="view"):
            grid.mul_(2)
    (alone,) = torch.meshgrid(rows(torch.arange(2.0 * P)), indexing="ij")
    assert gathered(alone.mul_(2)).sum() == 2 * P * (2 * P - 1)


@pytest.mark.parametrize(
    "divide",
    [
        torch.floor_divide,
        torch.remainder,
        torch.fmod,
        lambda a, b, out: torch.div(a, b, rounding_mode="floor", out=out),
        lambda a, b, out: torch.div(a, other=b, rounding_mode="trunc", out=out),
    ],
)
def test_a_zero_on_one_rank_divides_nowhere(divide):
    a = rows(torch.full((2 * P,), 4))
    b = torch.ones(2 * P, dtype=torch.long)
    b[-1] = 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        divide(a, rows(b), out=a.clone())


def test_what_torch_refuses_of_complex_numbers_is_refused_without_cells():
    q = rows(torch.ones(4, 3, dtype=torch.complex64), (4, *(0,) * (P - 1)))
    with pytest.raises(NotImplementedError):
        F.scaled_dot_product_attention(q, q, q)


NO_GRAD_WRITES = {
    "unsqueeze_": lambda v: v.unsqueeze_(0),
    "squeeze_": lambda v: v.squeeze_(),
    "squeeze_ of a sharded dim": lambda v: v.squeeze_(0),
    "a selected row": lambda v: v.mul_(2),
    "one that came from another rank, in two steps": lambda v: v[:2].add_(1),
}


@pytest.mark.parametrize("name", NO_GRAD_WRITES)
def test_a_graph_goes_on_beyond_what_is_written_without_gradients(name):
    """As torch's does, unless it has another shape then: the node before it refuses the cotangent."""

    def derivative(x):
        y = x * 2
        v = y[:1] * 3 if "squeeze" in name else y[P]
        with torch.set_grad_enabled("squeeze" in name and not isinstance(x, ms.ShardTensor)):
            NO_GRAD_WRITES[name](v)
        (v.sin().sum() + y.sum()).backward()
        return v.detach(), y.detach(), x.grad

    full = torch.linspace(0, 1, 4 * (P + 1), dtype=torch.float64).view(P + 1, 4)
    expected = derivative(full.clone().requires_grad_())
    for sizes in (None, (*(0,) * (P - 1), P + 1)):
        got = derivative(rows(full, sizes, requires_grad=True))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(gathered(a), b)


def test_views_of_a_leaf_of_local_blocks_are_alike_on_all_ranks():
    """One rank's block may be a view where others' are none, or have no cells, which torch treats in another way."""
    whole = torch.arange(8.0)
    for local in (whole[2:2] if P > 1 and WORLD.rank == P - 1 else torch.ones(2), whole[2 : 2 + WORLD.rank].view(-1)):
        x = ms.ShardTensor.from_local(local, mesh_of((P,)), (ms.Shard(0),)).requires_grad_()
        with torch.no_grad():
            assert len(set(WORLD.allgather(x[:1].requires_grad))) == 1
        v = x[::2]
        with torch.no_grad():
            v.mul_(2)
        v.sum().backward()
        torch.testing.assert_close(gathered(x.grad), torch.tensor([1.0, 0.0]).repeat(len(x))[: len(x)])
        x.detach_()
        assert not x.requires_grad


def test_what_is_returned_itself():
    """As torch does, and a change of shape in place then is one of both."""
    for sizes in uneven():
        x = rows(torch.ones(3 + P - 1 if sizes[0] == 3 else 4, 3), sizes)
        y = torch.broadcast_tensors(x, x.new_ones(3), x[:1])[0]
        assert y is x
        assert y.unsqueeze_(0).shape == x.shape == (1, *y.shape[1:])
        line = x.flatten()
        assert line.ravel() is line


def test_a_result_is_detached_in_place():
    """A block without cells may be a view, which torch does not detach in place."""
    for sizes in uneven():
        x = rows(torch.ones(3 + P - 1 if sizes[0] == 3 else 4, 3), sizes, requires_grad=True)
        y = F.conv1d(x.T[None], torch.ones(3, 3, 1))
        assert y.detach_() is y
        assert not y.requires_grad


@pytest.mark.parametrize("name", ["fft", "irfft", "hfft", "pixel_shuffle", "pixel_unshuffle"])
def test_a_result_without_cells_is_no_view_of_its_operand(name):
    """Torch would find the operand changed where the result is written into, on that rank alone."""
    full = torch.ones(4, 4, 4, 4, dtype=torch.float64)
    for sizes in ((4, *(0,) * (P - 1)), (*(0,) * (P - 1), 4)):
        for dim in (0, 1):
            y = rows(full, sizes, dim, requires_grad=True).sin()
            y = torch.complex(y, y) if "fft" in name else y
            saved, z = y * y, getattr(torch.fft, name)(y, dim=-1) if "fft" in name else getattr(F, name)(y, 2)
            with torch.no_grad():
                z.mul_(2)
            saved.abs().sum().backward()


WITH_GAPS = {
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "conv_transpose": lambda x: F.conv_transpose2d(x, torch.ones(4, 4, 3, 3, dtype=x.dtype), stride=2, padding=1),
    "gradient": lambda x: torch.gradient(x, dim=2)[0],
}


@pytest.mark.parametrize("name", WITH_GAPS)
def test_views_of_a_result_that_was_cut_out_share_its_memory(name):
    """Taken before and after ``contiguous``."""
    full = torch.linspace(0, 1, 2 * 4 * 3 * (P + 1) * 2, dtype=torch.float64).view(2, 4, 3 * (P + 1), 2)
    for first in (lambda y: y[0], lambda y: y.detach(), lambda y: y.data, lambda y: y.transpose(0, 1), copy.copy):
        x, expected = (WITH_GAPS[name](z) for z in (rows(full, dim=2), full))
        for y in (x, expected):
            view, again = first(y), y.contiguous()
            view.add_(100)
            again.mul_(2)
        torch.testing.assert_close(gathered(x), expected)


@pytest.mark.parametrize("write", [lambda y: y.reshape(-1).add_(1), lambda y: y.view(torch.int32).add_(1)])
def test_where_a_row_does_not_tell_all_ranks_do_the_same(write):
    x = rows(torch.arange(6.0 * (P + 1)).view(P + 1, 6), (2, *(1,) * (P - 1)))
    y, refused = x.t() + x.t(), False
    try:
        write(y)
    except UnsupportedOperationError:
        refused = True
    assert len(set(WORLD.allgather((refused, y.is_contiguous())))) == 1


@pytest.mark.parametrize("part", [lambda x: x[::2, :2], lambda x: x[:, :2], lambda x: x[:, :2].t()])
def test_complex_numbers_of_a_part_are_there_on_all_ranks_or_on_none(part):
    full = torch.arange(6.0 * (P + 2)).view(2 * P + 4, 3)
    try:
        expected = torch.view_as_complex(part(full))
    except RuntimeError as e:
        with pytest.raises(RuntimeError, match=str(e)):
            torch.view_as_complex(part(rows(full)))
    else:
        torch.testing.assert_close(gathered(torch.view_as_complex(part(rows(full)))), expected)


def test_a_deep_copy_of_a_part_leaves_out_what_the_part_does():
    full = torch.arange(4.0 * (P + 1)).view(P + 1, 4)
    for view in (lambda x: x[:, :2], lambda x: x[:, ::2].t(), lambda x: x.t(), lambda x: x):
        x, expected = (copy.deepcopy(view(z)) for z in (rows(full), full))
        for y in (x, expected):
            y.contiguous().add_(100)
        torch.testing.assert_close(gathered(x), expected)


def test_diag_copies_a_diagonal():
    full = torch.ones(P + 1, P + 1)
    for dim in (0, None):
        x = rows(full) if dim == 0 else shard(full, mesh_of((P,)), (ms.Replicate(),))
        torch.diag(x).add_(1)
        x.diag(1).zero_()
        torch.testing.assert_close(gathered(x), full)
