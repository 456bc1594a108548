"""The command line: `mpishard info`, `mpishard ops` and `mpishard config`, also as `python -m mpishard ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status. Collective for ``info``, else not."""
    parser = argparse.ArgumentParser(prog="mpishard", description="Domain parallelism for torch on plain MPI.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="describe the job: ranks, GPUs, MPI; under mpiexec or srun, of all ranks")
    ops = commands.add_parser("ops", help="list the torch functions that run on sharded tensors")
    ops.add_argument("family", nargs="?", help="only this family: a folder such as window, or a file such as pool")
    ops.add_argument("--markdown", action="store_true", help="print the page docs/operations.md")
    ops.add_argument("--missing", action="store_true", help="list the functions without a rule instead")
    config = commands.add_parser(
        "config", help="compile the libraries for C and Fortran hosts, and say how to use them"
    )
    config.add_argument("--build", metavar="DIR", required=True, help="where they are, or go: compiled if not current")
    config.add_argument("--cflags", action="store_true", help="print what a compiler needs")
    config.add_argument("--libs", action="store_true", help="print what a linker needs")
    config.add_argument("--link", action="store_true", help="side by side alone: no Python in the program")
    given = parser.parse_args(arguments)
    if given.command == "info":
        from mpishard.comm.info import survey

        survey(lambda line: print(line, flush=True))
        return 0
    if given.command == "config":
        return _config(given.build, given.cflags, given.libs, given.link)
    return _ops(parser, given.family, given.markdown, given.missing)


def _config(folder: str, cflags: bool, libs: bool, link: bool) -> int:
    from mpishard.errors import MpishardError
    from mpishard.insitu.build import build

    try:
        built = build(folder, link=link)
    except MpishardError as error:
        print(error, file=sys.stderr)
        return 1
    if cflags or libs:
        print(*[built.cflags] * cflags, *[built.libs] * libs)
    return 0


def _ops(parser: argparse.ArgumentParser, family: str | None, markdown: bool, missing: bool) -> int:
    # torch takes a second to import: not for --help
    from mpishard.ops import op_table

    if markdown:
        print(*op_table.markdown(), sep="\n")
        return 0
    if missing:
        print(*op_table.uncovered(), sep="\n")
        return 0
    table = op_table.covered()
    families = sorted({c.family for c in table})
    if family is not None and not any(family in (f, *f.split("/")) for f in families):
        parser.error(f"no family {family!r}; there are {', '.join(families)}")
    for name, members in groupby(table, lambda c: c.family):
        if family in (None, name, *name.split("/")):
            print(f"{name}")
            for treatment, same in groupby(sorted(members, key=lambda c: c.treatment), lambda c: c.treatment):
                print(f"  {treatment:<10}{' '.join(sorted({c.name for c in same}))}")
    count = len({(place, c.name) for c in table for place in c.places})
    print(f"{count} functions have rules, {len(op_table.uncovered())} none")
    return 0
