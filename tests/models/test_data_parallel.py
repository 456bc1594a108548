"""Data parallelism: the batch over one dim of a mesh, space over the others, against one process on the whole batch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

import mpishard as ms
from mpishard.comm import guard
from tests.compare import WORLD, mesh_of
from tests.models.convolutional import UNet
from tests.models.transformer import VisionTransformer
from tests.models.twin import close, data, mean_square, run, same_state, seeded

# where the ranks allow both: batch and rows
SHAPES = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1)], 4: [(2, 2), (4, 1)]}
BATCH_AND_ROWS = (ms.Shard(0), ms.Shard(2))


@pytest.fixture(params=SHAPES.get(WORLD.size, [(2, WORLD.size // 2)]), ids=str)
def mesh(request):
    return mesh_of(request.param)


def fno(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import fno

    return fno.FNO(width=3, modes=3, layers=2)


def model_of(name, monkeypatch):
    if name == "vit":
        return lambda: VisionTransformer((20, 28)), (5, 3, 20, 28)
    if name == "fno":
        return lambda: fno(monkeypatch), (5, 1, 12, 9)
    return lambda: UNet(2, norm=name.split()[1]), (5, 1, 13, 11)


MODELS = ["unet batch", "unet instance", "unet group", "fno", "vit"]


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_one_process(mesh, name, monkeypatch):
    build, shape = model_of(name, monkeypatch)
    full = data(*shape)
    reference, whole = seeded(build, full.dtype), full.clone().requires_grad_()
    expected, expected_loss = run(reference, whole, mean_square)
    model = ms.distribute_module(seeded(build, full.dtype, mesh.rank), mesh)
    x = ms.distribute_tensor(full, mesh, BATCH_AND_ROWS).requires_grad_()
    out, loss = run(model, x, mean_square)
    close(out, expected, "output")
    close(loss, expected_loss, "loss")
    close(x.grad, whole.grad, "gradient of the input")
    same_state(model, reference, name)
    close(clip_grad_norm_(model.parameters(), 0.1), clip_grad_norm_(reference.parameters(), 0.1), "norm")
    same_state(model, reference, "clipped")


def test_two_dims_of_space():
    """Batch, rows and columns; of eight ranks two along each."""
    shape = {1: (1, 1, 1), 2: (2, 1, 1), 3: (3, 1, 1), 4: (2, 1, 2), 8: (2, 2, 2)}[WORLD.size]
    mesh = ms.init_mesh(shape, ("data", "y", "x"))
    full = data(3, 1, 13, 11)
    reference = seeded(lambda: UNet(2), full.dtype)
    expected, _ = run(reference, full, mean_square)
    model = ms.distribute_module(seeded(lambda: UNet(2), full.dtype, mesh.rank), mesh)
    out, _ = run(model, ms.distribute_tensor(full, mesh, (ms.Shard(0), ms.Shard(2), ms.Shard(3))), mean_square)
    close(out, expected, "output")
    same_state(model, reference, "gradients")


def test_losses_weigh_all_cells_of_the_batch_alike(mesh):
    """Of cells that are left out, some members of the batch have more."""
    full, target = data(5, 4, 7, 6), torch.randint(0, 4, (5, 7, 6), generator=torch.Generator().manual_seed(1))
    target[:2, :5] = -100
    whole = full.clone().requires_grad_()
    expected = F.cross_entropy(whole, target, ignore_index=-100)
    expected.backward()
    x = ms.distribute_tensor(full, mesh, BATCH_AND_ROWS).requires_grad_()
    loss = F.cross_entropy(x, ms.distribute_tensor(target, mesh, (ms.Shard(0), ms.Shard(1))), ignore_index=-100)
    loss.backward()
    close(loss, expected, "loss")
    close(x.grad, whole.grad, "gradient")


def test_dropout_is_that_of_the_whole_batch(mesh):
    def drawn(placements):
        torch.manual_seed(5)
        x = ms.distribute_tensor(data(5, 2, 8, 3), mesh, placements)
        return F.dropout2d(F.dropout(x, 0.5), 0.3).full_tensor()

    got = drawn(BATCH_AND_ROWS)
    assert torch.equal(got, drawn((ms.Replicate(), ms.Replicate())))
    assert (got == 0).any()


def parts_of(full, count, mesh, placements=BATCH_AND_ROWS):
    return [ms.distribute_tensor(x, mesh, placements) for x in full.chunk(count)]


class Weighted(nn.Module):
    """A parameter that data use, and that a penalty uses without them; and one that only some passes use."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.rare = nn.Parameter(torch.ones(2, 1, 1))

    def forward(self, x, rare=False):
        y = self.conv(x)
        return y * self.rare if rare else y


def accumulate(model, batches, penalty=True):
    """Three passes, of which the first alone uses one parameter, and a penalty of parameters alone in between."""
    for i, x in enumerate(batches):
        last = i == len(batches) - 1

        def backward(i=i, x=x):
            model(x, rare=i == 0).square().sum().backward()
            if penalty:
                model.conv.weight.square().sum().backward()

        if last or not isinstance(x, ms.ShardTensor):
            backward()
        else:
            with ms.no_sync():
                backward()


def test_accumulated_gradients_are_summed_once(mesh):
    full = data(6, 1, 9, 8)
    reference = seeded(Weighted, full.dtype)
    accumulate(reference, full.chunk(3))
    model = ms.distribute_module(seeded(Weighted, full.dtype), mesh)
    for _ in range(2):  # the second time on top of the first
        accumulate(model, parts_of(full, 3, mesh))
        same_state(model, reference, "accumulated")
        accumulate(model, parts_of(full, 3, mesh))
        for p in reference.parameters():
            p.grad *= 2
        same_state(model, reference, "twice")
        for p in reference.parameters():
            p.grad /= 2
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_waits_is_forgotten_with_the_gradient(mesh, set_to_none):
    full = data(4, 1, 9, 8)
    reference = seeded(Weighted, full.dtype)
    first, second = full.chunk(2)
    reference(second).square().sum().backward()
    model = ms.distribute_module(seeded(Weighted, full.dtype), mesh)
    a, b = parts_of(full, 2, mesh)
    with ms.no_sync():
        model(a).square().sum().backward()
    model.zero_grad(set_to_none=set_to_none)
    model(b).square().sum().backward()
    close(model.conv.weight.grad, reference.conv.weight.grad, "the second alone")
    assert first.shape == second.shape
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.step()  # nothing waits any more, and nothing was replaced
    model(b).square().sum().backward()
    optimizer.step()
    close(model.conv.weight.grad, 2 * reference.conv.weight.grad, "the second twice")


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_pass_with_create_graph_sums_what_waits(mesh):
    full = data(4, 1, 9, 8)
    reference = seeded(Weighted, full.dtype)
    reference(full).square().sum().backward()
    model = ms.distribute_module(seeded(Weighted, full.dtype), mesh)
    a, b = parts_of(full, 2, mesh)
    with ms.no_sync():
        model(a).square().sum().backward()
    model(b).square().sum().backward(create_graph=True)
    close(model.conv.weight.grad.detach(), reference.conv.weight.grad, "both")
    model.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_pass_with_create_graph_inside_sums_what_waits(mesh):
    full = data(6, 1, 9, 8)
    reference = seeded(Weighted, full.dtype)
    reference(full).square().sum().backward()
    model = ms.distribute_module(seeded(Weighted, full.dtype), mesh)
    a, b, c = parts_of(full, 3, mesh)
    with ms.no_sync():
        model(a).square().sum().backward()
        model(b).square().sum().backward(create_graph=True)
    model(c).square().sum().backward()
    close(model.conv.weight.grad.detach(), reference.conv.weight.grad, "all three")
    model.zero_grad()


@pytest.mark.ranks(2, 3, 4)
def test_no_sum_travels_inside():
    mesh = mesh_of((WORLD.size, 1))
    model = ms.distribute_module(seeded(Weighted, torch.float64), mesh)
    x = ms.distribute_tensor(data(4, 1, 9, 8), mesh, BATCH_AND_ROWS)
    loss = model(x).square().sum()
    with ms.no_sync(), ms.comm_counter() as counter:
        loss.backward()
    assert counter.messages == 0
    loss = model(x).square().sum()
    with ms.comm_counter() as counter:
        loss.backward()
    assert counter.messages == 1


def test_steps_and_writes_before_the_sum_are_refused(mesh):
    model = ms.distribute_module(seeded(Weighted, torch.float64), mesh)
    x = ms.distribute_tensor(data(4, 1, 9, 8), mesh, BATCH_AND_ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ms.no_sync():
        model(x).square().sum().backward()
    with pytest.raises(ms.UnsupportedOperationError, match="before gradients are summed"):
        optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(ms.UnsupportedOperationError, match="a gradient was written into"):
        model(x).square().sum().backward()
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        with ms.no_sync():
            model(x).square().sum().backward()
    model.conv.weight.grad.add_(1)
    other = ms.distribute_module(seeded(Weighted, torch.float64), mesh)
    other(x).square().sum().backward()  # has nothing to do with it
    with pytest.raises(ms.UnsupportedOperationError, match="a gradient was written into"):
        model(x).square().sum().backward()
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


CHANGES = {
    "scaled": lambda p: 2 * p.grad,
    "a clone": lambda p: p.grad.clone(),
    "another": torch.ones_like,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("finished", [False, True])
def test_a_gradient_in_the_place_of_one_that_waits_is_refused(mesh, change, finished):
    """What waits is lost with it: nobody can tell what the other was made of."""
    model = ms.distribute_module(seeded(Weighted, torch.float64), mesh)
    x = ms.distribute_tensor(data(4, 1, 9, 8), mesh, BATCH_AND_ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if finished:
        model(x).square().sum().backward()
    with ms.no_sync():
        model(x).square().sum().backward()
    weight = model.conv.weight
    weight.grad = CHANGES[change](weight)
    other = ms.distribute_module(seeded(Weighted, torch.float64), mesh)
    other(x).square().sum().backward()  # has nothing to do with it
    for call in (optimizer.step, lambda: model(x).square().sum().backward()):
        for p in model.parameters():  # of the others the sum is still to come
            p.grad = p.grad if p is weight else None
        with pytest.raises(ms.UnsupportedOperationError, match="a gradient was replaced"):
            call()
    optimizer.zero_grad()
    model(x).square().sum().backward()
    once = weight.grad.clone()
    weight.grad = weight.grad / 2  # nothing waits
    model(x).square().sum().backward()
    close(weight.grad, 1.5 * once, "half of the first, and the second")
    optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_was_forgotten_stays_so_where_a_plain_loss_follows(mesh, set_to_none):
    """Autograd itself adds its gradient: where that is into zeros, nobody can tell them from a part; it is refused."""
    model = ms.distribute_module(seeded(Weighted, torch.float64), mesh)
    x = ms.distribute_tensor(data(4, 1, 9, 8), mesh, BATCH_AND_ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(x).square().sum().backward()
    once = model.conv.weight.grad.clone()
    with ms.no_sync():
        model(x).square().sum().backward()
    model.zero_grad(set_to_none)
    model(x).square().sum().full_tensor().backward()
    if not set_to_none:
        for call in (optimizer.step, model(x).square().sum().backward):
            with pytest.raises(ms.UnsupportedOperationError, match="gradient"):
                call()
        return
    optimizer.step()
    model(x).square().sum().backward()
    close(model.conv.weight.grad, 2 * once, "both after it")


def test_members_of_an_ensemble_do_not_meet():
    """One member at each coordinate of "member": its own parameters, data and gradients; no message leaves it."""
    size = WORLD.size
    mesh = ms.init_mesh((2, -1) if size % 2 == 0 else (size, 1), ("member", "y"))
    own, member = mesh["y"], mesh.coords[0]
    full = data(2, 1, 9, 8, seed=member)
    reference = seeded(lambda: UNet(2), full.dtype, member)
    model = ms.distribute_module(copy.deepcopy(reference), own)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    x = ms.distribute_tensor(full, own, [ms.Shard(2)])
    for _ in range(2 + member):  # as many steps as it likes
        for m, step, batch in zip((reference, model), steps, (full, x)):
            step.zero_grad()
            mean_square(m(batch)).backward()
            step.step()
    same_state(model, reference, f"member {member}")


@pytest.mark.ranks(2, 3, 4)
def test_bad_meshes_and_batches(monkeypatch):
    with pytest.raises(ms.MeshError, match="does not fit the number of ranks"):
        ms.init_mesh((WORLD.size + 1, -1), ("data", "y"))
    mesh = mesh_of((WORLD.size, 1))
    with pytest.raises(ms.MeshError, match="no such mesh dim"):
        mesh["data"]
    monkeypatch.setattr(guard, "DEBUG", True)
    with pytest.raises(ms.LayoutError, match="differ"):
        ms.distribute_tensor(data(4, 2, seed=WORLD.rank), mesh, (ms.Shard(0), ms.Replicate()))
