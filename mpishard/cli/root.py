"""The command `mpishard` itself: its help, its exit codes, and what it does when nobody reads any more."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence

import click

from mpishard.cli.bench import bench
from mpishard.cli.config import config
from mpishard.cli.info import info
from mpishard.cli.job import mpirun, pbs, slurm
from mpishard.cli.ops import ops
from mpishard.cli.plan import plan
from mpishard.cli.run import run
from mpishard.comm import exit
from mpishard.errors import JobError, MpishardError


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="""\b
First steps:
  mpiexec -n 4 mpishard info --check              can this job run as it should?
  mpiexec -n 4 python -m mpishard run train.py    a script on 4 ranks; one that fails ends all
  mpishard ops conv2d                             what an operation does with a sharded dim
  mpishard plan net.py:Net --shape 1x1x512x512x512 --ranks 64    memory, messages and time on 64 ranks
  mpishard slurm render --nodes 2 --ranks-per-node 4 -- python train.py > job.sh
  eval "$(mpishard completion bash)"              completion, in this shell

\b
Exit codes: 0 all is well; 1 a check failed, or a command could not do its work;
2 wrong use; a program that `run` or a job starts has its own.
""",
)
@click.version_option(package_name="mpishard", prog_name="mpishard", message="%(prog)s %(version)s")
def root() -> None:
    """Domain parallelism for torch on plain MPI: one sample, sharded over many ranks.

    A program says `import mpishard as ms`, makes a mesh of ranks with `ms.init_mesh`, and shards its tensors on it.
    These commands look at a job, at what is covered, and write the scripts that start it.
    """


@root.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what completes commands and options in a shell: eval "$(mpishard completion bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is not None:
        click.echo(kind(root, {}, "mpishard", "_MPISHARD_COMPLETE").source())


for _command in (bench, config, info, mpirun, ops, pbs, plan, run, slurm):
    root.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status. Collective for ``bench``, ``info`` and ``run``, else not."""
    if "_MPISHARD_COMPLETE" in os.environ and arguments is None:
        # the shell asks what may come next; click answers and leaves
        root.main(prog_name="mpishard", complete_var="_MPISHARD_COMPLETE")
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = root.main(args=words, prog_name="mpishard", standalone_mode=False, obj=words)
        if sys.stdout is not None:  # as it is where a shell has closed it
            sys.stdout.flush()
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        exit.say_for_node(text.getvalue())
        raise SystemExit(error.exit_code) from None
    except click.Abort:
        return 130
    except MpishardError as error:
        exit.say_for_node(f"mpishard: {error}\n")
        return 2 if isinstance(error, JobError) else 1
    except OSError as error:
        left = isinstance(error, BrokenPipeError)
        if not left and (error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or not exit.alone()):
            # in a job this ends the others, too
            raise
        if not left:
            click.echo(f"mpishard: {error.strerror}: not all of the output is written", err=True)
        # as click and rich do where they write: `| head` has read enough, and what is left must not fail at the end
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status or 0
