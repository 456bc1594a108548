"""Stages of a model on different ranks: loss, gradients and outputs of one process."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpishard as ms
from mpishard.comm import guard
from mpishard.errors import FileError
from tests.compare import WORLD
from tests.models.twin import close, data, seeded

SHAPES = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1)], 4: [(4, 1), (2, 2)]}


@pytest.fixture(params=SHAPES.get(WORLD.size, [(2, WORLD.size // 2)]), ids=str)
def mesh(request):
    return ms.init_mesh(request.param, ("stage", "y"))


class Skips(nn.Module):
    """Takes and returns two tensors, of which one skips the stage."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.GroupNorm(1, 3)

    def forward(self, x, skip=None):
        y = torch.tanh(self.norm(self.conv(x)))
        return y, (x if skip is None else skip)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x, skip=None):
        return self.conv(x if skip is None else x + skip)


def stages_of(count):
    return [lambda i=i: seeded(Skips if i < count - 1 else Last, torch.float64, i) for i in range(count)]


def whole(stages, x):
    x = (x,)
    for stage in stages:
        x = stage(*x) if isinstance(x, tuple) else stage(x)
    return x


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_equals_one_process(mesh, microbatches):
    """Fewer, as many, and more micro-batches than stages; 5 samples in 2 parts are 3 and 2."""
    full, target = data(5, 3, 9, 8), data(5, 2, 9, 8, seed=2)
    count = mesh.shape[0]
    reference = [make() for make in stages_of(count)]
    everything = full.clone().requires_grad_()
    pipe = ms.Pipeline(stages_of(count), mesh, "stage", microbatches=microbatches)
    x = ms.distribute_tensor(full, pipe.mesh, [ms.Shard(2)]).requires_grad_()
    y = ms.distribute_tensor(target, pipe.mesh, [ms.Shard(2)])
    for step in range(2):
        expected = F.mse_loss(whole(reference, everything), target)
        expected.backward()
        loss = pipe.step(x if pipe.is_first else None, y if pipe.is_last else None, F.mse_loss)
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
        own = reference[mesh.coords[0]]
        for (name, p), q in zip(pipe.stage.named_parameters(), own.parameters(), strict=True):
            close(p.grad, q.grad, f"{step}: {name}")
    if pipe.is_first:
        close(x.grad, everything.grad, "gradient of the batch")
    out = pipe(x if pipe.is_first else None)
    assert (out is None) != pipe.is_last
    if pipe.is_last:
        close(out, whole(reference, full).detach(), "output")


@pytest.mark.ranks(4)
def test_stages_with_batch_and_parameters_sharded():
    mesh = ms.init_mesh((2, 2), ("stage", "data"))
    full, target = data(6, 3, 9, 8), data(6, 2, 9, 8, seed=2)
    reference = [make() for make in stages_of(2)]
    F.mse_loss(whole(reference, full), target).backward()
    pipe = ms.Pipeline(stages_of(2), mesh, "stage", microbatches=3, shard_parameters="data")
    x, y = (ms.distribute_tensor(v, pipe.mesh, [ms.Shard(0)]) for v in (full, target))
    pipe.step(x, y, F.mse_loss)
    own = reference[mesh.coords[0]]
    assert any(isinstance(p, ms.ShardTensor) for p in pipe.parameters())
    for (name, p), q in zip(pipe.stage.named_parameters(), own.parameters(), strict=True):
        close(p.grad, q.grad, name)
    out = pipe(x)
    if pipe.is_last:
        close(out, whole(reference, full).detach(), "output, in the order of the batch")


class Relaid(nn.Module):
    """Lays what has an odd number of samples out otherwise than the rest."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *x):
        y = self.inner(*x)
        first = y[0] if isinstance(y, tuple) else y
        if not isinstance(first, ms.ShardTensor) or first.shape[0] % 2 == 0:
            return y
        moved = [t.redistribute([ms.Shard(0)]) for t in (y if isinstance(y, tuple) else (y,))]
        return tuple(moved) if isinstance(y, tuple) else moved[0]


@pytest.mark.parametrize("of_x", [ms.Shard(0), ms.Shard(2), ms.Replicate(), None], ids=str)
@pytest.mark.parametrize("of_target", [ms.Shard(0), ms.Shard(3), None], ids=str)
def test_a_target_that_lies_otherwise_than_the_batch(mesh, of_x, of_target):
    """Parts of a batch that is sharded along its samples are not made of neighbours: so must be those of targets."""
    full, target = data(7, 3, 9, 8), data(7, 2, 9, 8, seed=2)
    reference = [make() for make in stages_of(mesh.shape[0])]
    F.mse_loss(whole(reference, full), target).backward()
    stages = [Relaid(make()) for make in stages_of(mesh.shape[0])]
    pipe = ms.Pipeline(stages, mesh, "stage", microbatches=3)
    x, y = (t if p is None else ms.distribute_tensor(t, pipe.mesh, [p]) for t, p in ((full, of_x), (target, of_target)))
    # each part is a mean over its samples, of which they may have different numbers
    loss = pipe.step(x, y, F.mse_loss)
    expected = F.mse_loss(whole(reference, full), target)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    for (name, p), q in zip(pipe.stage.named_parameters(), reference[mesh.coords[0]].parameters(), strict=True):
        close(p.grad, q.grad, name)
    out = pipe(x)
    if pipe.is_last:
        close(out, whole(reference, full).detach(), "output, in the order of the batch")


def test_targets_of_several_rows_a_sample(mesh):
    full, target = data(6, 3, 9, 8), data(12, 2, 9, 8, seed=2)
    reference = [make() for make in stages_of(mesh.shape[0])]
    expected = F.mse_loss(whole(reference, full).repeat_interleave(2, 0), target)
    pipe = ms.Pipeline(stages_of(mesh.shape[0]), mesh, "stage", microbatches=2)
    x = ms.distribute_tensor(full, pipe.mesh, [ms.Shard(0)])
    sizes = {0: [2 * n for n in x.sharding.sizes[0]]}
    y = ms.distribute_tensor(target, pipe.mesh, [ms.Shard(0)], sizes=sizes)

    def loss_fn(out, part):
        return F.mse_loss(out.repeat_interleave(2, 0), part)

    for given in (y, target):
        loss = pipe.step(x, given, loss_fn)
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    with pytest.raises(ms.LayoutError, match="a target that does not fit the batch"):
        pipe.step(x, target[:-1], loss_fn)


def test_plain_tensors_and_dtypes_that_change_between_stages():
    """No other mesh dim; and the next stage is given half the digits, so that messages of both ways differ."""
    mesh = ms.init_mesh((-1,), ("stage",))
    count = mesh.size

    class Convert(nn.Module):
        def __init__(self, i):
            super().__init__()
            self.linear, self.dtype = nn.Linear(4, 4).double(), torch.float32 if i % 2 else torch.float64

        def forward(self, x):
            return torch.tanh(self.linear(x.double())).to(self.dtype)

    def stages():
        out = []
        for i in range(count):
            torch.manual_seed(i)
            out.append(Convert(i))
        return out

    full, target = data(6, 4), data(6, 4, seed=2)
    reference = stages()
    y = full
    for stage in reference:
        y = stage(y)
    F.mse_loss(y.double(), target).backward()
    pipe = ms.Pipeline(stages(), mesh, 0, microbatches=3)
    assert pipe.mesh is None
    pipe.step(full, target, lambda y, t: F.mse_loss(y.double(), t))
    for p, q in zip(pipe.parameters(), reference[mesh.rank].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-8)


def test_what_is_refused(mesh):
    stages = stages_of(mesh.shape[0])
    for given, dim, options, error, text in (
        ([*stages, nn.Identity()], "stage", {}, ms.LayoutError, "stages or micro-batches do not fit"),
        (stages, "stage", {"microbatches": 0}, ms.LayoutError, "stages or micro-batches do not fit"),
        (stages, "stage", {"microbatches": 1.5}, ms.LayoutError, "stages or micro-batches do not fit"),
        (stages, "depth", {}, ms.MeshError, "no such mesh dim"),
        (None, "stage", {}, ms.LayoutError, "stages= is of another kind"),
        ([3] * mesh.shape[0], "stage", {}, ms.LayoutError, "stages= is of another kind"),
    ):
        with pytest.raises(error, match=text):
            ms.Pipeline(given, mesh, dim, **options)
    pipe = ms.Pipeline(stages, mesh, "stage", microbatches=4)
    few = ms.distribute_tensor(data(3, 3, 9, 8), pipe.mesh, [ms.Shard(2)])
    for x, target in ((few, few), (None, few), (few, None)):
        with pytest.raises(ms.LayoutError, match="a batch or target that does not fit"):
            pipe.step(x, target, F.mse_loss)
    batch = ms.distribute_tensor(data(4, 3, 9, 8), pipe.mesh, [ms.Shard(2)])
    on_all = ms.distribute_tensor(data(4, 3, 9, 8), mesh, [ms.Replicate(), ms.Shard(2)])
    for x, target in ((on_all, batch), (batch, on_all)):
        with pytest.raises(ms.MeshError, match="a batch or target on another mesh"):
            pipe.step(x, target, F.mse_loss)


@pytest.mark.ranks(2, 3, 4)
def test_a_stage_holds_few_micro_batches():
    mesh = ms.init_mesh((-1,), ("stage",))
    alive = []

    class Counted(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            flying.append(1)
            y.register_hook(lambda _g: flying.pop() and None)
            alive.append(len(flying))
            return y

    flying = []
    pipe = ms.Pipeline([lambda: Counted(4, 4)] * mesh.size, mesh, "stage", microbatches=8)
    x = data(8, 4, dtype=torch.float32)
    pipe.step(x, x, F.mse_loss)
    assert max(alive) == mesh.size - mesh.rank
    assert not flying


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_and_the_dtype_of_a_loss(dtype):
    n = WORLD.size
    mesh = ms.init_mesh((n,), ("stage",), device="cpu")
    stages = [seeded(lambda: nn.Linear(3, 3), dtype) for _ in range(n)]
    pipe = ms.Pipeline(stages, mesh, "stage", microbatches=2)
    x, target = data(5, 3).to(dtype), data(5, 3).to(dtype) + 1
    reference = nn.Sequential(*[seeded(lambda: nn.Linear(3, 3), dtype) for _ in range(n)])
    expected = F.mse_loss(reference(x), target, reduction="sum")
    expected.backward()
    loss = pipe.step(x, target, lambda y, t: F.mse_loss(y, t, reduction="sum"), reduction="sum")
    assert loss.dtype == dtype
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(pipe.stage.weight.grad, reference[mesh.rank].weight.grad)
    with pytest.raises(ms.LayoutError, match="reduction"):
        pipe.step(x, target, F.mse_loss, reduction="none")
    mesh.free()


class Fails(nn.Module):
    """Raises in the forward or backward pass of one of the micro-batches, while it is told to."""

    def __init__(self, stage, backward):
        super().__init__()
        self.stage, self.backward, self.left = stage, backward, None

    def forward(self, *x):
        out = self.stage(*x)
        if self.backward and torch.is_grad_enabled():
            (out[0] if isinstance(out, tuple) else out).register_hook(lambda _: self.count())
        else:
            self.count()
        return out

    def count(self):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise ZeroDivisionError("no such luck")


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
@pytest.mark.parametrize("late", [0, 2])
def test_what_a_stage_raises_all_raise(mesh, where, late):
    """And the next step is as if nothing had been."""
    full, target = data(6, 3, 9, 8), data(6, 2, 9, 8, seed=2)
    count = mesh.shape[0]
    makes = stages_of(count)
    odd = count // 2 if count > 1 and where != "loss" else 0
    if where != "loss":
        makes[odd] = lambda: Fails(stages_of(count)[odd](), where == "backward")
    pipe = ms.Pipeline(makes, mesh, "stage", microbatches=3)
    x, y = (ms.distribute_tensor(t, pipe.mesh, [ms.Shard(2)]) for t in (full, target))
    broken = where == "loss"

    def loss_fn(y, t):
        if broken:
            raise ZeroDivisionError("no such luck")
        return F.mse_loss(y, t)

    if where != "loss" and pipe.index == odd:
        pipe.stage.left = late
    with pytest.raises((ms.MpishardError, ZeroDivisionError), match="no such luck"):
        pipe.step(x, y, loss_fn)
    if where == "forward":
        if pipe.index == odd:
            pipe.stage.left = late
        with pytest.raises((ms.MpishardError, ZeroDivisionError), match="no such luck"):
            pipe(x)
    broken = False
    if where != "loss" and pipe.index == odd:
        pipe.stage.left = None
    pipe.zero_grad()
    reference = [make() for make in stages_of(count)]
    expected = F.mse_loss(whole(reference, full), target)
    expected.backward()
    torch.testing.assert_close(pipe.step(x, y, loss_fn), expected.detach())
    for p, q in zip(pipe.stage.parameters(), reference[pipe.index].parameters(), strict=True):
        close(p.grad, q.grad, "gradient")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("now"), SystemExit("now")], ids=["KeyboardInterrupt", "SystemExit"]
)
@pytest.mark.parametrize("late", [0, 2])
def test_what_ends_programs_in_a_stage_of_one_rank_is_told_to_all(error, late):
    """The others waited for the watchdog where the program caught it; and the next step is as if nothing had been."""
    mesh = ms.init_mesh((-1,), ("stage",))
    pipe = ms.Pipeline([nn.Identity() for _ in range(mesh.size)], mesh, "stage", microbatches=3)
    x, y = data(6, 3).requires_grad_(), torch.zeros(6, 3, dtype=torch.float64)
    left = [late if mesh.rank == mesh.size - 1 else None]

    def interrupted(*_):
        if left[0] is not None:
            left[0] -= 1
            if left[0] < 0:
                raise error

    handle = pipe.stage.register_forward_pre_hook(interrupted)
    with pytest.raises(type(error) if mesh.rank == mesh.size - 1 else ms.MpishardError, match="now") as raised:
        pipe.step(x, y, F.mse_loss)
    assert mesh.rank == mesh.size - 1 or f"{type(error).__name__}: now" in str(raised.value)
    assert not guard._untold
    handle.remove()
    torch.testing.assert_close(pipe.step(x, y, F.mse_loss), x.detach().square().mean())


@pytest.mark.ranks(2, 3)
def test_a_step_that_was_left_halfway_ends_the_pipeline(monkeypatch):
    """Ctrl-C that all ranks catch: the messages that were sent met the next step's, of other samples."""
    mesh = ms.init_mesh((-1,), ("stage",))
    pipe = ms.Pipeline([nn.Identity() for _ in range(mesh.size)], mesh, "stage", microbatches=3)
    x, y = data(6, 3), torch.zeros(6, 3, dtype=torch.float64)
    taken, calls = pipe._taken, [0]

    def interrupted(*given, **options):
        calls[0] += 1
        if calls[0] == 1 + pipe.is_first:
            raise KeyboardInterrupt
        return taken(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pipe, "_cut", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pipe.step(x, y, F.mse_loss)  # nothing was sent yet
    torch.testing.assert_close(pipe.step(x, y, F.mse_loss), x.square().mean())
    # the first stage has sent what the second never takes
    with monkeypatch.context() as patch:
        patch.setattr(pipe, "_taken", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipe.step(x, y, F.mse_loss)
    for again in (pipe, ms.Pipeline([nn.Identity() for _ in range(mesh.size)], mesh, "stage")):
        with pytest.raises(ms.UnsupportedOperationError, match="an earlier step was interrupted"):
            again.step(x, y, F.mse_loss)
    # whose communicator has another context, although that of the first is free
    mesh.free()
    for _ in range(3):
        other = ms.init_mesh((-1,), ("stage",))
        pipe = ms.Pipeline([nn.Identity() for _ in range(other.size)], other, "stage", microbatches=3)
        torch.testing.assert_close(pipe.step(x, y, F.mse_loss), x.square().mean())


class Gives(nn.Module):
    """Returns what the next stage cannot get."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


@pytest.mark.ranks(2, 3)
@pytest.mark.filterwarnings("ignore:.*(quantize|nested tensors)")
@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda x: x.to_sparse(), "to_dense"),
        (lambda x: torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.qint8), "dequantize"),
        (lambda x: (x, torch.nested.nested_tensor([x.detach()])), "unbind"),
        (lambda x: {"x": x}, "return tensors"),
        (lambda x: (x, 3), "return tensors"),
    ],
)
def test_what_a_stage_cannot_send_on(make, fix):
    mesh = ms.init_mesh((-1,), ("stage",))
    pipe = ms.Pipeline([Gives(make), *[nn.Identity() for _ in range(mesh.size - 1)]], mesh, "stage", microbatches=2)
    x = torch.ones(4, 2, dtype=torch.float64) if mesh.rank == 0 else None
    for call in (lambda: pipe(x), lambda: pipe.step(x, torch.ones(4, 2), lambda y, t: (y - t).sum())):
        with pytest.raises(ms.UnsupportedOperationError, match=rf"Pipeline: a stage returns(.|\n)*{fix}"):
            call()


def saved_pipeline(spatial, mesh=None):
    """Return a pipeline that differs from stage to stage, its optimizer, and a function that trains it a step."""
    if mesh is None:
        mesh = ms.init_mesh((2, -1) if spatial else (-1,), ("s", "y")[: 1 + spatial], device="cpu")
    makes = [
        lambda i=i: seeded(lambda: nn.Conv2d(2, 2, 3 - 2 * (i % 2), padding=1 - i % 2), torch.float64, i)
        for i in range(9)
    ]
    pipe = ms.Pipeline(makes[: mesh.shape[0]], mesh, 0, microbatches=2)
    optimizer = torch.optim.Adam(pipe.parameters())
    x, y = data(4, 2, 6, 6), data(4, 2, 6, 6, seed=2)
    if spatial:
        x, y = (ms.distribute_tensor(t, pipe.mesh, [ms.Shard(2)]) for t in (x, y))

    def train():
        optimizer.zero_grad()
        loss = pipe.step(x, y, F.mse_loss)
        optimizer.step()
        return loss

    return pipe, optimizer, train


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("spatial", [False, True] if WORLD.size % 2 == 0 else [False])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_stages_are_saved_in_one_checkpoint(spatial, asynchronous, tmp_path):
    folder = WORLD.bcast(str(tmp_path))
    pipe, optimizer, train = saved_pipeline(spatial)
    for step in range(3):
        train()
        ms.io.save_checkpoint(
            folder, step, model=pipe, optimizer=optimizer, extra=pipe.index, keep=2, asynchronous=asynchronous
        )
    expected = train()
    after, its_optimizer, again = saved_pipeline(spatial, pipe.pipeline_mesh)
    found = ms.io.load_checkpoint(folder, model=after, optimizer=its_optimizer, mesh=pipe.pipeline_mesh)
    assert (found.step, found.extra) == (2, pipe.index)
    torch.testing.assert_close(again(), expected, rtol=0, atol=0)
    for p, q in zip(after.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
    assert sorted(p.name for p in Path(folder).glob("step*")) == ["step_0000000001", "step_0000000002"]
    # each stage by itself, in a folder of its own
    own = f"{folder}/{pipe.index}"
    ms.io.save_checkpoint(own, 1, model=pipe.stage, mesh=pipe.stage_mesh)
    ms.io.load_checkpoint(own, model=after, mesh=after.stage_mesh, strict=False)
    pipe.pipeline_mesh.free()


@pytest.mark.ranks(2, 4)
def test_a_checkpoint_of_all_stages_or_of_none(tmp_path):
    """What fails in one stage fails on all ranks, and what other stages wrote goes with it."""
    folder = WORLD.bcast(str(tmp_path))
    pipe, _, train = saved_pipeline(True)
    mesh, names = pipe.pipeline_mesh, lambda: sorted(p.name for p in Path(folder).iterdir() if not p.is_file())
    first = train()
    ms.io.save_checkpoint(folder, 1, model=pipe, mesh=mesh)
    before = [p.clone() for p in pipe.parameters()]
    for extra in (object() if pipe.is_last else None, {"x": torch.zeros(2).to_sparse()} if WORLD.rank == 1 else None):
        with pytest.raises(ms.MpishardError, match="cannot be stored"):
            ms.io.save_checkpoint(folder, 2, model=pipe, extra=extra)
        assert names() == ["step_0000000001"]
    with pytest.raises(ms.DesyncError):
        ms.io.save_checkpoint(folder, 2 + pipe.index, model=pipe)
    with pytest.raises(ms.UnsupportedOperationError, match="not its own"):
        ms.io.save_checkpoint(folder, 2, model=pipe, mesh=ms.init_mesh((-1,), device="cpu"))
    train()
    ms.io.save_checkpoint(folder, 2, model=pipe)
    WORLD.Barrier()
    if WORLD.rank == 0:
        state = Path(folder, "step_0000000002", "stage_1", "state.json")
        state.write_text(state.read_text().replace("weight", "height"))
    WORLD.Barrier()
    with pytest.raises(FileError, match="stage_1"):
        ms.io.load_checkpoint(folder, model=pipe)
    with pytest.warns(RuntimeWarning, match="stage_1") if WORLD.rank == 0 else nullcontext():
        assert ms.io.load_checkpoint(folder, model=pipe, fallback=True).step == 1
    for p, q in zip(pipe.parameters(), before, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
    for model, of in ((pipe.stage, mesh), (ms.Pipeline([nn.Linear(1, 1)] * WORLD.size, ms.init_mesh((-1,)), 0), None)):
        if of is None and WORLD.size == 2:
            continue
        # ranks of one mesh with the model of their own stage each are told of that first
        with pytest.raises(ms.LayoutError if of is None else ms.DesyncError, match=r"other stages|different calls"):
            ms.io.load_checkpoint(folder, model=model, mesh=of, step=1)
    assert first.isfinite()
    mesh.free()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_folders_of_stages_that_are_not_where_they_were_written(asynchronous, tmp_path):
    """Stages that are alike have the same names and shapes: which one a folder is of, and of which save, it says."""
    folder = Path(WORLD.bcast(str(tmp_path)))
    mesh = ms.init_mesh((WORLD.size,), ("stage",))
    pipe = ms.Pipeline([lambda: nn.Linear(2, 2)] * WORLD.size, mesh, "stage")
    for step in (1, 2):
        with torch.no_grad():
            pipe.stage.weight.fill_(10 * step + pipe.index)
        ms.io.save_checkpoint(folder, step, model=pipe, asynchronous=asynchronous).wait()
    before, after = folder / "step_0000000001", folder / "step_0000000002"

    def swap():
        (after / "stage_0").rename(after / "x")
        (after / "stage_1").rename(after / "stage_0")
        (after / "x").rename(after / "stage_1")

    def mix():
        shutil.rmtree(after / "stage_1")
        shutil.copytree(before / "stage_1", after / "stage_1")

    for harm, what in ((swap, r"it is that of stage '[01]', not of stage"), (mix, "another save")):
        WORLD.Barrier()
        if WORLD.rank == 0:
            harm()
        WORLD.Barrier()
        nn.init.constant_(pipe.stage.weight, -1)
        with pytest.raises(FileError, match=what):
            ms.io.load_checkpoint(folder, model=pipe)
        assert (pipe.stage.weight == -1).all()
        WORLD.Barrier()
        if WORLD.rank == 0 and harm is swap:
            swap()
    with pytest.warns(RuntimeWarning, match="another save") if WORLD.rank == 0 else nullcontext():
        assert ms.io.load_checkpoint(folder, model=pipe, fallback=True).step == 1
    assert (pipe.stage.weight == 10 + pipe.index).all()
    mesh.free()


class Writes(nn.Module):
    """Begins by a write into its input, as a stage that was cut behind a norm does."""

    def __init__(self, writes):
        super().__init__()
        self.first = nn.ReLU(inplace=True) if writes else nn.Tanh()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(self.first(x))


def test_a_stage_may_write_into_its_input_and_the_batch_may_have_been_computed(mesh):
    count = mesh.shape[0]
    stages = [lambda i=i: seeded(lambda: Writes(i > 0), torch.float64, i) for i in range(count)]
    full, target = data(5, 3, 9, 8), data(5, 3, 9, 8, seed=2)
    reference = [make() for make in stages]
    everything = full.clone().requires_grad_()
    expected = F.mse_loss(whole(reference, torch.sin(everything)), target)
    expected.backward()
    pipe = ms.Pipeline(stages, mesh, "stage", microbatches=3)
    x = ms.distribute_tensor(full, pipe.mesh, [ms.Shard(2)]).requires_grad_()
    loss = pipe.step(torch.sin(x), ms.distribute_tensor(target, pipe.mesh, [ms.Shard(2)]), F.mse_loss)
    torch.testing.assert_close(loss, expected.detach())
    for (name, p), q in zip(pipe.stage.named_parameters(), reference[mesh.coords[0]].parameters(), strict=True):
        close(p.grad, q.grad, name)
    if pipe.is_first:
        close(x.grad, everything.grad, "gradient of what the batch was made of")


@pytest.mark.parametrize("made", [lambda y: None, torch.sum, lambda y: {"y": y}], ids=["None", "scalar", "dict"])
def test_outputs_that_cannot_be_put_together_raise_on_all_ranks(mesh, made):
    class Odd(nn.Module):
        def forward(self, x, *_skip):
            return made(x)

    stages = [*stages_of(mesh.shape[0])[:-1], Odd()]
    pipe = ms.Pipeline(stages, mesh, "stage", microbatches=2)
    with pytest.raises((ms.MpishardError, RuntimeError, TypeError)):  # one rank has torch's own
        pipe(ms.distribute_tensor(data(4, 3, 9, 8), pipe.mesh, [ms.Shard(2)]))


def test_a_batch_or_target_that_one_rank_alone_has_wrong(mesh):
    """Others of its stage would wait for what it does not compute."""
    beside = mesh.shape[1]
    pipe = ms.Pipeline(stages_of(mesh.shape[0]), mesh, "stage", microbatches=2)
    batch = ms.distribute_tensor(data(4, 3, 9, 8), pipe.mesh, [ms.Shard(2)])
    is_odd = mesh.rank == mesh.size - 1
    with pytest.raises(ms.LayoutError, match="a target that does not fit the batch"):
        pipe.step(batch, data(5, 3, 9, 8) if is_odd else batch, F.mse_loss)
    if beside > 1:
        is_odd = mesh.rank == 0
        with pytest.raises(ms.DesyncError, match=r"Pipeline\.step of"):
            pipe.step(data(4, 3, 9, 8) if is_odd else batch, batch, F.mse_loss)
    pipe.step(batch, batch, lambda y, _: y.square().mean())


class Stops(nn.Module):
    """Without a gradient from its third call on."""

    def __init__(self):
        super().__init__()
        self.conv, self.calls = nn.Conv2d(3, 3, 3, padding=1), 0

    def forward(self, x):
        self.calls += 1
        return self.conv(x) if self.calls < 3 else self.conv(x).detach()


def test_a_last_micro_batch_without_gradients(mesh):
    """What the earlier ones found is summed over the ranks all the same."""
    full = data(6, 3, 9, 8)
    stages = [lambda i=i: seeded(Stops, torch.float64, i) for i in range(mesh.shape[0])]
    reference = [make() for make in stages]
    for part in full.split(2):
        y = whole(reference, part)
        if y.requires_grad:
            (y**2).mean().div(3).backward()
    pipe = ms.Pipeline(stages, mesh, "stage", microbatches=3)
    x = ms.distribute_tensor(full, pipe.mesh, [ms.Shard(2)])
    pipe.step(x, x, lambda y, _: (y**2).mean())
    torch.optim.SGD(pipe.parameters()).step()
    for (name, p), q in zip(pipe.stage.named_parameters(), reference[mesh.coords[0]].parameters(), strict=True):
        close(p.grad, q.grad, name)
