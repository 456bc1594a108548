"""Learning on line, to be seen: a solver on four ranks, beside it a model on two that learns what the solver gives it.

    python examples/online_demo.py                     # about two minutes on 2 cores; also: make demo-insitu
    python examples/online_demo.py --solver numpy      # without a Fortran compiler

The solver is online_solver.f90, compiled with the mpif90 of the MPI library that starts the job; where there is none
that works, online_solver.py does the same. jobs/online_closure.sbatch is the same under Slurm.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="of the coarse run")
    parser.add_argument("--window", type=int, default=100, help="steps after which the coarse runs begin anew")
    parser.add_argument("--cells", type=int, default=64, help="of the coarse run, per dim; the fine one has four times")
    parser.add_argument("--ranks", type=int, nargs=2, default=(4, 2), metavar=("SOLVER", "MODEL"))
    parser.add_argument("--solver", choices=("auto", "fortran", "numpy"), default="auto")
    parser.add_argument(
        "--mpiexec", default=os.environ.get("MPIEXEC"), help="launcher; $MPIEXEC, or Python's, or PATH's"
    )
    parser.add_argument("--build", type=Path, default=Path("build/insitu"), help="folder of what is compiled")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the figure")
    parser.add_argument("--multi-prog", action="store_true", help="print what srun --multi-prog wants, and end")
    return parser.parse_args()


def compiled(mpiexec: str, folder: Path) -> Path:
    """Return the solver in Fortran, or say why it cannot be had."""
    launcher = shutil.which(mpiexec)
    # compiled for another MPI library, its ranks would not find each other
    wrappers = {n: Path(launcher or "/").with_name(w) for n, w in (("MPICC", "mpicc"), ("MPIFC", "mpif90"))}
    for path in wrappers.values():
        if not path.exists():
            raise RuntimeError(f"no {path.name} beside {launcher}")
    environment = {**os.environ, **{name: shlex.quote(os.fspath(path)) for name, path in wrappers.items()}}

    def ran(command: list[str]) -> str:
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}:\n{done.stderr}")
        return done.stdout

    built = folder / "mpishard"
    flags = ran([sys.executable, "-m", "mpishard", "config", "--cflags", "--libs", "--build", os.fspath(built)])
    program = folder.resolve() / "online_solver"
    source = os.fspath(HERE / "online_solver.f90")
    ran([os.fspath(wrappers["MPIFC"]), "-O2", source, *shlex.split(flags), "-o", os.fspath(program)])
    return program


def main() -> int:
    args = arguments()
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = shlex.split(args.mpiexec or os.fspath(beside if beside.exists() else "mpiexec"))
    solver = [sys.executable, os.fspath(HERE / "online_solver.py")]
    if args.solver != "numpy":
        try:
            solver = [os.fspath(compiled(mpiexec[0], args.build))]
        except RuntimeError as error:
            if args.solver == "fortran":
                raise SystemExit(f"online_demo: the solver was not compiled: {error}") from None
            reason = str(error).splitlines()[0]
            print(
                f"No Fortran compiler for this MPI ({reason}): the solver runs in numpy.", file=sys.stderr, flush=True
            )
    solver += [str(n) for n in (args.steps, args.window, args.cells)]
    model = [sys.executable, os.fspath(HERE / "online_model.py"), str(args.steps), str(args.cells)]
    model += ["--out", os.fspath(args.out)]
    if args.multi_prog:
        a, b = args.ranks
        print(f"0-{a - 1} {shlex.join(solver)}", f"{a}-{a + b - 1} {shlex.join(model)}", sep="\n")
        return 0
    environment = {
        # ranks beyond the cores leave these to the ones that work
        "OMP_NUM_THREADS": "1",
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "100",
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **os.environ,
    }
    parts = [["-n", str(n), *words] for n, words in zip(args.ranks, (solver, model), strict=True)]
    return subprocess.call([*mpiexec, *parts[0], ":", *parts[1]], env=environment)


if __name__ == "__main__":
    sys.exit(main())
