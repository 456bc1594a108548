"""`mpishard run`: a script on all ranks, which ends the job where one of them fails."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import TracebackType

import click


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--check", is_flag=True, help="First check the job, as `mpishard info --check` does; end it if it fails.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as behind python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(check: bool, module: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT on every rank of the job, under srun or mpiexec. Collective.

    An uncaught error on one rank prints its traceback and ends the whole job; sys.exit, with any status, ends that
    rank alone. Where OMP_NUM_THREADS is not set, the
    ranks of a node share its cores; where nothing is said of malloc, memory that arrays free stays the process's.

    \b
    srun --mpi=pmix -n 64 python -m mpishard run --check train.py --epochs 3
    """
    if not module and not Path(script).is_file():
        raise click.UsageError(f"no file {script!r}")
    from mpishard.comm import exit, threads
    from mpishard.comm.memory import heap

    exit.install()
    threads.share_cores()
    heap.keep_freed()
    if check:
        from mpishard.cli.info import checked

        if not checked(".", as_json=False):
            raise SystemExit(1)
    sys.argv[:] = [script, *arguments]
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.fspath(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 (whatever it is, the script's traceback is told, and the job ends)
        # Python's own hook shows the error's, whatever it is given
        trace = _of_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that started the script."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        inner = inner.tb_next
    return inner
