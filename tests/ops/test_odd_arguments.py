"""Calls that nobody means: what torch refuses is refused on shards, by a text that is more than Python's own."""

from __future__ import annotations

import inspect
import random
import warnings

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD
from tests.release import RELEASE

MODULES = {"torch": torch, "F": F, "linalg": torch.linalg, "fft": torch.fft, "special": torch.special}
# of z, v, m, i: a number, a vector, a matrix, an index
ARGUMENTS = [
    lambda z, v, m, i: (z,),
    lambda z, v, m, i: (z, 0),
    lambda z, v, m, i: (z, 1),
    lambda z, v, m, i: (z, z),
    lambda z, v, m, i: (z, v),
    lambda z, v, m, i: (v, z),
    lambda z, v, m, i: (z, m),
    lambda z, v, m, i: (m, z),
    lambda z, v, m, i: (z, i, 0),
    lambda z, v, m, i: (z, 0, i),
    lambda z, v, m, i: (z, 0, (1, 1)),
    lambda z, v, m, i: (z, (0,)),
    lambda z, v, m, i: (z, 2, 0),
    lambda z, v, m, i: (v, 5),
    lambda z, v, m, i: (v, (3, 3)),
    lambda z, v, m, i: (z, 0, i, z),
    lambda z, v, m, i: ([z, v],),
    lambda z, v, m, i: ([],),
    lambda z, v, m, i: (v, v, v),
    lambda z, v, m, i: (z, z, z),
    lambda z, v, m, i: (v, -3),
    lambda z, v, m, i: (v, "a"),
    lambda z, v, m, i: (m, (0, 0)),
    lambda z, v, m, i: (m, (0, 5)),
    lambda z, v, m, i: (m, m),
]
# they change the process, or ask for what is no operation
LEFT_OUT = """
assert_int_or_pair asarray as_tensor tensor autocast_decrement_nesting autocast_increment_nesting compile cond export
fork from_file import_ir_module init_num_threads load manual_seed save seed thread_safe_generator unify_type_list vmap
wait while_loop empty_permuted empty_quantized empty_strided full
""".split()
if RELEASE < (2, 13):  # torch names what is missing for some arguments, and what is odd for others
    LEFT_OUT += ["can_cast", "promote_types", "quantize_per_tensor_dynamic"]
# numbers given as tensors, which the rules do not look into
NUMBERS = "alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_ randint_like rrelu rrelu_".split()
# another value for everyone who asks
DRAWN = "bernoulli empty gumbel multinomial normal poisson rand resize dropout rrelu binomial".split()
BARE = """
tuple index|list index|KeyError|AssertionError|AttributeError|IndexError: list|not enough values|unpack|StopIteration|
ZeroDivision|TypeError: '|NoneType|missing 1|takes |unexpected keyword|max()|min()
""".replace("\n", "").split("|")


def functions():
    for module, place in MODULES.items():
        for name in dir(place):
            function = getattr(place, name)
            odd = name.startswith(("_", "set_", "cudnn", "sym_")) or name in LEFT_OUT
            if not odd and callable(function) and not inspect.isclass(function):
                yield f"{module}.{name}", function


def is_bare(text):
    return any(bare in text for bare in BARE)


def outcome(function, args):
    torch.manual_seed(1)
    try:
        return function(*args), ""
    except Exception as e:  # noqa: BLE001 (the outcome)
        return None, f"{type(e).__name__}: {e}" + "!" * isinstance(e, ms.MpishardError)


@pytest.mark.ranks(2)
def test_odd_arguments(request):
    """Each function with a third of the arguments, others in each run."""
    draw = random.Random(request.config.option.seed)
    mesh = ms.init_mesh((2,), ("x",))
    whole = [torch.tensor(2.0), torch.arange(6.0), torch.arange(12.0).reshape(3, 4), torch.tensor(0)]
    placed = [ms.Replicate(), ms.Shard(0), ms.Shard(0), ms.Replicate()]
    found, count = [], 0
    for name, function in functions():
        for k, arguments in draw.sample(list(enumerate(ARGUMENTS)), len(ARGUMENTS) // 3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected, refusal = outcome(function, arguments(*(t.clone() for t in whole)))
                shards = [ms.distribute_tensor(t, mesh, (p,)) for t, p in zip(whole, placed, strict=True)]
                got, said = outcome(function, arguments(*shards))
            count += 1
            if refusal and is_bare(said) and not is_bare(refusal):
                found.append(f"{name}, {k}: {said}, where torch says {refusal}")
            elif refusal and not said and name.partition(".")[2] not in NUMBERS:
                found.append(f"{name}, {k}: no error, where torch says {refusal}")
            elif isinstance(expected, torch.Tensor) and not said and not any(word in name for word in DRAWN):
                value = got.full_tensor() if isinstance(got, ms.ShardTensor) else got
                try:
                    torch.testing.assert_close(value.to_dense(), expected.to_dense(), equal_nan=True)
                except AssertionError as e:
                    found.append(f"{name}, {k}: {e}".replace("\n", " "))
    assert WORLD.allgather(count) == [count] * WORLD.size
    assert count > 5000 // 3
    assert not found, "\n- ".join(["", *found])
