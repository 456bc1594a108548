"""What torch's own database of operators says is an error is one on every rank, and says more than a missing index."""

from __future__ import annotations

import random
import re
import warnings
import zlib

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.compare import WORLD, mesh_of, mesh_shapes
from tests.ops import test_database as database
from tests.ops.test_database_gradgrad import placed

# whose own error is of Python
PYTHON = ("__rdiv__", "jiterator")
BARE = ("tuple index", "list index", "KeyError", "AssertionError", "AttributeError")


@pytest.mark.ranks(3)
def test_errors(monkeypatch):
    found, count = [], 0
    for entry in database.entries(monkeypatch):
        name = database.name_of(entry)
        if entry.error_inputs_func is None or name.startswith(PYTHON):
            continue
        torch.manual_seed(1)
        for i, error in enumerate(entry.error_inputs("cpu")):
            if "number of categories" in error.error_regex:
                continue  # torch's limit of categories is none here, and the weights are memory that nobody has filled
            sample = error.sample_input
            given, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
            at = [k for k, x in enumerate(given) if isinstance(x, Tensor)]
            # some come in the order of a set of words, which each rank has for itself
            what = repr([(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in given])
            if len(set(WORLD.allgather(zlib.crc32(re.sub("0x[0-9a-f]+", "", what).encode())))) > 1:
                continue
            if not at or any(given[k].layout != torch.strided or given[k].is_meta for k in at):
                continue

            def called(values, entry=entry, spec=spec):
                try:
                    input, args, kwargs = tree_unflatten(values, spec)
                    entry.op(input, *args, **kwargs)
                except Exception as e:  # noqa: BLE001 (the outcome)
                    return f"{type(e).__name__}: {e}"
                return ""

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if not called([x.clone() if isinstance(x, Tensor) else x for x in given]):
                    continue  # of how a tensor lies in memory
                rng = random.Random(zlib.crc32(f"{name} {i}".encode()))
                mesh = mesh_of(rng.choice(mesh_shapes(2)))
                chosen = at if rng.random() < 0.6 else [rng.choice(at)]
                values = [placed(x, mesh, rng, x.requires_grad) if k in chosen else x for k, x in enumerate(given)]
                came = called(values)
            told = WORLD.allgather(came.partition("\n")[0])
            count += 1
            if not all(told) or len({t.partition(":")[0] for t in told}) > 1 or any(bare in came for bare in BARE):
                found.append(f"{name}, {i}: {told}")
    assert count > 300
    assert not found, "\n- ".join(["", *found])
