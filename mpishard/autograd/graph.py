"""The nodes that torch made for an operation on blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.utils._python_dispatch import _disable_current_modes, _len_torch_dispatch_stack

_ACCUMULATE = "torch::autograd::AccumulateGrad"


def packs() -> bool:
    """Tell whether what nodes keep is packed, as in a checkpoint. Not collective."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def unpacked() -> contextlib.AbstractContextManager[Any]:
    """Have torch keep for backward, in the body, what a checkpoint around it would drop. Not collective.

    So the nodes may be run twice.
    """
    if not (packs() and torch.is_grad_enabled()):
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which modes that count operations and memory see nothing. Not collective."""
    return _disable_current_modes() if _len_torch_dispatch_stack() else contextlib.nullcontext()


def recorded(x: Tensor, requires_grad: bool) -> Tensor:
    """Return ``x``, a new tensor, of which autograd records operations where that is asked for. Not collective.

    Inside a transform of `torch.func` torch does not even take what is so already.
    """
    return x.requires_grad_() if requires_grad else x


def _itself(x: Tensor) -> Tensor:
    return x


def replayed_views() -> contextlib.AbstractContextManager[Any]:
    """Have views that are taken in the body, and written into later, followed as they were taken. Not collective.

    Torch follows them by their strides, which ends the graph of one that has no cells: on this rank alone, where others
    have some. It is not for views whose base changes its shape in place, which a block does not.
    """
    return _force_original_view_tracking(True)


def apart(part: Tensor) -> Tensor:
    """Return a part of what nobody else holds as a tensor of its own, which is no view for autograd. Not collective.

    For results that are cut out on some ranks alone: written into, a view is followed in another way than a tensor of
    its own, so that a second derivative would have a graph on some ranks, which communicates, and none on others.
    """
    return torch.ops.aten._unsafe_view(part, part.shape)  # type: ignore[no-any-return]


def own_nodes(results: Iterable[Tensor], operands: Iterable[Tensor]) -> Iterator[Any]:
    """Give torch's own nodes between operands and results, which communicate nothing.

    Not collective. What they keep may be packed, as in a checkpoint, where it may be asked for once.
    """
    seen = {x.grad_fn for x in operands}
    waiting = [y.grad_fn for y in results]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [n for n, _ in node.next_functions]
        if not isinstance(node, BackwardCFunction) and node.name() != _ACCUMULATE:
            yield node


class _Underivable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, value: Tensor, *operands: Tensor) -> Tensor:  # noqa: ARG004
        ctx.name = name
        return torch.ops.aten._unsafe_view(value, value.shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ARG004
        raise RuntimeError(f"derivative for {ctx.name} is not implemented")


def underivable(name: str, value: Tensor, operands: Iterable[Any]) -> Tensor:
    """Return a value through which torch has no derivative: as there, it needs one where an operand does.

    Not collective. A backward through it raises.
    """
    needed = [x for x in operands if isinstance(x, Tensor) and x.requires_grad]
    if not needed or not torch.is_grad_enabled() or not value.is_floating_point():
        return value
    return _Underivable.apply(name, value, *needed)  # type: ignore[no-any-return]


def before(node: Any, call: Callable[[Any, Any], None]) -> None:
    """Have ``call(node, cotangents)`` called before autograd runs the node; as there, grad mode tells of a graph.

    Not collective.
    """

    def prehook(cotangents: Any) -> None:
        # a hook that held its node would keep both
        call(torch._C._current_autograd_node(), cotangents)

    node.register_prehook(prehook)
