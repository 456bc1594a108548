"""balance: cuts that follow the measured time of each rank's steps."""

from __future__ import annotations

import math
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mpishard.comm import guard
from mpishard.comm.collective.blocking import all_reduce
from mpishard.comm.collective.gather_sizes import digest
from mpishard.comm.mesh import CartMesh
from mpishard.comm.mesh_argument import listed, two_meshes
from mpishard.comm.wait_meter import WaitMeter
from mpishard.errors import LayoutError, MeshError, MpishardError, UnsupportedOperationError
from mpishard.layout import Layout, balanced, bounds, sizes_of
from mpishard.layout.balance import CostDensity, moved_borders
from mpishard.layout.partition import rank_of
from mpishard.tensor.convert import rebalance
from mpishard.tensor.shard_tensor import ShardTensor

_MOST_S = 1e9  # of a step; in nanoseconds it fits 63 bits


def balance(
    mesh: CartMesh,
    *,
    dims: Sequence[str | int] | str | int | None = None,
    every: int = 20,
    threshold: float = 0.05,
    relaxation: float = 0.8,
    min_cells: int = 1,
    multiple: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Balancer:
    """Return a `Balancer`, which measures the ranks' steps and cuts tensors so that all ranks take as long.

    Collective.

    Parameters
    ----------
    mesh
        Of the tensors that it will cut.
    dims
        Names or indices of the mesh dims along which cuts may move; None: all. A dim of samples is better left out.
    every
        Steps from one decision to the next; of their times the median counts.
    threshold
        The part of the slowest rank's time that new cuts must be expected to save: less is noise, or not worth the
        move.
    relaxation
        How much of the way to equal costs cuts go at once, above 0 and at most 1.
    min_cells
        Cells that every block keeps along every cut dim, at least: a model's halo is not to be wider than a
        neighbour's block, or more ranks must be asked for it.
    multiple
        Of which borders are multiples, such as the total stride of a network, as in `scatter_tensor`.
    clock
        Returns seconds. ``time.process_time`` where ranks share cores, and the work is the processor's.

    Raises
    ------
    LayoutError
        On every rank: a number out of its range.
    MeshError
        No mesh, or no such dim.
    DesyncError
        The ranks' arguments differ.

    Examples
    --------
    >>> balancer = ms.balance(mesh, every=20, min_cells=4)
    >>> for x, target in batches:
    ...     x, target = balancer(x, target)
    ...     with balancer.step():
    ...         loss_of(model(x), target).backward()
    ...         optimizer.step()
    """
    if not isinstance(mesh, CartMesh):
        raise MeshError("balance: no mesh", expected="a CartMesh", got=type(mesh).__name__, fix="give one")
    error: Exception | None = None
    among: tuple[int, ...] = ()
    try:
        asked = range(mesh.ndim) if dims is None else listed(dims)
        among = tuple(sorted({mesh.mesh_dim(d) for d in asked}))
        _check_numbers(every, threshold, relaxation, min_cells, multiple)
    except Exception as e:  # noqa: BLE001 (Python's too, of what is no number)
        error = e
    comm = mesh.all_ranks.comm
    guard.agree(comm, error, f"balance{(among, every, threshold, relaxation, min_cells, multiple)}")
    how = {"relaxation": float(relaxation), "min_cells": int(min_cells), "multiple": int(multiple)}
    return Balancer(mesh, among, int(every), float(threshold), how, clock)


def _check_numbers(every: Any, threshold: Any, relaxation: Any, min_cells: Any, multiple: Any) -> None:
    for name, value in (("every", every), ("min_cells", min_cells), ("multiple", multiple)):
        try:
            good = operator.index(value) >= 1
        except TypeError:
            good = False
        if not good:
            raise LayoutError(
                f"balance: {name}", expected="an integer >= 1", got=repr(value), fix="give one, or leave it"
            )
    for name, value, good in (
        ("threshold", threshold, isinstance(threshold, int | float) and 0 <= threshold < 1),
        ("relaxation", relaxation, isinstance(relaxation, int | float) and 0 < relaxation <= 1),
    ):
        if not good:
            expected = "a number in [0, 1)" if name == "threshold" else "a number in (0, 1]"
            raise LayoutError(f"balance: {name}", expected=expected, got=repr(value), fix="give one, or leave it")


class _Line:
    """Mesh dims that together shard one tensor dim: where it is cut, and what its cells cost."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.borders = bounds(sizes)
        self.density = CostDensity(self.borders[-1])

    def sizes(self, n: int) -> tuple[int, ...]:
        """Return the block sizes of an extent: cut in the same proportions where it is another one."""
        own = self.borders[-1]
        return sizes_of(self.borders if n == own else tuple((2 * b * n + own) // (2 * own) for b in self.borders))


class Balancer:
    """Measures this rank's own work in each step, and cuts tensors so that all ranks take as long.

    What `balance` returns. What a rank waits for others does not count as its work. After every ``every`` steps the
    ranks compare: each slab of the mesh between two cuts has a cost, the time of its slowest rank; along one mesh dim
    the cuts move to where the costs are equal, if that saves enough. Where that did not, they go back to the best ones.

    Attributes
    ----------
    changes : int
        How often the cuts have changed.
    imbalance : float or None
        The slowest rank's time over the mean of all, at the last decision: 1 where all are as fast.
    """

    def __init__(
        self,
        mesh: CartMesh,
        dims: tuple[int, ...],
        every: int,
        threshold: float,
        how: dict[str, Any],
        clock: Callable[[], float],
    ) -> None:
        self.changes = 0
        self.imbalance: float | None = None
        self._mesh, self._dims, self._every, self._threshold, self._how = mesh, dims, every, threshold, how
        self._clock, self._meter = clock, WaitMeter(clock)
        self._begun: float | None = None
        self._seconds: list[float] = []
        self._fresh = True  # the next step makes plans
        self._lines: dict[tuple[int, ...], _Line] = {}
        self._targets: dict[Layout, dict[int, tuple[int, ...]]] = {}
        self._before: float | None = None  # imbalance that the last change was to mend
        self._doubt = 1.0
        # the least imbalance that was measured, and the cuts that had it
        self._best: tuple[float, dict[_Line, tuple[int, ...]]] | None = None

    # cuts

    def __call__(self, *tensors: ShardTensor) -> Any:
        """Return tensors in the present cuts: themselves where they have them, else re-balanced.

        Collective where the cuts of a tensor differ from the present ones, which no rank decides alone; else not.

        Parameters
        ----------
        *tensors
            On the mesh of the balancer. The first one says how many cells there are, and how they are cut at first;
            one of another extent, such as a coarser field, is cut in the same proportions.

        Returns
        -------
        ShardTensor or tuple of ShardTensor
            One of one, else as many.

        Raises
        ------
        LayoutError
            No ShardTensor, mesh dims that shard one dim together in one tensor and several in another, or fewer cells
            than ``min_cells`` asks for.
        MeshError
            A tensor on another mesh.

        Notes
        -----
        Adjoint: the re-balancing back.
        """
        out = tuple(self._placed(x) for x in tensors)
        return out[0] if len(out) == 1 else out

    def _placed(self, x: ShardTensor) -> ShardTensor:
        if not isinstance(x, ShardTensor):
            raise LayoutError(
                "balance: cannot cut this", expected="a ShardTensor", got=type(x).__name__, fix="shard it"
            )
        if x.mesh is not self._mesh:
            raise two_meshes(self._mesh, x.mesh)
        layout = x.sharding
        target = self._targets.get(layout)
        if target is None:
            target = self._targets[layout] = self._target(layout)
        return rebalance(x, target) if target else x

    def _target(self, layout: Layout) -> dict[int, tuple[int, ...]]:
        target = {}
        for dim, mesh_dims in layout.shard_dims.items():
            if set(mesh_dims).isdisjoint(self._dims):
                continue
            own = layout.sizes[dim]
            assert own is not None
            sizes = self._line(mesh_dims, own).sizes(layout.shape[dim])
            if sizes != own:
                target[dim] = sizes
        return target

    def _line(self, mesh_dims: tuple[int, ...], sizes: tuple[int, ...]) -> _Line:
        line = self._lines.get(mesh_dims)
        if line is None:
            used = {m for others in self._lines for m in others}
            if not used.isdisjoint(mesh_dims) or not set(mesh_dims) <= set(self._dims):
                raise LayoutError(
                    "balance: mesh dims that shard one dim of a tensor together",
                    expected=f"the same together in every tensor: {list(map(self._names, self._lines))}"
                    f"; all of them, or none, among the dims to balance: {self._names(self._dims)}",
                    got=self._names(mesh_dims),
                    fix="give tensors that are sharded alike, or a balancer of their own",
                )
            line = _Line(sizes)
            moved_borders(line.borders, line.borders, **self._how)  # raises where there are too few cells
            self._lines[mesh_dims] = line
            self._best = None  # of fewer lines
        return line

    def _names(self, mesh_dims: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._mesh.mesh_dim_names[m] for m in mesh_dims)

    @property
    def sizes(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Names of mesh dims, several where they shard one dim together -> block sizes of the first tensor."""
        return {self._names(dims): sizes_of(line.borders) for dims, line in self._lines.items()}

    # state

    def state_dict(self) -> dict[str, Any]:
        """Return the cuts and what is known of costs, of numbers and strings: `load_state_dict` goes on from there.

        Not collective; the same on every rank.

        Examples
        --------
        >>> ms.io.save_checkpoint("checkpoints", step, model=model, extra={"balance": balancer.state_dict()}, mesh=mesh)
        """
        lines = [
            {"mesh_dims": list(self._names(dims)), "borders": list(line.borders), "told": line.density.told}
            for dims, line in self._lines.items()
        ]
        return {
            "lines": lines,
            "changes": self.changes,
            "imbalance": self.imbalance,
            "before": self._before,
            "doubt": self._doubt,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, on a mesh of as many ranks or of others.

        Collective. Where a mesh dim has another extent, its cuts are made anew from what is known of costs. Times of
        steps since the last decision are forgotten.

        Parameters
        ----------
        state
            What `state_dict` returned, the same on all ranks.

        Raises
        ------
        LayoutError
            On every rank: no such state, or one of mesh dims that this mesh has not, or that are not to be balanced.
        DesyncError
            The ranks' states differ.
        """
        error: MpishardError | None = None
        lines: dict[tuple[int, ...], _Line] = {}
        try:
            for told in state["lines"]:
                dims = tuple(self._mesh.mesh_dim(name) for name in told["mesh_dims"])
                if not set(dims) <= set(self._dims):
                    raise ValueError(f"{told['mesh_dims']} are not to be balanced")
                lines[dims] = self._loaded(dims, told)
            numbers = operator.index(state["changes"]), *(state[k] for k in ("imbalance", "before", "doubt"))
            if not all(x is None or 0 <= x < math.inf for x in numbers[:3]) or not numbers[3] >= 1:
                raise ValueError(f"numbers {numbers}")
        except (MpishardError, KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            error = LayoutError(
                "balance: this is no state of a balancer of this mesh",
                expected=f"what state_dict() returned, of mesh dims among {self._names(self._dims)}",
                got=str(e) or type(e).__name__,
                fix="load it into a balancer of the same mesh dims, or begin without it",
            )
        comm = self._mesh.all_ranks.comm
        guard.agree(comm, error, f"balance: load_state_dict {digest((state, sorted(lines)))}")
        self._lines = lines
        self.changes, self.imbalance, self._before, self._doubt = numbers
        self._seconds, self._fresh, self._best = [], True, None
        self._targets.clear()

    def _loaded(self, dims: tuple[int, ...], told: Mapping[str, Any]) -> _Line:
        borders = [operator.index(b) for b in told["borders"]]
        count = math.prod(self._mesh.shape[m] for m in dims)
        even = bounds(balanced(borders[-1], count))
        if borders[0] != 0 or borders != sorted(borders):
            raise ValueError(f"borders {borders[:3]} ...")
        same = len(borders) == count + 1
        line = _Line(sizes_of(tuple(borders)) if same else balanced(borders[-1], count))
        for ends, shares in told["told"]:
            fits = [*ends] == sorted(ends) and ends[0] == 0 and ends[-1] == borders[-1] and len(ends) == len(shares) + 1
            if not fits or not all(0 <= share < math.inf for share in shares):
                raise ValueError("costs of other cells")
        line.density.remember(told["told"])
        if not same:
            line.borders = moved_borders(even, line.density.equal(count), **{**self._how, "relaxation": 1.0})
        return line

    # time

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step of work: `start` and `stop` around a ``with`` block.

        Collective after every ``every`` steps, at the end of the block; else not.
        """
        self.start()
        try:
            yield
        except BaseException:
            self._measured()
            raise
        self.stop()

    def start(self) -> None:
        """Begin to measure a step. Not collective.

        Raises
        ------
        UnsupportedOperationError
            A step is being measured already.
        """
        if self._begun is not None:
            raise UnsupportedOperationError(
                "balance: a step in a step", expected="stop() first", got="start()", fix="call it once"
            )
        self._meter.start()
        self._begun = self._now()

    def stop(self) -> None:
        """End a step. Collective after every ``every`` steps; else not.

        Raises
        ------
        UnsupportedOperationError
            No step is being measured.
        DesyncError
            The ranks have not measured the same steps.
        """
        if self._begun is None:
            raise UnsupportedOperationError(
                "balance: no step to end", expected="start() first", got="stop()", fix="call it before"
            )
        self.record(self._measured())

    def _measured(self) -> float:
        seconds = self._now() - (self._begun or 0.0) - self._meter.stop()
        self._begun = None
        return max(0.0, seconds)

    def _now(self) -> float:
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
        return self._clock()

    def record(self, seconds: float) -> None:
        """Take this rank's own work in a step from elsewhere: for clocks of one's own, or costs that are known.

        Collective after every ``every`` steps; else not. The first step, and the first after new cuts, make plans
        and do not count, here and in `stop`.

        Parameters
        ----------
        seconds
            Without waits for other ranks. The unit cancels out: any measure of cost from 1e-6 to 1e9 will do.

        Raises
        ------
        LayoutError
            On every rank, at the next decision: a rank gave no finite number >= 0.
        DesyncError
            The ranks have not recorded the same steps.
        """
        if self._fresh:
            self._fresh = False
            return
        self._seconds.append(seconds)
        if len(self._seconds) == self._every:
            told, self._seconds = self._seconds, []
            self._decide(told)

    # decisions

    def _decide(self, told: list[float]) -> None:
        mesh, error, own = self._mesh, None, 0
        comm = mesh.all_ranks.comm
        try:
            bad = [v for v in told if not 0 <= float(v) < _MOST_S]
            own = 0 if bad else round(1e9 * statistics.median(map(float, told)))
        except (TypeError, ValueError):
            bad = told
        if bad:
            error = LayoutError(
                "balance: these are no times of steps",
                expected=f"numbers >= 0, below {_MOST_S:.0e}",
                got=bad[:3],
                fix="record the seconds of this rank's own work",
            )
        cuts = {self._names(dims): line.borders for dims, line in self._lines.items()}
        _, slowest = guard.agree(comm, error, f"balance after {self.changes} changes of the cuts, {cuts}", (0, own))
        # whole numbers, whose sums are the same on every rank in whatever order, and do not overflow
        total, costs = self._costs((own << 40) // max(1, slowest))
        if not total or not costs:
            return
        imbalance = self.imbalance = (mesh.size << 40) / total
        here = {line: line.borders for line in self._lines.values()}
        if self._best is None or imbalance < self._best[0] or here == self._best[1]:
            self._best = imbalance, here
        if self._before is not None:
            # who was promised a gain and got none, asks for more next time
            self._doubt = 1.0 if imbalance < self._before else 2 * self._doubt
            self._before = None
        kept, moved = 1.0, here
        for line, cost in zip(here, costs):
            line.density.learn(line.borders, cost)
            borders = moved_borders(line.borders, line.density.equal(len(cost)), **self._how)
            part = float(line.density.costs(borders).max()) * sum(cost) / max(cost)
            if part < kept:
                # of one line: what the slowest rank costs along another changes with it
                kept, moved = part, {line: borders}
        if 1 - kept > self._threshold * self._doubt:
            self._before = imbalance
        elif 1 - self._best[0] / imbalance > self._threshold:
            moved = self._best[1]
        else:
            return
        for line, borders in moved.items():
            line.borders = borders
        self._targets.clear()
        self.changes += 1
        self._fresh = True

    def _costs(self, own: int) -> tuple[int, list[list[int]]]:
        """Return the sum of all ranks' times, and per line that of the slowest rank of each slab. Collective."""
        counts = [len(line.borders) - 1 for line in self._lines.values()]
        mine = torch.zeros(sum(counts), dtype=torch.int64, device="cpu")
        ends = [0, *np.cumsum(counts).tolist()]
        for dims, first in zip(self._lines, ends):
            at = rank_of([self._mesh.coords[m] for m in dims], [self._mesh.shape[m] for m in dims])
            mine[first + at] = own
        group = self._mesh.all_ranks
        slowest = all_reduce(mine, group, "max").tolist()
        return int(all_reduce(torch.tensor(own, device="cpu"), group)), [slowest[a:b] for a, b in zip(ends, ends[1:])]
