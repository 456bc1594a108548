"""Plans: a step on a mesh of any size, its memory, messages and bytes as they are, its time by a machine's numbers."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mpishard.comm import counter
from mpishard.comm.null import A_VALUE, Event, no_values
from mpishard.errors import JobError, LayoutError, MpishardError, UnsupportedOperationError
from mpishard.layout.partition import balanced
from mpishard.planning.arguments import candidates, checked_machine, checked_mesh, checked_program, checked_ranks
from mpishard.planning.machine import Machine
from mpishard.planning.mesh import mesh_on
from mpishard.planning.step import Program, default_dims, step_failed, step_on
from mpishard.planning.timeline import Parts, host_seconds, run
from mpishard.planning.trace import Operation, Trace


@dataclass(frozen=True)
class Plan:
    """What one step costs a rank in the middle of a mesh, and how long it takes.

    Attributes
    ----------
    machine, mesh, dims, ranks, block
        Name of the machine, extents of the mesh, tensor dims they shard, number of ranks, shape of the rank's block.
    memory : int
        Bytes of tensors at their peak: parameters, gradients, optimizer's state, activations, buffers of messages.
    messages, nbytes : int
        That the rank sends in a step.
    exchanges, reductions : int
        Rounds of messages with neighbours; collectives.
    by_op : dict
        The same by operation: name -> (calls, messages, bytes).
    flops, traffic, operations : int
        Arithmetic of products, bytes through the memory, operations of torch.
    parts : Parts
        Seconds.
    ideal : float
        Seconds that the whole step computes on one rank, over the number of ranks.
    imbalance : float
        Cells of the largest block over the mean.
    planning : float
        Processor seconds, here, that the first step takes longer than a later one.
    available : float
        Bytes of memory that the machine's rank has.
    """

    machine: str
    mesh: tuple[int, ...]
    dims: tuple[int, ...]
    ranks: int
    block: tuple[int, ...]
    memory: int
    messages: int
    nbytes: int
    exchanges: int
    reductions: int
    by_op: dict[str, tuple[int, int, int]]
    flops: int
    traffic: int
    operations: int
    parts: Parts
    ideal: float
    imbalance: float
    planning: float
    available: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.parts.seconds

    @property
    def efficiency(self) -> float:
        """Of the job: what one rank would compute, shared equally, over what it takes."""
        return self.ideal / self.seconds if self.seconds else 1.0

    @property
    def limit(self) -> str:
        """Where most of the step goes: compute, halo, reductions or host."""
        return max(zip(self.parts, Parts._fields))[1]

    @property
    def fits(self) -> bool:
        """Whether the rank's memory is enough."""
        return self.memory <= self.available

    def as_dict(self) -> dict[str, Any]:
        """Return everything in JSON's types. Not collective."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("parts", "by_op")}
        own["available"] = None if math.isinf(self.available) else self.available
        ops = {op: dict(zip(("calls", "messages", "nbytes"), row)) for op, row in self.by_op.items()}
        derived = {name: getattr(self, name) for name in ("seconds", "efficiency", "limit", "fits")}
        return {**own, "by_op": ops, "parts": self.parts._asdict(), **derived}


def plan(
    model: Callable[[], nn.Module],
    shape: Sequence[int],
    *,
    ranks: int | None = None,
    mesh: Sequence[int] | None = None,
    dims: Sequence[int] | None = None,
    coords: Sequence[int] | None = None,
    machine: str | Machine = "perlmutter",
    dtype: torch.dtype = torch.float32,
    optimizer: str | None = "sgd",
    loss: Callable[[Any], Tensor] | None = None,
) -> Plan:
    """Predict a step of a model on a mesh of any size: memory, messages, bytes and reductions per rank, and time.

    Not collective: the package's own planners and rules run in this process, as those of one rank in the middle of the
    mesh, on tensors without values (`mesh`). So counts and bytes are those of a real run; time is a machine's numbers
    applied to them.

    Parameters
    ----------
    model
        Returns the model; it may be made on torch's ``meta`` device.
    shape
        Of its input, global: ``(batch, channels, *space)``.
    ranks, mesh
        Number of ranks, for which the best mesh is looked for: among those of the smallest surface, and the best of
        each choice of dims to cut; or its extents.
    dims
        Tensor dims that the mesh shards, in order; all of space if not given.
    coords
        Which rank of ``mesh``; one in the middle if not given.
    machine
        A name of `machine_names`, a file of one (see `machine_named`), ``"local"``, or a `Machine`. ``"local"`` does
        the rank's work here, on blocks of that shape, and adds what messages take by measured latency and bandwidth.
    dtype
        Of the input and the parameters; complex ones have the complex dtype of it.
    optimizer
        ``"sgd"``, ``"adam"``, ``"adamw"``; None: forward alone.
    loss
        A scalar of the model's output; the mean of its squares if not given.

    Returns
    -------
    Plan

    Raises
    ------
    JobError
        Shape, dims, mesh and ranks do not fit each other, the machine is not known, or the model or the loss fails:
        the cause is what they raised.
    MeshError
        ``coords`` outside the mesh.
    UnsupportedOperationError
        The model asks for values, or has an operation without a rule.

    Examples
    --------
    >>> best = ms.plan(UNet, (1, 1, 4096, 4096, 4096), ranks=65536, machine="perlmutter")
    >>> best.mesh, best.seconds, best.efficiency, best.limit
    """
    program = checked_program(model, shape, dims, dtype, optimizer, loss)
    if (ranks is None) == (mesh is None) or (mesh is None and coords is not None):
        raise JobError(
            "plan",
            expected="either ranks or mesh, and coords with mesh alone",
            got=f"ranks={ranks}, mesh={mesh}, coords={coords}",
            fix="give one of them",
        )
    meshes = [checked_mesh(program, mesh)] if mesh is not None else checked_ranks(program, ranks)
    known = checked_machine(machine)
    # of one rank, once for all meshes
    alone = cache(lambda: trace(program, (1,), (0,)).events)
    # one rank may plan on its own: its random numbers stay those of the others
    with torch.random.fork_rng(devices=()):
        found = [_planned(program, extents, known, coords, alone) for extents in meshes]
    return min(found, key=lambda p: (not p.fits, p.seconds))


def sweep(model: Callable[[], nn.Module], shape: Sequence[int], ranks: Sequence[int], **options: Any) -> Iterator[Plan]:
    """Yield the `plan` of every number of ranks; options as of `plan`. Not collective."""
    for size in ranks:
        yield plan(model, shape, ranks=size, **options)


def _middle(program: Program, extents: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of a rank with the most neighbours and, of those, the most cells."""
    coords = []
    for d, p in zip(program.dims, extents):
        sizes = balanced(program.shape[d], p)
        inner = range(1, p - 1) if p > 2 else range(p)
        coords.append(max(inner, key=lambda i: (sizes[i], -abs(i - p // 2))))
    return tuple(coords)


def _planned(
    program: Program,
    extents: tuple[int, ...],
    machine: Machine | Literal["local"],
    coords: Sequence[int] | None,
    alone: Callable[[], list[Operation | Event]],
) -> Plan:
    coords = _middle(program, extents) if coords is None else coords
    traced = trace(program, extents, coords)
    lengths = [program.shape[d] for d in program.dims[: len(extents)]]
    imbalance = math.prod(-(-n // p) * p for n, p in zip(lengths, extents)) / math.prod(lengths)
    if machine == "local":
        # takes seconds, and threads of its own
        from mpishard.planning.local import check_room, local_machine, step_seconds

        known = local_machine()
        check_room(traced.memory, extents)
        traced = trace(program, extents, coords, "cpu")
        measured = step_seconds(program, extents, coords)
        waits, host = run(known, traced.events), min(host_seconds(known, traced.events), measured)
        parts = Parts(measured - host, waits.halo, waits.reductions, host)
        # the whole on one rank may not fit here
        ideal = parts.compute / imbalance
    else:
        known = machine
        parts = run(known, traced.events)
        ideal = run(known, alone()).compute / math.prod(extents)
    ops = [e for e in traced.events if isinstance(e, Operation)]
    events = [e for e in traced.events if isinstance(e, Event)]
    return Plan(
        machine=known.name,
        mesh=extents,
        dims=program.dims[: len(extents)],
        ranks=math.prod(extents),
        block=traced.block,
        memory=traced.memory,
        messages=sum(c[1] for c in traced.by_op.values()),
        nbytes=sum(c[2] for c in traced.by_op.values()),
        exchanges=sum(e.kind == "start" for e in events),
        reductions=sum(e.kind in ("collective", "begin") for e in events),
        by_op=traced.by_op,
        flops=sum(op.flops for op in ops),
        traffic=sum(op.nbytes for op in ops),
        operations=len(ops),
        parts=parts,
        ideal=ideal,
        imbalance=imbalance,
        planning=traced.planning,
        available=known.memory,
    )


@dataclass(frozen=True)
class Traced:
    """A step on a planning mesh.

    Attributes
    ----------
    events : list
        Of a later step than the first.
    memory : int
        Bytes at their peak.
    by_op : dict
        Operation -> (calls, messages, bytes).
    planning : float
        Seconds that the first step took longer.
    block : tuple of int
        Shape of the rank's block of the input.
    """

    events: list[Operation | Event]
    memory: int
    by_op: dict[str, tuple[int, int, int]]
    planning: float
    block: tuple[int, ...]


def trace(program: Program, extents: Sequence[int], coords: Sequence[int], device: str = "meta") -> Traced:
    """Run a program on a planning mesh, as the rank at ``coords``. Not collective.

    On the CPU blocks take their memory and time, and rules choose as they do there: some choose otherwise on a GPU,
    as ``meta`` does.
    """
    mesh = mesh_on(device, extents, coords=coords)
    shape = list(program.shape)
    for d, p, c in zip(program.dims, extents, coords):
        shape[d] = balanced(program.shape[d], p)[c]
    try:
        with Trace(mesh) as traced:
            step = step_on(mesh, program)
            first = _timed(step)
            traced.clear()
            with counter.comm_counter() as count:
                later = _timed(step)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        of_torch = isinstance(error, RuntimeError) and "meta" in str(error)
        if (of_torch and not isinstance(error, MpishardError)) or str(error) == str(no_values(A_VALUE)):
            raise UnsupportedOperationError(
                "plan: the model asks for values",
                expected="a step whose course does not depend on the values of tensors",
                got=text,
                fix="leave out of the planned step what reads values: .item(), bool(tensor), indices that are searched",
            ) from error
        if isinstance(error, MpishardError) and not isinstance(error, LayoutError):
            raise
        raise step_failed(error, program) from error
    by_op = {op: (c.calls, c.messages, c.nbytes) for op, c in sorted(count.by_op.items())}
    mesh.free()
    return Traced(traced.events, traced.peak, by_op, max(0.0, first - later), tuple(shape))


def _timed(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def powers(largest: int, shape: Sequence[int] | None = None, dims: Sequence[int] | None = None) -> list[int]:
    """Return 1, 2, 4, ... and the largest, for `sweep`. Not collective.

    Parameters
    ----------
    shape, dims
        As of `plan`: numbers of ranks for which these have no mesh are left out.
    """
    found = sorted({*itertools.takewhile(lambda p: p < largest, (2**i for i in range(32))), largest})
    if shape is None:
        return found
    cut = default_dims(shape) if dims is None else dims
    return [p for p in found if candidates(shape, cut, p)]
