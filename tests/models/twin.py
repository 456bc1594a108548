"""A model on shards beside the same model in one process: output, loss, gradients and buffers must agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpishard as ms
from tests.compare import flat, gathered, mesh_of, mesh_shapes

RTOL = 1e-9


def data(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 7) -> Tensor:
    """Random numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got: Any, expected: Any, what: str, rtol: float = RTOL) -> None:
    """Assert that values agree, up to rounding relative to the largest."""
    for g, e in zip(flat(gathered(got)), flat(gathered(expected)), strict=True):
        scale = float(e.abs().max()) if e.numel() else 0.0
        torch.testing.assert_close(g, e, rtol=rtol, atol=rtol * scale + 1e-14, msg=lambda m: f"{what}: {m}")


def mean_square(out: Any) -> Any:
    """Mean square distance to fixed random targets: plain tensors, as a data loader gives them."""
    return sum(F.mse_loss(y, data(*y.shape, dtype=y.dtype, seed=k)) for k, y in enumerate(flat(out)))


def meshes(dims: Sequence[int]) -> Iterator[tuple[ms.CartMesh, tuple[ms.Placement, ...]]]:
    """Every mesh of 1 and 2 dims, that shards the first of ``dims``, or both."""
    for shape in mesh_shapes(2 if len(dims) > 1 else 1):
        yield mesh_of(shape), tuple(ms.Shard(d) for d in dims[: len(shape)])


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A model whose parameters are all random, also those that begin as zeros or ones."""
    torch.manual_seed(seed)
    # Module.to would make complex parameters real
    model = build()._apply(
        lambda t: t.to(dtype.to_complex() if t.is_complex() else dtype if t.is_floating_point() else t.dtype)
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 2 and not nn.parameter.is_lazy(p):
                p.add_(0.1 * torch.randn_like(p))
    return model


def run(model: nn.Module, x: Any, loss_of: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Output and loss, after a backward pass."""
    out = model(x)
    loss = loss_of(out)
    loss.backward()
    return out, loss


def twins(
    build: Callable[[], nn.Module],
    full: Tensor,
    dims: Sequence[int],
    *,
    train: bool = True,
    loss_of: Callable[[Any], Any] = mean_square,
    rtol: float = RTOL,
    sharded: bool = False,
    **options: Any,
) -> None:
    """Assert that a model does on shards what it does in one process.

    Parameters
    ----------
    build
        Makes the model.
    full
        Its input.
    dims
        Of the input: sharded on meshes of 1 and 2 dims.
    sharded
        Whether the (first) output must be sharded over all ranks.
    options
        Of ``distribute_tensor``.
    """
    reference = seeded(build, full.dtype).train(train)
    whole = full.clone().requires_grad_()
    expected, expected_loss = run(reference, whole, loss_of)
    for mesh, placements in meshes(dims):
        model = ms.distribute_module(seeded(build, full.dtype, mesh.rank).train(train), mesh)
        x = ms.distribute_tensor(full, mesh, placements, **options).requires_grad_()
        out, loss = run(model, x, loss_of)
        what = f"mesh {mesh.shape} {placements}"
        if sharded:
            layout = flat(out)[0].sharding
            blocks = math.prod(mesh.shape[m] for m in layout.sharded_mesh_dims)
            assert blocks == mesh.size, f"{what}: the output is {layout}"
        close(out, expected, f"{what}: output", rtol)
        close(loss, expected_loss, f"{what}: loss", rtol)
        close(x.grad, whole.grad, f"{what}: gradient of the input", rtol)
        same_state(model, reference, what, rtol)


def same_state(model: nn.Module, reference: nn.Module, what: str, rtol: float = RTOL) -> None:
    """Assert that parameters, their gradients and buffers agree."""
    # to the largest gradient of all: that of a bias before a batch norm is zero up to rounding
    gradients = [p.grad for p in reference.parameters() if p.grad is not None]
    scale = max((float(g.abs().max()) for g in gradients), default=0.0)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(p.detach(), q.detach(), f"{what}: {name}", rtol)
        assert (p.grad is None) == (q.grad is None), f"{what}: gradient of {name}: {p.grad}, {q.grad}"
        if p.grad is not None:
            torch.testing.assert_close(
                p.grad, q.grad, rtol=rtol, atol=rtol * scale, msg=lambda m, n=name: f"{what}: gradient of {n}: {m}"
            )
    for (name, b), c in zip(model.named_buffers(), reference.buffers(), strict=True):
        close(b, c, f"{what}: buffer {name}", rtol)
