"""The same steps by mpishard, by torch's DTensor over gloo and, where it is installed, by HeAT.

The floor is ours: ratios say how many times as long the others take. Each result is compared with that of the whole
tensor first: where a rival's differs, or it cannot run at all, its row says so. None has a halo exchange that autograd
knows.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch.distributed import tensor as dtensor

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench

Step = Callable[[Any], Any]


def gradient(x: Any, f: Step) -> Any:
    x = x.detach().requires_grad_()
    f(x).backward()
    return x.grad


def steps(extent: int) -> Iterator[tuple[str, int, Step, Step, Step | None]]:
    """Yield what is timed: name, extent of a square per rank's rows, mpishard's, DTensor's and HeAT's way."""

    def scaled(x: Any) -> Any:
        return (x * 2 + 1).sum()

    def convolved(x: Any) -> Any:
        return torch.nn.functional.conv2d(x[None, None], KERNEL, padding=1)[0, 0]

    def slope(x: Any) -> Any:
        return gradient(x, lambda x: convolved(x).square().mean())

    yield "x * x", 16, lambda x: x * x, lambda x: x * x, lambda x: x * x
    yield "x * x", extent, lambda x: x * x, lambda x: x * x, lambda x: x * x
    yield "sum of rows", 16, lambda x: x.sum(0), lambda x: x.sum(0).full_tensor(), lambda x: x.sum(0)
    yield "(2 x + 1).sum() and backward", 16, lambda x: gradient(x, scaled), lambda x: gradient(x, scaled), None
    yield "rows to columns", extent, to_columns, lambda x: x.redistribute(placements=[dtensor.Shard(1)]), resplit
    yield "x @ weights", extent, lambda x: x @ WEIGHTS[extent], lambda x: x @ replicated(x), times_weights
    yield "fft of columns", extent, spectrum, spectrum, heat_spectrum
    yield "conv2d 3x3", extent, convolved, convolved, None
    yield "conv2d 3x3 and backward", extent, slope, slope, None


KERNEL = torch.linspace(-1, 1, 9).view(1, 1, 3, 3)
WEIGHTS: dict[int, Tensor] = {}


def to_columns(x: Any) -> Any:
    return x.redistribute(placements=[ms.Shard(1)]) if isinstance(x, ms.ShardTensor) else x


def replicated(x: dtensor.DTensor) -> dtensor.DTensor:
    return dtensor.DTensor.from_local(WEIGHTS[x.shape[1]], x.device_mesh, [dtensor.Replicate()], run_check=False)


def spectrum(x: Any) -> Any:
    return torch.fft.fft(x, dim=0).abs()


def resplit(x: Any) -> Any:
    import heat

    return heat.resplit(x, 1)


def times_weights(x: Any) -> Any:
    import heat

    return heat.matmul(x, heat.array(WEIGHTS[x.shape[1]], copy=False))


def heat_spectrum(x: Any) -> Any:
    import heat

    return heat.abs(heat.fft.fft(x, axis=0))


def whole(x: Any) -> Tensor:
    """Return the whole value of anybody's result."""
    if isinstance(x, Tensor):
        x = x.full_tensor() if hasattr(x, "full_tensor") else x
        return x.detach()
    return torch.from_numpy(x.numpy())


def joined(folder: Path) -> dtensor.DeviceMesh:
    """Return DTensor's mesh of the same ranks."""
    if WORLD.Split_type(MPI.COMM_TYPE_SHARED).size == WORLD.size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=WORLD.rank, world_size=WORLD.size)
    return dist.init_device_mesh("cpu", (WORLD.size,))


def agreed(error: BaseException | None) -> str:
    """Return what is wrong on any rank: all time the same calls."""
    return max(WORLD.allgather("" if error is None else f"{type(error).__name__}: {error}".split("\n", 1)[0]))


def heat_error() -> str:
    """Return why HeAT cannot run, nothing where it can."""
    try:
        import heat  # noqa: F401
    except Exception as error:  # noqa: BLE001 (whatever a rival's import does, our figures go on)
        return agreed(error)
    return agreed(None)


def ways(
    bench: Bench,
    what: str,
    extent: int,
    at: tuple[Step, Step, Step | None],
    mesh: ms.CartMesh,
    other: dtensor.DeviceMesh,
    heat_missing: str,
) -> Mapping[str, Callable[[], object]]:
    """Return the calls of everybody whose result is right; note what is wrong with the others."""
    full = torch.randn(extent * WORLD.size, extent, generator=torch.Generator().manual_seed(extent))
    rows = {
        "ours": ms.distribute_tensor(full, mesh, (ms.Shard(0),)),
        "DTensor": dtensor.distribute_tensor(full, other, [dtensor.Shard(0)]),
        "HeAT": None,
    }
    if not heat_missing:
        import heat

        rows["HeAT"] = heat.array(full, split=0)
    expected = at[0](full)
    calls = {}
    for (who, x), step in zip(rows.items(), at):
        if step is None or x is None:
            bench.failed(what, who, "it has no such step" if step is None else heat_missing)
            continue
        error: BaseException | None = None
        try:
            if not torch.allclose(whole(step(x)), expected, rtol=1e-4, atol=1e-4):
                error = ArithmeticError("the result is wrong")
        except Exception as e:  # noqa: BLE001 (as above)
            error = e
        if mistake := agreed(error):
            bench.failed(what, who, mistake)
        else:
            calls[who] = lambda step=step, x=x: step(x)
    assert "ours" in calls, f"{what}: mpishard's own result is wrong"
    return calls


def run(bench: Bench) -> None:
    """Compare each step of everybody who has it."""
    mesh = ms.init_mesh((-1,))
    extent = 64 if bench.quick else 1024
    WEIGHTS[extent] = torch.randn(extent, extent, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        missing = heat_error()
        other = joined(bench.folder)
        for name, n, *at in steps(extent):
            what = f"{name}, {n}x{n} a rank"
            calls = ways(bench, what, n, (at[0], at[1], at[2]), mesh, other, missing)
            count = (200 if n == 16 else 5) if not bench.quick else 2
            bench.compare(what, calls, floor="ours", count=count, extent=n)
        dist.destroy_process_group()
    mesh.free()
