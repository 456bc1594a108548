"""Plain tensors taken out of ShardTensors: their gradients are those of one process, or it raises."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import wrap_torch_function

import mpishard as ms
from mpishard.autograd import plain
from tests.compare import WORLD, gathered, mesh_of, mesh_shapes, shard

N = 7


def values(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def inside(x, y):
    return (x[:, None] - y).square().sum(-1).amin(1)


@wrap_torch_function(lambda x, y: (x, y))
def nearest(x, y):
    return inside(x, y)


@wrap_torch_function(lambda x, y: (x, y))
def composed(x, y):
    return inside(x, y)


@wrap_torch_function(lambda x, y: (x, y))
def total(x, y):
    return inside(x, y).sum()


@ms.implements(nearest)
def _(x, y):
    return ms.ShardTensor(inside(x.to_local(), y.full_tensor()), rows(x), x.mesh)


@ms.implements(composed)
def _(x, y):
    return inside(x, y.full_tensor())  # torch functions of a ShardTensor and a plain one


@ms.implements(total)
def _(x, y):
    found = inside(x.to_local(), y.redistribute([ms.Replicate()] * x.mesh.ndim).to_local()).sum()
    found = ms.all_reduce(found, x.mesh, x.sharding.sharded_mesh_dims, replicated=True)
    return ms.ShardTensor.from_local(found, x.mesh, [ms.Replicate()] * x.mesh.ndim)


def rows(x):
    """The layout of a result with one number per row."""
    return x.detach().sum(1).sharding


def layouts():
    for shape in mesh_shapes(2):
        some = [ms.Shard(0), ms.Replicate()]
        choices = [[p] for p in some] if len(shape) == 1 else [[p, q] for p in some for q in some]
        for mine in choices:
            for theirs in choices:
                yield mesh_of(shape), mine, theirs


def check(f, end=lambda out: (out * torch.arange(1.0, out.numel() + 1).reshape(out.shape)).sum().backward()):
    for mesh, mine, theirs in layouts():
        found = []
        for where in (None, mesh):
            x = shard(values(N, 2), mesh, mine if where else None, requires_grad=True)
            y = shard(values(N + 2, 2), mesh, theirs if where else None, requires_grad=True)
            end(f(x, y * 1.5) + 0)
            found.append([gathered(x.grad), gathered(y.grad)])
        for expected, got in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, msg=lambda m, a=mine, b=theirs: f"{a} {b}: {m}")


@pytest.mark.parametrize("rule", [nearest, composed, total])
def test_a_rule_that_gathers(rule):
    check(rule)


def test_a_rule_of_a_tensor_with_itself():
    for mesh, placements, _ in layouts():
        whole = values(N, 2).requires_grad_()
        x = shard(values(N, 2), mesh, placements, requires_grad=True)
        for t in (whole, x):
            nearest(t, t * 2).square().sum().backward()
        torch.testing.assert_close(gathered(x.grad), whole.grad)


def test_without_a_rule():
    def f(x, y):
        if not isinstance(x, ms.ShardTensor):
            return inside(x, y)
        return ms.ShardTensor.from_local(inside(x.to_local(), y.full_tensor()), x.mesh, x.placements)

    check(f)


def test_a_whole_loss():
    check(lambda x, y: inside(*(t.full_tensor() if isinstance(t, ms.ShardTensor) else t for t in (x, y))))


def mesh_1d():
    return mesh_of((WORLD.size,))


@pytest.mark.ranks(2, 3, 4)
def test_a_loss_of_blocks():
    mesh = mesh_1d()
    x, y = (shard(values(*shape), mesh, [ms.Shard(0)], requires_grad=True) for shape in ((N, 2), (N + 2, 2)))
    with pytest.raises(ms.DesyncError, match="grad_placements"):
        inside(x.to_local(), y.full_tensor()).sum().backward()
    whole = [values(N, 2).requires_grad_(), values(N + 2, 2).requires_grad_()]
    inside(*whole).sum().backward()
    x.grad = y.grad = None
    inside(x.to_local(), y.full_tensor(grad_placements=[ms.Partial()])).sum().backward()
    for t, expected in zip((x, y), whole):
        torch.testing.assert_close(gathered(t.grad), expected.grad)


@pytest.mark.parametrize("placement", [ms.Shard(0), ms.Replicate(), ms.Partial()])
def test_grad_placements(placement):
    """Of cotangents that are parts of a sum, and of the same one."""
    mesh = mesh_1d()
    full = values(N, 2)
    for given, factor in ((ms.Partial(), WORLD.size), (ms.Replicate(), 1)):
        x = shard(full, mesh, [ms.Replicate() if placement.is_partial() else placement], requires_grad=True)
        y = (x * 1).redistribute([placement])
        c = values(N, 2)
        (y.full_tensor(grad_placements=[given]) * c).sum().backward()
        torch.testing.assert_close(gathered(x.grad), factor * c)
        if placement != ms.Shard(0):
            x.grad = None
            if not placement.is_partial():
                ((x * 1).to_local(grad_placements=given) * c).sum().backward()
                torch.testing.assert_close(gathered(x.grad), factor * c)
        else:
            x.grad = None
            (x.to_local(grad_placements=[placement]) * 3).sum().backward()
            torch.testing.assert_close(gathered(x.grad), torch.full((N, 2), 3.0, dtype=torch.float64))


def test_of_second_order():
    mesh = mesh_1d()

    def f(x):
        whole = x.full_tensor(grad_placements=[ms.Partial()]) if isinstance(x, ms.ShardTensor) else x
        mine = x.to_local() if isinstance(x, ms.ShardTensor) else x
        out = (mine[:, None] * whole).square().sum((1, 2))
        return ms.ShardTensor.from_local(out, x.mesh, x.placements) if isinstance(x, ms.ShardTensor) else out

    found = []
    for x in (values(N, 2).requires_grad_(), shard(values(N, 2), mesh, [ms.Shard(0)], requires_grad=True)):
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        found.append([gathered(t) for t in (g, *torch.autograd.grad((g**3).sum(), x))])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_what_does_not_fit():
    x = shard(values(N, 2), mesh_1d(), [ms.Shard(0)], requires_grad=True)
    for bad in ([ms.Shard(0)], [ms.Partial(), ms.Partial()]):
        with pytest.raises(ms.LayoutError):
            x.full_tensor(grad_placements=bad)
    for bad in (ms.Partial(), ms.Replicate(), ms.Shard(1)):
        with pytest.raises(ms.LayoutError, match="grad_placements do not fit"):
            x.to_local(grad_placements=bad)


def test_the_loss_of_a_block_is_one_term_of_a_sum():
    x, y = (shard(t, mesh_1d(), [ms.Shard(0)], requires_grad=True) for t in values(2, 4 * WORLD.size, 3))
    F.mse_loss(x.to_local(), y.to_local()).backward()
    of_blocks, x.grad = gathered(x.grad), None
    F.mse_loss(x, y).backward()
    torch.testing.assert_close(of_blocks, WORLD.size * gathered(x.grad))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_statistics_on_blocks(rows):
    """What was computed, and is whole on every rank: one cell of it, or several, and ranks that hold one or more."""
    full = values(4, 3)[:, :rows]
    for mean in (lambda t: t.mean(0, keepdim=True), lambda t: t.mean()):
        mesh = mesh_1d()
        x = shard(full, mesh, [ms.Shard(0)], requires_grad=True)
        average = mean(x.sin()).redistribute(placements=[ms.Replicate()])
        blocks = x.to_local() * average.to_local()
        ms.ShardTensor.from_local(blocks, mesh, [ms.Shard(0)]).square().sum().backward()
        whole = full.clone().requires_grad_()
        (whole * mean(whole.sin())).square().sum().backward()
        torch.testing.assert_close(gathered(x.grad), whole.grad)


def test_products_of_blocks_of_unlike_size():
    first, second = values(3), values(6)
    for shape in mesh_shapes(2):
        if len(shape) == 1:
            continue
        mesh = mesh_of(shape)
        x = shard(first, mesh, [ms.Shard(0), ms.Replicate()], requires_grad=True)
        y = shard(second, mesh, [ms.Replicate(), ms.Shard(0)])
        blocks = x.sin().to_local()[:, None] * y.to_local()
        ms.ShardTensor.from_local(blocks, mesh, [ms.Shard(0), ms.Shard(1)]).square().sum().backward()
        whole = first.clone().requires_grad_()
        (whole.sin()[:, None] * second).square().sum().backward()
        torch.testing.assert_close(gathered(x.grad), whole.grad)


def test_terms_of_a_sum():
    """What each rank holds of a Partial is its own: its cotangent is that of the sum, not one for each rank."""
    mesh = mesh_1d()
    first, second = values(3, N), values(N, 2)
    x = shard(first, mesh, [ms.Shard(1)], requires_grad=True)
    y = shard(second, mesh, [ms.Shard(0)], requires_grad=True)
    terms = x @ y
    if WORLD.size > 1:
        assert terms.placements == (ms.Partial(),)
    total = ms.ShardTensor.from_local(terms.to_local() * 2, mesh, terms.placements)
    total.square().sum().backward()
    whole = [t.clone().requires_grad_() for t in (first, second)]
    (2 * (whole[0] @ whole[1])).square().sum().backward()
    for t, expected in zip((x, y), whole, strict=True):
        torch.testing.assert_close(gathered(t.grad), expected.grad)
    if WORLD.size > 1:
        # of terms that are no multiples of each rank's, no cotangent of the sum
        with pytest.raises(ms.DesyncError, match="differs between ranks"):
            ms.ShardTensor.from_local((x @ y).to_local().square(), mesh, terms.placements).sum().backward()


@pytest.mark.ranks(2, 3, 4)
def test_a_result_that_is_used_in_both_ways():
    """As parts of a sum, and as a whole that meets ShardTensors: the second counted as often as there are ranks."""
    mesh, full, other = mesh_of((WORLD.size,)), values(N, 3), values(N + 1, 3)
    a = full.clone().requires_grad_()
    ((other @ a.T).sum() + a.square().sum()).backward()

    def loss(x, first, second):
        y = shard(other, mesh, (ms.Shard(0),))
        parts = ms.ShardTensor.from_local(y.to_local() @ first.T, mesh, (ms.Shard(0),))
        return parts.sum() + second.square().sum()

    x = shard(full, mesh, (ms.Shard(0),)).requires_grad_()
    both = x.full_tensor()
    with pytest.raises(ms.DesyncError, match="take one for each"):
        loss(x, both, both).backward()
    x.grad = None
    loss(x, x.full_tensor(), x.full_tensor()).backward()
    torch.testing.assert_close(gathered(x.grad), a.grad)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("metric", ["beside", "number", "parts", "all"])
def test_what_is_no_part_of_the_loss_does_not_count(metric, again):
    """A metric that is kept, made without `no_grad`, of the plain tensor that the loss uses in the other way."""
    mesh, full, other = mesh_of((WORLD.size,)), values(N, 3), values(N + 1, 3)
    x = shard(full, mesh, (ms.Shard(0),)).requires_grad_()
    y = shard(other, mesh, (ms.Shard(0),))
    whole = x.full_tensor()

    def parts():
        return ms.ShardTensor.from_local(y.to_local() @ whole.T, mesh, (ms.Shard(0),)).square().sum()

    loss = parts() if metric in ("beside", "number") else whole.square().sum() * 3
    if metric == "beside":
        kept = F.linear(y, whole).mean()
    elif metric == "number":
        kept = (y * whole.norm()).sum()
    elif metric == "parts":
        kept = parts()
    else:
        kept = ms.all_reduce((y.to_local() @ whole.T).sum(), mesh, replicated=True)
    a = full.clone().requires_grad_()
    expected = (other @ a.T).square().sum() if metric in ("beside", "number") else a.square().sum() * 3
    for t, end in ((x, loss), (a, expected)):
        if again:
            (g,) = torch.autograd.grad(end, t, create_graph=True)
            g.square().sum().backward()
        else:
            end.backward(retain_graph=True)
    torch.testing.assert_close(gathered(x.grad), a.grad)
    if not again:  # a pass of its own
        kept.backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_what_is_not_recorded_does_not_count(context):
    mesh, full, other = mesh_of((WORLD.size,)), values(N, 3), values(N, 3)
    x, y = shard(full, mesh, (ms.Shard(0),)).requires_grad_(), shard(other, mesh, (ms.Shard(0),))
    twice = x.full_tensor() * 2
    loss = ms.ShardTensor.from_local(y.to_local() @ twice.T, mesh, (ms.Shard(0),)).sum()
    with context():
        for got, expected in (
            (y * twice, other * twice),
            (F.linear(y, twice), F.linear(other, twice)),
            (torch.where(y > 0, twice, y), torch.where(other > 0, twice, other)),
            (y.clone().add_(twice[0]), other + twice[0]),
            (torch.cat([twice, y]), torch.cat([twice, other])),
        ):
            torch.testing.assert_close(gathered(got), expected.detach())
    loss.backward()
    a = full.clone().requires_grad_()
    (other @ (a * 2).T).sum().backward()
    torch.testing.assert_close(gathered(x.grad), a.grad)


def test_a_pass_looks_at_a_node_once(monkeypatch):
    mesh, visits = mesh_of((WORLD.size,)), []
    visit = plain._visit
    monkeypatch.setattr(plain, "_visit", lambda *args: visits.append(1) or visit(*args))

    def count(n):
        x = shard(values(N, 3), mesh, (ms.Shard(0),)).requires_grad_()
        h, y = x.full_tensor().sum(0), shard(values(N, 3), mesh, (ms.Shard(0),))
        for _ in range(n):
            h = h * 0.5
            y = y + h
        visits.clear()
        y.sum().backward()
        return len(visits)

    assert count(40) < 2.5 * count(20)
