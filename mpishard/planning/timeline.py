"""How long the events of a step take on a machine: the clocks of one rank's host and device, in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mpishard.comm.null import Event
from mpishard.planning.machine import Machine
from mpishard.planning.trace import Operation

_VIEW = 0.25  # what a view costs the host, of an operation that computes


class Parts(NamedTuple):
    """Seconds of a step: where the rank computes, waits for neighbours, waits for all, and where its host is late."""

    compute: float
    halo: float
    reductions: float
    host: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return sum(self)


def operation_seconds(machine: Machine, op: Operation) -> float:
    """Return how long an operation computes: by its arithmetic or its bytes, whichever takes longer. Not collective."""
    return max(op.flops / machine.rate(op.dtype), op.nbytes / machine.memory_bandwidth)


def collective_seconds(machine: Machine, op: str, nbytes: int, size: int) -> float:
    """Return how long a collective over ``size`` ranks takes, each giving ``nbytes``. Not collective.

    Sums by recursive doubling or, where that is less, a reduce-scatter and an all-gather.
    """
    if size <= 1:
        return 0.0
    hops, one = math.ceil(math.log2(size)), nbytes / machine.network_bandwidth
    share = one * (size - 1) / size
    if op in ("all_reduce", "agreement", "reduce"):
        return min(hops * (machine.latency + one), 2 * hops * machine.latency + 2 * share)
    if op == "all_gather":
        return hops * machine.latency + one * (size - 1)
    if op == "all_to_all":
        return (size - 1) * machine.latency + share
    return hops * machine.latency + one


def host_seconds(machine: Machine, events: Sequence[Operation | Event]) -> float:
    """Return what all calls of a step cost the host. Not collective."""
    total = 0.0
    for event in events:
        if isinstance(event, Operation):
            total += machine.operation if event.nbytes else _VIEW * machine.operation
        elif event.kind == "start":
            total += machine.exchange
        elif event.kind in ("begin", "collective"):
            total += machine.collective
    return total


def run(machine: Machine, events: Sequence[Operation | Event]) -> Parts:
    """Return the parts of a step on a machine. Not collective.

    The rank's neighbours are as fast as it is: a message is there its travel time after this rank has sent its own.
    On a GPU the host queues operations and waits for the device before it sends; else both are one.
    """
    host = device = compute = halo = reductions = 0.0
    under_way: dict[object, float] = {}
    for event in events:
        if isinstance(event, Operation):
            # a view or a new tensor starts nothing on the device
            host += machine.operation if event.nbytes else _VIEW * machine.operation
            lasts = operation_seconds(machine, event)
            compute += lasts
            device = max(device, host) + lasts
            if not machine.gpu:
                host = device
            continue
        if event.kind in ("start", "begin", "collective"):
            # what is sent must have been computed
            host = max(host, device) + (machine.exchange if event.kind == "start" else machine.collective)
        if event.kind == "start":
            travel = machine.latency + event.nbytes / machine.network_bandwidth if event.messages else 0.0
            under_way[id(event.key)] = host + travel
        elif event.kind == "begin":
            under_way[id(event.key)] = host + collective_seconds(machine, event.op, event.nbytes, event.size)
        elif event.kind == "collective":
            lasts = collective_seconds(machine, event.op, event.nbytes, event.size)
            host, reductions = host + lasts, reductions + lasts
        else:
            arrives = under_way.pop(id(event.key), 0.0)
            # while the device has work, nobody is late
            waits = max(0.0, arrives - max(host, device))
            host = max(host, arrives)
            if event.kind == "finish":
                halo += waits
            else:
                reductions += waits
        device = max(device, host)
    total = max(host, device)
    return Parts(compute, halo, reductions, max(0.0, total - compute - halo - reductions))
