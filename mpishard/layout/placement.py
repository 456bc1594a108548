"""Placements: how one mesh dim holds a tensor. DTensor's vocabulary, without its import cost.

Nothing here is collective.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NoReturn

from mpishard.errors import LayoutError, described


class Frozen:
    """What is shared by all that name it, so that nobody may change it. Its slots are its arguments, in order."""

    __slots__: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            described(
                f"{type(self).__name__}: {name} cannot be set",
                expected="no change: it is shared",
                got=f"{name} = {value!r}",
                fix="make another one",
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, name) for name in self.__slots__)


# past the refusal of Frozen
set_once = object.__setattr__


class Kind(Frozen):
    """What placements of every kind can be asked."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:  # noqa: ARG002
        """Tell whether this is a Shard (of ``dim``, if given)."""
        return False

    def is_replicate(self) -> bool:
        """Tell whether this is a Replicate."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:  # noqa: ARG002
        """Tell whether this is a Partial (of ``reduce_op``, if given)."""
        return False


def _index(dim: Any) -> int:
    """Return the number of a tensor dim."""
    try:
        return operator.index(dim)
    except TypeError:
        raise LayoutError(
            "Shard: no tensor dim", expected="an integer", got=repr(dim), fix="count the dims of the tensor from 0"
        ) from None


class Shard(Kind):
    """The tensor dim ``dim`` is cut into one block per coordinate of the mesh dim.

    Parameters
    ----------
    dim
        Tensor dim; negative counts from the end and is resolved when a layout is built.
    """

    __slots__ = ("dim",)
    dim: int

    def __init__(self, dim: int) -> None:
        set_once(self, "dim", _index(dim))

    def __eq__(self, other: object) -> bool:
        # torch's own Shard is accepted without importing it: that import costs half a second
        return type(other).__name__ == "Shard" and getattr(other, "dim", None) == self.dim

    # hashes are torch's: what compares equal must hash equal
    def __hash__(self) -> int:
        return hash(self.dim)

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})"

    def is_shard(self, dim: int | None = None) -> bool:
        """Tell whether this is a Shard (of ``dim``, if given)."""
        return dim is None or dim == self.dim


class Replicate(Kind):
    """Every coordinate of the mesh dim holds the whole tensor."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other).__name__ == "Replicate"

    def __hash__(self) -> int:
        return -1

    def __repr__(self) -> str:
        return "Replicate()"

    def is_replicate(self) -> bool:
        """Return True."""
        return True


class Partial(Kind):
    """The tensor is the sum over the mesh dim of what its coordinates hold.

    Parameters
    ----------
    reduce_op
        Only ``"sum"``.
    """

    __slots__ = ("reduce_op",)
    reduce_op: str

    def __init__(self, reduce_op: str = "sum") -> None:
        if reduce_op != "sum":
            raise LayoutError(
                "Partial: reduction not supported",
                expected="'sum'",
                got=repr(reduce_op),
                fix="reduce with mpishard.all_reduce and hold the result as Replicate()",
            )
        set_once(self, "reduce_op", reduce_op)

    def __eq__(self, other: object) -> bool:
        return type(other).__name__ == "Partial" and getattr(other, "reduce_op", None) == "sum"

    def __hash__(self) -> int:
        return 1 + hash(self.reduce_op)

    def __repr__(self) -> str:
        return "Partial()"

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Tell whether this is a Partial (of ``reduce_op``, if given)."""
        return reduce_op in (None, self.reduce_op)


Placement = Shard | Replicate | Partial

_shard, _replicate = lru_cache(maxsize=64)(Shard), Replicate()


def as_placements(placements: object, mesh_ndim: int, ndim: int) -> tuple[Placement, ...]:
    """Return our own placements, one per mesh dim, with non-negative tensor dims.

    Parameters
    ----------
    placements
        A placement or a sequence of them, ours or ``torch.distributed.tensor``'s.
    mesh_ndim
        Number of mesh dims.
    ndim
        Number of tensor dims.

    Returns
    -------
    tuple of Placement

    Raises
    ------
    LayoutError
        Wrong count, unknown kind, or a tensor dim that does not exist.
    """
    given = tuple(placements) if isinstance(placements, Iterable) else (placements,)
    if len(given) != mesh_ndim:
        raise LayoutError(
            "placements do not fit the mesh",
            expected=f"{mesh_ndim} placements, one per mesh dim",
            got=f"{len(given)}: {given}",
            fix="give Shard(dim), Replicate() or Partial() for every mesh dim",
        )
    return tuple(_own(p, ndim) for p in given)


def _own(placement: object, ndim: int) -> Placement:
    kind = type(placement).__name__
    if kind == "Shard":
        dim = _index(placement.dim)  # type: ignore[attr-defined]
        if not -ndim <= dim < ndim:
            raise LayoutError(
                "placements do not fit the tensor",
                expected=f"Shard(dim) with dim in [{-ndim}, {ndim})",
                got=f"Shard({dim}) for a tensor of {ndim} dims",
                fix="shard a dim that the tensor has, or use Replicate()",
            )
        return _shard(dim % ndim)
    if kind == "Replicate":
        return _replicate
    if kind == "Partial":
        return Partial(str(placement.reduce_op))  # type: ignore[attr-defined]
    raise LayoutError(
        "unknown placement",
        expected="Shard(dim), Replicate() or Partial()",
        got=repr(placement),
        fix="import them from mpishard",
    )
