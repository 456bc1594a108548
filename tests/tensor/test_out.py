"""``out=``: what a function gives lies in it afterwards, laid out as it was."""

import random
import re

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import mpishard as ms
from tests.compare import WORLD, gathered, mesh_of, shard, skew

pytestmark = pytest.mark.filterwarnings("ignore:torch.chain_matmul")

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
SPD = X @ X.mT + 4 * torch.eye(4, dtype=torch.float64)
INDEX = torch.tensor([[0, 3, 1, 2], [2, 2, 0, 1]])

CASES = {
    "abs": lambda x, i, **o: torch.abs(x, **o),
    "add": lambda x, i, **o: torch.add(x, x.mT, alpha=2, **o),
    "bernoulli": lambda x, i, **o: torch.bernoulli((x > 0).double(), **o),
    "cat": lambda x, i, **o: torch.cat([x, x], 1, **o),
    "chain_matmul": lambda x, i, **o: torch.chain_matmul(x, x, x, **o),
    "cholesky": lambda x, i, **o: torch.linalg.cholesky(x, **o),
    "column_stack": lambda x, i, **o: torch.column_stack([x, x], **o),
    "cumsum": lambda x, i, **o: torch.cumsum(x, 0, **o),
    "cummax": lambda x, i, **o: torch.cummax(x, 0, **o),
    "diag": lambda x, i, **o: torch.diag(x, **o),
    "expand_copy": lambda x, i, **o: torch.expand_copy(x, (2, 4, 4), **o),
    "frexp": lambda x, i, **o: torch.frexp(x, **o),
    "gather": lambda x, i, **o: torch.gather(x, 0, i, **o),
    "histogram": lambda x, i, **o: torch.histogram(x, 5, **o),
    "index_select": lambda x, i, **o: torch.index_select(x, 1, i[0], **o),
    "isin": lambda x, i, **o: torch.isin(x, x[0], **o),
    "linspace in buckets": lambda x, i, **o: torch.bucketize(x, x[0].sort()[0], **o),
    "max": lambda x, i, **o: torch.max(x, 0, **o),
    "mean": lambda x, i, **o: torch.mean(x, 1, **o),
    "mm": lambda x, i, **o: torch.mm(x, x, **o),
    "nanmean": lambda x, i, **o: torch.nanmean(x, 0, **o),
    "norm": lambda x, i, **o: torch.norm(x, 2, 0, **o),
    "normalize": lambda x, i, **o: torch.nn.functional.normalize(x, **o),
    "renorm": lambda x, i, **o: torch.renorm(x, 2, 0, 1.0, **o),
    "scatter_add": lambda x, i, **o: torch.scatter_add(x, 0, i, x[:2], **o),
    "sort": lambda x, i, **o: torch.sort(x, 0, **o),
    "std": lambda x, i, **o: torch.std(x, 0, **o),
    "sum": lambda x, i, **o: torch.sum(x, 0, **o),
    "svd": lambda x, i, **o: torch.linalg.svd(x, **o),
    "take": torch.take,
    "tril": lambda x, i, **o: torch.tril(x, **o),
    "transpose_copy": lambda x, i, **o: torch.transpose_copy(x, 0, 1, **o),
    "var": lambda x, i, **o: torch.var(x, 0, **o),
    "where": lambda x, i, **o: torch.where(x > 0, x, x.mT, **o),
}


@pytest.mark.parametrize("name", CASES)
def test_out(name):
    call, mesh = CASES[name], mesh_of((WORLD.size,))
    expected = call(SPD, INDEX)
    many = isinstance(expected, tuple)
    for dim, sizes in ((0, None), (1, {1: skew(4, WORLD.size)})):
        x, index = shard(SPD, mesh, (ms.Shard(dim),), sizes), shard(INDEX, mesh, (ms.Shard(1),))
        outs = [
            shard(torch.zeros_like(t), mesh, (ms.Shard(0) if t.ndim else ms.Replicate(),))
            for t in (expected if many else [expected])
        ]
        before = [t.sharding for t in outs]
        got = call(x, index, out=tuple(outs) if many else outs[0])
        assert type(got) is type(expected) if many else got is outs[0]
        assert all(a is b for a, b in zip(got if many else [got], outs, strict=True))
        for t, e, own in zip(outs, expected if many else [expected], before, strict=True):
            torch.testing.assert_close(gathered(t), e)
            assert t.sharding is own


def test_out_of_plain_operands_takes_their_result():
    out = shard(torch.zeros(4, 4).double(), mesh_of((WORLD.size,)), (ms.Shard(1),))
    assert torch.mm(X, X, out=out) is out
    torch.testing.assert_close(gathered(out), X @ X)


@pytest.mark.parametrize("name", CASES)
def test_a_plain_out_takes_all_of_it(name):
    """As optimizers write products of parameters into memory of their own."""
    call = CASES[name]
    expected = call(SPD, INDEX)
    many = isinstance(expected, tuple)
    x, index = (shard(t, mesh_of((WORLD.size,)), (ms.Shard(0),)) for t in (SPD, INDEX))
    outs = [torch.zeros_like(t) for t in (expected if many else [expected])]
    got = call(x, index, out=tuple(outs) if many else outs[0])
    assert all(a is b for a, b in zip(got if many else [got], outs, strict=True))
    torch.testing.assert_close(outs, list(expected) if many else [expected])


def test_what_does_not_fit_is_refused():
    mesh = mesh_of((WORLD.size,))
    x = shard(X, mesh, (ms.Shard(0),))
    for out in (torch.zeros(3).double(), shard(torch.zeros(3).double(), mesh, (ms.Shard(0),))):
        for call in (lambda out: torch.sum(x, 0, out=out), lambda out: torch.add(x[0], x[1], out=out)):
            with pytest.raises(ms.UnsupportedOperationError, match="out="):
                call(out)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.std(x, 0, out=shard(torch.zeros(4, dtype=torch.int64), mesh, (ms.Shard(0),)))
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.sum(x.clone().requires_grad_(), 0, out=shard(torch.zeros(4).double(), mesh, (ms.Shard(0),)))


OTHER_DTYPE = {
    "mm": lambda x, out: torch.mm(x, x, out=out),
    "exp": lambda x, out: torch.exp(x, out=out),
    "softmax": lambda x, out: torch.softmax(x, 0, out=out),
    "cumsum": lambda x, out: torch.cumsum(x, 1, out=out),
    "index_select": lambda x, out: torch.index_select(x, 0, torch.arange(4), out=out),
    "inv": lambda x, out: torch.linalg.inv(x, out=out),
    "where": lambda x, out: torch.where(x > 0, x, x, out=out),
    "cat": lambda x, out: torch.cat([x[:2], x[2:]], out=out),
}


@pytest.mark.parametrize("name", OTHER_DTYPE)
def test_out_of_another_dtype(name):
    """It is written or refused as torch does it."""
    call, full = OTHER_DTYPE[name], X + 4 * torch.eye(4)
    for dtype in (torch.float32, torch.complex128):
        expected: object = torch.zeros(4, 4, dtype=dtype)
        try:
            call(full, expected)
        except RuntimeError as e:
            expected = str(e)
        for dim in (0, 1):
            x, out = (shard(t, mesh_of((WORLD.size,)), (ms.Shard(dim),)) for t in (full, full.to(dtype)))
            if isinstance(expected, str):
                with pytest.raises(RuntimeError) as e:
                    call(x, out)
                assert str(e.value) == expected
            else:
                torch.testing.assert_close(gathered(call(x, out)), expected)


# Numbers that are drawn; faults of torch (docs/upstream.md); what takes no such argument.
OTHERWISE = set(
    """
    _batch_norm_with_update all bernoulli fft.ihfft2 fft.ihfftn hash_tensor linalg.lstsq linalg.lstsq/grad_oriented
    logsumexp multinomial normal normal/number_mean
    """.split()
)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.complex64, torch.bool)


def came(call):
    try:
        return call()
    except Exception as e:  # noqa: BLE001 (the outcome)
        return e


def calls_with_out(entry, dtype, draw):
    """A drawn sample of an entry of torch's database: its leaves, what calls it, and the results' shapes and dtypes."""
    torch.default_generator.manual_seed(1)
    random.seed(1)
    samples = [
        s
        for s, _ in zip(entry.sample_inputs("cpu", dtype, requires_grad=False), range(12))
        if any(isinstance(x, torch.Tensor) and x.numel() > 1 for x in tree_flatten((s.input, s.args, s.kwargs))[0])
    ]
    for sample in draw.sample(samples, min(1, len(samples))):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))

        def call(leaves, out=None, spec=spec):
            input, args, kwargs = tree_unflatten(leaves, spec)
            return entry.op(input, *args, **kwargs, **({} if out is None else {"out": out}))

        result = came(lambda: call(leaves))
        parts = [result] if isinstance(result, torch.Tensor) else result
        if isinstance(parts, (tuple, list)) and all(type(t) is torch.Tensor for t in parts):
            yield leaves, call, [(t.shape, t.dtype) for t in parts], isinstance(result, torch.Tensor)


def test_what_torch_refuses_is_told_in_its_words():
    """Not in those of its rules for tensors without data, which are others here."""
    mesh = mesh_of((WORLD.size,))
    x, out = torch.ones(5, 2, dtype=torch.complex64), torch.zeros(5, 4)
    with pytest.raises((TypeError, RuntimeError)) as theirs:
        torch.column_stack([x, x], out=out)
    sharded = shard(x, mesh, (ms.Shard(0),))
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value))):
        torch.column_stack([sharded, sharded], out=shard(out, mesh, (ms.Shard(0),)))


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore")
def test_every_function_takes_the_dtypes_that_torch_takes(request):
    """Those of torch's database, on drawn samples and dtypes: the values of torch, or its error."""
    from torch.testing._internal.common_methods_invocations import op_db

    whole = request.config.getoption("--sample") == 1
    draw = random.Random(request.config.option.seed)
    mesh, wrong, tried = mesh_of((WORLD.size,)), [], 0
    names = lambda e: f"{e.name}/{e.variant_test_name}" if e.variant_test_name else e.name  # noqa: E731
    known = sorted((e for e in op_db if e.supports_out and names(e) not in OTHERWISE), key=names)
    for entry in known if whole else draw.sample(known, 40):
        dtype = draw.choice([d for d in DTYPES if d in entry.supported_dtypes("cpu")] or [None])
        if dtype is None:
            continue
        for leaves, call, results, single in calls_with_out(entry, dtype, draw):
            changed = draw.randrange(len(results))
            for other in DTYPES:
                dtypes = [other if i == changed else d for i, (_, d) in enumerate(results)]
                outs = [torch.zeros(shape, dtype=d) for (shape, _), d in zip(results, dtypes)]
                placed = [shard(t, mesh, (ms.Shard(0) if t.ndim else ms.Replicate(),)) for t in outs]
                shards = [
                    shard(x, mesh, (ms.Shard(0) if x.ndim else ms.Replicate(),))
                    if type(x) is torch.Tensor and x.layout == torch.strided
                    else x
                    for x in leaves
                ]
                expected = came(lambda: call(leaves, outs[0] if single else tuple(outs)))
                got = came(lambda: call(shards, placed[0] if single else tuple(placed)))
                what = f"{names(entry)} of {dtype} into {dtypes}"
                tried += 1
                if isinstance(expected, Exception) or isinstance(got, Exception):
                    alike = isinstance(got, type(expected)) or isinstance(expected, type(got))
                    if not (isinstance(expected, Exception) and alike):
                        wrong.append(f"{what}: {got!r:.200} and not {expected!r:.200}")
                    continue
                for t, e in zip(placed, outs):
                    same = came(
                        lambda: torch.testing.assert_close(gathered(t), e, equal_nan=True, rtol=2e-3, atol=1e-3)
                    )
                    if same is not None:
                        wrong.append(f"{what}: {same!r:.200}")
    assert tried > 50
    assert not wrong, "\n- ".join(["", *wrong])
