"""Every pointwise function on shards against whole tensors: broadcasting, dtypes, in-place forms, errors."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from mpishard.ops.pointwise import pointwise
from mpishard.tensor.registry import RULES, spellings
from tests.compare import WORLD, compare, gathered, layouts, mesh_of, shard

SHAPE = (3, 5, 4)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample(shape, dims, first=0, step=1):
    return list(layouts(shape, dims))[first::step]


X, Y, Z = values(*SHAPE), values(*SHAPE, seed=1), values(*SHAPE, seed=2)
P, Q = X.abs() + 0.1, Y.abs() + 0.1  # positive
U = X.tanh() * 0.9  # inside (-1, 1)
I, J = (X * 4).long(), (Y * 4).long().abs() % 5 + 1
B, C = X > 0, Y > 0
H = torch.complex(X, Y)

# function -> argument lists; a name that is not here takes X alone
ARGUMENTS = {
    **{key: [(U,)] for key in "acos arccos asin arcsin atanh arctanh erfinv".split()},
    **{key: [(P + 1,)] for key in "acosh arccosh".split()},
    **{key: [(P,)] for key in "log log10 log1p log2 lgamma digamma gammaln psi rsqrt sqrt".split()},
    **{key: [(X,)] for key in "log_ndtr ndtr i0 i0e i1 i1e erfcx logsigmoid sinc".split()},
    "fill": [(X, 2.0)],
    "logit": [(U.abs(),)],
    "ndtri": [(U.abs(),)],
    **{
        key: [(P, Q), (P, Q[0]), (P[:, :1], Q)]
        for key in (
            "add sub subtract mul multiply div divide true_divide eq ne not_equal lt less le less_equal gt greater ge "
            "greater_equal maximum minimum fmax fmin rsub logaddexp logaddexp2 atan2 arctan2 copysign hypot isclose "
            "xlog1py xlogy nextafter"
        ).split()
    },
    **{key: [(P, Q), (P, 2.0), (I, J), (P, Q[0])] for key in "fmod remainder floor_divide pow float_power".split()},
    **{key: [(P.detach(), Q)] for key in "igamma igammac".split()},
    "heaviside": [(X, Y)],
    "_standard_gamma_grad": [(P, Q)],
    "_dirichlet_grad": [(U.abs(), P, P + Q)],
    "zeta": [(P + 2, Q + 1)],
    "polygamma": [],
    "mvlgamma": [(P + 3, 2)],
    "ldexp": [(X, J)],
    "addcdiv": [(X, Y, P), (X, Y[0], P)],
    "addcmul": [(X, Y, Z), (X, Y[0], Z[:, :1])],
    "lerp": [(X, Y, 0.3), (X, Y, U)],
    "where": [(B, X, Y), (B[0], X, 1.5), (B, X, Y[:, :1])],
    "masked_fill": [(X, C, 2.5), (X, C[0], 0.0)],
    **{key: [(X, -0.5, 0.5), (X, Y.abs() * -1, Z.abs())] for key in "clamp clip".split()},
    **{key: [(X, 0.2), (X, Y)] for key in "clamp_max clamp_min".split()},
    **{key: [(I, J), (B, C), (I, 3)] for key in "bitwise_and bitwise_or bitwise_xor".split()},
    **{key: [(I.abs(), J)] for key in "bitwise_left_shift bitwise_right_shift".split()},
    "bitwise_not": [(I,), (B,)],
    **{key: [(B, C), (X, Y)] for key in "logical_and logical_or logical_xor".split()},
    "logical_not": [(B,), (X,)],
    "complex": [(X, Y)],
    "polar": [(P, X)],
    **{
        key: [(X,), (H,)]
        for key in "conj conj_physical resolve_conj resolve_neg angle isreal sgn real positive".split()
    },
    "imag": [(H,)],
    "isneginf": [(X,)],
    "hardtanh": [(X, -0.4, 0.6)],
    "threshold": [(X, 0.1, 0.2)],
    **{key: [(X, 2.5)] for key in "full_like".split()},
    **{key: [(X,)] for key in "relu relu6 elu selu celu leaky_relu hardswish hardsigmoid silu mish".split()},
    "type_as": [(X, I)],
    "round": [(X,)],
    "nan_to_num": [(X / (X > 0),)],
}
NAMES = [
    name
    for name in [*pointwise._OUT_OF_PLACE, *pointwise._ALIASING, "contiguous", "polar", *pointwise._LIKE]
    if name != "polygamma"
]
NO_DERIVATIVE = {"floor_divide", "igamma", "igammac", "zeta", "nextafter", "heaviside", "ldexp", "detach_copy"}
NO_DERIVATIVE |= {"_standard_gamma_grad", "_dirichlet_grad"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_function(name):
    functions = spellings(name)
    assert functions, f"torch has no {name}"
    every, ran = sample(SHAPE, (0, 1, 2)), 0
    for k, (function, arguments) in enumerate(itertools.product(functions, ARGUMENTS.get(name, [(X,)]))):
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        rest = arguments[len(tensors) :]
        try:
            function(*arguments)
        except (TypeError, RuntimeError):
            continue  # this spelling has other arguments

        def f(*x, function=function, rest=rest):
            x = [t.detach() for t in x] if name in NO_DERIVATIVE else x
            y = function(*x, *rest)
            return torch.zeros_like(y) if name == "empty_like" else y

        for i in (k, k + 7):
            mesh, placements, sizes = every[5 * i % len(every)]
            # smaller operands stay plain
            where = [(mesh, placements, sizes) if t.shape == SHAPE else (None, None, None) for t in tensors]
            if any(m is not None for m, _, _ in where):
                ran += 1
                operands = [(t, *w) for t, w in zip(tensors, where)]
                compare(f, operands, rtol=1e-9, what=f"{name} {len(arguments)} {placements}")
    assert ran


def test_every_argument_list_is_used():
    assert set(ARGUMENTS) <= set(NAMES) | {"polygamma"}


@pytest.mark.parametrize("name", [*pointwise._DUNDERS, *pointwise._IN_PLACE_DUNDERS])
def test_operator(name):
    functions = spellings(name)
    for function in functions:
        unary = name in ("__neg__", "__pos__", "__abs__", "__invert__")
        logical = name.strip("_").lstrip("ir") in ("and", "or", "xor", "lshift", "shift", "nvert")
        x, y = (I, J) if logical else (P, Q)
        in_place = name in pointwise._IN_PLACE_DUNDERS
        for mesh, placements, sizes in sample(SHAPE, (0, 1, 2), 0, 4):
            seconds = [()] if unary else [(y,), (3,), (y[0],)]
            for second in seconds:

                def f(a, *b, function=function, second=second):
                    if "floordiv" in name or "mod" in name:  # some have no derivative
                        a, b = a.detach(), [t.detach() for t in b]
                    a = a.clone() if in_place else a
                    return function(a, *(b or second))

                operands = [(x, mesh, placements, sizes)]
                if second and isinstance(second[0], torch.Tensor) and second[0].shape == SHAPE:
                    operands.append((y, mesh, placements, sizes))
                compare(f, operands, what=f"{name} {placements}")


IN_PLACE = {
    "add_": lambda x, y: x.add_(y, alpha=2),
    "mul_ broadcast": lambda x, y: x.mul_(y[:1]),
    "div_ number": lambda x, y: x.div_(3),
    "relu_": lambda x, y: torch.relu_(x),
    "F.relu inplace": lambda x, y: F.relu(x, inplace=True),
    "F.leaky_relu inplace": lambda x, y: F.leaky_relu(x, 0.1, inplace=True),
    "clamp_": lambda x, y: x.clamp_(-0.3, 0.4),
    "copy_": lambda x, y: x.copy_(y),
    "fill_": lambda x, y: x.fill_(2.0),
    "zero_": lambda x, y: x.zero_(),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 0.5),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=0.5),
    "sigmoid_": lambda x, y: x.sigmoid_(),
    "pow_": lambda x, y: x.pow_(2),
    "+=": lambda x, y: x.__iadd__(y),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name):
    def f(x, y):
        x = x * 2
        out = IN_PLACE[name](x, y)
        assert out is x
        return x * 1

    for k, (mesh, placements, sizes) in enumerate(sample(SHAPE, (0, 1, 2), 0, 3)):
        # the second operand alike, laid out differently, and plain
        for other in ((mesh, placements, sizes), sample(SHAPE, (0, 1, 2))[k], (None, None, None)):
            if other[0] in (None, mesh):
                compare(f, [(X, mesh, placements, sizes), (Y, *other)], what=f"{name} {placements} {other[1:]}")


def test_differently_laid_out_operands():
    every = sample(SHAPE, (0, 1, 2))
    n = 0
    for (mesh, p, s), (other, q, t) in itertools.product(every[::2], every[::3]):
        if mesh is other:
            n += 1
            compare(lambda x, y: torch.atan2(x * y, y + x).exp(), [(X, mesh, p, s), (Y, mesh, q, t)], what=f"{p} {q}")
    assert n


def test_broadcasting_of_shards():
    for shape, dims in [((5, 1), (0,)), ((1, 4), (1,)), ((1, 5, 1), (1, 0)), ((4,), (0,)), ((), ())]:
        small = values(*shape)
        for mesh, p, s in sample(SHAPE, (0, 1, 2), 0, 2):
            for other, q, t in sample(shape, dims):
                if other is mesh:
                    compare(lambda x, y: x * y - y, [(X, mesh, p, s), (small, mesh, q, t)], what=f"{shape} {p} {q}")
            compare(lambda x, y: y - x, [(X, mesh, p, s), (small, None, None, None)], what=f"plain {shape} {p}")


@pytest.mark.ranks(2, 3, 4)
def test_the_smaller_of_two_operands_moves():
    mesh = mesh_of((WORLD.size,))
    x, y = ms.distribute_tensor(X, mesh, ms.Shard(0)), ms.distribute_tensor(X[0], mesh, ms.Shard(0))
    assert (x + y).sharding is (y + x).sharding is x.sharding
    z = ms.distribute_tensor(X, mesh, ms.Shard(1))
    assert (z + x).sharding is z.sharding


def test_gradients_of_plain_operands():
    """Of a scalar, a row, a whole tensor and a parameter used twice: the same, whole gradient on every rank."""
    plain = [values(*s, seed=5).requires_grad_() for s in ((), (4,), (5, 1), SHAPE)]
    for mesh, p, s in sample(SHAPE, (0, 1, 2), 0, 2):
        compare(
            lambda x: (x * plain[0] + plain[1]) * plain[2].exp() + plain[3] * plain[1],
            [(X, mesh, p, s)],
            plain,
            second=True,
            what=f"{p}",
        )


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.uint8,
]


def test_dtype_promotion():
    mesh = mesh_of((WORLD.size,))
    for a, b in itertools.product(DTYPES, DTYPES):
        x, y = (X * 3).to(a), (Y * 3).to(b)
        for other in (y, y[0, 0, 0], 2, 2.5, True):
            got = shard(x, mesh, (ms.Shard(1),)) + (shard(other, mesh, (ms.Shard(1),)) if other is y else other)
            assert got.dtype == (x + other).dtype
            torch.testing.assert_close(gathered(got), x + other)


def test_number_first():
    x = X.clone()
    for mesh, p, s in sample(SHAPE, (0, 1), 0, 2):
        part = shard(x, mesh, p, s)
        for f in (
            lambda t: 2 - t,
            lambda t: 2 / t,
            lambda t: 2**t,
            lambda t: torch.where(t > 0, 1.0, t),
            lambda t: t.where(t > 0, -t),
            lambda t: torch.tensor(2.0, dtype=torch.float64) * t,
            lambda t: values(*SHAPE) - t,
            lambda t: values(4) ** 2 / t,
            lambda t: t > 1.0,
        ):
            torch.testing.assert_close(gathered(f(part)), f(x))


def test_complex_parts():
    for mesh, p, s in sample(SHAPE, (0, 1, 2), 0, 4):
        compare(lambda x: x.real * x.imag + torch.view_as_real(x).pow(2)[..., 0], [(H, mesh, p, s)], what=f"{p}")


def test_prelu():
    one, per_channel = values(1).requires_grad_(), values(5).requires_grad_()
    for mesh, p, s in sample(SHAPE, (0, 1, 2), 0, 2):
        compare(lambda x: F.prelu(x, one), [(X, mesh, p, s)], [one], what=f"{p}")
        compare(lambda x: F.prelu(x, per_channel), [(X, mesh, p, s)], [per_channel], what=f"{p}")


def test_partial_operands_are_summed_first():
    mesh = mesh_of((WORLD.size,))
    local = torch.full((3,), 1.0 + mesh.rank, dtype=torch.float64)
    total = float(sum(range(1, WORLD.size + 1)))
    for f in (torch.exp, lambda t: t + 1, lambda t: 2 * t, lambda t: t * t, lambda t: t + torch.ones(3), torch.clone):
        x = ms.ShardTensor.from_local(local, mesh, ms.Partial())
        y = f(x)
        assert not y.sharding.partial_dims
        torch.testing.assert_close(gathered(y), f(torch.full((3,), total, dtype=torch.float64)))
    x = ms.ShardTensor.from_local(local.clone(), mesh, ms.Partial())
    x += 1
    torch.testing.assert_close(gathered(x), torch.full((3,), total + 1, dtype=torch.float64))


def test_tensors_of_the_same_kind():
    mesh = mesh_of((WORLD.size,))
    x = shard(X, mesh, (ms.Shard(1),))
    for f in (
        lambda t: t.new_zeros(t.shape),
        lambda t: t.new_ones(*t.shape, dtype=torch.int32),
        lambda t: t.new_full(t.size(), 2.5),
        lambda t: t.new_full(size=(2, 3), fill_value=2),
        lambda t: t.new_zeros((4,)),
        lambda t: t.new_ones(()),
        lambda t: t.new_empty(3, 2).zero_(),
        lambda t: t.new_tensor([[1, 2], [3, 4]]),
        lambda t: t.new(3, 2).zero_(),
        lambda t: t.new(t.shape).zero_(),
        lambda t: t.new([1, 2]),
        lambda t: t.new(),
    ):
        got, expected = f(x), f(X)
        assert got.dtype == expected.dtype
        assert got.placements == ((ms.Shard(1),) if got.shape == x.shape else (ms.Replicate(),))
        torch.testing.assert_close(gathered(got), expected)
    with pytest.raises(ms.UnsupportedOperationError, match="another device"):
        x.new_zeros(3, device="meta")
    with pytest.raises(TypeError, match="extents or a list"):
        x.new(x)


def test_a_tensor_for_what_is_computed_beside():
    """It lies where that does: what is written into it stays on its rank."""
    for mesh, placements, sizes in layouts(X.shape, (0, 1)):
        x = shard(X, mesh, placements, sizes)
        for times in ((1, 3, 1), (2, 1, 1), (2, 2, 1)):
            shape = [n * k for n, k in zip(X.shape, times)]
            expected, y = X.new_zeros(shape), x.new_zeros(shape)
            assert y.placements == x.placements
            expected[:: times[0], :: times[1]] = X
            with ms.comm_counter() as counter:
                y[:: times[0], :: times[1]] = x
            assert not counter.messages
            torch.testing.assert_close(gathered(y), expected)


def test_conversions():
    mesh = mesh_of((WORLD.size,))
    x = shard(X, mesh, (ms.Shard(1),))
    assert x.to(torch.float64) is x
    assert x.to(torch.float32).dtype == x.float().dtype == x.to(dtype=torch.float32).dtype == torch.float32
    assert x.type_as(shard(I, mesh, (ms.Shard(1),))).dtype == torch.int64
    assert x.to(x.float()).dtype == torch.float32
    assert x.to("cpu") is x
    assert x.type(torch.float32).sharding is x.sharding
    assert gathered(x.type("torch.FloatTensor")).dtype == torch.float32
    assert x.type() == X.type()
    assert torch.arange(3).to(x).dtype == x.dtype
    assert x.cpu() is x
    assert torch.result_type(x, 1) == torch.result_type(1.0, shard(I, mesh, (ms.Shard(1),)).double()) == torch.float64
    assert gathered(x.half()).dtype == torch.float16
    with pytest.raises(ms.UnsupportedOperationError, match="another device"):
        x.to("meta")


def test_out():
    mesh = mesh_of((WORLD.size,))
    x, out = shard(X, mesh, (ms.Shard(1),)), shard(Y, mesh, (ms.Shard(0),))
    assert torch.maximum(out, x, out=out) is out
    torch.testing.assert_close(out.full_tensor(), torch.maximum(Y, X))
    assert torch.mul(x, Y[0], out=out).placements == (ms.Shard(0),)
    torch.testing.assert_close(out.full_tensor(), X * Y[0])
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.exp(shard(X, mesh, (ms.Shard(0),), None, True), out=out)


def test_out_of_another_kind():
    mesh = mesh_of((WORLD.size,))
    x = shard(X, mesh, (ms.Shard(1),))
    torch.add(x, x, out=(whole := torch.empty_like(X)))
    assert torch.equal(whole, X + X)
    for out in (X[0].clone(), shard(X[0], mesh, (ms.Shard(1),))):
        with pytest.raises(ms.UnsupportedOperationError, match="out="):
            torch.add(x, x, out=out)


def test_in_place_needs_the_shape_of_its_result():
    mesh = mesh_of((WORLD.size,))
    x = shard(X[0], mesh, (ms.Shard(1),))
    with pytest.raises(RuntimeError, match="broadcast shape"):
        x += shard(X, mesh, (ms.Shard(2),))


def test_all_in_place_twins_are_registered():
    for function in spellings(*[f"{n}_" for n in pointwise._OUT_OF_PLACE]):
        assert function in RULES


def test_infinite_cells_of_prelu_leave_the_slope_its_gradient():
    full = torch.tensor([float("inf"), -2.0, 0.0, 3.0, float("inf")], dtype=torch.float64)
    grads = []
    for x in (full, shard(full, mesh_of((WORLD.size,)), [ms.Shard(0)])):
        slope = torch.tensor([0.25], dtype=torch.float64, requires_grad=True)
        F.prelu(x, slope).clamp_max(9).sum().backward()
        grads.append(slope.grad)
    assert torch.equal(*grads)
