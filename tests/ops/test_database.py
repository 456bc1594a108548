"""Every entry of torch's own database of operators, on shards: right, or refused for a reason that is listed here.

Each entry runs on a few of torch's own samples, with all operands sharded along their first or last dim, each along
another, with one alone, and with all cells on the last rank: values, shapes, dtypes and first gradients are those of
torch on the whole tensors. All ranks come to the same end. An entry that is listed and works is an error, too.
"""

from __future__ import annotations

import itertools
import random
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from mpi4py import MPI
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

import mpishard as ms
from mpishard.errors import NoShardingRule, UnsupportedOperationError
from tests.compare import compare, flat, gathered, mesh_of, shard
from tests.conftest import has_gpu
from tests.release import RELEASE

WORLD = MPI.COMM_WORLD
DEVICE = "cuda" if has_gpu() else "cpu"
DTYPES = (torch.float64, torch.complex128, torch.float32, torch.int64, torch.bool)
PARTS = 8
# samples of an entry that are tried, and are looked at for that; those with cells, where one is drawn of them
TRIED, SEEN, SEEN_TO_DRAW = 3, 60, 12
# how long a rank with an error waits for the others
GRACE_S = 20

# Numbers that are drawn, or are not set: shapes and dtypes are compared.
DRAWN = set(
    """
    bernoulli cauchy empty_like exponential geometric log_normal multinomial new_empty new_empty_strided
    nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d
    nn.functional.feature_alpha_dropout/with_train nn.functional.multi_head_attention_forward nn.functional.rrelu
    normal normal/in_place normal/number_mean rand_like randint_like randn_like uniform
    """.split()
)

# Entries that make tensors of numbers, whose first samples have no cells or one, or that run on other devices.
NOTHING_TO_SHARD = set(
    """
    arange broadcast_shapes empty empty_permuted empty_strided eye full item jiterator_2inputs_2outputs
    jiterator_4inputs_with_extra_args jiterator_binary jiterator_binary_return_by_ref jiterator_unary linspace
    linspace/tensor_overload logspace logspace/tensor_overload nn.functional.batch_norm/without_cudnn
    nn.functional.unfold ones randint randn scalar_tensor signal.windows.bartlett signal.windows.blackman
    signal.windows.cosine signal.windows.exponential signal.windows.gaussian signal.windows.general_cosine
    signal.windows.general_hamming signal.windows.hamming signal.windows.hann signal.windows.kaiser
    signal.windows.nuttall torch._scaled_mm torch._scaled_mm_v2 torch.ops.aten._efficient_attention_forward
    torch.ops.aten._flash_attention_forward tril_indices triu_indices zeros
    """.split()
)

# reason: entries, or entry@form
REFUSED = {
    reason: words.split()
    for reason, words in {
        "the result is a sparse tensor": "sparse.sampled_addmm to_sparse",
        "a hash of the bits of all cells, which MPI's reductions here do not know": "hash_tensor",
        "one device's kernel, which F.scaled_dot_product_attention chooses by itself": (
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"
        ),
        "known: torch gives the input the gradient of the cells that are written": "as_strided_scatter",
    }.items()
}

if DEVICE == "cuda":
    NOTHING_TO_SHARD -= {"nn.functional.batch_norm/without_cudnn", "torch.ops.aten._efficient_attention_forward"}
    REFUSED["one device's kernel, which F.scaled_dot_product_attention chooses by itself"] = [
        "torch.ops.aten._efficient_attention_forward"
    ]


class Call(NamedTuple):
    """A call of an entry, as a function of its tensors, and which of these have a gradient."""

    run: Callable[..., Any]
    tensors: list[Tensor]
    differentiable: list[bool]


Placed = tuple[int, tuple[int, ...] | None] | None


def name_of(entry: Any) -> str:
    return f"{entry.name}/{entry.variant_test_name}" if entry.variant_test_name else entry.name


def chosen(entry: Any, most: int) -> list[tuple[Any, Any, Callable[..., Any]]]:
    """A few samples of different kinds that have cells to shard: leaves, what joins them, and what ends the call."""
    dtype = next((d for d in DTYPES if d in entry.supported_dtypes(DEVICE)), None)
    if dtype is None:
        return []
    autograd = entry.supports_autograd and dtype in entry.supported_backward_dtypes(DEVICE)
    torch.manual_seed(1)
    random.seed(1)
    found: dict[Any, tuple[Any, Any, Callable[..., Any]]] = {}
    fit = 0
    for sample in itertools.islice(entry.sample_inputs(DEVICE, dtype, requires_grad=autograd), SEEN):
        given, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        dims = tuple(x.ndim if isinstance(x, Tensor) else None for x in given)
        if not any(isinstance(x, Tensor) and x.ndim and x.numel() > 1 for x in given):
            continue
        fit += 1
        if (str(spec), dims) not in found:
            found[str(spec), dims] = given, spec, sample.output_process_fn_grad
        if len(found) == TRIED or fit == most:
            break
    # some are made in the order of a set of words, which each rank has for itself
    words = repr([[x for x in given if isinstance(x, (str, int))] for given, _, _ in found.values()])
    if len(set(WORLD.allgather(zlib.crc32(words.encode())))) > 1:
        trees = WORLD.bcast([(given, spec) for given, spec, _ in found.values()])
        return [(*tree, end) for tree, (_, _, end) in zip(trees, found.values(), strict=True)]
    return list(found.values())


def calls(entry: Any, most: int) -> Iterator[Call]:
    """The calls of an entry that are tried, the same on every rank."""
    if entry.name.startswith("jiterator"):
        return  # kernels that are called past torch's dispatch: docs/gpu.md
    for leaves, spec, end in chosen(entry, most):
        at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.layout == torch.strided]

        def run(*operands: Any, leaves: Any = leaves, spec: Any = spec, at: Any = at, end: Any = end) -> Any:
            filled = list(leaves)
            for i, x in zip(at, operands):
                filled[i] = x
            input, args, kwargs = tree_unflatten(filled, spec)
            return end(entry.op(input, *args, **kwargs))

        call = Call(run, [leaves[i].detach() for i in at], [leaves[i].requires_grad for i in at])
        try:
            run(*(shard(t, None, None, requires_grad=d) for t, d in zip(call.tensors, call.differentiable)))
        except Exception:  # noqa: BLE001
            continue  # of another device
        if any(t.ndim and t.numel() > 1 for t in call.tensors):
            yield call


def forms(tensors: list[Tensor]) -> Iterator[tuple[str, list[Placed]]]:
    """Names of forms, with the sharded dim of each tensor and its block sizes; None: stays plain."""
    yield "first", [(0, None) if t.ndim else None for t in tensors]
    if any(t.ndim > 1 for t in tensors):
        yield "last", [(t.ndim - 1, None) if t.ndim else None for t in tensors]
    if len(tensors) > 1:
        for i, t in enumerate(tensors):
            if t.ndim:
                yield f"only {i}", [(0, None) if j == i else None for j in range(len(tensors))]
        yield (
            "mixed",
            [(zlib.crc32(f"{i} {t.shape}".encode()) % t.ndim, None) if t.ndim else None for i, t in enumerate(tensors)],
        )
    nothing = (0,) * (WORLD.size - 1)
    yield "empty", [(0, (*nothing, t.shape[0])) if t.ndim else None for t in tensors]


def tried(call: Call, placed: list[Placed], drawn: bool, sums: tuple[bool, ...]) -> str:
    """What came of a call on shards: '' where all was right."""
    mesh = mesh_of((WORLD.size,))
    operands: list[Any] = []
    for t, p in zip(call.tensors, placed):
        if p is None:
            operands.append((t, None, None, None))
        else:
            operands.append((t, mesh, [ms.Shard(p[0])], None if p[1] is None else {p[0]: p[1]}))
    tolerance = 1e-4 if torch.float32 in {t.dtype for t in call.tensors} else 1e-7
    try:
        if drawn:
            expected = flat(call.run(*(t.clone() for t in call.tensors)))
            got = flat(gathered(call.run(*(shard(*o) for o in operands))))
            assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in expected]
        else:
            for summed in sums:
                got = compare(
                    call.run,
                    operands,
                    differentiable=call.differentiable,
                    summed=summed,
                    rtol=tolerance,
                    atol=tolerance,
                )
            # what torch left for later, as a conjugate, is left so by every rank, or its next step is refused by some
            left = [(t.to_local().is_conj(), t.to_local().is_neg()) for t in flat(got) if isinstance(t, ms.ShardTensor)]
            assert len(set(map(tuple, WORLD.allgather(left)))) == 1, f"left for later by some ranks: {left}"
    except (NoShardingRule, UnsupportedOperationError) as e:
        return f"refused: {e}"
    except AssertionError as e:
        return f"wrong: {e}"
    except Exception as e:  # noqa: BLE001 (the outcome)
        return f"raised: {type(e).__name__}: {e}"
    return ""


def together(outcome: str, what: str) -> str:
    """The outcome of all ranks; a rank with an error does not wait for ever for those that are in a collective."""
    mine = bytearray(outcome.encode()[:400].ljust(400))
    every = bytearray(len(mine) * WORLD.size)
    request = WORLD.Iallgather(mine, every)
    start = time.monotonic()
    while not request.Test():
        time.sleep(1e-4)  # ranks may share a core
        if outcome and time.monotonic() - start > GRACE_S:
            pytest.fail(f"{what}: {outcome}: the other ranks did not follow")
    texts = [every[i : i + len(mine)].decode(errors="replace").rstrip() for i in range(0, len(every), len(mine))]
    return outcome if len({t.partition(":")[0] for t in texts}) == 1 else f"differs: {texts}"


def outcomes(entry: Any, draw: random.Random | None) -> dict[str, str] | None:
    """What came of an entry, by entry@form, where it was not right; None where it has nothing to shard.

    Of all samples, or of one that is drawn.
    """
    found: dict[str, str] | None = None
    # torch 2.8 has no transform of one number in all cells, which is the cotangent of a sum
    sums = (False,) if entry.name.startswith("fft.") and RELEASE < (2, 13) else (False, True)
    each = list(enumerate(calls(entry, SEEN if draw is None else SEEN_TO_DRAW)))
    for i, call in each if draw is None else draw.sample(each, min(1, len(each))):
        found = found or {}
        for form, placed in forms(call.tensors):
            what = f"{name_of(entry)}@{form}"
            outcome = together(tried(call, placed, name_of(entry) in DRAWN, sums), what)
            if outcome:
                found.setdefault(what, f"sample {i}: {outcome}")
    return found


def entries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Torch's table, which takes long to import, and without what takes long to draw its samples."""
    if not has_gpu():
        # each of the thousands of samples is drawn after torch's own, which formats a stack for every kind of device
        monkeypatch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
    # not above: every collection of tests would wait for it
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    for module in (common_utils, core):
        # nor look for a unittest through the source of each frame, which is most of the time
        monkeypatch.setattr(module, "extract_test_fn", lambda: None, raising=False)
    return op_db


@pytest.mark.ranks(2)
@pytest.mark.parametrize("part", range(PARTS))
def test_entries(part, request, monkeypatch):
    """Each entry on one of its samples, on all in a run that leaves none out."""
    whole = request.config.getoption("--sample") == 1
    draw = None if whole else random.Random(request.config.option.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch deprecates
        came = {name_of(entry): outcomes(entry, draw) for entry in entries(monkeypatch)[part::PARTS]}
    reasons = {word: reason for reason, words in REFUSED.items() for word in words}
    wrong, listed = [], {word: False for word in reasons if word.partition("@")[0] in came}
    for name, found in came.items():
        if (found is None) != (name in NOTHING_TO_SHARD):
            wrong.append(f"{name}: {'nothing' if found is None else 'something'} to shard, and the list says otherwise")
        for what, text in (found or {}).items():
            word = what if what in reasons else name
            if word in reasons:
                listed[word] = True
            if word not in reasons or not (": refused" in text or reasons[word].startswith("known")):
                wrong.append(f"{what}: {text}")
    if whole:
        wrong += [f"{word}: listed as refused, and right" for word, failed in listed.items() if not failed]
    assert not wrong, "\n- ".join(["", *wrong])
