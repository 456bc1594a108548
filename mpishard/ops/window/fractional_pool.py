"""Fractional max pooling: its regions are spread over the whole extent of a dim."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from mpishard.ops.rule.whole import whole
from mpishard.tensor.registry import implements
from mpishard.tensor.stream import drawn_once


def _rule(ndim: int, with_indices: bool) -> Callable[..., Any]:
    func = getattr(F, f"fractional_max_pool{ndim}d_with_indices")

    def rule(
        input: Any,
        kernel_size: Any,
        output_size: Any = None,
        output_ratio: Any = None,
        return_indices: bool = False,
        _random_samples: Any = None,
    ) -> Any:
        """Pool over random regions.

        Not collective where batch and channels are sharded, and samples are given: else rank 0 draws them as torch
        does. Collective where other dims are sharded: they are gathered.
        """
        if _random_samples is None:
            shape = ((*(1,) * ndim, *input.shape)[-ndim - 2], input.shape[-ndim - 1], ndim)
            _random_samples = drawn_once(input.mesh, partial(torch.rand, shape, dtype=input.dtype, device=input.device))
        lead = ("batch", "channel")[ndim + 2 - input.ndim :]
        # samples always have a batch dim
        found = whole(
            lambda x, samples: func(x, kernel_size, output_size, output_ratio, _random_samples=samples),
            (input, _random_samples),
            ((*lead, *(None,) * ndim), (*(None,) * (2 - len(lead)), *lead, None)),
            (*lead, *(None,) * ndim),
        )
        return found if with_indices or return_indices else found[0]

    return rule


for _n in (2, 3):
    implements(getattr(F, f"fractional_max_pool{_n}d"), sharded="gathers")(_rule(_n, False))
    implements(getattr(F, f"fractional_max_pool{_n}d_with_indices"), sharded="gathers")(_rule(_n, True))
