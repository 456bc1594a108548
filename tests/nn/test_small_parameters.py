"""Small parameters share a node of autograd: their gradients are those that each would have on its own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import mpishard as ms
from mpishard.autograd import withhold
from mpishard.comm import guard
from tests.compare import WORLD, mesh_of, mesh_shapes

COUNT = 70  # more than share one node


class Many(nn.Module):
    """Scales and shifts: one used twice, one on replicated data too, one never."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        make = [torch.rand(5, generator=generator, dtype=torch.float64) + 0.5 for _ in range(COUNT)]
        self.weights = nn.ParameterList(nn.Parameter(w) for w in make)
        self.number = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.single = nn.Parameter(torch.ones(5))
        self.unused = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.matrix = nn.Parameter(torch.eye(5, dtype=torch.float64) + 0.1)

    def forward(self, x):
        for i, w in enumerate(self.weights):
            x = x * w if i % 2 else x + w
            x = x / (1 + x.abs().mean())
        x = (x * self.weights[0] * self.number) @ self.matrix + self.single
        return x, (self.weights[1] ** 2).sum()


def full():
    return torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(8))


def loss_of(model, x):
    y, extra = model(x)
    return (y**2).sum() + extra


def models(shape=(-1,)):
    mesh = mesh_of(shape)
    placements = [ms.Shard(0), ms.Shard(1), ms.Replicate()][: mesh.ndim]
    return Many(), ms.distribute_module(Many(), mesh), ms.distribute_tensor(full(), mesh, placements)


def alike(a, b):
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6 if name == "single" else 1e-10, atol=1e-9, msg=name)


@pytest.mark.parametrize("shape", mesh_shapes(2))
def test_gradients_and_their_accumulation(shape):
    plain, ours, x = models(shape)
    for _ in range(2):
        loss_of(plain, full()).backward()
        loss_of(ours, x).backward()
        alike(ours, plain)
    assert ours.unused.grad is None


def test_one_graph_has_few_nodes_and_a_pass_one_message(monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", False)  # which compares gradients in a message of its own
    mesh = mesh_of((-1,))
    weights = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(COUNT))
    ms.distribute_module(weights, mesh)
    y = ms.distribute_tensor(torch.ones(8, 4), mesh, (ms.Shard(0),))
    for w in weights:
        y = y * w
    loss = y.sum()
    assert len(small_nodes(loss)) == 2  # of 64, and the others
    with ms.comm_counter() as count:
        loss.backward()
    assert count.by_op["all_reduce"].calls == 1 if mesh.size > 1 else not count.by_op
    assert all(torch.equal(w.grad, torch.full((4,), 8.0)) for w in weights)


def small_nodes(loss):
    seen, ahead = set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [parent for parent, _ in node.next_functions]
    return {node for node in seen if "UseTogether" in type(node).__name__}


def test_a_model_keeps_its_nodes_and_a_copy_has_its_own():
    _, ours, x = models()
    first, _ = ours(x)
    kept = small_nodes(first)
    first.sum().backward()
    assert kept
    assert small_nodes(ours(x)[0]) == kept
    twin = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    twin.zero_grad()
    ms.distribute_module(twin, x.mesh)
    assert not small_nodes(twin(x)[0]) & kept
    ours.zero_grad()
    loss_of(twin, x).backward()
    assert all(p.grad is None for p in ours.parameters())
    loss_of(ours, x).backward()
    alike(ours, twin)


def test_meshes_in_turns():
    plain, ours, _ = models()
    for _ in range(6):
        x = ms.distribute_tensor(full(), mesh_of((-1,)), (ms.Shard(0),))
        loss_of(ours, x).backward()
        loss_of(plain, full()).backward()
    alike(ours, plain)


def test_several_passes_over_one_graph():
    plain, ours, x = models()
    for model, field in ((plain, full()), (ours, x)):
        loss = loss_of(model, field)
        loss.backward(retain_graph=True)
        loss.backward()
    alike(ours, plain)


def test_a_forward_without_a_backward_before():
    plain, ours, x = models()
    for model, field in ((plain, full()), (ours, x)):
        loss_of(model, field)
        first = loss_of(model, field)
        with torch.no_grad():
            model(field)
        second = loss_of(model, field)
        second.backward()
        first.backward()
    alike(ours, plain)


def test_no_sync():
    plain, ours, x = models()
    loss_of(plain, full()).backward()
    with ms.no_sync():
        loss_of(ours, x).backward()
    loss_of(plain, full()).backward()
    loss_of(ours, x).backward()
    alike(ours, plain)


def test_a_model_that_only_some_ranks_have_collected_is_summed_on_all_or_none():
    """It is in a cycle of references: when it goes is up to each rank's collector."""
    gone, ours, x = *models()[1:2], *models()[1:]
    plain = models()[0]
    gc.collect()
    gc.disable()
    try:
        gone.myself = [gone]
        with ms.no_sync():
            loss_of(gone, x).backward()
        del gone
        if WORLD.rank == 0:
            gc.collect()
        loss_of(plain, full()).backward()
        loss_of(ours, x).backward()
    finally:
        gc.enable()
    alike(ours, plain)
    gc.collect()
    assert not withhold.held


def test_hooks_see_whole_gradients():
    plain, ours, x = models()
    seen = {}
    for model, field in ((plain, full()), (ours, x)):
        found = seen[model] = []
        model.weights[3].register_hook(lambda g, found=found: found.append(g.clone()) or 2 * g)
        model.weights[4].register_post_accumulate_grad_hook(lambda p, found=found: found.append(p.grad.clone()))
        loss_of(model, field).backward()
    torch.testing.assert_close(seen[ours], seen[plain])
    alike(ours, plain)


def test_gradients_of_some_and_second_ones():
    plain, ours, x = models()
    found = []
    for model, field in ((plain, full()), (ours, x)):
        some = [model.weights[0], model.weights[66], model.number]
        first = torch.autograd.grad(loss_of(model, field), some, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), [model.weights[2], model.number])
        found.append([*first, *second])
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(loss_of(model, field), [model.unused])
        loss_of(model, field).backward(inputs=[model.weights[5]])
    torch.testing.assert_close(found[1], found[0])
    alike(ours, plain)


def test_frozen_thawed_and_replaced_memory():
    plain, ours, x = models()
    for model, field in ((plain, full()), (ours, x)):
        loss_of(model, field)
        model.weights[2].requires_grad_(False)
        model.weights[6].data = model.weights[6].data * 2
        model.weights[7] = nn.Parameter(torch.full((5,), 0.9, dtype=torch.float64))
        loss_of(model, field).backward()
        model.weights[2].requires_grad_()
        loss_of(model, field).backward()
    alike(ours, plain)


def test_memory_replaced_of_one_leaves_no_second_node_to_the_others():
    plain, ours, x = models()
    for model, field in ((plain, full()), (ours, x)):
        loss_of(model, field).backward()
        model.weights[6].data = model.weights[6].data * 2
        model.single.data = model.single.data[:1]  # where it was, but of another shape
        model.zero_grad()
        loss_of(model, field)
        loss_of(model, field).backward()
    alike(ours, plain)
    _, fresh, _ = models()
    assert len(small_nodes(ours(x)[0])) == len(small_nodes(fresh(x)[0]))


def test_beside_layouts_in_turns():
    plain, ours, x = models()
    other = x.redistribute(placements=[ms.Shard(1)])
    for _ in range(2):
        for field in (x, other, x):
            loss_of(ours, field).backward()
            loss_of(plain, full()).backward()
    with torch.no_grad():
        torch.testing.assert_close(ours(x)[0].full_tensor(), plain(full())[0])
    alike(ours, plain)


@pytest.mark.parametrize("limit", [0, 1 << 16])
def test_memory_of_new_gradients(limit, monkeypatch):
    monkeypatch.setattr("mpishard.autograd.bucket._SHARED_NBYTES", limit)
    plain, ours, x = models()
    for model, field in ((plain, full()), (ours, x)):
        loss_of(model, field).backward()
        kept = model.weights[0].grad
        model.zero_grad()
        loss_of(model, field).backward()
        kept.mul_(3)  # no other has its cells
        loss_of(model, field).backward()
    alike(ours, plain)
    assert all(p.grad._base is None for p in ours.parameters() if p.grad is not None)
    grads = [w.grad for w in ours.weights]
    assert (len({g.untyped_storage().data_ptr() for g in grads}) == COUNT) == (limit == 0)
    assert all(g.untyped_storage().nbytes() <= max(limit, g.nbytes) for g in grads)


def test_a_write_between_forward_and_backward_is_noticed():
    _, ours, x = models()
    loss = loss_of(ours, x)
    with torch.no_grad():
        ours.weights[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_training_and_what_is_left_of_it():
    plain, ours, x = models()
    for model, field in ((plain, full()), (ours, x)):
        steps = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(3):
            steps.zero_grad()
            loss_of(model, field).backward()
            steps.step()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
    gone = weakref.ref(ours.weights[0])
    loss_of(ours, x).backward()
    del ours, model, steps, p, q
    gc.collect()
    assert gone() is None


def test_two_meshes():
    plain, ours, x = models()
    other = mesh_of((-1,))
    loss_of(plain, full()).backward()
    loss_of(plain, full()).backward()
    y = ms.distribute_tensor(full(), other, (ms.Shard(1),))
    (loss_of(ours, x).full_tensor() + loss_of(ours, y).full_tensor()).backward()
    alike(ours, plain)


@pytest.mark.parametrize("before", ["nothing", "forward", "pass"])
def test_hooks_of_parameters_that_a_pass_does_not_reach(before):
    net = ms.distribute_module(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), mesh_of((-1,)))
    x = ms.distribute_tensor(torch.randn(8, 4), mesh_of((-1,)), (ms.Shard(0),))
    if before != "nothing":
        loss = net[1](net[0](x)).square().mean()
        if before == "pass":
            loss.backward()
    called = []
    net[1].bias.register_hook(lambda _: called.append("tensor"))
    net[1].bias.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    for reached in (0, 1, 0, 1, 0):
        net[reached](x).square().mean().backward()
        assert called == ["tensor", "accumulated"] * reached
        called.clear()
