"""distribute_module and the training loop around it: one result, whatever the mesh."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import vector_to_parameters
from torch.utils.checkpoint import checkpoint

import mpishard as ms
from mpishard.autograd import bucket
from mpishard.comm import guard
from tests.compare import WORLD, mesh_of, mesh_shapes, shard


class Net(nn.Module):
    """Convolutions, norms and a scalar that is used on sharded and on replicated data."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.b = nn.Conv2d(6, 6, 3, stride=2, padding=1)
        self.c = nn.ConvTranspose2d(6, 3, 3, stride=2, padding=1)
        self.scale = nn.Parameter(torch.tensor([0.3]))
        self.recompute = False

    def body(self, x):
        return self.b(torch.nn.functional.silu(self.norm(self.a(x))))

    def forward(self, x):
        x = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        x = self.c(x * self.scale)
        return x, self.scale.square().sum()  # the second on replicated data


def data():
    generator = torch.Generator().manual_seed(11)
    return torch.randn(2, 2, 13, 10, dtype=torch.float64, generator=generator)


def build(mesh=None, dtype=torch.float64):
    torch.manual_seed(0 if mesh is None else mesh.rank)
    model = Net().to(dtype)
    return model if mesh is None else ms.distribute_module(model, mesh)


def loss_of(model, x):
    y, extra = model(x)
    return y.square().mean() + extra


def placements_of(mesh):
    return [ms.Shard(2), ms.Shard(3), ms.Replicate()][: mesh.ndim]


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def close(a, b, rtol=1e-9):
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol * 1e-2)


@pytest.mark.parametrize("nbytes", [0, bucket.BUCKET_NBYTES])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_one_process(nbytes, recompute, monkeypatch):
    monkeypatch.setattr(bucket, "BUCKET_NBYTES", nbytes)
    reference = build()
    loss_of(reference, data()).backward()
    for mesh_shape in mesh_shapes(2):
        mesh = mesh_of(mesh_shape)
        model = build(mesh)
        model.recompute = recompute
        x = ms.distribute_tensor(data(), mesh, placements_of(mesh))
        loss_of(model, x).backward()
        close(gradients(model), gradients(reference))
        # a second pass accumulates
        loss_of(model, x).backward()
        close(gradients(model), [2 * g for g in gradients(reference)])


def test_it_makes_no_difference_to_the_result():
    mesh = mesh_of((-1,))
    x = ms.distribute_tensor(data(), mesh, (ms.Shard(2),))
    plain = build()
    loss_of(plain, x).backward()
    model = build(mesh)
    loss_of(model, x).backward()
    close(gradients(model), gradients(plain))


def test_hooks_and_autograd_grad_see_whole_gradients():
    mesh = mesh_of((-1,))
    model, x = build(mesh), ms.distribute_tensor(data(), mesh, (ms.Shard(2),))
    seen = []
    model.a.weight.register_hook(lambda g: seen.append(g.clone()))
    loss_of(model, x).backward()
    reference = build()
    loss_of(reference, data()).backward()
    close(gradients(model), gradients(reference))
    close(seen, [reference.a.weight.grad])
    close(torch.autograd.grad(loss_of(model, x), list(model.parameters())), gradients(reference))


def test_everyone_starts_from_rank_0():
    mesh = mesh_of((-1,))
    model = build(mesh)
    close([p.detach() for p in model.parameters()], [p.detach() for p in build().parameters()])


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_training_with_clipping(optimizer):
    def train(model, x):
        steps = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
        losses, norms = [], []
        for _ in range(3):
            steps.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            steps.step()
            losses.append(loss.item())
        return torch.tensor([losses, norms]), list(model.parameters())

    expected, reference = train(build(), data())
    mesh = mesh_of(mesh_shapes(2)[-1])
    got, params = train(build(mesh), ms.distribute_tensor(data(), mesh, placements_of(mesh)))
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)
    close(params, reference, 1e-6)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("dims", [None, "y"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers_of_parameters_in_another_order(name, dims, hooked):
    """They walk through a parameter and its gradient as these lie in memory."""

    def train(model, x):
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, fused=True)
        if hooked:
            model.a.weight.register_hook(lambda g: 2 * g)
        for again in (1, 2):
            optimizer.zero_grad()
            for _ in range(again):
                loss_of(model, x).backward()
            optimizer.step()
        return [p.full_tensor() if isinstance(p, ms.ShardTensor) else p for p in model.parameters()]

    there = {"memory_format": torch.channels_last}
    mesh = ms.init_mesh((-1,), ("y",))
    model = ms.distribute_module(build().to(**there), mesh, shard_parameters=dims).to(**there)
    got = train(model, ms.distribute_tensor(data(), mesh, (ms.Shard(2),)))
    close(got, train(build().to(**there), data()), 1e-6)


def test_autocast_to_bfloat16():
    """The dtypes of torch, and its values up to bfloat16's rounding."""
    reference, x = build(dtype=torch.float32), data().float()
    mesh = mesh_of((-1,))
    model, shards = build(mesh, torch.float32), ms.distribute_tensor(x, mesh, (ms.Shard(2),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = reference(x)[0], model(shards)[0]
        assert got.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(got.full_tensor().float(), expected.float(), rtol=0.05, atol=0.05)
        expected, got = loss_of(reference, x), loss_of(model, shards)
    assert got.dtype == expected.dtype
    expected.backward()
    got.backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("name", ["partition_fn", "input_fn", "output_fn"])
def test_functions_that_are_none_or_on_some_ranks_alone(name):
    mesh = ms.init_mesh((-1,))
    with pytest.raises(ms.LayoutError, match=f"distribute_module: {name}= is of another kind"):
        ms.distribute_module(nn.Linear(2, 2), mesh, **{name: 3})
    if mesh.size > 1:
        with pytest.raises(ms.DesyncError, match="functions="):
            ms.distribute_module(nn.Linear(2, 2), mesh, **{name: (lambda *_: None) if mesh.rank == 1 else None})


def test_functions_without_the_module():
    mesh = ms.init_mesh((-1,))
    model, x = nn.Linear(3, 2), torch.arange(12.0).view(4, 3)
    expected = model(2 * x) + mesh.size
    with pytest.warns(FutureWarning, match="(input|output)_fn= without the module") as caught:
        ms.distribute_module(
            model, mesh, None, lambda inputs, mesh: (2 * inputs[0],), lambda outputs, mesh: outputs + mesh.size
        )
    assert [w.filename for w in caught] == [__file__] * 2
    torch.testing.assert_close(model(ms.distribute_tensor(x, mesh, (ms.Shard(0),))).full_tensor(), expected)
    with pytest.raises(ms.LayoutError, match="input_fn= takes other arguments"):
        ms.distribute_module(nn.Linear(3, 2), mesh, None, lambda inputs: inputs)


@pytest.mark.ranks(2, 3, 4)
def test_models_that_differ_are_refused():
    mesh = mesh_of((-1,))
    with pytest.raises(ms.MpishardError, match="rank"):
        ms.distribute_module(nn.Linear(3 + (mesh.rank == 1), 2), mesh)
    with pytest.raises(ms.DesyncError, match="frozen"):
        ms.distribute_module(nn.Linear(3, 2).requires_grad_(mesh.rank != 1), mesh)


def test_a_buffer_that_is_an_expanded_view():
    mesh = mesh_of((-1,))
    model = nn.Linear(3, 2)
    model.register_buffer("scale", torch.arange(2.0)[:, None].add(mesh.rank).expand(2, 3))
    ms.distribute_module(model, mesh)
    assert model.scale.tolist() == [[0.0] * 3, [1.0] * 3]


@pytest.mark.ranks(2, 3, 4)
def test_many_gradients_share_one_message(monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", False)  # which compares gradients in a message of its own
    mesh = mesh_of((-1,))
    layers = nn.Sequential(*[nn.Conv2d(2, 2, 1) for _ in range(8)])
    x = ms.distribute_tensor(data().float(), mesh, (ms.Shard(2),))

    def count_of(model):
        loss = model(x).mean()
        with ms.comm_counter() as count:
            loss.backward()
        return count.by_op["all_reduce"].calls

    assert count_of(copy.deepcopy(layers)) == 16
    assert count_of(ms.distribute_module(layers, mesh)) == 1


class Parts(nn.Module):
    """Parameters of which each rank needs a part, one on whole data too."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        shapes = [(5, 3), (5, 6, 3), (5, 1)]
        self.scale, self.mix, self.shift = (
            nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)) for shape in shapes
        )

    def forward(self, x):
        y = torch.einsum("bcx,cdx->bdx", x * self.scale + self.shift, self.mix)
        return y.square().mean() + (self.shift**2).sum()


@pytest.mark.parametrize("hooked", [False, True])
def test_parts_of_parameters(hooked):
    full = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    for mesh_shape in mesh_shapes(2):
        mesh = mesh_of(mesh_shape)
        reference, model, seen = Parts(), ms.distribute_module(Parts(), mesh), []
        for placements in ([ms.Shard(1)], [ms.Shard(2)], [ms.Shard(0)]):
            placements = [*placements, ms.Shard(1)][: mesh.ndim]
            x = ms.distribute_tensor(full, mesh, placements)
            handle = model.mix.register_hook(lambda g: seen.append(g.clone())) if hooked else None
            reference(full).backward()
            with ms.comm_counter() as count:
                loss = model(x)
                loss.backward()
            if hooked:
                handle.remove()
                once = torch.autograd.grad(reference(full), reference.mix)[0]
                torch.testing.assert_close(seen.pop(), once)
            elif mesh.ndim == 1:
                assert "all_gather" not in count.by_op  # each would stop the pass
            close(gradients(model), gradients(reference))
            found = [torch.autograd.grad(m(z), list(m.parameters())) for m, z in ((model, x), (reference, full))]
            close(*found)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_sharded_parameter_or_buffer_is_one(copied):
    mesh = mesh_of((-1,))
    cells = ms.ones(7, mesh=mesh, placements=(ms.Shard(0),))
    for kind, told in ((nn.Parameter, "requires_grad"), (nn.Buffer, "persistent")):
        for kept in (kind(cells), kind(cells.clone(), **{told: False})):
            found = copied(kept)
            assert isinstance(found, kind)
            assert not isinstance(found, nn.Buffer if kind is nn.Parameter else nn.Parameter)
            assert found.requires_grad == kept.requires_grad
            assert getattr(found, "persistent", None) == getattr(kept, "persistent", None)
    module = nn.Module()
    module.w = copied(nn.Parameter(cells))
    assert [name for name, _ in module.named_parameters()] == ["w"]
    assert not isinstance(copied(cells), nn.Parameter)


def test_a_plain_parameter_takes_the_whole_of_a_sharded_tensor_as_its_data():
    """Torch gave it the memory of the ShardTensor, which has none: the next read ended the process."""
    mesh = mesh_of((WORLD.size,))
    full = torch.arange(3.0 * WORLD.size).reshape(WORLD.size, 3)
    p, x = nn.Parameter(torch.zeros(WORLD.size, 3)), shard(full, mesh, [ms.Shard(0)], requires_grad=True)
    p.data = x
    assert type(p) is nn.Parameter
    torch.testing.assert_close(p.detach(), full)
    model = nn.Linear(3, WORLD.size)
    vector_to_parameters(torch.cat([x.detach().flatten(), x.detach()[:, 0]]), model.parameters())
    torch.testing.assert_close(model.weight.detach(), full)
    torch.testing.assert_close(model.bias.detach(), full[:, 0])
    with pytest.raises(TypeError):
        p.data = full.tolist()


@pytest.mark.parametrize("kind", ["lazy", "meta"])
def test_a_model_without_values_is_refused(kind):
    """On all ranks, with the way out; it was torch's own error, of a shape or a move."""
    last = WORLD.rank == WORLD.size - 1
    module = nn.Linear(2, 3)
    if last:
        module = nn.LazyLinear(3) if kind == "lazy" else nn.Linear(2, 3, device="meta")
    way = "call the module once before" if kind == "lazy" else "to_empty"
    with pytest.raises(ms.UnsupportedOperationError, match=f"(?s)'weight' cannot be given.*{way}"):
        ms.distribute_module(module, ms.init_mesh((-1,), ("y",)))
