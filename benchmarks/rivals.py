"""The same steps by mpishard, by torch's DTensor over gloo and, where they are installed, by other libraries.

As of November 2026, mpi4torch 0.1.3 does not build on torch 2.13, and DistDL asks NumPy for names that it lacks.

The floor is ours: ratios say how many times as long the others take. Each result is compared with that of the whole
tensor first: where a rival's differs, or it cannot run at all, its row says so.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch.distributed import tensor as dtensor

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench

Step = Callable[[Any], Any]


class Rival(NamedTuple):
    """Someone else who does some of the steps.

    Parameters
    ----------
    given
        Returns what its steps take, of the whole field, cut along the first dim.
    whole
        Returns the whole of a result.
    steps
        Its ways, by the names of ours.
    """

    given: Callable[[Tensor], Any]
    whole: Callable[[Any], Tensor]
    steps: Mapping[str, Step]


# -- the steps

KERNEL = torch.linspace(-1, 1, 9).view(1, 1, 3, 3)
WEIGHTS: dict[int, Tensor] = {}


def gradient(x: Any, f: Step) -> Any:
    x = x.detach().requires_grad_()
    f(x).backward()
    return x.grad


def convolved(x: Any) -> Any:
    return torch.nn.functional.conv2d(x[None, None], KERNEL, padding=1)[0, 0]


def scaled(x: Any) -> Any:
    return (x * 2 + 1).sum()


def to_columns(x: Any) -> Any:
    return x.redistribute(placements=[ms.Shard(1)]) if isinstance(x, ms.ShardTensor) else x


# ours, and plain torch's on the whole tensor
OURS: dict[str, Step] = {
    "x * x": lambda x: x * x,
    "sum of rows": lambda x: x.sum(0),
    "(2 x + 1).sum() and backward": lambda x: gradient(x, scaled),
    "rows to columns": to_columns,
    "x @ weights": lambda x: x @ WEIGHTS[x.shape[1]],
    "fft of columns": lambda x: torch.fft.fft(x, dim=0).abs(),
    "conv2d 3x3": convolved,
    "conv2d 3x3 and backward": lambda x: gradient(x, lambda x: convolved(x).square().mean()),
}
SMALL = ("x * x", "sum of rows", "(2 x + 1).sum() and backward")


def sizes(extent: int) -> Iterator[tuple[str, int]]:
    """Yield which steps are timed, and the extent of a square per rank's rows."""
    yield from ((name, 16) for name in SMALL)
    yield from ((name, extent) for name in OURS if name == "x * x" or name not in SMALL)


# -- who does them


def with_dtensor(folder: Path) -> Rival:
    mesh = joined(folder)

    def replicated(x: Any) -> Any:
        return dtensor.DTensor.from_local(WEIGHTS[x.shape[1]], mesh, [dtensor.Replicate()], run_check=False)

    steps = OURS | {
        "sum of rows": lambda x: x.sum(0).full_tensor(),
        "rows to columns": lambda x: x.redistribute(placements=[dtensor.Shard(1)]),
        "x @ weights": lambda x: x @ replicated(x),
    }
    return Rival(lambda full: dtensor.distribute_tensor(full, mesh, [dtensor.Shard(0)]), of_tensor, steps)


def with_heat(_: Path) -> Rival:
    import heat

    steps: dict[str, Step] = {
        "x * x": lambda x: x * x,
        "sum of rows": lambda x: x.sum(0),
        "rows to columns": lambda x: heat.resplit(x, 1),
        "x @ weights": lambda x: heat.matmul(x, heat.array(WEIGHTS[x.shape[1]], copy=False)),
        "fft of columns": lambda x: heat.abs(heat.fft.fft(x, axis=0)),
    }
    return Rival(lambda full: heat.array(full, split=0), lambda x: torch.from_numpy(x.numpy()), steps)


def with_physicsnemo(folder: Path) -> Rival:
    mesh = joined(folder)
    try:
        shards = importlib.import_module("physicsnemo.domain_parallel")
    except ModuleNotFoundError:  # before its version 2
        shards = importlib.import_module("physicsnemo.distributed.shard_tensor")

    def given(full: Tensor) -> Any:
        # to ask the others for their shapes needs a GPU
        return shards.ShardTensor.from_local(
            own_rows(full), mesh, [dtensor.Shard(0)], sharding_shapes="chunk", global_shape=full.shape
        )

    steps = OURS | {
        "sum of rows": lambda x: x.sum(0).full_tensor(),
        "rows to columns": lambda x: x.redistribute(placements=[dtensor.Shard(1)]),
    }
    return Rival(given, of_tensor, steps)


def with_mpi4jax(_: Path) -> Rival:
    import jax
    import mpi4jax

    def summed(x: Any) -> Any:
        found = mpi4jax.allreduce(x, op=MPI.SUM, comm=WORLD)
        return found[0] if isinstance(found, (tuple, list)) else found  # before its version 0.8, with a token

    steps: dict[str, Step] = {
        "x * x": jax.jit(lambda x: x * x),
        "sum of rows": jax.jit(lambda x: summed(x.sum(0))),
        "(2 x + 1).sum() and backward": jax.jit(jax.grad(lambda x: summed((2 * x + 1).sum()))),
    }

    def waited(step: Step) -> Step:
        return lambda x: step(x).block_until_ready()

    own = {name: waited(step) for name, step in steps.items()}
    return Rival(lambda full: jax.numpy.asarray(own_rows(full).numpy()), of_rows, own)


def with_mpi4torch(_: Path) -> Rival:
    import mpi4torch

    ranks = mpi4torch.comm_from_mpi4py(WORLD)

    def summed(x: Tensor) -> Tensor:
        return ranks.Allreduce(x, mpi4torch.MPI_SUM)

    def to_columns(x: Tensor) -> Tensor:
        return ranks.Alltoall(x, 0, 1, x.shape[1] // WORLD.size)

    steps: dict[str, Step] = {
        "x * x": lambda x: x * x,
        "sum of rows": lambda x: summed(x.sum(0)),
        "(2 x + 1).sum() and backward": lambda x: gradient(x, lambda x: summed(scaled(x)) / WORLD.size),
        "rows to columns": to_columns,
        "x @ weights": lambda x: x @ WEIGHTS[x.shape[1]],
    }
    return Rival(own_rows, of_rows, steps)


def with_distdl(_: Path) -> Rival:
    from distdl import nn
    from distdl.backends.mpi.partition import MPIPartition

    world = MPIPartition(WORLD)
    ranks = world.create_cartesian_topology_partition([WORLD.size, 1])
    images = world.create_cartesian_topology_partition([1, 1, WORLD.size, 1])
    columns = world.create_cartesian_topology_partition([1, WORLD.size])
    summed, across = nn.AllSumReduce(ranks, (0,)), nn.Repartition(ranks, columns, preserve_batch=False)
    conv = nn.DistributedFeatureConv2d(images, 1, 1, (3, 3), padding=(1, 1), bias=False)
    for p in conv.parameters():
        p.detach().copy_(KERNEL)
    steps: dict[str, Step] = {
        "x * x": lambda x: x * x,
        "sum of rows": lambda x: summed(x.sum(0, keepdim=True))[0],
        "rows to columns": across,
        "x @ weights": lambda x: x @ WEIGHTS[x.shape[1]],
        "conv2d 3x3": lambda x: conv(x[None, None])[0, 0],
        "conv2d 3x3 and backward": lambda x: gradient(x, lambda x: conv(x[None, None]).square().mean() / WORLD.size),
    }
    return Rival(own_rows, of_rows, steps)


RIVALS: dict[str, Callable[[Path], Rival]] = {
    "DTensor": with_dtensor,
    "HeAT": with_heat,
    "PhysicsNeMo": with_physicsnemo,
    "mpi4jax": with_mpi4jax,
    "mpi4torch": with_mpi4torch,
    "DistDL": with_distdl,
}


def own_rows(full: Tensor) -> Tensor:
    return full.tensor_split(WORLD.size)[WORLD.rank].contiguous()


def of_rows(x: Any) -> Tensor:
    """Return the whole of what each rank has rows of, or columns; sums are whole."""
    found = torch.as_tensor(x).detach()
    return found if found.ndim < 2 else torch.cat(WORLD.allgather(found), int(found.shape[0] > found.shape[1]))


def of_tensor(x: Any) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def joined(folder: Path) -> dtensor.DeviceMesh:
    """Return torch's mesh of the same ranks."""
    if not dist.is_initialized():
        if WORLD.Split_type(MPI.COMM_TYPE_SHARED).size == WORLD.size:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        place = f"file://{folder / 'ranks'}"
        dist.init_process_group("gloo", init_method=place, rank=WORLD.rank, world_size=WORLD.size)
    return dist.init_device_mesh("cpu", (WORLD.size,))


# -- the comparison


def agreed(error: BaseException | None) -> str:
    """Return what is wrong on any rank: all time the same calls."""
    return max(WORLD.allgather("" if error is None else f"{type(error).__name__}: {error}".split("\n", 1)[0]))


def found(bench: Bench) -> dict[str, Rival]:
    """Return who can run, and note why the others cannot."""
    there = {}
    for who, load in RIVALS.items():
        error: BaseException | None = None
        try:
            there[who] = load(bench.folder)
        except Exception as e:  # noqa: BLE001 (whatever a rival's import does, our figures go on)
            error = e
        if missing := agreed(error):
            there.pop(who, None)
            bench.failed("all", who, missing)
    return there


def right(bench: Bench, what: str, who: str, rival: Rival, name: str, full: Tensor) -> Callable[[], object] | None:
    """Return the call of a rival whose result is right, or note what is wrong with it."""
    step = rival.steps.get(name)
    if step is None:
        bench.failed(what, who, "it has no such step")
        return None
    error: BaseException | None = None
    x: Any = None
    try:
        x = rival.given(full)
        if not torch.allclose(rival.whole(step(x)), OURS[name](full), rtol=1e-4, atol=1e-4):
            error = ArithmeticError("the result is wrong")
    except Exception as e:  # noqa: BLE001 (as above)
        error = e
    if mistake := agreed(error):
        bench.failed(what, who, mistake)
        return None
    return lambda: step(x)


def run(bench: Bench) -> None:
    """Compare each step of everybody who has it."""
    mesh = ms.init_mesh((-1,))
    extent = 64 if bench.quick else 1024
    WEIGHTS[extent] = torch.randn(extent, extent, generator=torch.Generator().manual_seed(1))
    ours = Rival(lambda full: ms.distribute_tensor(full, mesh, (ms.Shard(0),)), of_tensor, OURS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        everybody = {"ours": ours, **found(bench)}
        for name, n in sizes(extent):
            what = f"{name}, {n}x{n} a rank"
            full = torch.randn(n * WORLD.size, n, generator=torch.Generator().manual_seed(n))
            each = {who: right(bench, what, who, rival, name, full) for who, rival in everybody.items()}
            calls = {who: call for who, call in each.items() if call is not None}
            assert "ours" in calls, f"{what}: mpishard's own result is wrong"
            count = (200 if n == 16 else 5) if not bench.quick else 2
            bench.compare(what, calls, floor="ours", count=count, extent=n)
        if dist.is_initialized():
            dist.destroy_process_group()
    mesh.free()
