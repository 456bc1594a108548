"""ShardTensor as a torch.Tensor: what users expect of one, and what must be refused."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import mpishard as ms
from mpishard.ops.pointwise.pointwise import pointwise
from mpishard.tensor.registry import no_rule
from tests.compare import WORLD, mesh_of, shard

SHAPE = (3, 7, 4)


def values(*shape):
    return torch.randn(shape or SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(21))


@pytest.fixture
def x():
    return shard(values(), mesh_of((-1,)), (ms.Shard(1),), requires_grad=True)


def test_it_describes_the_global_tensor(x):
    assert x.shape == torch.Size(SHAPE)
    assert x.size() == x.shape
    assert x.size(1) == x.size(-2) == 7
    assert (x.ndim, x.dim(), x.numel(), len(x)) == (3, 3, 84, 3)
    assert x.stride() == values().stride()
    assert x.dtype == torch.float64
    assert x.device == x.mesh.device
    assert x.is_floating_point()
    assert not x.is_complex()
    assert x.placements == (ms.Shard(1),)
    assert x.sharding.shape == SHAPE
    assert isinstance(x, torch.Tensor)
    text = repr(x)
    for part in ("(3, 7, 4)", "Shard(dim=1)", str(tuple(x.to_local().shape)), "mesh", "requires_grad"):
        assert part in text


@pytest.mark.parametrize("rows", [2 * WORLD.size, WORLD.size + 1, 1])
def test_a_memory_format_is_that_of_all_ranks(rows):
    """A program that looks at it goes the same way on all; one row of a block, or none, lies in several formats."""
    full = torch.arange(float(12 * rows)).view(1, 2, rows, 6)
    formats = (torch.contiguous_format, torch.channels_last)
    for dim in (2, 3):
        y = shard(full, mesh_of((WORLD.size,)), (ms.Shard(2),)).transpose(2, dim)
        of_torch = full.transpose(2, dim)
        for x, like in ((y, of_torch), (y.to(memory_format=formats[1]), of_torch.to(memory_format=formats[1]))):
            found = [x.is_contiguous(memory_format=f) for f in formats]
            assert len(set(map(str, WORLD.allgather(found)))) == 1
            if rows % WORLD.size == 0:
                assert found == [like.is_contiguous(memory_format=f) for f in formats]
            assert x.view(-1).shape == (12 * rows,)


def test_python_protocols(x):
    assert copy.copy(x).to_local() is x.to_local()
    deep = copy.deepcopy(x)
    assert deep.sharding is x.sharding
    assert deep.to_local() is not x.to_local()
    assert deep.requires_grad
    torch.testing.assert_close(deep.full_tensor(), values())
    rows = list(x)
    assert len(rows) == 3
    torch.testing.assert_close(rows[2].full_tensor(), values()[2])
    assert {x: 1}[x] == 1
    with pytest.raises(TypeError, match="0-d"):
        len(x.sum())
    with pytest.raises(TypeError, match=r"torch\.tensor\(\[float"):
        torch.tensor([x.sum(), x.mean()])
    with pytest.raises(TypeError, match="0-d"):
        iter(x.sum())


def test_one_cell_has_a_global_value(x):
    total = values().sum().item()
    assert abs(x.sum().item() - total) < 1e-12
    assert abs(float(x.sum()) - total) < 1e-12
    assert bool(x.sum() > total - 1)
    for cells, text in ((x, "more than one value"), (x[:0], "no values")):
        with pytest.raises(RuntimeError, match=f"Boolean value of Tensor with {text} is ambiguous"):
            bool(cells)
    for check, error in ((torch._assert, AssertionError), (torch._assert_async, RuntimeError)):
        assert check((x == x).all(), "all of it") is None
        with pytest.raises(error, match="in one cell"):
            check((x != x[1, 1]).all(), "in one cell")
        with pytest.raises(RuntimeError, match="more than one value"):
            check(x, "which?")
    with pytest.raises(RuntimeError, match="nonzero value, but got zero"):
        torch._assert_async(x.sum() * 0)
    assert int(x.sum() * 0 + 3) == 3
    one = shard(torch.tensor([5.0]), x.mesh, (ms.Shard(0),))
    assert one.item() == 5
    assert one.tolist() == [5.0]
    with pytest.raises(RuntimeError, match="84 elements"):
        x.item()


@pytest.mark.parametrize(
    "call",
    [
        pickle.dumps,
        lambda t: t.numpy(),
        lambda t: t.data_ptr(),
        lambda t: torch.autograd.graph.get_gradient_edge(t.detach().requires_grad_() * 2),
    ],
)
def test_what_needs_the_whole_is_refused(x, call):
    with pytest.raises(ms.UnsupportedOperationError, match="ShardTensor"):
        call(x)


def test_memory_of_a_shard_is_not_handed_on(x):
    for hand_on in (torch.from_dlpack, torch.utils.dlpack.to_dlpack, torch.to_dlpack, np.from_dlpack):
        with pytest.raises(ms.NoShardingRule, match="__dlpack"):
            hand_on(x)
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(torch.ones(2))).sum() == 2


class Named(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_what_looks_for_no_rule(x):
    """Torch hands these over below its functions, where no rule is."""
    with pytest.raises(ms.UnsupportedOperationError, match="Named of a ShardTensor"):
        x.as_subclass(Named)
    with pytest.raises(ms.NoShardingRule, match="hand it plain tensors"):
        torch.Tensor(x)
    loss = x.square().mean()
    for number in (torch.tensor(loss.detach()), torch.tensor(loss.detach(), dtype=torch.float32)):
        assert type(number) is torch.Tensor
        assert number.item() == pytest.approx(values().square().mean().item())
    assert x.name is None


@pytest.mark.parametrize("dim", [1, 2])
def test_the_cells_of_another_tensor(x, dim):
    y, kept = x.detach().clone(), x.sharding
    alias = y
    for source in (values() + 1, shard(values() + 2, x.mesh, (ms.Shard(dim),))):
        assert y.set_(source) is alias
        torch.testing.assert_close(y.full_tensor(), source.full_tensor() if hasattr(source, "mesh") else source)
        assert y.sharding == kept
    for source in ((), (values(), 0, (3,), (1,)), (values(2),), (values().float(),)):
        with pytest.raises(ms.UnsupportedOperationError):
            y.set_(*source)


def test_what_every_rank_holds_is_an_array(x):
    whole = x.detach().redistribute(placements=[ms.Replicate()] * x.mesh.ndim)
    for array in (whole.numpy(), np.asarray(whole), whole.cpu().numpy(force=True), np.asarray(whole, dtype=np.float32)):
        assert np.array_equal(array, values().numpy().astype(array.dtype))
    with pytest.raises(RuntimeError, match="requires grad"):
        whole.requires_grad_().numpy()


def test_gradients_are_those_of_a_tensor(x):
    (x * x).sum().backward()
    assert isinstance(x.grad, ms.ShardTensor)
    assert x.grad.sharding is x.sharding
    torch.testing.assert_close(x.grad.full_tensor(), 2 * values())
    x.grad = None
    assert x.grad is None
    x.grad = x.detach() * 3
    torch.testing.assert_close(x.grad.full_tensor(), 3 * values())
    assert x.is_leaf
    assert (x * 2).grad_fn is not None
    assert not x.detach().requires_grad
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with pytest.raises(RuntimeError, match="scalar"):
        (x * 2).backward()
    x.grad = None
    (x * 2).backward(shard(values() * 5, x.mesh, x.placements))
    torch.testing.assert_close(x.grad.full_tensor(), 10 * values())


def test_an_assigned_gradient_is_brought_to_where_the_tensor_lies(x):
    size = x.mesh.shape[0]
    g = 5 * values()
    everywhere = [ms.Replicate()] * x.mesh.ndim
    uneven = {x.placements[0].dim: [SHAPE[x.placements[0].dim], *[0] * (size - 1)]}
    for value in (
        g,
        ms.distribute_tensor(g, x.mesh, everywhere),
        ms.distribute_tensor(g, x.mesh, x.placements, sizes=uneven),
        ms.distribute_tensor(g.flatten(), x.mesh, [ms.Shard(0)]).view(SHAPE),
    ):
        x.grad = value
        assert x.grad.sharding == x.sharding
        torch.testing.assert_close(x.grad.full_tensor(), g)
    assert g.equal(5 * values())
    other = ms.init_mesh(x.mesh.shape, x.mesh.mesh_dim_names)
    for value in (
        g.float(),
        g[:1],
        ms.distribute_tensor(g.float(), x.mesh, x.placements),
        ms.distribute_tensor(g, other, x.placements),
    ):
        with pytest.raises(ms.UnsupportedOperationError, match="another kind of tensor"):
            x.grad = value
    torch.testing.assert_close(x.grad.full_tensor(), g)


def test_a_plain_gradient_counts_as_whole(x):
    (x * 2).backward(values())
    torch.testing.assert_close(x.grad.full_tensor(), 2 * values())


def test_gradients_of_gradients(x):
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad((g * g).sum(), x)
    torch.testing.assert_close(h.full_tensor(), 36 * values() ** 3)


def test_hooks_see_shard_tensors(x):
    seen = []
    x.register_hook(seen.append)
    y = x * 2
    y.retain_grad()
    y.register_hook(lambda g: g * 10)
    y.sum().backward()
    assert isinstance(seen[0], ms.ShardTensor)
    torch.testing.assert_close(x.grad.full_tensor(), torch.full(SHAPE, 20.0, dtype=torch.float64))


def test_writing_in_place(x):
    y = x.detach().clone()
    z = y
    y += 1
    y.mul_(2)
    assert z is y
    torch.testing.assert_close(y.full_tensor(), (values() + 1) * 2)
    y.copy_(values())
    torch.testing.assert_close(y.full_tensor(), values())
    y.zero_()
    assert not y.full_tensor().any()
    with pytest.raises(RuntimeError, match="broadcast shape"):
        y.add_(values(2, 3, 7, 4))
    with pytest.raises(ms.UnsupportedOperationError, match="out="):
        torch.add(y, y, out=values(2, 2))


def test_a_parameter_can_be_sharded(x):
    model = nn.Module()
    model.field = nn.Parameter(x.detach())
    steps = torch.optim.AdamW(model.parameters(), lr=0.1)
    plain = nn.Parameter(values())
    reference = torch.optim.AdamW([plain], lr=0.1)
    for _ in range(3):
        for parameter, optimizer in ((model.field, steps), (plain, reference)):
            optimizer.zero_grad()
            (parameter**2).mean().backward()
            optimizer.step()
    assert isinstance(model.field, ms.ShardTensor)
    torch.testing.assert_close(model.field.detach().full_tensor(), plain.detach())


class Product(torch.autograd.Function):
    """The ShardTensor is not an argument, or not one that torch sees."""

    @staticmethod
    def forward(ctx, p, made, held):
        x = made() if made else held["x"] if isinstance(held, dict) else held[0][0]
        return (x * p, p) if made else x * p

    @staticmethod
    def backward(ctx, *grads):
        raise AssertionError("not reached")


def test_a_users_function_that_meets_shards_elsewhere(x):
    p = torch.ones(SHAPE[1:], dtype=torch.float64, requires_grad=True)
    for arguments in [(p, None, [(x,)]), (p, None, {"x": x})]:
        with pytest.raises(ms.UnsupportedOperationError, match="got:      ShardTensors inside a list"):
            Product.apply(*arguments)
    with pytest.raises(ms.UnsupportedOperationError, match="got:      a ShardTensor as its result"):
        Product.apply(p, lambda: x, None)


def test_a_miss_is_loud_and_a_rule_can_be_added(x):
    def own(t):
        return torch.overrides.handle_torch_function(own, (t,), t)

    with pytest.raises(ms.NoShardingRule, match="own") as caught:
        own(x)
    for way in ("implements", "redistribute", "full_tensor", "Shard(dim=1)"):
        assert way in str(caught.value)

    @ms.implements(own)
    def rule(t):
        return ms.ShardTensor.from_local(t.to_local() + 7, t.mesh, t.placements)

    torch.testing.assert_close(own(x).full_tensor(), values() + 7)


def test_a_rule_can_be_replaced(x):
    functions = torch.sin, torch.nn.functional.gelu
    try:

        @ms.implements(*functions)
        def rule(t):
            return ms.ShardTensor.from_local(t.to_local() + 7, t.mesh, t.placements)

        for function in functions:
            torch.testing.assert_close(function(x).full_tensor(), values() + 7)
    finally:
        pointwise(*functions)
    torch.testing.assert_close(torch.sin(x).full_tensor(), torch.sin(values()))


@pytest.mark.ranks(2, 3, 4)
def test_meshes_do_not_mix(x):
    other = ms.init_mesh((-1,))
    with pytest.raises(ms.MeshError, match="different meshes"):
        x + ms.distribute_tensor(values(), other, (ms.Shard(1),))


def test_errors_have_one_text_on_all_ranks(x):
    y = shard(values(), ms.init_mesh((-1,)), (ms.Shard(1),))
    for call in (lambda: x + y, x.numpy, lambda: pickle.dumps(x)):
        with pytest.raises(ms.MpishardError) as caught:
            call()
        assert len(set(x.mesh.comm.allgather(str(caught.value)))) == 1


def test_data_is_that_of_a_shard_tensor(x):
    for value in (values()[1:], values().float(), values().numpy()):
        with pytest.raises(ms.UnsupportedOperationError, match=r"ShardTensor\.data"):
            x.data = value
    x.data = x.data * 2
    torch.testing.assert_close(x.detach().full_tensor(), 2 * values())
    kept = x.sharding
    x.data = values() + 1
    assert x.sharding == kept
    torch.testing.assert_close(x.detach().full_tensor(), values() + 1)


def test_a_freed_mesh_is_refused():
    mesh = ms.init_mesh((-1,))
    x = ms.distribute_tensor(values(), mesh, (ms.Shard(1),))
    mesh.free()
    with pytest.raises(ms.MeshError, match="free"):
        ms.halo_exchange(x, {1: 1}, mode="zeros")


def test_an_operator_lets_our_own_errors_through(x):
    contributions = ms.ShardTensor.from_local(torch.ones(3, dtype=torch.bool), x.mesh, (ms.Partial(),))
    with pytest.raises(ms.UnsupportedDtypeError, match="no reduction"):
        contributions & contributions


def test_a_miss_names_the_layouts_in_lists(x):
    text = str(no_rule(torch.block_diag, ([x, (torch.ones(2), 1)],), {}))
    assert "block_diag(ShardTensor(3, 7, 4) [Shard(dim=1)], Tensor(2,))" in text


def test_names_for_a_shell():
    x = ms.zeros(4, mesh=mesh_of((WORLD.size,)), placements=[ms.Shard(0)])
    assert {"full_tensor", "placements", "sum", "grad"} <= {*dir(x)}


def test_new_data_of_a_view_are_its_own():
    full, other = values(), values()[1] * 3
    mesh = mesh_of((WORLD.size,))
    x = shard(full, mesh, [ms.Shard(0)])
    for data in (shard(other, mesh, [ms.Replicate()]), shard(other, mesh, [ms.Shard(0)]), other.clone()):
        y = x[0]  # of one rank's cells: a copy here
        y.data = data
        y.add_(1)
        assert torch.equal(y.full_tensor(), other + 1)
        assert torch.equal(x.full_tensor(), full)
