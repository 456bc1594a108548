"""torch.compile from call to call: what is compiled once, and ranks that take another path in one of the calls."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

import mpishard as ms
from tests.compare import WORLD, gathered, mesh_of, shard

RANK, SIZE = WORLD.rank, WORLD.size
pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Counted:
    """A back-end that counts what it is given."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, examples):
        self.count += 1
        return lookup_backend("aot_eager")(graph, examples)


def field(*shape):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def given(*shape, dim=0, requires_grad=False):
    return shard(field(*shape), mesh_of((SIZE,)), (ms.Shard(dim),), requires_grad=requires_grad)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x):
        return torch.relu(self.linear(x)) + x


# torch 2.8 reads each module's own `compile` anew
WAYS = [torch.compile, lambda block, **given: block.compile(**given) or block][: 1 + (torch.__version__ >= (2, 9))]


@pytest.mark.parametrize("how", WAYS)
def test_blocks_of_a_model_are_compiled_once(how):
    """More of them than torch's `recompile_limit`: each for itself, the ninth and those after it would run eagerly."""
    backend = Counted()
    blocks = [Block() for _ in range(10)]
    model = ms.distribute_module(nn.Sequential(*blocks), mesh_of((SIZE,)))
    whole = copy.deepcopy(model)
    compiled = [how(block, backend=backend) for block in blocks]
    for turn in range(2):
        x, y = given(2 * SIZE + 1, 4), field(2 * SIZE + 1, 4)
        for block, reference in zip(compiled, whole, strict=True):
            x, y = block(x), reference(y)
        (x.square().sum() + turn).backward()
        (y.square().sum() + turn).backward()
        torch.testing.assert_close(gathered(x), y)
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    # the input of the first needs no gradient
    assert backend.count == 2


def test_a_model_that_was_compiled_is_freed():
    gone = []
    for _ in range(2):
        block = ms.distribute_module(Block(), mesh_of((SIZE,)))
        torch.compile(block, backend="aot_eager")(given(2 * SIZE, 4))
        gone.append(weakref.ref(block))
        del block
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_rank_whose_call_has_no_graph():
    """It takes part in what the others agree on before they make a program, and in no more."""
    mesh = mesh_of((SIZE,))
    compiled = torch.compile(lambda x: x * 1 if RANK else x.ndim, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            y = compiled(given(2 * SIZE, 4))
            assert ms.all_reduce(torch.ones(3), mesh).tolist() == [SIZE] * 3
            assert y == 2 if RANK == 0 else y.shape == (2 * SIZE, 4)


def test_a_rank_that_raises_alone_and_goes_on():
    """The others run eagerly from then on, but not before they have agreed on that with it."""
    calls = []

    def f(x):
        calls.append(x.shape)
        if RANK == 0 and len(calls) <= 3:
            raise ValueError("no")
        return x.exp()

    compiled = torch.compile(f, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(6):
            try:
                y = compiled(given(2 * SIZE, 4))
            except ValueError:
                assert RANK == 0
            if turn > 3:
                torch.testing.assert_close(gathered(y), field(2 * SIZE, 4).exp())


def test_each_mesh_has_its_own_word_on_what_runs_eagerly():
    """Another one may have other ranks, which have not heard of it."""
    rows = mesh_of((SIZE,))
    # alone in its sub-mesh, of which the other ranks have theirs
    alone = mesh_of((SIZE, 1))[1]

    def f(x, ask):
        return x.exp() if not ask else x[x > 0.5]

    compiled = torch.compile(f, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        full = field(2 * SIZE, 4)
        for turn in range(3):
            # on some ranks alone
            if RANK == 0:
                compiled(shard(full, alone, (ms.Shard(0),)), ask=turn < 3)
        for _ in range(3):
            torch.testing.assert_close(gathered(compiled(shard(full, rows, (ms.Shard(0),)), ask=False)), full.exp())


@pytest.mark.parametrize("anew", ["shape", "layout"])
@pytest.mark.parametrize("wanted", ["stance", "config"])
def test_an_error_is_wanted_where_something_is_compiled_anew(wanted, anew):
    """On all ranks, and no more than that: the call after it compiles."""
    backend = Counted()
    compiled = torch.compile(lambda x: x * 2, backend=backend)
    other = given(2 * SIZE, 4, dim=1) if anew == "layout" else given(2 * SIZE + 1, 4)
    compiled(given(2 * SIZE, 4))
    with contextlib.ExitStack() as stack:
        if wanted == "stance":
            stack.enter_context(torch.compiler.set_stance("fail_on_recompile"))
        else:
            stack.enter_context(torch._dynamo.config.patch(error_on_recompile=True))
        compiled(given(2 * SIZE, 4))
        with pytest.raises(RuntimeError, match=r"Detected recompile|Recompiling function"):
            compiled(other)
    torch.testing.assert_close(gathered(compiled(other)), 2 * gathered(other))
    assert backend.count == 2


def test_an_error_is_wanted_where_one_rank_alone_would_compile_anew():
    compiled = torch.compile(lambda x, n: x * n, backend="aot_eager")
    compiled(given(2 * SIZE, 4), 2)
    with torch.compiler.set_stance("fail_on_recompile"):
        with pytest.raises(RuntimeError, match="Detected recompile"):
            compiled(given(2 * SIZE, 4), 3 if RANK == 0 else 2)
        torch.testing.assert_close(gathered(compiled(given(2 * SIZE, 4), 2)), 2 * field(2 * SIZE, 4))


def test_copies_of_compiled_modules_compile():
    backend = Counted()
    block = ms.distribute_module(Block(), mesh_of((SIZE,)))
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    x = given(2 * SIZE, 4)
    expected = gathered(compiled(x))
    copied = copy.deepcopy(nn.Sequential(compiled))
    with torch.no_grad():
        for p in block.parameters():
            p.zero_()
    torch.testing.assert_close(gathered(copied(x)), expected)
    assert isinstance(copied[0], torch._dynamo.OptimizedModule)
    assert backend.count == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("how", ["stance", "config"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_rank_whose_program_turns_the_compiler_off(how, strict):
    """The others run that call eagerly, too, and compile the next one."""
    backend = Counted()
    compiled = torch.compile(lambda x: (x.cumsum(0) * x).sum(), backend=backend, fullgraph=strict)
    expected = (field(2 * SIZE, 4).cumsum(0) * field(2 * SIZE, 4)).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for off in (True, False, True, False):
            with contextlib.ExitStack() as stack:
                if off and RANK == SIZE - 1:
                    if how == "stance":
                        stack.enter_context(torch.compiler.set_stance("force_eager"))
                    else:
                        stack.enter_context(torch._dynamo.config.patch(disable=True))
                torch.testing.assert_close(gathered(compiled(given(2 * SIZE, 4))), expected)
    assert backend.count == 1


@pytest.mark.parametrize("way", ["pickle", "copy", "save"])
def test_pickled_compiled_modules_compile(way):
    block = ms.distribute_module(Block(), mesh_of((SIZE,)))
    compiled = torch.compile(nn.Sequential(block), backend="aot_eager", fullgraph=True)
    x = given(2 * SIZE, 4)
    expected = gathered(compiled(x))
    if way == "save":
        file = io.BytesIO()
        torch.save(compiled, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    else:
        copied = copy.copy(compiled) if way == "copy" else pickle.loads(pickle.dumps(compiled))
    counters.clear()
    torch.testing.assert_close(gathered(copied(x)), expected)
    assert isinstance(copied, torch._dynamo.OptimizedModule)
    assert not counters["graph_break"]


HOOKS = {
    "before": lambda m: m.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    "after": lambda m: m.register_forward_hook(lambda _, __, y: y * 2),
    "backward": lambda m: m.register_full_backward_hook(lambda _, gi, __: (gi[0] * 3,)),
    "before backward": lambda m: m.register_full_backward_pre_hook(lambda _, g: (g[0] * 3,)),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_a_compiled_module_run(kind, in_place, late):
    """Its own, not those of its parts: they are around what Dynamo reads; also one that comes, or goes, later."""
    torch.manual_seed(0)
    whole = Block()
    block = ms.distribute_module(copy.deepcopy(whole), mesh_of((SIZE,)))
    handles = [] if late else [HOOKS[kind](m) for m in (whole, block)]
    compiled = torch.compile(block, backend="aot_eager")
    if in_place:
        block.compile(backend="aot_eager")
        compiled = block

    def compare():
        x, w = given(2 * SIZE, 4, requires_grad=True), field(2 * SIZE, 4).requires_grad_()
        y, e = compiled(x), whole(w)
        torch.testing.assert_close(gathered(y), e.detach())
        y.square().sum().backward()
        e.square().sum().backward()
        torch.testing.assert_close(gathered(x.grad), w.grad)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare()
        handles = handles or [HOOKS[kind](m) for m in (whole, block)]
        compare()
        for handle in handles:
            handle.remove()
        compare()


def test_a_hook_of_one_rank_alone_runs_there():
    """As that of a logger."""
    seen = []
    block = ms.distribute_module(Block(), mesh_of((SIZE,)))
    expected = gathered(block(given(2 * SIZE, 4)))
    compiled = torch.compile(block, backend="aot_eager")
    torch.testing.assert_close(gathered(compiled(given(2 * SIZE, 4))), expected)
    if RANK == 0:
        block.register_forward_hook(lambda _, __, y: seen.append(tuple(y.shape)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            torch.testing.assert_close(gathered(compiled(given(2 * SIZE, 4))), expected)
    assert seen == ([(2 * SIZE, 4)] * 2 if RANK == 0 else [])


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_written_into_in_another_order_has_its_history(grad):
    """Of an input whose cells lie in another order than those of the first call the program writes into a copy."""

    def f(x, w):
        x.add_(w)
        if grad:
            with torch.no_grad():
                x.mul_(2)
        return x.sum()

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for turned in (False, True):
        results = []
        for call in (f, compiled):
            # two columns: a block of one row lies in any order
            x = (given(2, 2 * SIZE, dim=1).t() if turned else given(2 * SIZE, 2)) * 2
            w = given(2 * SIZE, 2, requires_grad=True)
            y = call(x, w)
            assert x.requires_grad
            (y * y + (x * x).sum()).backward()
            results.append([gathered(v) for v in (x, y, w.grad)])
        torch.testing.assert_close(*results)
