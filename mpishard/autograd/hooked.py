"""Hooks of parameters whose gradients are summed later in a backward pass: they wait for the sums.

So that ranks send the same wherever hooks are: a logger of rank 0 has some that the others lack.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.replica import Replica, replica_of
from mpishard.comm.transport.slot import slot_of


def has_hooks(param: Tensor) -> bool:
    """Tell whether a user's hooks see the gradient of a replicated parameter. Not collective."""
    # one is its Replica
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks) > 1  # type: ignore[attr-defined]


class Hooked:
    """A parameter with hooks, in the pass that reached it last.

    Attributes
    ----------
    waits
        Whether autograd is to pass the hooks by, until `settled`: what it has is not the gradient yet.
    total
        The sum over the ranks, as far as it has come.
    """

    __slots__ = ("_before", "_leaf", "_plain", "total", "waits")

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = weakref.ref(leaf)
        self.waits = False
        self.total: Tensor | None = None
        # what ``.grad`` was, and what autograd added to it, of uses without data on a mesh
        self._plain: tuple[Tensor | None, Tensor] | None = None
        # a pass that came to a node of this parameter, and ``.grad`` then
        self._before: tuple[int, ...] = ()

    def begin(self) -> None:
        """Note that a pass has come to a node of this parameter. Not collective."""
        self._before, self._plain, self.total = self._seen(), None, None

    def _seen(self) -> tuple[int, ...]:
        leaf = self._leaf()
        grad = None if leaf is None else leaf.grad
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        return (task,) if grad is None else (task, id(grad), grad._version)

    def keep(self, g: Tensor) -> None:
        """Note a gradient that autograd is about to add. Not collective."""
        leaf = self._leaf()
        if self._plain is not None:  # of a pass within this one
            self._plain = self._plain[0], self._plain[1] + g
        elif leaf is not None:
            self._plain = None if leaf.grad is None else leaf.grad.clone(), g

    def note_change(self) -> None:
        """Note that a hook has returned another gradient: ranks where none did raise at the next small all-reduce.

        Not collective. Their copies of the parameter would part.
        """
        leaf = self._leaf()
        replica = None if leaf is None else replica_of(leaf)
        if replica is None:
            return
        for holders in replica.holders():
            if not holders.is_planning:
                slot_of(holders.group).remark(f"a hook returned another gradient of {replica.name}")

    def arrived(self) -> bool:
        """Tell whether autograd has added something, since `begin` if this pass called that. Not collective."""
        return self._before != self._seen()

    def settled(self, leaf: Tensor) -> Tensor | None:
        """Return the whole gradient of the pass, and leave ``.grad`` as it was before. Not collective."""
        plain, total, self._plain, self.total, self.waits = self._plain, self.total, None, None, False
        if plain is None:
            return total
        before, g = plain
        if before is None or leaf.grad is None:
            leaf.grad = before
        else:
            with torch.no_grad():
                leaf.grad.copy_(before)
        return g if total is None else g + total


class _Waiting:
    """What autograd calls in a hook's place, which stays that of the handle by which it is removed."""

    __slots__ = ("hook", "hooked")

    def __init__(self, hook: Callable[[Tensor], Any], hooked: Hooked) -> None:
        self.hook, self.hooked = hook, hooked


class _OfGradient(_Waiting):
    """A hook that sees the gradient before it is accumulated, and may return another."""

    __slots__ = ()

    def __call__(self, g: Tensor | None) -> Any:
        if g is None:  # its sum waits, or the node that it shares was reached for others
            return None
        if self.hooked.waits:
            self.hooked.keep(g)
            return None
        other = self.hook(g)
        if other is not None:
            self.hooked.note_change()
        return other


class _OfParameter(_Waiting):
    """A hook that sees the parameter when its gradient is accumulated."""

    __slots__ = ()

    def __call__(self, leaf: Tensor) -> Any:
        # torch calls also where nothing arrived
        if self.hooked.arrived() and not self.hooked.waits:
            return self.hook(leaf)  # of which torch takes None alone
        return None


def hooked(leaf: Tensor) -> Hooked:
    """Return what is known of a parameter with hooks, to which a pass has come. Not collective."""
    places = [
        (hooks, kind)
        for hooks, kind in (
            (leaf._backward_hooks, _OfGradient),
            (leaf._post_accumulate_grad_hooks, _OfParameter),  # type: ignore[attr-defined]
        )
        if hooks
    ]
    known = [hook.hooked for hooks, _ in places for hook in hooks.values() if isinstance(hook, _Waiting)]
    found = known[0] if known else Hooked(leaf)
    for hooks, kind in places:
        for number, hook in list(hooks.items()):
            if not isinstance(hook, (kind, Replica)):
                hooks[number] = kind(hook, found)
    if not found.waits:
        found.begin()
    return found


def deliver(waiting: Iterable[tuple[Tensor, Hooked]]) -> None:
    """Accumulate sums that have come, by autograd itself, which calls the hooks. Not collective, if they are not."""
    settled = [(leaf, state.settled(leaf)) for leaf, state in waiting]
    due = [(leaf, g) for leaf, g in settled if g is not None and leaf.requires_grad]
    for leaf, _ in due:
        replica = replica_of(leaf)
        if replica is not None:
            replica.summed()
    if due:
        torch.autograd.backward([leaf for leaf, _ in due], [g for _, g in due])
