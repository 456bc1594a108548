"""How torch.compile is called with shards; traces and exports raise, once and clearly."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import mpishard as ms
from tests.compare import WORLD, gathered, mesh_of, shard


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv1d(3, 1, 3, padding=1)).double()


def sharded(mesh):
    m = ms.distribute_module(model(), mesh, shard_parameters=mesh.mesh_dim_names[0])
    m.register_buffer("field", shard(values(), mesh, [ms.Shard(2)]))  # where parameters are small they stay whole
    return m.requires_grad_(False)


def of_sharded(m):
    return lambda w: m(w) * m.field


def values():
    return torch.rand(1, 2, 3 * WORLD.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def in_place(m):
    m.compile(backend="eager")
    return m


@pytest.mark.parametrize(
    "compiled",
    [
        lambda m: torch.compile(m, backend="eager"),
        lambda m: torch.compile(lambda x: m(x) * 1, backend="eager"),
        lambda m: torch.compile(backend="eager")(lambda x: m(x) + 0),
        in_place,
    ],
)
def test_every_spelling(compiled):
    torch._dynamo.reset()
    m, reference = model(), model()
    run = compiled(m)
    x = shard(values(), mesh_of((WORLD.size,)), [ms.Shard(2)], requires_grad=True)
    again = [run(x), run(x)][1]
    expected = reference(values())
    torch.testing.assert_close(gathered(again), expected)
    again.square().mean().backward()
    expected.square().mean().backward()
    for p, q in zip(m.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    if isinstance(run, nn.Module):
        assert run.state_dict().keys()
        run.train(False)
        assert not m.training


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"shard_parameters": 0}])
def test_shards_that_are_no_arguments(options):
    """A step that closes over its data, and that of an optimizer: Dynamo breaks its graphs there."""
    torch._dynamo.reset()
    mesh = mesh_of((WORLD.size,))
    found = []
    for m, x in (
        (model(), values()),
        (ms.distribute_module(model(), mesh, **options), shard(values(), mesh, [ms.Shard(2)])),
    ):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)

        def step(m=m, x=x):
            loss = (m(x) - x[:, :1]).square().mean()
            loss.backward()
            return loss

        run, update = torch.compile(step, backend="eager"), torch.compile(optimizer.step, backend="eager")
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(float(run()))
            update()
        found.append([*losses, *[gathered(p) for p in m.parameters()]])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    "export",
    [
        lambda m, x: torch.jit.trace(m, example_inputs=x),
        lambda m, x: torch.jit.trace(m, (x,), strict=False),
        lambda m, x: torch.export.export(m, (x,)),
        lambda m, x: torch.export.export(m, args=(), kwargs={"input": x}),
        lambda m, x: torch.onnx.export(m, (x,), dynamo=False),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_traces_are_refused(export):
    x = shard(values(), mesh_of((WORLD.size,)), [ms.Shard(2)])
    with pytest.raises(ms.UnsupportedOperationError, match=r"torch\.\w+\.\w+ with ShardTensors"):
        export(model(), x)


@pytest.mark.parametrize(
    "trace",
    [
        make_fx(lambda y: y.sin() * 2),
        lambda x: make_fx(lambda w: (x * w).sum())(values()),
        lambda x: make_fx(lambda w: torch.cat([w, x]))(values()),
        lambda x: torch.func.linearize(torch.sin, x),
        lambda x: torch.func.linearize(lambda w: (x * w).sum(), values()),
    ],
)
def test_traces_by_make_fx_are_refused(trace):
    """Their graphs would hold blocks, and what was computed from them, as constants."""
    x = shard(values(), mesh_of((WORLD.size,)), [ms.Shard(2)])
    with pytest.raises(ms.UnsupportedOperationError, match="make_fx with ShardTensors"):
        trace(x)


@pytest.mark.parametrize(
    "made_of",
    [
        lambda mesh, x: lambda w: (x * w).sum(2).full_tensor(),
        lambda mesh, x: of_sharded(sharded(mesh)),
        lambda mesh, x: lambda w: ms.all_reduce(w, mesh),
        lambda mesh, x: lambda w: ms.all_gather(w, mesh, dim=0),
        lambda mesh, x: lambda w: ms.shift(w, mesh, 0, 1),
        lambda mesh, x: lambda w: ms.ShardTensor.from_local(w, mesh, [ms.Shard(0)]).to_local(),
        lambda mesh, x: lambda w: ms.scatter_tensor(w, 0, mesh, [ms.Shard(2)]).to_local(),
    ],
)
@pytest.mark.parametrize("trace", [lambda f, w: torch.jit.trace(f, (w,)), lambda f, w: make_fx(f)(w)])
@pytest.mark.filterwarnings("ignore")
def test_a_trace_of_what_communicates_is_refused(trace, made_of):
    """Its graph would hold what came from other ranks as constants, whatever it is given later."""
    mesh = mesh_of((WORLD.size,))
    f = made_of(mesh, shard(values(), mesh, [ms.Shard(2)]))
    with pytest.raises(ms.UnsupportedOperationError, match=r"ShardTensors|trace|make_fx"):
        trace(f, values())


@pytest.mark.parametrize("export", [lambda m, x: torch.jit.trace(m, (x,)), lambda m, x: torch.export.export(m, (x,))])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_exports_of_models_that_own_shards_are_refused(export, grad):
    """Their graphs would hold what was gathered of sharded parameters, in memory that is used again."""
    mesh = mesh_of((WORLD.size,))
    m = sharded(mesh).requires_grad_(grad)
    assert WORLD.size not in (2, 3) or any(isinstance(p, ms.ShardTensor) for p in m.parameters())
    with pytest.raises(ms.UnsupportedOperationError, match=r"a Sequential whose [\w.]+ is one"):
        export(m, values())


@pytest.mark.filterwarnings("ignore")
def test_what_compiles_by_itself_is_named_alike_on_all_ranks():
    x = shard(values(), mesh_of((WORLD.size,)), [ms.Shard(2)])
    with pytest.raises(ms.UnsupportedOperationError, match=r"rule for cond\(") as raised:
        torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    assert "other reasons" not in str(raised.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made_of", [model, lambda: lambda x: x + x.shape[2]])
def test_a_trace_says_what_to_call(made_of):
    traced = torch.jit.trace(made_of(), values())
    with pytest.raises(ms.NoShardingRule, match="call the model or function that it was made of"):
        traced(shard(values(), mesh_of((WORLD.size,)), [ms.Shard(2)]))


@torch.jit.script
def scripted(a, b, factor: int = 2):
    return torch.einsum("bcx,cd->bdx", a, b).cumsum(2) * factor


@torch.jit.script
def scripted_in_turn(a, b):
    return scripted(a, b, factor=3).sigmoid()


def test_scripted_functions():
    """As models of climate have them around products of complex numbers."""
    for function in (scripted, scripted_in_turn):
        x, w = values().requires_grad_(), torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        own = shard(values(), mesh_of((WORLD.size,)), [ms.Shard(2)], requires_grad=True)
        expected, got = function(x, w), function(own, b=w)
        torch.testing.assert_close(gathered(got), expected)
        (gw,) = torch.autograd.grad(expected.square().sum(), w, retain_graph=True)
        expected.square().sum().backward()
        got.square().sum().backward()
        torch.testing.assert_close(gathered(own.grad), x.grad)
        torch.testing.assert_close(w.grad, 2 * gw)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, lambda f: lambda x: torch.func.vjp(f, x)[0]])
def test_transforms_of_plain_tensors_compile_as_before(transform):
    """What the package puts in the place of torch's own functions would break their graphs."""
    torch._dynamo.reset()
    x = torch.linspace(0, 1, 4)
    f = transform(lambda y: y.sin().sum(-1))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), f(x))
