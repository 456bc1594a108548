"""What travels: messages and bytes of each family of operations, forward and backward, summed over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from mpishard.layout import balanced, bounds
from mpishard.layout.partition import owner
from mpishard.ops import op_table
from mpishard.tensor.registry import RULES
from tests.compare import WORLD, mesh_of

P = WORLD.size
ROWS = 8 * P
SHAPE = (2, 4, ROWS, 6)  # sharded along dim 2, 8 rows a rank
ROW = 2 * 4 * 6 * 8  # bytes
FIELD = ROWS * ROW
BORDERS = P - 1

pytestmark = pytest.mark.ranks(2, 3, 4)


def values(*shape):
    """Random numbers, the same on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def halo(op, lo=1, hi=1):
    """Rows from the ranks before and after, and none past the domain's ends."""
    return {op: (BORDERS * ((lo > 0) + (hi > 0)), BORDERS * (lo + hi) * ROW)}


def each(op, nbytes, calls=1):
    """Collectives to which every rank brings ``nbytes`` altogether."""
    return {op: (P * calls, P * nbytes)}


def transposed(nbytes):
    """Blocks that change to another sharded dim, and back: from each rank to every other, all but its own part."""
    return {"redistribute": (2 * P * (P - 1), nbytes * (P - 1) // P)}


def turned(times):
    """The field, once or more, as blocks that change to another sharded dim."""
    return {"redistribute": (times * P * (P - 1), times * FIELD * (P - 1) // P)}


KERNEL = values(4, 4, 3, 3)
WEIGHT = values(4, 4, 3, 3).requires_grad_()
TABLE = values(10, 3).requires_grad_()
INDEX = torch.zeros(2, 4, 3, 6, dtype=torch.long)
SAMPLES = torch.full((2, 4, 2), 0.5, dtype=torch.float64)


def between(op, source, target):
    """Rows that go from a rank to another: a message for each pair."""
    pairs = [(a, b) for a, b in zip(source, target) if a != b]
    return {op: (len(set(pairs)), len(pairs) * ROW)} if pairs else {}


# of rows 0, 3 and 5, into an even cut of three
PICKED = between(
    "index",
    [owner(bounds(balanced(ROWS, P)), row) for row in (0, 3, 5)],
    [owner(bounds(balanced(3, P)), k) for k in range(3)],
)


# from each rank to every other, all but its own part
FLATTENED = {"reshape": (P * (P - 1), 8 * ROW * (P - 1))}

TWICE = (P * (P - 1), 16 * ROW * (P - 1))  # of twice as many


def lookup(x):
    """Rows of a table that every rank has."""
    return F.embedding(x.detach().abs().long(), TABLE)


def shifted(x):
    """The field half a row further down."""
    grid = F.affine_grid(torch.eye(2, 3, dtype=x.dtype)[None].repeat(2, 1, 1), [2, 4, ROWS, 6], False)
    return F.grid_sample(x, grid + torch.tensor([0, 1 / ROWS]), align_corners=False)


def low_rank(x):
    """A few singular values of a tall matrix."""
    return torch.svd_lowrank(x.detach().permute(2, 0, 1, 3).reshape(ROWS, 48), 2)[1]


def written(x):
    """A row written by its owner."""
    y = x.clone()
    y[:, :, 0] = 1.0
    return y


def at_mask(x):
    """Cells picked by a mask, and written back."""
    y = x.permute(2, 0, 1, 3) * 1
    mask = y.detach() > 0.2
    y[mask] = y[mask] * 2
    return y


def written_through(x):
    """Rows whose cells are merged with others, written into."""
    y = x.mT.repeat(1, 1, 2, 1)
    y.view(2, 4, -1).mul_(2)
    return y


# ranks beyond the largest power of two give theirs to others, and get the result
BEYOND = P - (1 << (P.bit_length() - 1))
MEETINGS = (P - BEYOND) * ((P - BEYOND).bit_length() - 1) + 2 * BEYOND
BEST = {"send_recv": (MEETINGS, MEETINGS * 16), "all_reduce": (P, P * 8)}

NOTHING: dict[str, tuple[int, int]] = {}
# family: what is called, what travels forward, and backward
FAMILIES = {
    "window/adaptive_pool": (lambda x: F.adaptive_avg_pool2d(x, (2 * P, 3)), NOTHING, NOTHING),
    "window/adaptive_pool, to one cell": (
        lambda x: F.adaptive_avg_pool2d(x, 1),
        each("all_reduce", 2 * 4 * 8),
        NOTHING,
    ),
    "window/conv": (lambda x: F.conv2d(x, KERNEL, padding=1), halo("conv2d"), halo("conv2d")),
    "window/conv, of a weight": (
        lambda x: F.conv2d(x, WEIGHT, padding=1),
        halo("conv2d"),
        halo("conv2d") | each("all_reduce", 4 * 4 * 9 * 8),
    ),
    "window/conv, stride": (lambda x: F.conv2d(x, KERNEL, None, 2, 1), halo("conv2d", 1, 0), halo("conv2d", 1, 0)),
    "window/conv, transposed": (
        lambda x: F.conv_transpose2d(x, KERNEL, None, 2, 1),
        halo("conv_transpose2d", 0, 1),
        halo("conv_transpose2d", 0, 1),
    ),
    "window/gradient": (lambda x: torch.gradient(x, dim=2)[0], halo("gradient"), halo("gradient")),
    "window/interpolate": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        halo("interpolate"),
        halo("interpolate"),
    ),
    "window/interpolate, nearest": (lambda x: F.interpolate(x, scale_factor=2), NOTHING, NOTHING),
    "window/pad": (lambda x: F.pad(x, (0, 0, 1, 1)), NOTHING, NOTHING),
    # the two ends meet
    "window/pad, circular": (
        lambda x: F.pad(x, (0, 0, 1, 1), mode="circular"),
        {"pad": (2, 2 * ROW)},
        {"pad": (2, 2 * ROW)},
    ),
    "window/pool": (lambda x: F.max_pool2d(x, 3, 1, 1), halo("max_pool2d"), halo("max_pool2d")),
    "window/pool, aligned": (lambda x: F.avg_pool2d(x, 2), NOTHING, NOTHING),
    "shape/roll": (lambda x: x.roll(1, 2), {"roll": (P, P * ROW)}, {"roll": (P, P * ROW)}),
    "spectral/stft": (
        lambda x: torch.stft(x[0, 0, :, 0], 8, 4, window=SAMPLES.new_ones(8), return_complex=True).abs(),
        {"unfold": (BORDERS, BORDERS * 4 * 8)},
        {"unfold": (BORDERS, BORDERS * 4 * 8)},
    ),
    "window/unfold": (lambda x: F.unfold(x, 3, padding=1), halo("unfold"), halo("unfold")),
    "window/unpool": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), NOTHING, NOTHING),
    "linear/matmul, added": (
        lambda x: torch.addmm(values(6, 6), x[0, 0].T, x[0, 0]),
        each("all_reduce", 36 * 8),
        NOTHING,
    ),
    # the second one counts equal extrema, for the gradient
    "reduce/min_max": (lambda x: x.amax(2), each("all_reduce", 2 * ROW, 2), NOTHING),
    "reduce/histogram": (lambda x: torch.histc(x.detach(), 10, -3, 3), each("all_reduce", 10 * 8), NOTHING),
    "linear/matmul": (lambda x: F.linear(x, values(5, 6)), NOTHING, NOTHING),
    "linear/matmul, contraction": (lambda x: F.linear(x.mT, values(5, ROWS)), NOTHING, NOTHING),
    "loss": (lambda x: F.mse_loss(x, torch.zeros_like(x)), each("all_reduce", 8), NOTHING),
    # maxima, sums and picked scores; back, sums of the cotangents
    "loss, of sharded classes": (
        lambda x: F.cross_entropy(x.movedim(2, 1), torch.ones(2, 4, 6, dtype=torch.long)),
        each("all_reduce", 3 * ROW, 3),
        each("all_reduce", ROW),
    ),
    "loss/torch_loss": (
        lambda x: torch.hinge_embedding_loss(x, torch.ones_like(x), 1.0, 1),
        each("all_reduce", 8),
        NOTHING,
    ),
    "norm/normalization": (
        lambda x: F.batch_norm(x, None, None, training=True),
        each("all_reduce", 4 * 2 * 8),
        each("all_reduce", 4 * 2 * 8),
    ),
    "reduce/sum": (lambda x: x.sum(), each("all_reduce", 8), NOTHING),
    "reduce/sum, local": (lambda x: x.sum(1), NOTHING, NOTHING),
    "reduce/cumsum": (lambda x: x.cumsum(2), each("all_gather", ROW), each("all_reduce", P * ROW)),
    "reduce/softmax": (lambda x: x.softmax(2), each("all_reduce", 2 * ROW, 2), each("all_reduce", ROW)),
    "reduce/softmax, local": (lambda x: x.softmax(1), NOTHING, NOTHING),
    "reduce/prod": (lambda x: x.prod(), each("all_gather", 8), NOTHING),
    "reduce/norm": (lambda x: torch.linalg.vector_norm(x, 3), each("all_reduce", 8), NOTHING),
    "reduce/logsumexp": (lambda x: x.logsumexp(2), each("all_gather", ROW), NOTHING),
    "reduce/count": (lambda x: (x > 0).any(), each("all_reduce", 1), NOTHING),
    "reduce/var": (lambda x: x.var(), each("all_gather", 3 * 8), NOTHING),
    "linear/product": (lambda x: torch.cdist(x, values(5, 6)), NOTHING, NOTHING),
    # real numbers there, complex ones back
    "spectral/fft": (lambda x: torch.fft.fft(x, dim=2).abs(), transposed(3 * FIELD), transposed(3 * FIELD)),
    "spectral/fft, local": (lambda x: torch.fft.fft(x, dim=3).abs(), NOTHING, NOTHING),
    # half of each operand's rows are another rank's now, but for the first and the last rank
    "shape/cat": (
        lambda x: torch.cat([x, x], 2),
        {"redistribute": (2 * BORDERS, BORDERS * 16 * ROW)},
        {"redistribute": (2 * BORDERS, BORDERS * 16 * ROW)},
    ),
    "shape/cat, local": (lambda x: torch.cat([x, x], 1), NOTHING, NOTHING),
    "shape/cat, a new dim": (lambda x: torch.stack([x, x], 2), NOTHING, NOTHING),
    "index/advanced": (lambda x: x.index_select(2, torch.tensor([0, 3, 5])), PICKED, PICKED),
    "index/index_put": (lambda x: x.index_add(2, torch.tensor([0, 3]), values(2, 4, 2, 6)), NOTHING, NOTHING),
    # the sums of two rows travel, not the rows of x
    "index/added": (
        lambda x: x.new_zeros(2, 4, 2, 6).index_add(2, torch.arange(ROWS) % 2, x),
        each("all_reduce", 2 * ROW),
        NOTHING,
    ),
    "shape/pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), NOTHING, NOTHING),
    "shape/reshape": (lambda x: x.mT.flatten(2), FLATTENED, FLATTENED),
    "shape/reshape, in order": (lambda x: x.flatten(2), NOTHING, NOTHING),
    # taken, taken again to be written into, and the way back
    "shape/reshape, written through": (
        written_through,
        {"reshape": tuple(2 * n for n in TWICE), "redistribute": TWICE},
        {"reshape": TWICE, "redistribute": TWICE},
    ),
    "index/scatter": (written, NOTHING, NOTHING),
    "window/fractional_pool": (
        lambda x: F.fractional_max_pool2d(x, 2, output_size=(4, 3), _random_samples=SAMPLES),
        each("all_gather", FIELD // P),
        NOTHING,
    ),
    # few cells, and as many as there are
    "index/gather": (lambda x: x.gather(2, INDEX), each("all_reduce", INDEX.numel() * 8), NOTHING),
    "index/gather, of all": (
        lambda x: x.gather(2, torch.zeros(SHAPE, dtype=torch.long)),
        each("all_gather", FIELD // P),
        NOTHING,
    ),
    "linear/linalg": (lambda x: torch.linalg.pinv(x[0, 0]), each("all_gather", ROWS // P * 6 * 8), NOTHING),
    # a channel, of 4, is another rank's in place of rows
    "linear/linalg, a batch": (torch.linalg.pinv, turned(1), turned(1)),
    "reduce/sort": (lambda x: x.sort(2)[0], turned(3), turned(2)),
    # keys and positions of the best of two ranks, and then the values
    "reduce/sort, the largest": (lambda x: x[0, 0, :, 0].topk(1)[0], BEST, NOTHING),
    # counts of digits, of the values and of the places, as all are equal; which cell it is, and its bits
    "reduce/sort, the middle": (
        lambda x: torch.zeros_like(x[0, 0, :, 0], dtype=torch.uint8).median(),
        each("all_reduce", 2 * 256 * 8 + 8 + 4, 4),
        NOTHING,
    ),
    # how far ranks read, which rows, and these
    "window/grid_sample": (
        shifted,
        each("all_reduce", 2 * 8)
        | {"readers of grid_sample": (2 * BORDERS, 2 * BORDERS * 2 * 8)}
        | halo("grid_sample", 0, 1),
        halo("adjoint of grid_sample", 0, 1),
    ),
    "shape/diagonal": (lambda x: torch.diagonal(x, dim1=2, dim2=3), NOTHING, NOTHING),
    "shape/diagonal, of a plane": (lambda x: x.mT.diag_embed(1), NOTHING, NOTHING),
    "index/embedding": (lookup, NOTHING, each("all_reduce", 10 * 3 * 8)),
    "pointwise/foreach": (lambda x: torch._foreach_mul([x], 2.0)[0], NOTHING, NOTHING),
    "index/basic": (lambda x: x[:, 1, :, ::2], NOTHING, NOTHING),
    "index/basic, a slice": (lambda x: x[:, :, 1:-1], NOTHING, NOTHING),
    # how many every rank found
    "index/masked": (lambda x: x.detach()[0, 0, :, 0].nonzero(), each("all_gather", 8), NOTHING),
    "index/masked, written": (at_mask, each("all_gather", 2 * 8, 2), NOTHING),
    "index/searchsorted": (lambda x: torch.bucketize(x.detach(), values(5).sort()[0]), NOTHING, NOTHING),
    "pointwise/quantize": (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), NOTHING, NOTHING),
    "pointwise, masked": (lambda x: x.masked_fill(x > 0, 1.0), NOTHING, NOTHING),
    "pointwise": (lambda x: torch.where(x > 0, x * x, 1 / x), NOTHING, NOTHING),
    "pointwise, broadcast": (lambda x: x * x.amax(3, keepdim=True) + values(6), NOTHING, NOTHING),
    # the seed
    "random": (F.dropout, {"broadcast": (P, 8)}, NOTHING),
    "random/distribution": (lambda x: torch._standard_gamma(x.abs()), {"broadcast": (P, 8)}, NOTHING),
    "shape/repeat": (lambda x: x.repeat(1, 2, 1, 1), NOTHING, NOTHING),
    "pointwise/special": (lambda x: torch.special.bessel_j0(x.detach()), NOTHING, NOTHING),
    "pointwise, in place": (lambda x: x.clone().exp_(), NOTHING, NOTHING),
    "shape/view_copy": (lambda x: torch.permute_copy(x, (0, 2, 1, 3)), NOTHING, NOTHING),
    "shape/as_strided": (lambda x: x.as_strided(SHAPE, (24 * ROWS, 6 * ROWS, 6, 1)), NOTHING, NOTHING),
    "native": (lambda x: torch.native_layer_norm(x, (6,), None, None, 1e-5)[0], NOTHING, NOTHING),
    # two random columns, three thin orthogonalisations and their products
    "linear/low_rank": (
        low_rank,
        {"broadcast": (P, 128 * P)} | each("all_gather", 384, 3) | each("all_reduce", 2304, 3),
        NOTHING,
    ),
    "shape/view": (lambda x: x.permute(2, 0, 1, 3).unsqueeze(1), NOTHING, NOTHING),
}
# these have a test of their own traffic beside their other tests
ELSEWHERE = {"attention/multihead", "attention/scaled_dot_product", "torchvision"}
# nothing in them computes, or no tensor is at hand
WITHOUT = {"init", "recurrent", "tensor"}


def sent(count):
    """What all ranks sent: operation -> (messages, bytes)."""
    total: dict[str, tuple[int, int]] = {}
    for part in WORLD.allgather({op: (c.messages, c.nbytes) for op, c in count.by_op.items()}):
        for op, (messages, nbytes) in part.items():
            before = total.get(op, (0, 0))
            total[op] = (before[0] + messages, before[1] + nbytes)
    return {op: both for op, both in total.items() if both != (0, 0)}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_travels(family):
    f, forward, backward = FAMILIES[family]
    x = ms.distribute_tensor(values(*SHAPE), mesh_of((P,)), (ms.Shard(2),)).requires_grad_()
    f(x)  # plans are made once; ranks agree on them
    with ms.comm_counter() as count:
        y = f(x)
    assert sent(count) == forward
    with ms.comm_counter() as count:
        if y.requires_grad:
            y.backward(torch.ones_like(y))
    assert sent(count) == backward


def test_every_family_is_here():
    named = {name.partition(",")[0] for name in FAMILIES}
    own = {op_table.family_of(rule) for rule in RULES.values() if str(rule.__module__).startswith("mpishard.")}
    # other tests may have rules of their own
    assert named | ELSEWHERE | WITHOUT >= own & {c.family for c in op_table.covered()}
