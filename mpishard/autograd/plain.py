"""Plain tensors taken out of ShardTensors: how the cotangents that ranks find for one value come together.

Of a value that every rank holds whole, the cotangent is the same on every rank where all of them go on with it in
the same way, and a sum over the ranks where each uses it with its own block. Which of the two is known where the
result becomes a ShardTensor again, meets some, or is reduced: the backward pass that comes by there looks through the
graph, back to the value. One that does not, as of a metric that is no part of the loss, has no cotangent there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from mpishard.autograd.linear import apply
from mpishard.autograd.redistribute import run_steps
from mpishard.autograd.replica import apart
from mpishard.comm.mesh import CartMesh
from mpishard.errors import DesyncError, LayoutError
from mpishard.layout import Layout, Partial, Replicate, Shard, layout_of

# in the order in which they were taken; a dict, as weakref's sets are slow to tell if empty
_open: dict[int, weakref.ref[Plain]] = {}


class Plain:
    """The linear operation from a block to the plain tensor that a user gets of it.

    Attributes
    ----------
    mesh
        The mesh.
    held, shown
        Layouts of the block and of the result, as `Shard` and `Replicate`.
    sequence
        Autograd's number of the node.
    """

    def __init__(
        self, mesh: CartMesh, held: Layout, shown: Layout, given: Layout | None, terms: Iterable[int] = ()
    ) -> None:
        self.mesh, self.held, self.shown = mesh, held, shown
        self.sequence = 0
        self._given, self._terms = given, set(terms)
        # mesh dims, and whether ranks along them were seen to use it with blocks of their own, or all in the same way:
        # by one backward pass, or by any
        self._seen: dict[int, set[tuple[int, bool]]] = {}
        self._kept: set[tuple[int, bool]] = set()

    @property
    def adjoint(self) -> _Back:
        """The way back of the cotangent."""
        return _Back(self)

    def __call__(self, x: Tensor) -> Tensor:
        """Gather."""
        return run_steps(self.mesh, self.held, self.shown, x)

    def note(self, states: _States, task: int) -> None:
        """Note per mesh dim whether ranks use it with blocks of their own; ``task`` -1: in any pass. Not collective."""
        (self._kept if task < 0 else self._seen.setdefault(task, set())).update(states)

    def back(self, g: Tensor) -> Tensor:
        """Return the block's cotangent. Collective."""
        given = self._given
        if given is None:
            found = self._kept | self._seen.pop(torch._C._current_graph_task_id(), set())
            summed = {m for m, is_apart in found if is_apart and (m, False) not in found} - self._terms
            placements = [
                Partial() if m in summed and type(p) is Replicate else p for m, p in enumerate(self.shown.placements)
            ]
            given = layout_of(self.shown.mesh_shape, placements, self.shown.shape, self.shown.sizes)
            whole = tuple(m for m, p in enumerate(placements) if type(p) is Replicate and self.mesh.shape[m] > 1)
            if whole and apart(g, self.mesh.group(whole)):
                raise self._differ()
        return run_steps(self.mesh, given, self.held, g)

    def _differ(self) -> DesyncError:
        return DesyncError(
            f"the gradient of a plain tensor of shape {self.shown.shape}, taken from a ShardTensor, differs "
            "between ranks",
            expected="the same cotangent on every rank, of what every rank holds whole",
            got="another one on each: every rank went on with its own data",
            fix="say what the cotangents are: full_tensor(grad_placements=[ms.Partial(), ...]) sums those of the "
            "ranks; where it is used in both ways, take one for each; or work on the ShardTensor itself",
        )


class _Back:
    """Adjoint of a `Plain`."""

    def __init__(self, forward: Plain) -> None:
        self.adjoint = forward

    def __call__(self, g: Tensor) -> Tensor:
        return self.adjoint.back(g)


def taken(
    x: Tensor, mesh: CartMesh, held: Layout, shown: Layout, given: Layout | None = None, terms: Iterable[int] = ()
) -> Tensor:
    """Return the plain tensor of a block that lies as ``held`` says, as ``shown`` says.

    Collective where they differ.

    Parameters
    ----------
    x
        The block.
    mesh
        Its mesh.
    held, shown
        Layouts without `Partial`.
    given
        The layout of the cotangent, where the user says it.
    terms
        Mesh dims over which the block is a rank's own term of a sum: its cotangent is its own, and that of the sum.

    Notes
    -----
    Adjoint: the redistribution of the cotangent to ``held``. Where the cotangent of what is whole on all ranks is not
    ``given``, it is a sum over the ranks that were seen to use the value with blocks of their own; over the others it
    must be the same, which is compared.
    """
    op = Plain(mesh, held, shown, given, terms)
    y = apply(op, x)
    if given is None and y.grad_fn is not None:
        op.sequence = y.grad_fn._sequence_nr()
        number = id(op)
        _open[number] = weakref.ref(op, lambda _: _open.pop(number, None))
    return y


def given_layout(what: str, shown: Layout, placements: tuple[Any, ...]) -> Layout:
    """Return the layout of a cotangent by ``grad_placements``.

    Not collective.

    Raises
    ------
    LayoutError
        It is none of a tensor that lies as ``shown`` says.
    """
    fits = all(p == q if type(q) is Shard else type(p) is not Shard for p, q in zip(placements, shown.placements))
    if len(placements) != len(shown.placements) or not fits:
        raise LayoutError(
            f"{what}: grad_placements do not fit",
            expected=f"one per mesh dim: {shown.placements}, with Partial() where cotangents are to be summed",
            got=placements,
            fix="Replicate() says that all ranks find the same cotangent, Partial() that theirs are parts of a sum",
        )
    return layout_of(shown.mesh_shape, placements, shown.shape, shown.sizes)


def note_wrapped(x: Tensor, layout: Layout, mesh: CartMesh) -> None:
    """Note what the cotangent of a block of ``layout`` means for the plain tensors that it is made of.

    Not collective.
    """
    if _open and x.grad_fn is not None:
        _note(x.grad_fn, mesh, {m: type(p) is not Replicate for m, p in enumerate(layout.placements)})


def met(x: Tensor, mesh: CartMesh) -> Tensor:
    """Return a plain tensor that meets ShardTensors: its cotangent will be the same on all ranks. Not collective."""
    if _open and x.grad_fn is not None and torch.is_grad_enabled():
        x = x.view_as(x)  # what else is made of it has other nodes
        _note(x.grad_fn, mesh, dict.fromkeys(range(mesh.ndim), False))
    return x


def note_reduced(x: Tensor, mesh: CartMesh, mesh_dims: Iterable[int]) -> None:
    """Note that ``x`` is each rank's own part of what is made over ``mesh_dims``. Not collective."""
    if _open and x.grad_fn is not None:
        _note(x.grad_fn, mesh, dict.fromkeys(mesh_dims, True))


_States = tuple[tuple[int, bool], ...]


def _note(node: Any, mesh: CartMesh, states: dict[int, bool]) -> None:
    """Have a backward pass that comes by ``node`` go on from there to the plain tensors that were taken."""
    below = _visit(node, tuple(states.items()), mesh, -1)
    if below:  # else nothing lies between, or nothing is to be seen
        node.register_prehook(lambda _: _look(below, mesh))


# the backward pass that looks, from where on nodes may lead to what was taken, and what it has looked at
_pass: tuple[int, int, set[Any]] = -1, 0, set()


def _look(todo: list[tuple[Any, _States]], mesh: CartMesh) -> None:
    """Go on through the graph, once for all that a pass comes by."""
    global _pass  # noqa: PLW0603
    task = torch._C._current_graph_task_id()
    if _pass[0] != task:
        first = min((op.sequence for known in list(_open.values()) if (op := known()) is not None), default=0)
        _pass = task, first, set()
        Variable._execution_engine.queue_callback(_forget)  # type: ignore[attr-defined]
    _, first, seen = _pass
    # of a graph that is differentiated again, by ways that do not come by here
    task = -1 if torch.is_grad_enabled() else task
    todo = list(todo)
    while todo:
        at = todo.pop()
        if (*at, mesh) in seen or at[0]._sequence_nr() < first:
            continue
        seen.add((*at, mesh))
        todo += _visit(*at, mesh, task)


def _forget() -> None:
    global _pass  # noqa: PLW0603
    _pass = -1, 0, set()


def _visit(node: Any, states: _States, mesh: CartMesh, task: int) -> list[tuple[Any, _States]]:
    """Return the nodes before ``node``, and what a cotangent is there; note it where it is that of what was taken."""
    op = getattr(node, "op", None)
    if isinstance(op, Plain):
        if op.mesh is mesh:
            op.note(states, task)
        return []
    if op is not None:
        changes = getattr(op, "cotangent", ())
        if changes is None:
            return []  # a reduction of plain tensors: noted where it was called
        if changes:
            states = tuple({**dict(states), **dict(changes)}.items())
    else:
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and function.__module__.startswith("mpishard."):
            return []  # sums on its own: what it leaves is compared
    return [(child, states) for child, _ in node.next_functions if child is not None]
