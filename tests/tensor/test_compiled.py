"""torch.compile on shards: one graph, equal to the whole; what does not compile runs eagerly, with one warning."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import mpishard as ms
from mpishard.comm import traced
from tests.compare import WORLD, gathered, mesh_of, shard, skew
from tests.release import RELEASE

SIZE = WORLD.size
pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Exchanges:
    """A back-end that runs graphs as they are, and counts what communicates in them."""

    def __init__(self):
        self.graphs = []
        self.backend = aot_autograd(fw_compiler=self.kept, bw_compiler=self.kept)

    def kept(self, graph, _examples):
        operation = torch.ops.mpishard.communicate.default
        self.graphs.append([n.args[3].split(" (")[0] for n in graph.graph.nodes if operation in n.args])
        return make_boxed_func(graph.forward)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.ConvTranspose2d(4, 2, 2, stride=2),
    ).double()


def field(*shape):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def quietly(call):
    """What a call returns, and what it says of torch.compile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = call()
    return out, [str(w.message) for w in caught if "torch.compile" in str(w.message)]


def test_a_net_is_one_graph_and_equals_the_whole():
    full = field(2, 2, 4 * SIZE, 6)
    mesh = mesh_of((SIZE,))
    other = mesh_of((2, SIZE // 2) if SIZE % 2 == 0 else (SIZE, 1))
    model, reference = net(), net()
    ms.distribute_module(model, mesh)
    seen = Exchanges()
    compiled = torch.compile(model, backend=seen.backend, fullgraph=True)
    cases = [(mesh, (ms.Shard(2),), None), (mesh, (ms.Shard(2),), {2: skew(4 * SIZE, SIZE)})]
    if other.ndim == 2 and SIZE % 2 == 0:
        cases.append((other, (ms.Shard(2), ms.Shard(3)), None))
    layouts = set()
    for where, placements, sizes in [cases[0], *cases]:
        x = shard(full, where, placements, sizes, requires_grad=True)
        layouts.add(x.sharding)
        whole = full.clone().requires_grad_()
        results = []
        for m, given in ((compiled, x), (reference, whole)):
            m.zero_grad()
            y = m(given)
            (y.square().mean() + y[:, :, 0].sum()).backward()
            results.append([y, given.grad, *(p.grad for p in m.parameters()), *m.buffers()])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(gathered(ours), gathered(theirs))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    # forward and backward of every layout, and no more for the second call of the first
    assert len(seen.graphs) == 2 * len(layouts)
    if SIZE > 1:
        forward, backward = seen.graphs[:2]
        # of each norm two: a compiled program cannot look whether a mean is large
        assert forward == ["conv2d", "all_reduce sum", "all_reduce sum"] * 2
        # of each norm and halo one, and one of all parameters
        assert sorted(backward) == ["adjoint of conv2d"] * 2 + ["all_reduce sum"] * 3


@pytest.mark.parametrize(
    ("method", "kind", "uneven"),
    [
        ("auto", "plain", False),
        ("auto", "causal", True),
        ("all_to_all", "causal", False),
        ("ring", "plain", True),
        ("ring", "balanced", False),
        ("ring", "grouped", True),
        ("ring", "mask", True),
        ("ring", "half", False),
    ],
)
def test_attention_is_one_graph_and_equals_the_whole(method, kind, uneven):
    n = 256 * SIZE if kind == "balanced" else 4 * SIZE
    heads, keys = 2 * SIZE, 2 if kind == "grouped" else 2 * SIZE
    dtype = torch.bfloat16 if kind == "half" else torch.float64
    mesh = mesh_of((SIZE,))
    full = [field(1, h, n, 3).to(dtype).roll(i, 2) for i, h in enumerate((heads, keys, keys))]
    bias = field(n, n).sub(0.5).to(dtype)

    def f(q, k, v, *masks):
        causal = kind in ("causal", "balanced")
        mask = masks[0] if masks else None
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=kind == "grouped")
        return y.transpose(1, 2).reshape(1, n, -1)

    whole = [x.clone().requires_grad_() for x in (*full, *[bias] * (kind == "mask"))]
    cut = {2: skew(n, SIZE)} if uneven else None
    given = [shard(x, mesh, (ms.Shard(2),), cut, requires_grad=True) for x in full]
    if kind == "mask":
        given.append(bias.clone().requires_grad_())
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    with ms.attention_method(method):
        for _ in range(2):
            y = compiled(*given)
            (y.float() ** 2).sum().backward()
    z = f(*whole)
    for _ in range(2):
        (z.float() ** 2).sum().backward(retain_graph=True)
    close = {"rtol": 0.05, "atol": 0.05} if kind == "half" else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(gathered(y), z, **close)
    for ours, theirs in zip(given, whole, strict=True):
        torch.testing.assert_close(gathered(ours.grad), theirs.grad, **close)


def test_a_ring_drops_anew_as_it_does_eagerly():
    q, k, v = (shard(field(1, 2, 4 * SIZE, 3).roll(i, 2), mesh_of((SIZE,)), (ms.Shard(2),)) for i in range(3))
    q.requires_grad_()

    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    found = []
    for g in (torch.compile(f, backend="aot_eager", fullgraph=True), f):
        torch.manual_seed(5)
        for _ in range(2):
            y = g(q, k, v)
            found.append((gathered(y), gathered(torch.autograd.grad(y.square().sum(), q)[0])))
    torch.testing.assert_close(found[:2], found[2:])
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.dropout(x, 0.5) + x,
        lambda x: torch.bernoulli(x) + x,
        lambda x: torch.multinomial(x, 2),
        lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.5),
    ],
)
def test_what_is_drawn_is_drawn_anew_as_it_is_eagerly(f):
    x = shard(field(3 * SIZE, 8), mesh_of((SIZE,)), (ms.Shard(0),))
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.manual_seed(5)
    first, second = gathered(compiled(x)), gathered(compiled(x))
    torch.manual_seed(5)
    torch.testing.assert_close([first, second], [gathered(f(x)), gathered(f(x))])
    assert not torch.equal(first, second)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_wait_where_compiled_and_eager_passes_alternate(backend):
    """Of each parameter `no_sync` sees by its version who wrote into its gradient: they share none."""
    model = ms.distribute_module(nn.Conv2d(2, 4, 1), mesh_of((SIZE,)))
    compiled = torch.compile(model, backend=backend)
    x = shard(torch.ones(1, 2, 4 * SIZE, 6), mesh_of((SIZE,)), (ms.Shard(2),))
    compiled(x).sum().backward()
    with ms.no_sync():
        model(x).sum().backward()
    compiled(x).sum().backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad, torch.full_like(p, 3.0 * 24 * SIZE))


def test_what_is_written_into_is_the_callers():
    def f(x, y):
        x.mul_(2)
        return x, y.sin(), x[1:] - y[:-1]

    with torch.no_grad():
        x, y = (shard(field(3 * SIZE, 4), mesh_of((SIZE,)), (ms.Shard(0),)) for _ in range(2))
        outs = torch.compile(f, backend="aot_eager", fullgraph=True)(x, y)
        full = field(3 * SIZE, 4)
        expected = f(full, full.clone())
    assert outs[0] is x
    torch.testing.assert_close([gathered(o) for o in (*outs, x)], [*expected, full])


def _added_to_a_column(x):
    y = x * 1
    y[:, 0] += 1
    y[1:] *= x[1:]
    return y


def _shifted(x):
    y = x * 1
    y[1:, 2] = y[:-1, 1].clone()
    y[0] -= y[-1]
    return y


@pytest.mark.parametrize("f", [_added_to_a_column, _shifted])
@pytest.mark.parametrize("grad", [True, False])
def test_parts_are_written_in_place(f, grad):
    """Python writes what ``y[:, 0] += 1`` gives into ``y`` once more: it lies there already."""
    whole = field(3 * SIZE, 4).requires_grad_(grad)
    for dim, sizes in ((0, None), (0, {0: skew(3 * SIZE, SIZE)}), (1, None)):
        x = shard(whole.detach(), mesh_of((SIZE,)), (ms.Shard(dim),), sizes, requires_grad=grad)
        compiled, expected = torch.compile(f, backend="aot_eager", fullgraph=True)(x), f(whole)
        torch.testing.assert_close(gathered(compiled), expected.detach())
        if grad:
            got, wanted = (torch.autograd.grad(y.square().sum(), t)[0] for y, t in ((compiled, x), (expected, whole)))
            torch.testing.assert_close(gathered(got), wanted)


def test_autocast_is_that_of_the_call():
    x = shard(field(2 * SIZE, 8).float(), mesh_of((SIZE,)), (ms.Shard(0),))
    layer = nn.Linear(8, 3)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x).dtype is torch.bfloat16
    assert compiled(x).dtype is torch.float32


def test_checkpoints_and_inference_mode():
    def saved(x):
        return checkpoint(lambda x: (x.sin().cumsum(0)[[0, -1]] * x[:2]).exp(), x, use_reentrant=False) * 2

    compiled = torch.compile(saved, backend="aot_eager")
    grads = []
    for g in (compiled, saved):
        x = shard(field(2 * SIZE, 3), mesh_of((SIZE,)), (ms.Shard(0),), requires_grad=True)
        y, told = quietly(lambda: g(x))
        y.square().sum().backward()
        grads.append(gathered(x.grad))
        assert ["checkpoint" in text for text in told] == [True] * (g is compiled)
    torch.testing.assert_close(*grads)

    def f(x):
        return x.sin().cumsum(0)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=RELEASE >= (2, 13))
    with torch.inference_mode():
        torch.testing.assert_close(gathered(compiled(x)), gathered(f(x)))
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(gathered(compiled(x)), gathered(f(x)))


def test_after_a_call_that_failed_others_compile():
    x = shard(field(2 * SIZE, 3), mesh_of((SIZE,)), (ms.Shard(0),))
    seen = Exchanges()
    compiled = torch.compile(lambda x, i: x[i] + 1, backend=seen.backend)
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        compiled(x, torch.tensor([2 * SIZE]))
    y, told = quietly(lambda: compiled(x, torch.tensor([1])))
    torch.testing.assert_close(gathered(y), field(2 * SIZE, 3)[[1]] + 1)
    assert seen.graphs
    assert not told


class Keeps(nn.Module):
    last = None

    def forward(self, x):
        self.last = x
        return x + 1


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (lambda x: x * float(x.sum()), ""),
        (lambda x: x + 1 if x.sum() > 0 else x - 1, "Data-dependent"),
        (lambda x: x + 1 if isinstance(x, ms.ShardTensor) else x - 1, "ShardTensor"),
        (lambda x: x + 1 if hasattr(x, "placements") else x - 1, "placements"),
        (lambda x: ms.ShardTensor.from_local(x.to_local() + 1, x.mesh, x.placements), ""),
    ],
)
def test_what_does_not_compile_runs_eagerly_with_one_warning(f, says):
    x = shard(field(2 * SIZE, 3), mesh_of((SIZE,)), (ms.Shard(0),))
    compiled = torch.compile(f, backend="aot_eager")
    (one, two), told = quietly(lambda: (compiled(x), compiled(x)))
    assert len(told) == 1
    assert "runs eagerly" in told[0]
    assert says in told[0]
    for y in (one, two):
        torch.testing.assert_close(gathered(y), gathered(f(x)))
    with pytest.raises(ms.UnsupportedOperationError, match="fullgraph=True"):
        torch.compile(f, backend="aot_eager", fullgraph=True)(x)


def test_a_kept_argument_is_a_shard():
    m = Keeps()
    x, y = (shard(field(2 * SIZE, 3), mesh_of((SIZE,)), (ms.Shard(0),)) for _ in range(2))
    compiled = torch.compile(m, backend="aot_eager")
    compiled(x)
    assert m.last is x
    _, told = quietly(lambda: compiled(y))
    assert m.last is y
    assert "keeps" in told[0]


def test_a_kept_view_of_an_argument_is_a_shard():
    def f(x):
        m.last = x.mT
        return x * 2

    m = Keeps()
    x = shard(field(2 * SIZE, 3), mesh_of((SIZE,)), (ms.Shard(0),))
    torch.compile(f, backend="aot_eager")(x)
    torch.testing.assert_close(gathered(m.last), field(2 * SIZE, 3).mT)


def written_into(x):
    y = x.mT
    y.add_(1)
    return y, x


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("f", "dtype"),
    [
        (lambda x: x.mT, torch.float64),
        (lambda x: {"a": [x.T, (x.mT, x * 2)], "b": x}, torch.float64),
        (lambda x: (x.mT.mT, x.mH, x[1:].mT, x.sum()), torch.float64),
        (written_into, torch.float64),
        (lambda z: [z.real, z.imag, z.mH.imag, z.H, z.abs()], torch.complex128),
    ],
)
def test_views_of_arguments_by_attributes(f, dtype, grad):
    compiled = torch.compile(f, backend="aot_eager")
    whole = field(2 * SIZE, 3).to(dtype) * (2j if dtype.is_complex else 1)
    with grad():
        results = []
        for run, x in ((f, whole), (compiled, shard(whole, mesh_of((SIZE,)), (ms.Shard(0),)))):
            x.requires_grad_(grad is torch.enable_grad)
            # Dynamo asks views for .grad; and what requires a gradient it takes for a leaf, not to be written into
            y, told = quietly(lambda: pytree.tree_leaves(run(x * 1)))
            assert not told or (f is written_into and x.requires_grad)
            if x.requires_grad:
                sum(i * t.abs().square().sum() for i, t in enumerate(y, 1)).backward()
            results.append([*y, x.grad])
    for expected, y in zip(*results, strict=True):
        if expected is not None:
            assert isinstance(y, ms.ShardTensor)
            torch.testing.assert_close(gathered(y), expected.detach().resolve_conj().resolve_neg())


def test_where_one_rank_cannot_compile_none_does():
    def backend(graph, examples):
        if WORLD.rank == SIZE - 1:
            raise RuntimeError("no compiler here")
        return graph.forward

    x = shard(field(2 * SIZE, 3), mesh_of((SIZE,)), (ms.Shard(0),))
    compiled = torch.compile(lambda x: x.softmax(0), backend=backend)
    y, told = quietly(lambda: [compiled(x), compiled(x)][1])
    assert len(told) == 1
    assert "no compiler here" in told[0]
    torch.testing.assert_close(gathered(y), field(2 * SIZE, 3).softmax(0))


@pytest.mark.skipif(RELEASE < (2, 13), reason="torch compiles backward when it is run")
def test_a_compiler_that_fails_in_backward_on_one_rank():
    """Then all run eagerly: torch itself would raise in the backward pass of this rank alone."""

    def backward(graph, _examples):
        if WORLD.rank == SIZE - 1:
            raise RuntimeError("no backward here")
        return make_boxed_func(graph.forward)

    def f(x):
        return F.conv2d(x, torch.ones(1, 1, 3, 3), padding=1).cumsum(2)

    kept = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=backward)
    compiled = torch.compile(f, backend=kept)
    whole = torch.randn(1, 1, 8, 4, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad(f(x := whole.clone().requires_grad_()).square().sum(), x)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            x = shard(whole, mesh_of((SIZE,)), (ms.Shard(2),), requires_grad=True)
            compiled(x).square().sum().backward()
            torch.testing.assert_close(gathered(x.grad), expected)
    assert any("runs eagerly" in str(w.message) for w in told)


def test_ranks_that_disagree_on_a_branch_run_eagerly():
    flag = {"first": WORLD.rank == 0}

    def f(x):
        if flag["first"]:
            torch._dynamo.graph_break()
        return x.cumsum(0)

    x = shard(field(2 * SIZE, 3), mesh_of((SIZE,)), (ms.Shard(0),))
    compiled = torch.compile(f, backend="aot_eager")
    y, told = quietly(lambda: compiled(x))
    assert len(told) == 1
    torch.testing.assert_close(gathered(y), field(2 * SIZE, 3).cumsum(0))


@pytest.mark.parametrize("what", ["a parameter", "the input", "grad mode", "a layer"])
def test_ranks_whose_graphs_differ_run_eagerly(what):
    """Before one of them rehearses what the others do not: backward, the statistics of a norm."""
    odd = WORLD.rank == SIZE - 1 and SIZE > 1
    model = torch.nn.Sequential(torch.nn.Conv1d(3, 3, 3, padding=1), torch.nn.BatchNorm1d(3)).double()
    model[0].requires_grad_(not odd or what != "a parameter")
    if what == "a layer" and odd:
        model[0].bias = None
    x = shard(field(2, 3, 2 * SIZE), mesh_of((SIZE,)), (ms.Shard(2),)).requires_grad_(what == "the input" and not odd)
    for strict in (False, True):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=strict)
        with torch.set_grad_enabled(not odd or what != "grad mode"):
            if strict and SIZE > 1:
                with pytest.raises(ms.UnsupportedOperationError, match="programs differ"):
                    compiled(x)
            elif what != "a layer":
                y, told = quietly(lambda compiled=compiled: compiled(x))
                assert len(told) == (SIZE > 1)
                torch.testing.assert_close(gathered(y.detach()), model(field(2, 3, 2 * SIZE)).detach())


def test_at_the_recompile_limit_of_one_rank_all_run_eagerly_that_time_alone():
    step = {"number": 0}
    eager = []

    def f(x):
        if not torch.compiler.is_compiling():
            eager.append(1)
        return x.cumsum(0) + 0 * step["number"]

    x = shard(field(2 * SIZE, 3), mesh_of((SIZE,)), (ms.Shard(0),))
    compiled = torch.compile(f, backend="eager")
    expected = field(2 * SIZE, 3).cumsum(0)

    def run(number):
        step["number"] = number if WORLD.rank == 0 else 0
        torch.testing.assert_close(gathered(compiled(x)), expected)

    with torch._dynamo.config.patch(recompile_limit=2):
        _, told = quietly(lambda: [run(number) for number in range(5)])
        before = len(eager)
        run(0)
    assert len(told) == 1
    assert ("recompile limit" if WORLD.rank == 0 else "another rank runs it eagerly") in told[0].replace("_", " ")
    assert before
    assert len(eager) == before


# one small loop is compiled sooner than the headers are, or other processes start, or programs that try what
# instructions the processor has
QUICK = {"cpp_cache_precompile_headers": False, "compile_threads": 1, "cpp.vec_isa_ok": False}


def test_inductor():
    x = shard(field(2 * SIZE, 3), mesh_of((SIZE,)), (ms.Shard(0),))

    def f(x):
        return (x.sin() * 2 + x[:1]).cumsum(0)

    with torch.no_grad():
        y = torch.compile(f, fullgraph=True, options=QUICK)(x)
    torch.testing.assert_close(gathered(y), f(field(2 * SIZE, 3)))


@pytest.mark.parametrize("first", ["lazy", "evaluated"])
def test_conjugates_and_negatives_are_taken_before(first):
    """Torch notes them as a bit of a tensor, and takes them where they are read; inductor's loops do not look at it."""
    full = torch.complex(field(2 * SIZE, 3), field(2 * SIZE, 3))
    plain, inductor = ({"backend": "aot_eager"}, {"options": QUICK})
    functions = [
        (lambda x: x.sin() * 2, lambda z: z.imag, inductor),
        (lambda x: torch.view_as_real(x.resolve_conj()).sum(-1), lambda z: z, plain),
        (lambda x: x.mul_(3), lambda z: z.imag, plain),
    ]
    for f, part, options in functions:
        compiled = torch.compile(f, fullgraph=True, **options)
        for lazily in (True, False) if first == "lazy" else (False, True):
            whole = full.clone()
            z = shard(whole, mesh_of((SIZE,)), (ms.Shard(0),))
            x, expected = (part(t.conj() if lazily else t.conj_physical()) for t in (z, whole))
            with torch.no_grad():
                torch.testing.assert_close(gathered(compiled(x)), f(expected.clone()))


def test_inductor_keeps_the_order(monkeypatch):
    """Of what is drawn too, which reads nothing: by the sizes of its blocks, a rank would draw sooner."""
    x, order = shard(field(8 * SIZE, 64), mesh_of((SIZE,)), (ms.Shard(0),)), []
    keep = traced.Recording._keep

    def noted(self, key, run):
        return keep(self, key, lambda *operands: order.append(key) or run(*operands))

    monkeypatch.setattr(traced.Recording, "_keep", noted)

    def f(x):
        y = x.sin()
        s = (torch.roll(y, 1, 0) ** 2).sum()
        z = torch.roll(y * torch.rand_like(x), 2, 0)
        return s + z.sum(), z[:, :1]

    with torch.no_grad():
        torch.compile(f, fullgraph=True, options=QUICK)(x)
    expected = ["roll", "all_reduce sum", "random", "roll", "all_reduce sum"]
    names = [name.split(" (")[0] for name in order]
    assert names == [name for name in expected if SIZE > 1 or not name.startswith("all_reduce")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_without_a_compiler_of_the_machine():
    from torch._inductor import config

    x = shard(field(2 * SIZE, 3), mesh_of((SIZE,)), (ms.Shard(0),))
    compiled = torch.compile(lambda x: x.exp() - 7)
    with torch.no_grad(), config.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}):
        y, told = quietly(lambda: compiled(x))
    assert len(told) == 1
    torch.testing.assert_close(gathered(y), field(2 * SIZE, 3).exp() - 7)
