"""What is planned for a mesh, against real steps on it: messages, bytes, memory, time.

Every rank plans its own part of the job (machine `local`), then all do it. Messages and bytes must be the same, memory
within 10 %. Time: the rank's own work with messages to nobody, plus what messages take by the latency and bandwidth of
a ring, against the real step, in interleaved rounds; ranks that share cores share them in both.
"""

from __future__ import annotations

import os
import sys

from mpi4py import MPI
from torch import nn

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench, interleaved
from mpishard.planning.local import local_machine
from mpishard.planning.mesh import mesh_on
from mpishard.planning.predict import trace
from mpishard.planning.step import Program, step_on
from mpishard.planning.timeline import run as play

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "examples"))
from unet import UNet


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.GELU())])


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)


def cases(quick: bool) -> dict[str, Program]:
    side = 1 if quick else 2
    return {
        "U-Net, 3-D": Program(UNet, (1, 1, *[16 * side] * 3), (2, 3, 4), optimizer="adam"),
        "4 convolutions, 2-D": Program(convolutions, (1, 8, 128 * side, 128 * side), (2, 3)),
        "transformer layer": Program(attention, (1, 256 * side, 64), (1,), optimizer="adamw"),
    }


def run(bench: Bench) -> None:
    """Plan every program, and run it."""
    machine = local_machine()
    for name, program in cases(bench.quick).items():
        for extents in [(WORLD.size,)] + [(2, WORLD.size // 2)] * (WORLD.size == 4 and len(program.dims) > 1):
            mesh = ms.init_mesh(extents, device="cpu")
            planned = trace(program, extents, mesh.coords, "cpu")
            with ms.testing.LiveMemory() as live:
                real = step_on(mesh, program)
                real()
                with ms.comm_counter() as count:
                    real()
            by_op = {op: (c.calls, c.messages, c.nbytes) for op, c in sorted(count.by_op.items())}
            alone = mesh_on("cpu", extents, coords=mesh.coords)
            times = interleaved({"real": real, "own": step_on(alone, program)}, 2, bench.rounds)
            parts = play(machine, planned.events)
            waits = WORLD.allreduce(parts.halo + parts.reductions, MPI.MAX)
            what = f"{name} on {'x'.join(map(str, extents))}"
            steps = {"real": times["real"], "planned": [own + waits for own in times["own"]]}
            bench.add(f"step, {what}", steps, floor="real")
            most = WORLD.allreduce(planned.memory / live.peak, MPI.MAX)
            bench.figure(f"planned memory, {what}", most, "of the real one", "largest rank")
            if WORLD.allreduce(by_op == planned.by_op, MPI.LAND):
                bench.figure(f"planned messages, {what}", count.messages, "messages, as in the real one", "rank 0")
            else:
                bench.failed(f"planned messages, {what}", "rank 0", f"planned {planned.by_op}, but {by_op}")
            alone.free()
            mesh.free()
