"""What the arguments of the collectives on plain tensors may be."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from mpishard.comm.memory.buffer import UNCOPIED, followed, uncopied, unfit
from mpishard.comm.mesh import CartMesh, Group
from mpishard.comm.mesh_argument import listed, no_mesh
from mpishard.errors import LayoutError, MeshError, UnsupportedOperationError
from mpishard.layout import as_block_sizes, runs_of

MeshDims = int | str | Sequence[int | str] | None


def require(call: str, argument: str, value: Any, kind: type, fix: str) -> None:
    """Raise unless an argument is of a kind. Not collective."""
    if not isinstance(value, kind):
        what = f"{call}: {argument}= is of another kind"
        raise LayoutError(what, expected=f"a {kind.__name__}", got=type(value).__name__, fix=fix)


def require_functions(call: str, **arguments: Any) -> None:
    """Raise unless all arguments that are given can be called. Not collective."""
    for argument, value in arguments.items():
        if value is not None:
            require(call, argument, value, Callable, "give a function or a module")  # type: ignore[arg-type]


def whole_number(call: str, argument: str, value: Any) -> int:
    """Return an integer of any kind as Python's; raise where it is none. Not collective."""
    try:
        return operator.index(value)
    except TypeError:
        what = f"{call}: {argument}= is of another kind"
        raise LayoutError(what, expected="an integer", got=repr(value), fix="give a whole number") from None


def require_switches(call: str, mesh: CartMesh, mesh_dims: tuple[int, ...], **switches: Any) -> None:
    """Raise on every rank unless arguments are True, False or None. Collective as `together` is, where one is not."""
    for argument, value in switches.items():
        if value is not None and not isinstance(value, bool):
            what = f"{call}: {argument}= is of another kind"
            with together(call, mesh, mesh_dims):
                raise LayoutError(
                    what, expected="True or False", got=repr(value), fix="give one of them, or leave it out"
                )


def extents(call: str, argument: str, values: Any) -> tuple[int, ...]:
    """Return extents of blocks as they are kept; raise where there cannot be any. Not collective."""
    if isinstance(values, Iterable):
        return as_block_sizes(values)
    what = f"{call}: {argument}= is of another kind"
    raise LayoutError(what, expected="one extent per rank", got=repr(values), fix="give a sequence of integers")


def require_mesh(call: str, mesh: Any) -> None:
    """Raise unless an argument is a mesh: without one it is not known who the other ranks are. Not collective."""
    if not isinstance(mesh, CartMesh):
        raise no_mesh(call, mesh)


def require_state(call: str, **arguments: Any) -> None:
    """Raise unless all arguments that are given have a state, as modules and optimizers do. Not collective."""
    for argument, value in arguments.items():
        if value is not None and not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise LayoutError(
                f"{call}: {argument}= is of another kind",
                expected="what has state_dict and load_state_dict",
                got=type(value).__name__,
                fix="give tensors as tensors={name: tensor}",
            )


class together:  # noqa: N801 (a statement, as `contextlib.suppress`)
    """Whoever finds an argument wrong in here raises it on every rank: the others make a plan for a call new to them.

    Collective over ``mesh_dims`` (all, if not given) where something is raised, as the making of a plan is.
    """

    __slots__ = ("_call", "_mesh", "_mesh_dims")

    def __init__(self, call: str, mesh: CartMesh, mesh_dims: tuple[int, ...] | None = None) -> None:
        self._call, self._mesh, self._mesh_dims = call, mesh, mesh_dims

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception):
            return

        # no plan: where calls are compared, the others would be told that they differ, and not of the error
        ranks = self._mesh.all_ranks if self._mesh_dims is None else self._mesh.group(self._mesh_dims)
        self._mesh.agree(ranks.comm, error, f"{self._call} is refused")


def mesh_dims(mesh: CartMesh, mesh_dim: MeshDims) -> tuple[int, ...]:
    """Return the mesh dims that an argument names, in mesh order. Not collective."""
    if mesh_dim is None:
        return tuple(range(len(mesh.shape)))
    dims = tuple(mesh.mesh_dim(m) for m in listed(mesh_dim))
    if not dims or sorted(set(dims)) != list(dims):
        raise MeshError(
            "mesh dims out of order",
            expected="different mesh dims, in mesh order",
            got=listed(mesh_dim),
            fix="list them in the order of the mesh: ranks are counted row-major in it",
        )
    return dims


def require_plain(op: str, x: Any) -> None:
    """Raise unless ``x`` is a plain tensor. Not collective."""
    if not isinstance(x, Tensor) or hasattr(x, "to_local"):
        raise UnsupportedOperationError(
            f"{op}: works on plain tensors",
            expected="a torch.Tensor that is this rank's own",
            got=type(x).__name__,
            fix="give x.to_local(), or use x.redistribute(...), which knows what a placement means",
        )


def is_plain(x: Any) -> bool:
    """Whether ``x`` is a tensor of torch's own, numbers at strides and nothing else. Not collective."""
    return type(x) is Tensor and x.layout is torch.strided and x.dtype not in UNCOPIED and not x.is_nested


def valueless(x: Tensor) -> tuple[str, str] | None:
    """Return what a tensor is that has no values in memory of its own, and how to get some; None where it has.

    Not collective.
    """
    if is_lazy(x):
        return "one of a lazy module, without a shape", "call the module once before"
    if x.is_meta:
        return "one on the meta device, without values", "give it values before, e.g. with module.to_empty(device=...)"
    return None


def require_dense_on_all(op: str, x: Any, mesh: Any, mesh_dim: MeshDims) -> None:
    """Raise on every rank unless ``x`` is a plain tensor that is numbers at strides. Collective as `together` is."""
    require_mesh(op, mesh)
    nobody = isinstance(mesh_dim, (tuple, list)) and not mesh_dim  # but this rank, in an all-reduce
    with together(op, mesh, None if nobody else mesh_dims(mesh, mesh_dim)):
        require_dense(op, x)


def require_dense(op: str, x: Any) -> None:
    """Raise unless ``x`` is a plain tensor that is numbers at strides. Not collective."""
    require_plain(op, x)
    if odd := unfit(x) or uncopied(x) or followed():
        got, fix = odd
        what = f"{op}: works on plain tensors"
        raise UnsupportedOperationError(what, expected="a dense torch.Tensor", got=got, fix=fix)


def needs_grad(x: Tensor) -> bool:
    """Whether autograd records what happens to ``x``. Not collective."""
    return x.requires_grad and torch.is_grad_enabled()


def tensor_dim(op: str, x: Tensor, dim: int) -> int:
    """Return ``dim`` counted from the front. Not collective."""
    if type(dim) is not int:
        dim = whole_number(op, "dim", dim)
    if not -x.ndim <= dim < x.ndim:
        raise LayoutError(f"{op}: no such dim", expected=f"a dim of {tuple(x.shape)}", got=dim, fix="name a tensor dim")
    return dim % x.ndim


def fits_group(sizes: Sequence[int], group: Group, own: int | None = None) -> bool:
    """Whether there is one extent per rank, this rank's being ``own``. Not collective."""
    try:
        return len(sizes) == group.size and min(sizes) >= 0 and own in (None, sizes[group.rank])
    except TypeError:
        return False


def are_whole(sizes: Sequence[Any]) -> bool:
    """Whether extents are integers. Not collective."""
    try:
        for n, _ in runs_of(sizes):
            operator.index(n)
    except TypeError:
        return False
    return True


def misfit(op: str, expected: str, got: object) -> LayoutError:
    """Return the error of extents that do not fit. Not collective."""
    return LayoutError(f"{op}: sizes do not fit", expected=expected, got=got, fix="give one extent per rank, or none")


def require_rank(what: str, rank: int, group: Group) -> None:
    """Raise unless the group has a rank. Not collective."""
    if not 0 <= rank < group.size:
        raise MeshError(
            what, expected=f"a rank below {group.size}", got=rank, fix="count ranks along the mesh dims of the call"
        )
