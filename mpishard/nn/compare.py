"""compare_module: what a model gives on shards beside what it gives in one process."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mpishard.autograd.argument import require, require_mesh, together
from mpishard.comm import disagreement, guard
from mpishard.comm.collective.blocking import all_reduce
from mpishard.comm.mesh import CartMesh
from mpishard.errors import UnsupportedOperationError
from mpishard.layout import Replicate, Shard
from mpishard.nn.module import distribute_module
from mpishard.tensor.convert import distribute_tensor
from mpishard.tensor.shard_tensor import ShardTensor


def compare_module(module: nn.Module, *inputs: Tensor, mesh: CartMesh, placements: Sequence[Any]) -> dict[str, float]:
    """Run a model on whole inputs and on shards of them, forward and backward, and return how far they are apart.

    Collective. Every rank runs the whole model too: take a size that one process can hold. In float64 what
    remains is rounding, about 1e-14.

    Parameters
    ----------
    module
        Any model with plain parameters; left as it is. Without random functions (``module.eval()``): on shards they
        draw other numbers than torch in one process.
    *inputs
        Whole tensors, the same on every rank. The output may hold tensors in lists, tuples, mappings and dataclasses.
    mesh
        Where to run it.
    placements
        One placement per mesh dim, for every input; one that lacks the dim is replicated.

    Returns
    -------
    dict of str to float
        ``output``, ``input gradient``, ``parameter gradient``, ``buffer``: the largest difference between the two,
        relative to the largest value in the tensor (of parameters: in the gradients of all of them).
        Of a tensor that is zero but for rounding (the running mean behind a norm, the gradient through a softmax that
        is summed) that says nothing: about 1, on any mesh.

    Raises
    ------
    NoShardingRule
        The model calls what has no rule.
    UnsupportedOperationError
        The output holds no tensor.
    AssertionError
        On every rank: outputs of other shapes, or a gradient that only one of the two has.

    Examples
    --------
    >>> found = ms.compare_module(model.double().eval(), x.double(), mesh=mesh, placements=[ms.Shard(2)])
    >>> assert max(found.values()) < 1e-9, found
    """
    require_mesh("compare_module", mesh)
    with together("compare_module", mesh):
        require("compare_module", "module", module, nn.Module, "give the model")
        for x in inputs:
            require("compare_module", "inputs", x, Tensor, "give whole tensors")
        require("compare_module", "placements", placements, Sequence, "give one placement per mesh dim")
        on_shards, in_one = _copied(module), _copied(module).to(mesh.device)
    distribute_module(on_shards, mesh)
    with torch.no_grad():
        for one, other in zip(_state(in_one), _state(on_shards), strict=True):
            one.copy_(other)  # that of rank 0, on every rank
    shards = [_shard(x, mesh, placements) for x in inputs]
    whole = [s.full_tensor() for s in shards]
    for x in (*shards, *whole):
        x.requires_grad_(x.is_floating_point() or x.is_complex())
    expected, got = _run(in_one, whole), _run(on_shards, shards)
    error = None
    if not expected and not got:
        error = UnsupportedOperationError(
            "compare_module: nothing to compare",
            expected="tensors, in lists, tuples, mappings and dataclasses",
            got="an output without one",
            fix="wrap the model in a module that returns its tensors",
        )
    guard.agree(mesh.comm, error)
    _agreed(mesh, "shapes of outputs", [tuple(x.shape) for x in got], [tuple(x.shape) for x in expected])
    names = [*(f"input {i}" for i in range(len(inputs))), *(name for name, _ in module.named_parameters())]
    ours, theirs = (
        [x.grad for x in (*shards, *on_shards.parameters())],
        [x.grad for x in (*whole, *in_one.parameters())],
    )
    _agreed(mesh, "what has a gradient", _given(names, ours), _given(names, theirs))
    pairs = [(g, h) for g, h in zip(ours, theirs) if g is not None and h is not None]
    own = sum(g is not None for g in ours[: len(inputs)])
    largest = max((_largest(h) for _, h in pairs[own:]), default=0.0)
    found = {
        "output": max(map(_apart, got, expected), default=0.0),
        "input gradient": max((_apart(g, h) for g, h in pairs[:own]), default=0.0),
        "parameter gradient": max((_apart(g, h, largest) for g, h in pairs[own:]), default=0.0),
        "buffer": max(map(_apart, on_shards.buffers(), in_one.buffers()), default=0.0),
    }
    most = all_reduce(torch.tensor([*found.values()], dtype=torch.float64, device="cpu"), mesh.all_ranks, "max")
    return dict(zip(found, most.tolist()))


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy, also of a module that holds what Python does not copy: operators, and weights not yet computed."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, (ModuleType, torch.library.CustomOpDef)):  # a library of operators, or one of them
                memo[id(value)] = value
            elif isinstance(value, Tensor) and not value.is_leaf:  # of torch.nn.utils.weight_norm, say: made anew
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(module, memo)


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _given(names: list[str], gradients: list[Any]) -> list[str]:
    return [name for name, g in zip(names, gradients) if g is not None]


def _shard(x: Tensor, mesh: CartMesh, placements: Sequence[Any]) -> ShardTensor:
    own = [p if not isinstance(p, Shard) or -x.ndim <= p.dim < x.ndim else Replicate() for p in placements]
    return distribute_tensor(x.detach().to(mesh.device), mesh, own)


def _run(module: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs, after a backward pass from random cotangents."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # plain random numbers are the same in both runs, and on every rank
        out = list(_leaves(module(*inputs)))
    # a seed of its own: cotangents like the user's inputs are those that a norm lets nothing through of
    generator = torch.Generator().manual_seed(7_301_859)
    loss: Any = 0.0
    for y in out:
        if y.requires_grad:
            wide = torch.complex128 if y.is_complex() else torch.float64
            cotangent = torch.randn(y.shape, generator=generator, dtype=wide, device="cpu")
            loss = loss + (y * cotangent.to(y.device, y.dtype)).real.sum()
    if isinstance(loss, Tensor):
        loss.backward()
    return out


def _leaves(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, Mapping):
        for value in out.values():
            yield from _leaves(value)
    elif isinstance(out, (list, tuple)):
        for value in out:
            yield from _leaves(value)
    elif dataclasses.is_dataclass(out):
        for field in dataclasses.fields(out):
            yield from _leaves(getattr(out, field.name, None))


def _apart(got: Tensor, expected: Tensor, scale: float | None = None) -> float:
    """Return the largest difference relative to ``scale``, or to the largest value; infinite where one is NaN."""
    got = got.full_tensor() if isinstance(got, ShardTensor) else got
    wide = torch.complex128 if expected.is_complex() else torch.float64
    got, expected = got.detach().to(wide), expected.detach().to(wide)
    same = (got == expected) | (got.isnan() & expected.isnan())
    apart = torch.where(same, 0.0, (got - expected).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    difference = float(apart.max()) if apart.numel() else 0.0
    scale = _largest(expected) if scale is None else scale
    return difference / scale if scale else difference


def _largest(x: Tensor) -> float:
    """Return the largest finite magnitude: beside an infinite one, or none, no difference would count."""
    return float(torch.where(x.isfinite(), x.detach().abs(), 0.0).max()) if x.numel() else 0.0


def _agreed(mesh: CartMesh, what: str, got: list[Any], expected: list[Any]) -> None:
    """Raise on every rank where on any rank they differ. Collective."""
    own = None if got == expected else f"on shards {got}, in one process {expected}"
    with guard.waiting("compare_module", (), mesh.comm):
        found = disagreement.any_told(mesh.comm, own)
    if found:
        raise AssertionError(f"compare_module: {what} differ: {found.text}")
