"""What the tests of window operations share: fields, and a fixed sample of layouts for every case of a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import mpishard as ms
from tests.compare import compare, gathered, layouts, shard


def field(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random cells, the same on every rank."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def sampled(shape: Sequence[int], dims: Sequence[int], case: int, count: int = 4) -> Iterator[tuple[Any, Any, Any]]:
    """``count`` of the layouts of ``shape`` on meshes of 1 to 3 dims; which ones depends on ``case`` alone.

    One of them has an empty block, where there are several ranks.
    """
    every = [l for l in layouts(shape, dims, 3) if any(isinstance(p, ms.Shard) for p in l[1])]
    uneven = [l for l in every if l[2]]
    if uneven:
        yield uneven[case % len(uneven)]
    for k in range(count - 1):
        yield every[(case * 5 + k * len(every) // (count - 1)) % len(every)]


def check(
    f: Callable[[Any], Any],
    full: Tensor,
    dims: Sequence[int],
    case: int,
    *,
    count: int = 4,
    second: bool = False,
    **options: Any,
) -> None:
    """Compare ``f`` on shards with ``f`` on the whole tensor; ``second``: gradients of gradients of its cube too."""
    for k, (mesh, placements, sizes) in enumerate(sampled(full.shape, dims, case, count)):
        cube = second and k == 1
        compare(
            (lambda x: f(x) ** 3) if cube else f,
            [(full, mesh, placements, sizes)],
            second=cube,
            what=f"{tuple(full.shape)} on {mesh.shape} {placements} {sizes}",
            **options,
        )


def same(f: Callable[[Any], Any], full: Tensor, dims: Sequence[int], case: int, *, exact: bool = True) -> None:
    """Compare without gradients, for dtypes that have none."""
    expected = f(full)
    for mesh, placements, sizes in sampled(full.shape, dims, case):
        got = gathered(f(shard(full, mesh, placements, sizes)))
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, **({"rtol": 0, "atol": 0} if exact else {}))


def refused_alike(f: Callable[[Any], Any], full: Tensor, placements: Any = None) -> None:
    """Assert that a wrong argument meets torch's own error, text and all."""
    with pytest.raises((RuntimeError, ValueError, IndexError, TypeError)) as expected:
        f(full)
    for mesh, own, sizes in sampled(full.shape, [full.ndim - 1], 0, 2):
        with pytest.raises(type(expected.value)) as got:
            f(shard(full, mesh, placements or own, sizes))
        # torch's checks without data print sizes as torch.Size
        assert re.sub(r"torch.Size\((.*?)\)", r"\1", str(got.value)) == str(expected.value)
