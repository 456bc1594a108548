"""Which samples of a dataset somebody asks for."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from mpishard.errors import LayoutError
from mpishard.tensor import ShardTensor


def counted(indices: Sequence[int] | slice, n: int, name: str) -> Sequence[int]:
    """Return indices of ``n`` samples counted from the front; a range, which may be vast, as one. Not collective.

    Raises
    ------
    IndexError
        There are fewer samples.
    LayoutError
        They are no whole numbers. Those of a sharded tensor are not read: that would communicate, perhaps on one rank.
    """
    if isinstance(indices, slice):
        try:
            indices = range(*indices.indices(n))
        except (TypeError, ValueError) as e:
            raise _odd(indices, name) from e
    if isinstance(indices, range) and all(0 <= end < n for end in (*indices[:1], *indices[-1:])):
        return indices
    if isinstance(indices, (bytes, bytearray)) or _is_cut(indices):
        raise _odd(indices, name)
    out = []
    try:
        for given in indices:
            if _is_cut(given):
                raise _odd(given, name)
            index = operator.index(given)
            if not -n <= index < n:
                raise IndexError(f"sample {index} of {n} of {name!r}")
            out.append(index % n)
    except TypeError as e:
        raise _odd(indices, name) from e
    return out


def _is_cut(indices: object) -> bool:
    return isinstance(indices, ShardTensor) and not indices.sharding.is_replicated


def _odd(indices: object, name: str) -> LayoutError:
    return LayoutError(
        f"Dataset: an index of {name!r} is of another kind",
        expected="whole numbers, or a slice of them with a step other than 0",
        got=repr(indices),
        fix="give ds[t] an int, and ds.batch a sequence of them; of a sharded tensor x.full_tensor()",
    )
