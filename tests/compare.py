"""The one check of every operation: sharded against gathered, forward and all gradients."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

import mpishard as ms
from mpishard.layout import layout_of

WORLD = MPI.COMM_WORLD


@functools.cache
def mesh_of(shape: tuple[int, ...], periodic: bool = False) -> ms.CartMesh:
    """A mesh of this shape, made once."""
    return ms.init_mesh(shape, periodic=periodic)


def mesh_shapes(max_ndim: int = 3) -> list[tuple[int, ...]]:
    """Every way to write the number of ranks as 1 to ``max_ndim`` factors, without needless 1s."""
    n = WORLD.size
    out: list[tuple[int, ...]] = [(n,)]
    for ndim in range(2, max_ndim + 1):
        shapes = itertools.product([d for d in range(1, n + 1) if n % d == 0], repeat=ndim)
        proper = [s for s in shapes if math.prod(s) == n and (1 not in s or n in (1, 2, 3))]
        out += proper[:2]
    return out


def layouts(shape: Sequence[int], dims: Sequence[int], max_ndim: int = 2) -> Iterator[tuple[ms.CartMesh, Any, Any]]:
    """Meshes, placements and block sizes for a tensor of ``shape`` sharded over some of ``dims``.

    For every mesh: each choice of dims (and replication), block sizes balanced and, where there is room, skewed
    so that a block is empty. Meshes that differ in where a dim has one coordinate, as (1, 2) and (2, 1), take turns.
    """
    options: list[Any] = [*(ms.Shard(d) for d in dims), ms.Replicate()]
    for turn, mesh_shape in enumerate(mesh_shapes(max_ndim)):
        mesh = mesh_of(mesh_shape)
        alike = WORLD.size > 1 and 1 in mesh_shape
        choices = list(itertools.product(options, repeat=len(mesh_shape)))
        places = itertools.product(range(len(options)), repeat=len(mesh_shape))
        for placements, at in zip(choices, places):
            if not alike or (sum(at) + turn) % 2 == 0:
                yield mesh, placements, None
        for placements in choices[:1] + choices[-2:-1]:
            probe = layout_of(mesh_shape, placements, shape)
            skewed = {d: skew(shape[d], len(s)) for d, s in enumerate(probe.sizes) if s is not None and len(s) > 1}
            if skewed:
                yield mesh, placements, skewed


def skew(n: int, count: int) -> tuple[int, ...]:
    """Block sizes with an empty block and the rest uneven."""
    rest = [0] * count
    rest[0] = 0
    rest[-1] = n
    if count > 2:
        rest[1] = min(1, n)
        rest[-1] = n - rest[1]
    return tuple(rest)


def drawn_sizes(rng: random.Random, n: int, parts: int, least: int = 0) -> tuple[int, ...]:
    """Block sizes that are drawn, of at least so many cells; with none, some are empty where it happens."""
    spare = n - least * parts
    ends = [0, *(k * least + at for k, at in enumerate(sorted(rng.randint(0, spare) for _ in range(parts - 1)), 1)), n]
    return tuple(hi - lo for lo, hi in zip(ends, ends[1:]))


def shard(full: Tensor, mesh: ms.CartMesh, placements: Any, sizes: Any = None, requires_grad: bool = False) -> Any:
    """A leaf ShardTensor of ``full``."""
    if placements is None:
        return full.clone().requires_grad_(requires_grad)
    return ms.distribute_tensor(full.detach(), mesh, placements, sizes=sizes).requires_grad_(requires_grad)


def gathered(x: Any) -> Any:
    """The plain, full value of anything an operation returns."""
    if isinstance(x, ms.ShardTensor):
        return x.detach().full_tensor()
    if isinstance(x, Tensor):
        return x.detach()
    return type(x)(map(gathered, x)) if isinstance(x, (tuple, list)) else x


def flat(x: Any) -> list[Any]:
    """The tensors in what an operation returns."""
    if isinstance(x, Tensor):
        return [x]
    return [t for part in x for t in flat(part)] if isinstance(x, (tuple, list)) else []


def compare(
    f: Callable[..., Any],
    operands: Sequence[tuple[Tensor, ms.CartMesh | None, Any, Any]],
    params: Sequence[Tensor] = (),
    *,
    rtol: float = 1e-10,
    atol: float = 1e-11,
    second: bool = False,
    differentiable: Sequence[bool] | None = None,
    summed: bool = False,
    what: str = "",
) -> Any:
    """Assert that ``f`` gives on shards what it gives on whole tensors, with all first gradients.

    Parameters
    ----------
    f
        Called with the operands.
    operands
        (full tensor, mesh, placements, sizes); placements None: stays plain.
    params
        Plain leaf tensors that ``f`` closes over; their gradients are compared too.
    second
        Whether to compare gradients of gradients as well.
    differentiable
        Which operands have a gradient; those of real or complex numbers where not given.
    summed
        Whether the gradients are those of the results' sums, whose cotangents are one number, expanded.
    """

    def grads_of(out: Any, leaves: list[Any], weights: list[Any]) -> list[Any]:
        roots = [t for t in flat(out) if t.requires_grad]
        if summed:
            roots = [t for t in roots if t.dtype != torch.complex32]  # torch has no sum of these
            roots, weights = [t.sum() for t in roots], [torch.ones_like(t.sum()) for t in roots]
        if not roots or not leaves:
            return []
        first = torch.autograd.grad(roots, leaves, weights, allow_unused=True, create_graph=second)
        if not second:
            return list(first)
        live = [g for g in first if g is not None and g.requires_grad]
        if not live:
            return list(first)
        again = torch.autograd.grad([(g * g).sum() for g in live], leaves, allow_unused=True)
        return [*first, *again]

    if differentiable is None:
        differentiable = [full.is_floating_point() or full.is_complex() for full, *_ in operands]
    whole = [full.detach().clone().requires_grad_(d) for (full, *_), d in zip(operands, differentiable)]
    parts = [shard(full, m, p, s, d) for (full, m, p, s), d in zip(operands, differentiable)]
    expected, got = f(*whole), f(*parts)
    if not flat(expected):
        assert got == expected, f"{what}: {got}, torch {expected}"
    for e, g in zip(flat(expected), flat(got), strict=True):
        assert tuple(g.shape) == tuple(e.shape), f"{what}: shape {tuple(g.shape)}, torch {tuple(e.shape)}"
        assert g.dtype == e.dtype, f"{what}: {g.dtype}, torch {e.dtype}"
        if isinstance(g, ms.ShardTensor):
            local = g.sharding.local_shape(g.mesh.coords)
            assert tuple(g.to_local().shape) == local, f"{what}: block {tuple(g.to_local().shape)}, layout {local}"
        torch.testing.assert_close(
            gathered(g), e.detach(), rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}: forward: {m}"
        )
    generator = torch.Generator().manual_seed(3)
    whole_weights, part_weights = [], []
    for e, g in zip(flat(expected), flat(got), strict=True):
        assert e.requires_grad == g.requires_grad, f"{what}: requires_grad {g.requires_grad}"
        if e.requires_grad:
            w = torch.randn(e.shape, dtype=e.dtype, generator=generator).to(e.device)
            whole_weights.append(w)
            if isinstance(g, ms.ShardTensor):
                placements = [ms.Replicate() if p.is_partial() else p for p in g.placements]
                sizes = {d: s for d, s in enumerate(g.sharding.sizes) if s is not None}
                part_weights.append(ms.distribute_tensor(w, g.mesh, placements, sizes=sizes))
            else:
                part_weights.append(w)
    whole_leaves = [x for x, d in zip(whole, differentiable) if d] + list(params)
    part_leaves = [x for x, d in zip(parts, differentiable) if d] + list(params)
    expected_grads = grads_of(expected, whole_leaves, whole_weights)
    got_grads = grads_of(got, part_leaves, part_weights)
    for i, (e, g) in enumerate(zip(expected_grads, got_grads, strict=True)):
        e = torch.zeros(()) if e is None else e.detach()
        g = torch.zeros(()) if g is None else gathered(g)
        torch.testing.assert_close(
            *torch.broadcast_tensors(g, e),
            rtol=rtol,
            atol=atol,
            check_dtype=False,
            equal_nan=True,
            msg=lambda m, i=i: f"{what}: gradient {i}: {m}",
        )
    return got


def compare_penalties(f: Callable[[Any], Any], full: Tensor, dims: Sequence[int]) -> None:
    """Compare derivatives of a gradient's square, plain and on all layouts that shard these dims."""

    def penalty(x: Any) -> Any:
        (g,) = torch.autograd.grad((f(x) ** 3).sum(), x, create_graph=True)
        return torch.autograd.grad((g**2).sum(), x)[0]

    expected = penalty(full.clone().requires_grad_())
    for mesh, placements, sizes in layouts(full.shape, dims):
        torch.testing.assert_close(gathered(penalty(shard(full, mesh, placements, sizes, True))), expected)


def assert_loads(own: torch.nn.Module, folder: str, saved: dict[str, Tensor]) -> None:
    """Check that torch's own checkpoint gives the parameters back that were saved, after they have changed."""
    import torch.distributed.checkpoint as dcp

    with torch.no_grad():
        for p in own.parameters():
            p.zero_()
    loaded = own.state_dict()
    dcp.load({"model": loaded}, checkpoint_id=folder)
    for name, p in loaded.items():
        assert torch.equal(p.full_tensor(), saved[name])
