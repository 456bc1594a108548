"""A queue that takes PBS scripts as PBS does, on this machine: what qsub refuses, what a job finds, what is left of it.

``python pbs.py FOLDER [qsub's arguments]`` is its qsub, which only queues; `drain` runs what is queued, one job at a
time. It is no PBS: it knows the directives below, and the rules of them that scripts must keep, as OpenPBS 23.06.06 has
them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Job(NamedTuple):
    """A job that ended; ``index`` is that of its array, or None."""

    number: int
    index: int | None
    code: int
    output: str
    directives: dict[str, str]


def directives_of(script: str) -> dict[str, str]:
    """What lines of #PBS say, up to the first command; raise ValueError where qsub would refuse them."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    for option in ("N", "A", "q", "J", "j", "r"):
        parser.add_argument(f"-{option}")
    parser.add_argument("-l", action="append", default=[])
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith("#PBS "):
            words += line.removeprefix("#PBS ").split()
        elif line.strip() and not line.startswith("#"):
            break
    known, rest = parser.parse_known_args(words)
    if rest:
        raise ValueError(f"unknown directives {rest}")
    found: dict[str, str] = {name: value for name, value in vars(known).items() if isinstance(value, str)}
    for resource in known.l:
        name, sign, value = resource.partition("=")
        if not sign or not value:
            raise ValueError(f"-l {resource}")
        found[name] = value
    if not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", found.get("walltime", "")):
        raise ValueError(f"walltime {found.get('walltime')}")
    if not re.fullmatch(r"[A-Za-z0-9_.+-]{1,230}", found.get("N", "")):
        raise ValueError(f"name {found.get('N')}")
    if "J" in found:
        span = re.fullmatch(r"(\d+)-(\d+)(:[1-9]\d*)?(%\d+)?", found["J"])
        if not span or int(span[1]) >= int(span[2]):
            raise ValueError(f"array {found['J']}")
        if found.get("r") == "n":
            raise ValueError("an array that cannot be run again")
    return found


def queued(folder: Path, arguments: list[str]) -> int:
    """Put a script, of a file or of standard input, into the queue, and return its number."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-v", default="")
    parser.add_argument("file", nargs="?", type=Path)
    known = parser.parse_args(arguments)
    script = sys.stdin.read() if known.file is None else known.file.read_text()
    directives = directives_of(script)
    number = len(list(folder.glob("*.SC"))) + 1
    (folder / f"{number}.SC").write_text(script)
    variables = dict(pair.partition("=")[::2] for pair in known.v.split(",") if pair)
    facts = {"directives": directives, "variables": variables, "workdir": os.getcwd()}
    (folder / f"{number}.json").write_text(json.dumps(facts))
    return number


def indices(array: str | None) -> list[int | None]:
    """The indices of an array, or one None."""
    if array is None:
        return [None]
    first, last, step = re.findall(r"\d+", array.partition("%")[0] + ":1")[:3]
    return list(range(int(first), int(last) + 1, int(step)))


def drain(folder: Path, run: Callable[..., tuple[int, str]]) -> list[Job]:
    """Run what is queued, and what that queues, each in what PBS gives a job; return the jobs in their order."""
    ended: list[Job] = []
    number = 1
    while (folder / f"{number}.SC").exists():
        assert number < 20, "jobs without end"
        facts = json.loads((folder / f"{number}.json").read_text())
        for index in indices(facts["directives"].get("J")):
            nodes = folder / f"{number}.nodes"
            select = facts["directives"]["select"]
            ranks = re.search(r"mpiprocs=(\d+)", select)
            # a line for each rank of each chunk
            lines = int(select.partition(":")[0]) * int(ranks[1] if ranks else 1)
            nodes.write_text(f"{socket.gethostname()}\n" * lines)
            home = folder / "home"
            home.mkdir(exist_ok=True)
            variables = {
                "PBS_ENVIRONMENT": "PBS_BATCH",
                "PBS_JOBID": f"{number}.pbs",
                "PBS_JOBNAME": facts["directives"]["N"],
                "PBS_NODEFILE": os.fspath(nodes),
                "PBS_O_WORKDIR": facts["workdir"],
                "HOME": os.fspath(home),
                **facts["variables"],
                **({} if index is None else {"PBS_ARRAY_INDEX": str(index)}),
            }
            code, output = run(folder / f"{number}.SC", home, variables)
            ended.append(Job(number, index, code, output, facts["directives"]))
        number += 1
    return ended


def installed(folder: Path) -> Path:
    """Return a folder for PATH that has this qsub."""
    place = folder / "bin"
    place.mkdir(parents=True)
    (place / "qsub").write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {folder} "$@"\n')
    (place / "qsub").chmod(0o755)
    return place


def main() -> int:
    try:
        print(f"{queued(Path(sys.argv[1]), sys.argv[2:])}.pbs")
    except (ValueError, argparse.ArgumentError, OSError) as error:
        print(f"qsub: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
