"""What `plan` may be given."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from mpishard.errors import JobError
from mpishard.planning.machine import Machine, machine_named
from mpishard.planning.step import OPTIMIZERS, Program, default_dims

_LARGEST = 2**62  # cells: torch counts bytes in 64 bits
_MOST_RANKS = 2**31 - 1  # as MPI counts them
_TRIES = 4  # meshes of the smallest surface that are planned, of all that there are


def checked_program(
    model: Any, shape: Any, dims: Any, dtype: Any, optimizer: Any, loss: Callable[[Any], Any] | None
) -> Program:
    """Return the program that arguments of `plan` describe, or raise. Not collective."""
    extents = _whole_numbers("shape", shape)
    cut = default_dims(extents) if dims is None else _whole_numbers("dims", dims)
    cut = tuple(d + len(extents) if d < 0 else d for d in cut)
    if not extents or min(extents) < 1 or not cut or len(set(cut)) < len(cut) or not set(cut) <= {*range(len(extents))}:
        raise JobError(
            "plan: shape and dims",
            expected="extents of 1 or more, and different dims of that shape to shard",
            got=f"shape {extents}, dims {cut}",
            fix="give the global shape of the input, and the dims that the mesh shards",
        )
    if math.prod(extents) > _LARGEST:
        raise JobError(
            "plan: shape", expected=f"at most {_LARGEST} cells", got=f"shape {extents}", fix="plan a smaller field"
        )
    if isinstance(getattr(model, "func", model), nn.Module) or not callable(model):
        raise JobError(
            "plan: the model",
            expected="a function or class that returns one, as a mesh of any size makes its own",
            got=type(model).__name__,
            fix="give lambda: UNet(base=8), not UNet(base=8)",
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise JobError(
            "plan: dtype", expected="a floating-point torch.dtype", got=repr(dtype), fix="such as torch.float32"
        )
    if optimizer is not None and not (isinstance(optimizer, str) and optimizer in OPTIMIZERS):
        raise JobError(
            "plan: optimizer", expected=f"None or one of {', '.join(OPTIMIZERS)}", got=repr(optimizer), fix="name one"
        )
    if loss is not None and not callable(loss):
        raise JobError("plan: the loss", expected="a function of the output", got=type(loss).__name__, fix="give one")
    return Program(model, extents, cut, dtype, optimizer, loss)


def checked_machine(machine: Any) -> Machine | Literal["local"]:
    """Return a machine, or ``"local"``, or raise. Not collective."""
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, str):
        raise JobError(
            "plan: machine", expected="a name or a Machine", got=type(machine).__name__, fix="see machine_names()"
        )
    return "local" if machine == "local" else machine_named(machine)


def checked_mesh(program: Program, mesh: Any) -> tuple[int, ...]:
    """Return the extents of a mesh that a program may be planned on, or raise. Not collective."""
    extents = _whole_numbers("mesh", mesh)
    fits = 0 < len(extents) <= len(program.dims) and min(extents) >= 1 and math.prod(extents) <= _MOST_RANKS
    if not fits or any(n > program.shape[d] for n, d in zip(extents, program.dims)):
        raise JobError(
            "plan: mesh",
            expected=f"up to {len(program.dims)} extents, none above those of dims {program.dims}, of at most "
            f"{_MOST_RANKS} ranks",
            got=f"{extents} for shape {program.shape}",
            fix="give an extent for every dim that is to be sharded",
        )
    return extents


def checked_ranks(program: Program, ranks: Any) -> list[tuple[int, ...]]:
    """Return the meshes of so many ranks that are worth planning, or raise. Not collective."""
    size = _whole_numbers("ranks", ranks)
    counted = len(size) == 1 and 1 <= size[0] <= _MOST_RANKS
    found = candidates(program.shape, program.dims, size[0]) if counted else []
    if not found:
        raise JobError(
            "plan: ranks",
            expected=f"a number of up to {_MOST_RANKS} that is a product of extents of at most "
            f"{[program.shape[d] for d in program.dims]}",
            got=ranks,
            fix="take fewer ranks, or shard more dims",
        )
    return found


def candidates(shape: Sequence[int], dims: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Return the meshes whose blocks have the smallest surface, and the best of each choice of dims that are cut.

    Not collective. Fewer cuts are fewer messages, whose cost small blocks feel more than that of their surface; and
    what a surface costs depends on the dim, by the windows of the model.
    """
    lengths = [shape[d] for d in dims]

    def surface(extents: tuple[int, ...]) -> tuple[float, float]:
        block = [n / p for n, p in zip(lengths, extents)]
        cells = math.prod(-(-n // p) for n, p in zip(lengths, extents))
        return cells * sum(1 / b for b, p in zip(block, extents) if p > 1), -extents[0]

    every = sorted(_factors(ranks, lengths), key=surface)
    best: dict[tuple[bool, ...], tuple[int, ...]] = {}
    for extents in every:
        best.setdefault(tuple(p > 1 for p in extents), extents)
    return list(dict.fromkeys([*every[:_TRIES], *best.values()]))


def _factors(n: int, largest: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Give all ways to write a number as a product of factors that are not above the largest."""
    if n > math.prod(largest):
        return
    if not largest:
        yield ()
        return
    small = [p for p in range(1, math.isqrt(n) + 1) if n % p == 0]
    for p in sorted({*small, *(n // p for p in small)}):
        if p <= largest[0]:
            yield from ((p, *rest) for rest in _factors(n // p, largest[1:]))


def _whole_numbers(name: str, given: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, given if isinstance(given, Sequence) else (given,)))
    except TypeError:
        raise JobError(f"plan: {name}", expected="whole numbers", got=repr(given), fix="give integers") from None
