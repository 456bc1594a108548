"""`mpishard slurm`, `mpishard pbs` and `mpishard mpirun`: the scripts that start jobs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mpishard.errors import JobError
from mpishard.job import Request, rendered, site_named, site_names
from mpishard.job.request import joined

# the options of all three, and of those that have a queue
_QUEUED = (
    click.option("--site", default="generic-cpu", show_default=True, metavar="NAME", help="Where: see below."),
    click.option("--nodes", type=int, default=1, show_default=True, help="Nodes."),
    click.option("--gpus-per-node", type=int, default=None, help="GPUs of each node. [default: all the site's]"),
    click.option("--time", default="00:30:00", show_default=True, metavar="HH:MM:SS", help="How long it may take."),
    click.option("--job-name", default="mpishard", show_default=True, help="Its name in the queue."),
    click.option("--account", default="", help="The project that is charged."),
    click.option("--partition", default="", help="The partition, or queue."),
    click.option(
        "--max-requeues",
        type=int,
        default=None,
        help="Starts after the first, of a job that saved. [default: 10 with --checkpoints]",
    ),
    click.option("--array", default="", metavar="INDICES", help="Start it once per index, such as 0-9%2."),
)
_ALL = (
    click.option("--ranks-per-node", type=int, default=None, help="Ranks on each node. [default: one per GPU, or one]"),
    click.option("--cpus-per-rank", type=int, default=None, help="Cores, and threads, of a rank. [default: a share]"),
    click.option("--env", default="", metavar="ACTIVATE", help="A script, or virtual environment, to activate."),
    click.option("--checkpoints", default="", metavar="DIR", help="Where it saves: its MPISHARD_CHECKPOINTS."),
    click.option("--multi-prog", is_flag=True, help="COMMAND is several: -n 4 ./solver : -n 2 python model.py"),
    click.option("--container", default="", metavar="IMAGE", help="Run it in an image, with Apptainer."),
    click.option("--mesh", default="", metavar="EXTENTS", help="Check that ranks fit a mesh, such as 4x-1."),
    click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED),
)  # fmt: skip
_output = click.option("--output", type=click.Path(dir_okay=False), help="Write the script there; -: print it.")

_SITES = "\b\nSites (their facts and sources: mpishard/job/sites.toml):\n" + "\n".join(
    f"  {name:<16} {site_named(name).title}" for name in site_names()
)


def _with(*options: Any) -> Callable[[Any], Any]:
    def decorated(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorated


@click.group()
def slurm() -> None:
    """Write job scripts for Slurm, and submit them."""


@click.group()
def pbs() -> None:
    """Write job scripts for PBS."""


@click.group()
def mpirun() -> None:
    """Write scripts for one machine without a queue."""


@slurm.command("render", epilog=_SITES)
@_with(*_QUEUED, _output, *_ALL)
def slurm_render(output: str | None, **given: Any) -> None:
    """Print the job script that runs COMMAND.

    \b
    mpishard slurm render --site frontier --nodes 8 --account ABC123 --env env.sh \\
        --checkpoints ckpt -- python -u train.py > job.sh
    """
    _write(_script("slurm", given), output)


@slurm.command("submit", epilog=_SITES)
@click.option("--dry-run", is_flag=True, help="Only ask Slurm whether, and when, it would run: sbatch --test-only.")
@_with(*_QUEUED, _output, *_ALL)
def slurm_submit(dry_run: bool, output: str | None, **given: Any) -> int:
    """Hand the job script that runs COMMAND to sbatch; the exit code is sbatch's."""
    script = _script("slurm", given)
    if output is not None:
        _write(script, output)
    try:
        return subprocess.run(["sbatch", *["--test-only"] * dry_run], input=os.fsencode(script), check=False).returncode
    except FileNotFoundError:
        raise JobError(
            "no sbatch here",
            expected="a machine from which Slurm takes jobs",
            got="no program sbatch on PATH",
            fix="print the script with `mpishard slurm render`, and submit it from a login node",
        ) from None


@pbs.command("render", epilog=_SITES)
@_with(*_QUEUED, _output, *_ALL)
def pbs_render(output: str | None, **given: Any) -> None:
    """Print the job script that runs COMMAND.

    \b
    mpishard pbs render --site polaris --nodes 10 --account ABC123 --partition prod -- python train.py > job.sh
    """
    _write(_script("pbs", given), output)


@mpirun.command("render")
@_with(_output, *_ALL)
def mpirun_render(output: str | None, **given: Any) -> None:
    """Print a script that runs COMMAND on this machine.

    \b
    mpishard mpirun render --ranks-per-node 4 --env .venv -- python train.py > run.sh
    """
    _write(_script("mpirun", {"site": "generic-cpu", **given}), output)


def _script(scheduler: str, given: dict[str, Any]) -> str:
    words = {name: given.pop(name) for name in ("site", "mesh")}
    request = Request(site=site_named(words["site"]), scheduler=scheduler, mesh=_extents(words["mesh"]), **given)
    return rendered(request, _made_by())


def _extents(text: str) -> tuple[int, ...]:
    found = [word for word in re.split("[x, ]+", text) if word]
    if not all(re.fullmatch("-?[0-9]{1,18}", word) for word in found) or (text and not found):
        raise JobError("--mesh", expected="extents such as 4x2 or 4x-1", got=repr(text), fix="write numbers")
    return tuple(map(int, found))


def _made_by() -> str:
    """Return this command in one line, such that a shell would print the script with it."""
    words = list(click.get_current_context().obj)
    end = words.index("--") if "--" in words else len(words)
    options, rest = [w for w in words[:end] if w != "--dry-run"], words[end:]
    for i, word in enumerate(options):
        if word == "--output":
            del options[i : i + 2]
        elif word.startswith("--output="):
            del options[i]
    return joined(["mpishard", options[0], "render", *options[2:], *rest])


def _write(script: str, output: str | None) -> None:
    # bytes: a path need not be text
    data = os.fsencode(script)
    if output in (None, "-"):
        click.echo(data, nl=False)
        return
    try:
        Path(output).write_bytes(data)
        Path(output).chmod(0o755)
    except OSError as error:
        raise JobError("--output", expected="a file that can be written", got=error, fix="name another one") from None
