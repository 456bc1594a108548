"""`mpishard plan`: what a step of a model would cost on any number of ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from mpishard.errors import JobError

if TYPE_CHECKING:
    from mpishard.planning import Plan

_COLUMNS = 4  # of a table, in 80 letters
_DTYPES = ("float32", "float64", "bfloat16", "float16")

_MACHINES = "List the published machines, and where their numbers are from."


def _machines(context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    from mpishard.planning import machine_named, machine_names

    for name in machine_names():
        found = machine_named(name)
        click.echo(name)
        for key, source in found.sources.items():
            click.echo(f"  {key:<20}{source}")
    context.exit()


@click.command()
@click.option("--shape", required=True, metavar="EXTENTS", help="Of the input, global: 1x1x4096x4096x4096.")
@click.option("--ranks", metavar="P[,P...]", help="Numbers of ranks; the best mesh of each is looked for.")
@click.option("--mesh", metavar="EXTENTS", help="Extents of the mesh instead: 64x32x32.")
@click.option("--dims", metavar="DIMS", help="Tensor dims that are sharded: 2,3,4.  [default: all of space]")
@click.option("--machine", default="perlmutter", show_default=True, help="A name, FILE.toml[:NAME], or local.")
@click.option(
    "--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True, help="Of input and parameters."
)
@click.option(
    "--optimizer", type=click.Choice(["sgd", "adam", "adamw", "none"]), default="sgd", show_default=True,
    help="none: forward alone.",
)  # fmt: skip
@click.option("--loss", metavar="SPEC", help="MODULE:FUNCTION of the output.  [default: the mean of its squares]")
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="Argument of the model; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", metavar="FILE", help="Draw efficiency over ranks, from 1 to the largest (needs matplotlib).")
@click.option("--machines", is_flag=True, is_eager=True, expose_value=False, callback=_machines, help=_MACHINES)
@click.argument("model", metavar="MODULE:FACTORY")
def plan(
    model: str,
    shape: str,
    ranks: str | None,
    mesh: str | None,
    dims: str | None,
    machine: str,
    dtype: str,
    optimizer: str,
    loss: str | None,
    options: Sequence[str],
    as_json: bool,
    plot: str | None,
) -> None:
    """Predict a step of a model on any number of ranks: memory, messages, reductions, time, and what limits it.

    The package's planners and rules run in this process, without values, as one rank in the middle of the mesh.

    \b
    mpishard plan examples/unet.py:UNet --shape 1x1x4096x4096x4096 --ranks 512,4096,65536
    mpishard plan model.py:make --option width=64 --shape 1x4x8192x8192 --mesh 32x32 --machine frontier
    mpiexec -n 4 mpishard plan model.py:make --shape 1x4x1024x1024 --mesh 2x2 --machine local
    """
    if (ranks is None) == (mesh is None):
        raise click.UsageError("give either --ranks or --mesh")
    # torch takes a second to import: not for --help
    import torch

    from mpishard.comm.collective.blocking import world
    from mpishard.planning import plan as planned
    from mpishard.planning import powers, sweep
    from mpishard.planning.figure import draw
    from mpishard.planning.model import named

    torch.set_num_threads(1)
    given = {
        "dims": None if dims is None else _numbers("--dims", dims),
        "machine": machine,
        "dtype": getattr(torch, dtype),
        "optimizer": None if optimizer == "none" else optimizer,
        "loss": None if loss is None else named(loss, what="the loss").func,  # type: ignore[attr-defined]
    }
    make, extents = named(model, options), _numbers("--shape", shape)
    if mesh is not None:
        plans = [planned(make, extents, mesh=_numbers("--mesh", mesh), **given)]
    else:
        plans = [*sweep(make, extents, _numbers("--ranks", ranks or ""), **given)]
    first = world().rank == 0
    if first and as_json:
        click.echo(json.dumps([p.as_dict() for p in plans], indent=1))
    elif first:
        _show(plans)
    if plot:
        sizes = powers(max(p.ranks for p in plans), extents, given["dims"])
        drawn = [*sweep(make, extents, sizes, **given)]
        if first:
            draw(drawn, plot)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,18}([x,]\d{1,18})*", text):
        raise JobError(option, expected="numbers such as 4x2 or 4,2", got=repr(text), fix="write numbers")
    return tuple(map(int, re.split("[x,]", text)))


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def _show(plans: Sequence[Plan]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    for some in (plans[i : i + _COLUMNS] for i in range(0, len(plans), _COLUMNS)):
        table = Table(title=f"a step of one rank, predicted for {escape(plans[0].machine)}")
        table.add_column("ranks")
        for p in some:
            table.add_column(f"{p.ranks:,}", justify="right")
        rows = [_row(p) for p in some]
        for name in rows[0]:
            table.add_row(name, *(row[name] for row in rows))
        Console().print(table)
    for p in plans:
        if not p.fits:
            click.echo(f"{p.ranks} ranks: {_bytes(p.memory)} do not fit in {_bytes(p.available)}: take more ranks")


def _row(p: Plan) -> dict[str, str]:
    shares = {name: f"{100 * part / p.seconds:.0f} %" for name, part in p.parts._asdict().items()}
    shares[p.limit] = f"[bold]{shares[p.limit]}[/bold]"
    return {
        "mesh": "x".join(map(str, p.mesh)),
        "block": "x".join(map(str, p.block)),
        "memory": _bytes(p.memory) if p.fits else f"[red]{_bytes(p.memory)}[/red]",
        "sends": _bytes(p.nbytes),
        "messages": str(p.messages),
        "exchanges": str(p.exchanges),
        "reductions": str(p.reductions),
        "step": f"{1e3 * p.seconds:.3g} ms",
        **{f"  {name}": text for name, text in shares.items()},
        "efficiency": f"{p.efficiency:.2f}",
    }
