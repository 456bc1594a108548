"""The step that is planned: a model, its input, its loss and optimizer, on a mesh for planning or on ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpishard.comm.mesh import CartMesh
from mpishard.errors import JobError, own_line, text_of
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
    """Return the sum of the mean squares of all tensors of an output that are not of whole numbers."""
    numbers = [t for t in tree_leaves(output) if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]
    return sum(t.square().mean() for t in numbers)  # type: ignore[return-value]


def step_on(mesh: CartMesh, program: Program) -> Callable[[], None]:
    """Return a function that does one step of a program on a mesh. Collective, as it is.

    Raises
    ------
    JobError
        The model is none that a step of this program can be done with.
    """
    model = distribute_module(_made(program, mesh.device), mesh)
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
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise JobError(
                "plan: the loss",
                expected="a tensor of one number",
                got=f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__,
                fix="give loss, a function of the model's output that returns one, or optimizer=None",
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _made(program: Program, device: torch.device) -> nn.Module:
    """Return the model, its numbers in the program's dtype, or for complex ones in the complex one of it."""
    try:
        try:
            with torch.device(device):
                model = program.model()
        except Exception:  # noqa: BLE001 (torch and NumPy raise anything)
            # what reads values while it is made
            model = program.model()
    except (Exception, SystemExit) as error:
        raise JobError(
            "plan: the model cannot be made",
            expected="a function or class that can be called with these arguments",
            got=told(error),
            fix="give its arguments: --option NAME=VALUE, or lambda: UNet(base=8)",
        ) from error
    if not isinstance(model, nn.Module):
        raise JobError(
            "plan: the model",
            expected="a function or class that returns a torch.nn.Module",
            got=type(model).__name__,
            fix="return the model",
        )
    if program.optimizer is not None and not any(p.requires_grad for p in model.parameters()):
        raise JobError(
            "plan: the model",
            expected="parameters to train",
            got="none that requires a gradient",
            fix="plan the forward pass alone: optimizer=None, --optimizer none",
        )
    # torch has no complex numbers of bfloat16
    of_complex = torch.promote_types(program.dtype, torch.complex32)

    def cast(t: Tensor) -> Tensor:
        if t.is_complex():
            return t.to(of_complex)
        return t.to(program.dtype) if t.is_floating_point() else t

    return model._apply(cast)


def step_failed(error: Exception, program: Program) -> JobError:
    """Return what to raise where a step of a program raises. Not collective."""
    return JobError(
        "plan: the step fails",
        expected=f"a model that takes an input of shape {program.shape} and dtype {program.dtype}",
        got=told(error),
        fix="do the same step in one process of plain torch, on a smaller input",
    )


def told(error: BaseException) -> str:
    """Return what an error says, and the line of the user's program that met it. Not collective."""
    own = own_line(error)
    # the rest may be long, and repeat the program
    text = f"{type(error).__name__}: {text_of(error)[:1000]}"
    return f"{text} ({Path(own.filename).name}, line {own.lineno})" if own else text


def default_dims(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the dims of space of an input of shape (batch, channels, *space); of fewer dims, the first."""
    return tuple(range(2, len(shape))) if len(shape) > 2 else (0,)
