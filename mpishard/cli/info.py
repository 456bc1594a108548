"""`mpishard info`: the job that it is started in."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from mpishard.comm.preflight import Finding

_COLOURS = {"ok": "green", "note": "yellow", "broken": "red"}


@click.command()
@click.option("--check", is_flag=True, help="Check what the job promises; exit code 1 where it is not kept.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--output", default=".", metavar="DIR", show_default=True, help="With --check: the folder to write to.")
def info(check: bool, as_json: bool, output: str) -> int:
    """Describe the job: versions, MPI, who is where, GPUs. Collective.

    Start it as the job's program is started, under srun or mpiexec; alone it describes this machine.

    \b
    srun --mpi=pmix -n 64 mpishard info --check --output results
    """
    if check:
        return 0 if checked(output, as_json) else 1
    from mpishard.comm.info import described_job, survey

    if as_json:
        job = described_job()
        if job is not None:
            click.echo(json.dumps(job, indent=1))
        return 0
    survey(click.echo)
    return 0


def checked(output: str, as_json: bool) -> bool:
    """Check the job, tell on rank 0, and return on every rank whether it may start. Collective."""
    from mpishard.comm.preflight import preflight

    report = preflight(output)
    if report.first:
        if as_json:
            click.echo(json.dumps({"ok": report.ok, "findings": [f._asdict() for f in report.findings]}, indent=1))
        else:
            _show(report.findings)
            click.echo("the job keeps its promises" if report.ok else "broken promises: see the advice above")
    return report.ok


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "", "found", "advice", show_lines=True)
    for finding in findings:
        # what was found may have brackets, which are rich's own in a str
        cells = (Text(text, overflow="fold") for text in (finding.found, finding.advice))
        table.add_row(finding.check, Text(finding.state, _COLOURS[finding.state]), *cells)
    Console().print(table)
