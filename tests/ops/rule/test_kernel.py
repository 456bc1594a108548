"""What torch refuses beside an empty block is refused alike on every rank: kernels of a dtype, phases of vectors."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import mpishard as ms
from mpishard.tensor import kernel
from tests.compare import WORLD, gathered, mesh_of, shard, skew
from tests.ops.windows import field
from tests.release import RELEASE

MATRIX = field(4, 4)
IMAGES = field(4, 2, 4)
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")
REFUSED = (NotImplementedError, RuntimeError, ms.errors.MpishardError)


def beside_nothing(t, requires_grad=False):
    """Blocks of which the first, or the last, holds all."""
    nothing = (0,) * (WORLD.size - 1)
    for sizes in ((len(t), *nothing), (*nothing, len(t))):
        yield shard(t, mesh_of((WORLD.size,)), (ms.Shard(0),), {0: sizes}, requires_grad)


def refusal(f, *args):
    try:
        f(*args)
    except REFUSED as e:
        return f"{type(e).__name__}: {e}"
    return "none"


FORWARD = {
    "bitwise_not": (torch.bitwise_not, MATRIX),
    "bitwise_and_": (lambda x: x.bitwise_and_(x), MATRIX),
    "lgamma": (torch.lgamma, MATRIX + 1j),
    "gcd": (lambda x: torch.gcd(x, x), MATRIX),
    "mv": (lambda x: x @ x[0].full_tensor() if isinstance(x, ms.ShardTensor) else x @ x[0], MATRIX, torch.complex32),
    "max": (lambda x: x.max(1), MATRIX.to(torch.uint16)),
    "amax of integers": (torch.amax, MATRIX.to(torch.uint16)),
    "amax over blocks": (lambda x: x.amax(0), MATRIX + 1j),
    "cummax": (lambda x: x.cummax(1), MATRIX + 1j),
    "sum": (lambda x: x.sum(1), MATRIX, torch.complex32),
    "std_mean": (lambda x: torch.std_mean(x, 0), MATRIX.long()),
    "std_mean of rows": (lambda x: torch.std_mean(x, 1), MATRIX.long()),
    "gradient": (lambda x: torch.gradient(x, dim=0), MATRIX.byte()),
    "instance_norm": (F.instance_norm, IMAGES.long()),
    "group_norm": (lambda x: F.group_norm(x, 2), IMAGES + 1j),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), IMAGES + 1j),
    "segment_reduce": (lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([1, 3]), axis=0), MATRIX + 1j),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), IMAGES + 1j),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2, return_indices=True), IMAGES + 1j),
    "max_pool1d without a graph": (lambda x: F.max_pool1d(x, 2), IMAGES.long()),
    "flip, of the dims that stay": (lambda x: (x.flip(0), x.flip(1)), MATRIX.to(torch.uint16)),
    "grid_sample": (lambda x: F.grid_sample(x[:, None], field(4, 4, 4, 2).long(), align_corners=False), IMAGES.long()),
    "softmax": (lambda x: x.softmax(1), MATRIX.long()),
}


@pytest.mark.parametrize("name", FORWARD)
def test_no_kernel_for_a_dtype(name):
    f, whole, *dtype = FORWARD[name]
    whole = whole.to(*dtype) if dtype else whole
    expected = refusal(f, whole)
    assert expected != "none" or RELEASE > (2, 13)
    for x in beside_nothing(whole):
        for _ in range(2):  # the second is told from the first
            told = WORLD.allgather(refusal(f, x))
            assert set(told) == {told[0]}
            assert (told[0] == "none") == (expected == "none")


BACKWARD = {
    # what has a kernel, and its backward has none
    "add": (lambda x, w: x + w, MATRIX, torch.complex32),
    "bilinear": (lambda x, w: F.bilinear(x, x, w.expand(2, 4, 4)), MATRIX + 1j),
}


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("kept", [True, False])
def test_no_kernel_for_the_backward_of_a_dtype(name, kept):
    """Also in a checkpoint, where what a node needs is made again and may be taken once."""
    f, whole, *dtype = BACKWARD[name]
    whole = whole.to(*dtype) if dtype else whole
    w = torch.ones(1, 4, dtype=whole.dtype, requires_grad=True)

    def derive(x):
        y = f(x, w) if kept else checkpoint(f, x, w, use_reentrant=False)
        torch.autograd.grad(y, [x, w], y.detach() if isinstance(y, ms.ShardTensor) else torch.ones_like(y))

    assert refusal(derive, whole.requires_grad_()) != "none"
    for x in beside_nothing(whole, True):
        for _ in range(2):  # the second is asked again
            told = WORLD.allgather(refusal(derive, x))
            assert set(told) == {told[0]}
            assert told[0] != "none"
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("name", ["conv", "sort", "norm"])
def test_a_checkpoint_beside_an_empty_block(name):
    f = {
        "conv": lambda x, w: F.conv1d(x[None], w, padding=1)[0].exp(),
        "sort": lambda x, w: (x.sort(1)[0] * w.sum()).sin(),
        "norm": lambda x, w: F.layer_norm(x, (4,)) * w.sum() + x.sum(0),
    }[name]
    whole, w = field(4, 4), field(4, 4, 3).requires_grad_()
    leaf = whole.clone().requires_grad_()
    expected = torch.autograd.grad(f(leaf, w).square().sum(), [leaf, w])
    for x in beside_nothing(whole, True):
        y = checkpoint(f, x, w, use_reentrant=False)
        for got, e in zip(torch.autograd.grad(y.square().sum(), [x, w]), expected, strict=True):
            torch.testing.assert_close(gathered(got), e)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", ["product", "gelu", "conv"])
def test_a_penalty_of_a_gradient_beside_an_empty_block(name, kept):
    """What a checkpoint drops is made again for each pass, of which the second goes through the nodes of the first."""
    w = field(4, 4, 3).requires_grad_()
    f = {"product": lambda x: x * x, "gelu": F.gelu, "conv": lambda x: F.conv1d(x[None], w, padding=1)[0]}[name]

    def penalty(x):
        y = f(x) if kept else checkpoint(f, x, use_reentrant=False)
        loss = y.square().mean()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(g.square().sum() + loss, [x, *[w][: name == "conv"]])

    expected = penalty(field(4, 4).requires_grad_())
    for x in beside_nothing(field(4, 4), True):
        for _ in range(2):
            for got, e in zip(penalty(x), expected, strict=True):
                torch.testing.assert_close(gathered(got), e)


def test_torch_is_asked_once_and_where_a_block_is_empty(monkeypatch):
    asked = []
    ask = kernel._asking_torch

    def counted(run, *asking):
        asked.append(run)
        return ask(run, *asking)

    monkeypatch.setattr(kernel, "_asking_torch", counted)
    for x in beside_nothing(field(5, 3), True):
        for k in range(3):
            before = len(asked)
            y = torch.hypot(x, x)
            y.sum().backward()
            first = k == 0 and not x.to_local().numel()
            assert (len(asked) > before) == first
    assert len(asked) == 0 or WORLD.size > 1


@pytest.mark.parametrize("made", ["normal_", "dropout", "bernoulli"])
def test_nothing_is_drawn_to_ask(made):
    draws = {
        "normal_": lambda x: x.clone().normal_(),
        "dropout": lambda x: F.dropout(x, 0.5),
        "bernoulli": torch.bernoulli,
    }
    for x in beside_nothing(field(6, 3).sigmoid()):
        draws[made](x)
        after = torch.get_rng_state().sum().item()
        assert len(set(WORLD.allgather(after))) == 1


@pytest.mark.parametrize(
    "f", [torch.linalg.pinv, lambda x: torch.linalg.pinv(x.conj()), lambda x: (x @ x.mH).inverse()]
)
def test_conjugates_where_torch_is_asked(f):
    a = torch.complex(field(4, 4), field(4, 4).flip(0))
    for x in beside_nothing(a):
        torch.testing.assert_close(gathered(f(x)), f(a))


PHASES = {
    "eigh": lambda a: torch.linalg.eigh(a + a.mH)[1],
    "eig": lambda a: torch.linalg.eig(a.real)[1],
    "svd": lambda a: torch.linalg.svd(a)[0],
}


@pytest.mark.parametrize("name", PHASES)
@pytest.mark.parametrize("again", [None, False, True])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 0.0, 0.0)])
def test_phases_that_a_loss_depends_on(name, weights, again):
    """Also where a checkpoint makes the vectors again in backward."""
    of = PHASES[name]
    if again is not None:
        of = functools.partial(checkpoint, of, use_reentrant=again)
    a = torch.complex(field(3, 4, 4), field(3, 4, 4).flip(0))
    w = torch.tensor(weights)[:, None, None]

    def derive(x):
        (of(x) * w).real.sum().backward()

    expected = refusal(derive, a.clone().requires_grad_())
    assert "ill-defined" in expected
    spread = shard(a, mesh_of((WORLD.size,)), (ms.Shard(0),), None, True)
    for x in (*beside_nothing(a, True), spread):
        told = WORLD.allgather(refusal(derive, x))
        assert set(told) == {told[0]}
        assert "ill-defined" in told[0]
    for x in beside_nothing(a, True):
        (of(x).abs() ** 2 * w).sum().backward()
        whole = a.clone().requires_grad_()
        (PHASES[name](whole).abs() ** 2 * w).sum().backward()
        torch.testing.assert_close(gathered(x.grad), whole.grad)


def test_what_torch_is_asked_has_no_number_of_a_cell_that_is_not_there(monkeypatch):
    """Its kernels read where offsets and lengths say, unchecked: of an empty block they would read beyond it."""
    asked = []
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(kernel, "_refusal_of", lambda _, args, *_of: asked.append(args))
    cells, bags = torch.ones(2, 5, dtype=torch.bfloat16), torch.tensor([0, 3])
    places = torch.tensor([1, 3, 5, 7, 9])
    backward = torch.ops.aten._embedding_bag_per_sample_weights_backward.default
    kernel._require_kernel(backward, (cells, cells.repeat(5, 1), places, bags, places[:0], 0), {})
    reduced = torch.ops.aten.segment_reduce.default
    kernel._require_kernel(reduced, (cells[:0], "sum"), {"lengths": places, "axis": 0})
    kernel._require_kernel(torch.ops.aten.lgamma.default, (cells[:0],), {})
    shapes = [[tuple(x.shape) for x in args if isinstance(x, torch.Tensor)] for args in asked]
    assert shapes == [[(1, 1), (1, 1), (1,), (1,), (1,)], [(1, 1)], [(1, 5)]]
    assert all(not x.any() for args in asked[:2] for x in args if isinstance(x, torch.Tensor))


RESULTS = {
    "interpolate": lambda x: F.interpolate(x, 1, mode="linear"),
    "interpolate, nearest": lambda x: F.interpolate(x, scale_factor=0.34),
    "max_pool": lambda x: F.max_pool1d(x, 2, 3),
    "unfold": lambda x: F.unfold(x[:, :, None], (1, 3)),
    "diff": lambda x: x.diff(n=3),
    "cumsum": lambda x: x.cumsum(2),
    "sort": lambda x: x.sort(2)[0],
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "conv": lambda x: F.conv1d(x, torch.ones(3, 3, 2, dtype=x.dtype), stride=3),
}
WRITES = {
    "mul_": lambda y: y.mul_(2),
    "masked_fill_": lambda y: y.masked_fill_(y.detach() > 0.1, 0.0),
    "all": lambda y: y[..., :1].fill_(3.0),
    "a part": lambda y: y[0].mul_(3.0),
    "index": lambda y: y.__setitem__((..., slice(0, 1)), 3.0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_without_cells_is_written_into(name, write):
    """Of a block that has cells, or of none: its gradient has a graph on all ranks or none; else some would wait."""
    whole = field(2, 3, 4)
    for dim in range(3):
        for sizes in (None, skew(whole.shape[dim], WORLD.size), skew(whole.shape[dim], WORLD.size)[::-1]):
            x = shard(whole, mesh_of((WORLD.size,)), (ms.Shard(dim),), sizes and {dim: sizes}, True)
            leaf = whole.clone().requires_grad_()
            for t in (leaf, x):
                y = RESULTS[name](t)
                WRITES[write](y)
                (g,) = torch.autograd.grad((y**3 + y.sin()).sum(), t, create_graph=True)
                if t is leaf:
                    expected = g
            torch.testing.assert_close(gathered(g), expected.detach())
            assert set(WORLD.allgather(g.requires_grad)) == {g.requires_grad}
