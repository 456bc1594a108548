"""The step that is planned: a model, its input, its loss and optimizer, on a mesh for planning or on ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpishard.comm.mesh import CartMesh
from mpishard.errors import JobError
from mpishard.layout import Shard
from mpishard.nn import distribute_module
from mpishard.tensor import empty

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-9),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-9),
}


@dataclass(frozen=True)
class Program:
    """What runs: the same on any mesh.

    Parameters
    ----------
    model
        Returns the model; called once per mesh.
    shape
        Of its input, global.
    dims
        Tensor dims that the mesh dims shard, in order.
    dtype
        Of the input and the parameters.
    optimizer
        A key of `OPTIMIZERS`; None: forward alone.
    loss
        Of the model's output, a scalar; the mean of its squares if not given.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    optimizer: str | None = "sgd"
    loss: Callable[[Any], Tensor] | None = None


def squares(output: Any) -> Tensor:
    """Return the sum of the mean squares of all tensors of an output."""
    return sum(t.square().mean() for t in tree_leaves(output) if isinstance(t, Tensor))  # type: ignore[return-value]


def step_on(mesh: CartMesh, program: Program) -> Callable[[], None]:
    """Return a function that does one step of a program on a mesh. Collective, as it is."""
    try:
        with torch.device(mesh.device):
            model = program.model()
    except (RuntimeError, NotImplementedError):
        # what reads values while it is made
        model = program.model()
    model = distribute_module(model.to(program.dtype), mesh)
    placements = [Shard(d) for d in program.dims[: mesh.ndim]]
    x = empty(*program.shape, mesh=mesh, placements=placements, dtype=program.dtype)
    x.block.uniform_()
    if program.optimizer is None:

        def forward() -> None:
            with torch.no_grad():
                model(x)

        return forward
    optimizer = OPTIMIZERS[program.optimizer]([p for p in model.parameters() if p.requires_grad])
    loss_of = program.loss or squares

    def step() -> None:
        loss = loss_of(model(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def checked(program: Program) -> Program:
    """Return a program that may run, or raise. Not collective."""
    shape, dims = program.shape, program.dims
    if not shape or min(shape) < 1 or not dims or len(set(dims)) < len(dims) or not set(dims) <= set(range(len(shape))):
        raise JobError(
            "plan: shape and dims",
            expected="extents of 1 or more, and different dims of that shape to shard",
            got=f"shape {shape}, dims {dims}",
            fix="give the global shape of the input, and the dims that the mesh shards",
        )
    if program.optimizer is not None and program.optimizer not in OPTIMIZERS:
        raise JobError(
            "plan: optimizer", expected=f"one of {', '.join(OPTIMIZERS)}", got=program.optimizer, fix="name one"
        )
    return program


def default_dims(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the dims of space of an input of shape (batch, channels, *space); of fewer dims, the first."""
    return tuple(range(2, len(shape))) if len(shape) > 2 else (0,)
