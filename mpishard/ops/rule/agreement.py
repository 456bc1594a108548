"""Local calls that fail where the data is bad: on one rank they would leave the others waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mpishard.autograd.graph import before, own_nodes
from mpishard.autograd.linear import apply, pair, same
from mpishard.comm import guard, traced
from mpishard.comm.mesh import CartMesh
from mpishard.errors import MpishardError, UnsupportedOperationError
from mpishard.layout import Layout

T = TypeVar("T")

# what torch raises of bad values; agreement among ranks knows the package's own errors, and tells these by name
_KINDS = (IndexError, RuntimeError, ValueError, NotImplementedError, torch.linalg.LinAlgError)
_OF_TORCH: dict[str, Any] = {kind.__name__: kind for kind in _KINDS}


def agreed(
    call: Callable[..., T],
    mesh: CartMesh,
    layouts: Iterable[Layout],
    *operands: Tensor,
    check: Callable[..., object] | None = None,
) -> T:
    """Return ``call(*operands)``, or raise on every rank what it raises on any.

    Collective over the mesh dims that shard one of the layouts: one reduction of 24 bytes where all is well.

    Parameters
    ----------
    call
        Communicates nothing. Torch checks values as it reads them: an index that is out of range stops the ranks
        whose cells it names, and blocks without cells stop nobody.
    mesh, layouts
        Of the operands; ranks whose blocks of all of them are the same do not differ.
    operands
        Tensors whose values ``call`` may raise for. Where none are named, it is not compiled.
    check
        Raises what ``call`` does, of the operands alone: a compiled program calls it beforehand. That is ``call``
        itself, if not given.
    """
    if traced.recording is None or not traced.recording.tracing:
        return _agreed(lambda: call(*operands), mesh, layouts)
    return call(*_looked_at(check or call, mesh, layouts, operands))


def checked(check: Callable[[Tensor], object], mesh: CartMesh, layouts: Iterable[Layout], x: Tensor) -> Tensor:
    """Return ``x`` after a check, or raise on every rank what it raises on any. Collective as `agreed`."""
    if traced.recording is None or not traced.recording.tracing:
        _agreed(lambda: check(x), mesh, layouts)
        return x
    return _looked_at(check, mesh, layouts, (x,))[0]


def _looked_at(
    check: Callable[..., object], mesh: CartMesh, layouts: Iterable[Layout], operands: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the operands of a compiled program, the first of which is there once all ranks have looked at them."""
    if not operands:
        raise _unnamed()
    layouts = tuple(layouts)

    def look(*given: Tensor) -> Tensor:
        with torch.no_grad():
            _agreed(lambda: check(*given), mesh, layouts)
        return given[0]

    def record(x: Tensor) -> Tensor:
        assert traced.recording is not None
        return traced.recording.call("agreement", look, [x, *operands[1:]], x.shape)

    return apply(pair(record, same), operands[0]), *operands[1:]


def _unnamed() -> UnsupportedOperationError:
    return UnsupportedOperationError(
        "an operation that raises for some values, in a compiled program",
        expected="values that all ranks can look at beforehand",
        got="an operation whose rule does not name them",
        fix="run it eagerly",
    )


def in_range(index: Tensor, start: int, stop: int) -> bool:
    """Tell whether all of an index lies in ``[start, stop)``; one without values, of a plan, does. Not collective."""
    if index.is_meta:
        return True
    return not index.numel() or (start <= int(index.min()) and int(index.max()) < stop)


def blank(shape: Sequence[int], index: Tensor) -> Tensor:
    """Return zeros that take no memory: for torch's own error of an index into such a shape. Not collective."""
    return torch.zeros((), device=index.device).expand(tuple(shape))


def _agreed(call: Callable[[], T], mesh: CartMesh, layouts: Iterable[Layout]) -> T:
    over = tuple(sorted({m for layout in layouts for m in layout.sharded_mesh_dims if mesh.shape[m] > 1}))
    if not over:
        return call()
    error: Exception | None = None
    result: Any = None
    try:
        result = call()
    except (IndexError, RuntimeError, ValueError) as e:
        error = e
    comm = mesh.group(over).comm
    try:
        guard.agree(comm, error)
    except MpishardError as e:
        kind, _, text = str(e).partition(": ")
        if type(e) is not MpishardError or kind not in _OF_TORCH:
            raise
        raise guard.common(_OF_TORCH[kind](text), comm) from None
    return result  # type: ignore[no-any-return]


# whose backward refuses a cotangent that depends on the phase of complex vectors
_OF_PHASES = ("LinalgEigBackward0", "LinalgEighBackward0", "LinalgSvdBackward0")


def agree_in_backward(
    results: Iterable[Tensor], operands: Iterable[Tensor], mesh: CartMesh, layouts: Sequence[Layout]
) -> None:
    """Have the backward of a local call raise on every rank what it raises on any. Collective then, as `agreed`.

    The call was made in `unpacked`.

    Torch looks at the values of a cotangent where vectors are known up to their phase. So that is tried first, once
    more than needed: products of matrices, beside a decomposition.
    """
    own = [y for y in results if y.requires_grad]
    if not any(y.is_complex() for y in own):
        return
    if traced.recording is not None and traced.recording.tracing:
        raise _unnamed()

    def try_first(node: Any, gradients: Any) -> None:
        with torch.no_grad():
            agreed(lambda: node(*gradients), mesh, layouts)

    for node in own_nodes(own, operands):
        if node.name() in _OF_PHASES:
            before(node, try_first)
