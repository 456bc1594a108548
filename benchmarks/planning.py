"""What is planned for a mesh, against real steps on it: messages, bytes, memory, time.

    mpiexec -n 4 python benchmarks/planning.py

Every rank plans its own part of the job (machine `local`), then all do it. Messages and bytes must be the same, memory
within 10 %. Time: the rank's own work with messages to nobody, plus what messages take by the latency and bandwidth of
a ring, against the real step, in interleaved rounds; ranks that share cores share them in both.
"""

from __future__ import annotations

import os
import statistics
import sys

from mpi4py import MPI
from timing import WORLD, interleaved, options, say
from torch import nn

import mpishard as ms
from mpishard.planning.local import local_machine
from mpishard.planning.mesh import mesh_on
from mpishard.planning.predict import trace
from mpishard.planning.step import Program, step_on
from mpishard.planning.timeline import run

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


def main() -> None:
    args = options(__doc__)
    machine = local_machine()
    say(
        f"latency {1e6 * machine.latency:.1f} us, {machine.network_bandwidth / 1e9:.1f} GB/s; of the host an operation "
        f"{1e6 * machine.operation:.1f} us, an exchange or collective {1e6 * machine.exchange:.0f} us"
    )
    say(f"{'step':<24}{'mesh':>8}{'messages':>10}{'bytes':>12}{'memory MB':>18}{'time ms':>20}{'ratio':>7}")
    for name, program in cases(args.quick).items():
        for extents in [(WORLD.size,)] + [(2, WORLD.size // 2)] * (WORLD.size == 4 and len(program.dims) > 1):
            mesh = ms.init_mesh(extents, device="cpu")
            planned = trace(program, extents, mesh.coords, "cpu")
            with ms.testing.LiveMemory() as live:
                real = step_on(mesh, program)
                real()
                with ms.comm_counter() as count:
                    real()
            by_op = {op: (c.calls, c.messages, c.nbytes) for op, c in sorted(count.by_op.items())}
            same = WORLD.allreduce(by_op == planned.by_op, MPI.LAND)
            memory = (
                WORLD.allreduce(planned.memory / live.peak, MPI.MAX),
                WORLD.allreduce(planned.memory / live.peak, MPI.MIN),
            )
            alone = mesh_on("cpu", extents, coords=mesh.coords)
            times = interleaved({"real": real, "own": step_on(alone, program)}, 2, args.rounds)
            parts = run(machine, planned.events)
            waits = WORLD.allreduce(parts.halo + parts.reductions, MPI.MAX)
            ratio = statistics.median((own + waits) / t for own, t in zip(times["own"], times["real"]))
            told = [1e3 * statistics.median(times[k]) for k in ("own", "real")]
            messages, shape = count.messages if same else "DIFFER", "x".join(map(str, extents))
            say(
                f"{name:<24}{shape:>8}{messages:>10}{count.nbytes:>12}"
                f"{planned.memory / 1e6:>8.2f} ({memory[1]:.2f}-{memory[0]:.2f})"
                f"{told[0] + 1e3 * waits:>9.1f} / {told[1]:.1f}{ratio:>8.2f}"
            )
            alone.free()
            mesh.free()


if __name__ == "__main__":
    main()
