"""Gradients of several passes that are summed over the ranks once: `no_sync`.

What a pass finds waits beside the parameter's ``.grad``, as long as that lives: so ``zero_grad`` forgets it too. Where
another tensor takes its place, the next pass or step tells whether it was made of it: it has values.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpishard.comm.mesh import CartMesh
from mpishard.comm.thread import Depth
from mpishard.errors import UnsupportedOperationError

Key = tuple[CartMesh, tuple[int, ...], torch.dtype]

_depth = Depth()
_number = itertools.count()
_step_hook: Any = None


class Withheld:
    """What a rank found of the gradient of one parameter, by what it is to be summed over."""

    def __init__(self, param: Tensor) -> None:
        self._param = weakref.ref(param)
        self.shares: dict[Key, Tensor] = {}
        # in `held`
        self.number = next(_number)
        # of ``.grad``, as it was last seen
        self.version = -1

    def taken(self) -> list[tuple[Key, tuple[Tensor, Tensor]]]:
        """Return the shares, and forget them. Not collective.

        None of a gradient that was written into: its own next pass refuses that, or an optimizer's step, and a pass of
        another model does not.
        """
        param = self._param()
        if param is None or _is_written_into(param) or withheld_of(param) is not self:
            return []
        shares, self.shares = self.shares, {}
        self._leave(param.grad)
        return [(key, (param, share)) for key, share in shares.items()]

    def _leave(self, grad: Any) -> None:
        """Wait no more beside a gradient, which is not lost with what waits: it was summed, or is to be forgotten."""
        held.pop(self.number, None)
        del grad._withheld


# in the order in which they were made, which is the same on every rank, with their parameters: what a pass sums must
# not depend on when a rank collects a model that nobody has any more. A dict, as weakref's is slow to tell if empty
held: dict[int, tuple[weakref.ref[Withheld], Tensor | None]] = {}
# parameters whose ``.grad`` went with what waited: forgotten, or replaced
replaced: list[weakref.ref[Tensor]] = []


def is_withholding() -> bool:
    """Tell whether a pass is inside `no_sync`. Not collective."""
    return _depth.value > 0


@contextmanager
def no_sync() -> Iterator[None]:
    """Leave out the sums over ranks of parameter gradients in backward passes inside.

    Not collective. For gradient accumulation: the first pass after it sums what all found, so that there is one sum
    for several passes. ``.grad`` is complete then; until then it lacks the passes inside.

    Raises
    ------
    UnsupportedOperationError
        From an optimizer's step, and from a later pass: the sum is still to come, or ``.grad`` was written into or
        replaced (but by ``zero_grad``, None or zeros, which forget what was found). Torch does not count writes by
        ``p.grad.data``: they are not seen.

    Notes
    -----
    Sums happen nonetheless where something reads them at once: ``create_graph=True``, a plain loss. Hooks of parameters
    are called by the pass that sums, with the sum; inside, with what needs none.

    Examples
    --------
    >>> with ms.no_sync():
    ...     for x in batches[:-1]:
    ...         loss(model(x)).backward()
    >>> loss(model(batches[-1])).backward()
    >>> optimizer.step()
    """
    global _step_hook  # noqa: PLW0603
    if _step_hook is None:
        _step_hook = register_optimizer_step_pre_hook(_refuse_step)
    with _depth:
        yield


def withheld_of(param: Tensor) -> Withheld | None:
    """Return what waits of a parameter's gradient, or None.

    Not collective.

    Raises
    ------
    UnsupportedOperationError
        ``.grad`` was written into meanwhile, or another tensor with values took its place.
    """
    grad = param.grad
    found: Withheld | None = getattr(grad, "_withheld", None)
    if found is None and replaced:
        _require_kept(param)
    if found is None or grad is None or grad._version == found.version:
        return found
    if _is_written_into(param):
        raise _changed(grad, "was written into")
    found._leave(grad)
    return None


def _is_written_into(param: Tensor) -> bool:
    """Tell whether ``.grad``, of which more waits, has other values, and not only zeros."""
    found, grad = getattr(param.grad, "_withheld", None), param.grad
    if found is None or grad is None or grad._version == found.version:
        return False
    return _has_values(grad)


def _has_values(grad: Tensor) -> bool:
    parts = torch.view_as_real(grad) if grad.is_complex() else grad
    return bool(parts.any() or torch.signbit(parts).any())


def _lose(number: int) -> None:
    """Note that what waited has gone with a ``.grad``, which cannot be looked at here: it is being replaced."""
    _, param = held.pop(number, (None, None))
    if param is not None:
        replaced.append(weakref.ref(param))


def forget_replaced() -> None:
    """Forget parameters whose gradients begin anew. Not collective. Before a pass, which gives them others."""
    params = [known() for known in replaced]
    replaced[:] = [weakref.ref(p) for p in params if p is not None and p.grad is not None and _has_values(p.grad)]


def _require_kept(param: Tensor) -> None:
    if param.grad is not None and any(known() is param for known in replaced) and _has_values(param.grad):
        raise _changed(param.grad, "was replaced")


def _changed(grad: Tensor, how: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"a gradient {how}, parts of which wait for their sum over the ranks",
        expected="no change between a backward pass inside no_sync and the first one outside",
        got=f"a .grad of shape {tuple(grad.shape)} with other values",
        fix="scale or clip gradients after the pass outside no_sync; zero_grad forgets them",
    )


def withhold(param: Tensor, key: Key, g: Tensor) -> None:
    """Keep this rank's share of a gradient. Not collective."""
    if param.grad is None:
        # negative zeros: those of `zero_grad` are positive, and a gradient that is scaled stays negative
        param.grad = torch.zeros_like(param).neg_()
    found = withheld_of(param)
    if found is None:
        found = param.grad._withheld = Withheld(param)  # type: ignore[attr-defined]
        number = found.number
        held[number] = weakref.ref(found, lambda _: _lose(number)), param
    found.version = param.grad._version
    if key in found.shares:
        found.shares[key] += g
    else:
        found.shares[key] = g.clone()


def all_taken() -> Iterator[tuple[Key, tuple[Tensor, Tensor]]]:
    """Give the shares of all parameters, and forget them. Not collective."""
    for number, (known, _) in list(held.items()):
        waiting = known()
        if waiting is not None:
            yield from waiting.taken()
            if number in held:  # written into: nothing of it is summed any more, whenever it goes
                held[number] = known, None


def taken_share(param: Tensor, key: Key, g: Tensor) -> Tensor:
    """Return ``g`` with what waits for the same sum. Not collective."""
    found = withheld_of(param)
    share = None if found is None else found.shares.pop(key, None)
    return g if share is None else share + g


def note_accumulated(param: Tensor) -> None:
    """Note that autograd itself added to ``.grad``, or set it. Not collective."""
    grad: Any = param.grad
    found: Withheld | None = getattr(grad, "_withheld", None)
    if found is not None:
        if grad._version == found.version + 1:  # else it was written into before, which the next pass or step refuses
            found.version = grad._version
    elif replaced and grad is not None and not grad._version:
        replaced[:] = [known for known in replaced if known() is not param]


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not held and not replaced:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            found = getattr(param.grad, "_withheld", None)
            if found is None:
                _require_kept(param)
            elif found.shares:
                raise UnsupportedOperationError(
                    "an optimizer's step before gradients are summed over the ranks",
                    expected="a backward pass outside no_sync before it",
                    got=f"a parameter of shape {tuple(param.shape)} whose last pass was inside",
                    fix="leave no_sync before the last backward pass of an accumulation",
                )
