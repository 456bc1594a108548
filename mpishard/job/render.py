"""From a request to a script: the templates beside this file, filled in with quoted words only."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jinja2

from mpishard.job.request import Program, Request, joined, quoted

# what a container needs to reach the GPUs of a vendor
_CONTAINER_FLAGS = {"nvidia": ("--nv",), "amd": ("--rocm",)}


def rendered(request: Request, made_by: str) -> str:
    """Return the script of a job. Not collective.

    Parameters
    ----------
    request
        The job.
    made_by
        The command that asks for it, in one line: the script begins with it.

    Raises
    ------
    JobError
        The job cannot run on its site.
    """
    request.check()
    fact = request.site.fact
    programs = [Program(p.ranks, _contained(request, p.command)) for p in request.programs]
    last = [sum(p.ranks for p in programs[: i + 1]) - 1 for i in range(len(programs))]
    return (
        _templates()
        .get_template(f"{request.scheduler}.sh")
        .render(
            job=request,
            fact=fact,
            made_by=made_by,
            programs=programs,
            # rank numbers of each program, as srun's --multi-prog takes them
            numbers=[f"{end - p.ranks + 1}-{end}" for p, end in zip(programs, last)],
            options=_OPTIONS[request.scheduler](request),
            partition=request.partition or fact("partition", ""),
            env=_path(request.env),
            variables=fact("variables", {}) if request.gpus else {},
            modules=fact("modules", []) if request.gpus else [],
        )
    )


def _srun(request: Request) -> list[str]:
    fact, gpus = request.site.fact, request.gpus > 0
    given = {"mpi": fact("mpi"), "gpu-bind": gpus and fact("gpu_bind"), "cpu-bind": request.cpu_bind}
    return [*(f"--{name}={value}" for name, value in given.items() if value), "--kill-on-bad-exit=1"]


def _pals(request: Request) -> list[str]:
    if request.site.fact("launcher") != "pals":
        return []
    bind = ["--cpu-bind", request.cpu_bind] if request.cpu_bind else []
    return ["--ppn", str(request.ranks_on_node), "--depth", str(request.cpus), *bind]


_OPTIONS: dict[str, Callable[[Request], list[str]]] = {"slurm": _srun, "pbs": _pals, "mpirun": lambda _: []}


def _contained(request: Request, command: tuple[str, ...]) -> tuple[str, ...]:
    if not request.container:
        return command
    flags = _CONTAINER_FLAGS.get(str(request.site.fact("gpu_vendor")), ()) if request.gpus else ()
    return ("apptainer", "exec", *flags, _path(request.container), *command)


def _path(text: str) -> str:
    # a word without a slash would be looked for along PATH, and one that begins with - is an option
    return f"./{text}" if text and ("/" not in text or text.startswith("-")) else text


def _directive(word: Any) -> str:
    """Return a value as Slurm reads it behind #SBATCH: quotes, and a backslash before each of them."""
    text = str(word).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"' if text != word or not text.replace("-", "").replace("_", "").isalnum() else text


@lru_cache(1)
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mpishard.job", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # scripts, not pages: words are quoted for bash by the filters below
        autoescape=False,
    )
    environment.filters.update(quoted=quoted, joined=joined, directive=_directive)
    return environment
