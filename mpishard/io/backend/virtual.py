"""Back-end virtual: files of 64 ranks each, and a small file that shows them as whole datasets; without MPI-IO."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.comm.collective.gather_slabs import cells_of
from mpishard.io.backend.job import FAILURES, Job, finish
from mpishard.io.backend.part import Part, Planned, lay_out, make_folders
from mpishard.io.file.close import empty, made
from mpishard.io.file.open import LIBVER
from mpishard.io.file.parts import LAYOUTS, Parts, Plan, folders_of, part_folders, show, show_boxes, tell, writes
from mpishard.io.file.room import check_room, hold
from mpishard.io.file.schema import Schema, Variable, create, dataset_in
from mpishard.layout import without_partial


def write_virtual(job: Job) -> str:
    """Write the blocks to files in a folder beside, one of 64 ranks each, and the file that joins them.

    Collective. The folder goes where the file goes. Returns the mode in which cells were written.
    """
    rank, plan = job.group.rank, Plan.of(job.group.size)
    done, own = False, contextlib.ExitStack()
    try:
        planned = _planned(job)
        _on(job, rank == 0, lambda: own.enter_context(_made(job.parts, plan)))
        _on(job, plan.turn(rank) == 0, lambda: lay_out(job.parts, rank, plan, planned.values(), job.locking))
        scalars = _write(job, planned, plan)
        whole = [(name, p.variable.dtype, Parts(p.layout, job.parts.name, plan)) for name, p in planned.items()]
        if any(len(parts.boxes()) > 1 for _, _, parts in whole):
            _on(job, True, lambda: [job.settle(at) for at in show_boxes(job.parts, rank, whole)])
        _on(job, rank == 0, lambda: _join(job, plan, {name: parts for name, _, parts in whole}, scalars))
        done = True
    finally:
        with own:
            if rank == 0:
                job.discard()
                if not done:
                    shutil.rmtree(job.parts, ignore_errors=True)
    return f"a file per {plan.per_file} ranks"


@contextlib.contextmanager
def _made(folder: Path, plan: Plan) -> Iterator[None]:
    """Make the folder of the ranks' files, and hold it: until the file has its name, nothing else tells whose it is."""
    make_folders(folder, plan)
    with _held(folder, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def _held(folder: Path, how: int) -> Iterator[bool]:
    """Lock a folder, and tell whether nobody else holds it; where folders have no locks nobody does."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        free = True
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:
            free = True
        yield free
    finally:
        os.close(fd)


def _on(job: Job, mine: bool, call: Any) -> None:
    """Call on some ranks, and raise on all where one raised. Collective."""
    with job.together():
        if mine:
            call()


def _planned(job: Job) -> dict[str, Planned]:
    """Return what is written by ranks: Partial tensors are summed before."""
    variables = {v.name: v for v in job.form.variables}
    out = {}
    for name, x in job.tensors.items():
        out[name] = Planned(variables[name], without_partial(x.sharding))
    return out


def _write(job: Job, planned: dict[str, Planned], plan: Plan) -> dict[str, Any]:
    """Write this rank's blocks, and return the tensors that are scalars. Collective."""
    rank, scalars = job.group.rank, {}
    part, error = Part(job.parts, rank, plan, job.locking), None
    for name, layout, local in job.blocks():
        if error is not None or not writes(layout, job.tensors[name].mesh.coords):
            continue
        try:
            if local.ndim == 0:
                scalars[name] = cells_of(local, (), ()).numpy()[()]
            elif planned[name].is_plain:
                part.write({name: local})
            else:
                part.filter(name, planned[name].variable, local)
        except FAILURES as e:
            error = e
            empty(part.path)
    job.agree(error)
    try:
        if not all(p.is_plain for p in planned.values()):
            for turn in range(min(plan.per_file, plan.size)):
                _on(job, plan.turn(rank) == turn, part.copy)
    finally:
        part.close()
    job.agree(job.lost[0] if job.lost else None)
    with job.together():
        job.settle(part.path)
    return scalars


def prune(path: Path, replaced: Collection[str] = ()) -> None:
    """Remove the folders of ranks' files of the file that was ``replaced``, and those that no file ever joined.

    Not collective; one rank. All others stay: a file that has another name by now may join them. Other jobs may write
    files of this name: a folder that one is writing is locked, and one that is locked no more is looked for in the file
    that is there then.
    """
    for name in folders_of(path):
        folder = path.with_name(name)
        # of a damaged file h5py raises anything
        with contextlib.suppress(Exception), _held(folder, fcntl.LOCK_EX) as free:
            lost = name in replaced or not os.path.lexists(folder / LAYOUTS)
            if free and lost and name not in part_folders(path):
                shutil.rmtree(folder, ignore_errors=True)


def _join(job: Job, plan: Plan, parts: dict[str, Parts], scalars: dict[str, Any]) -> None:
    def lay(file: Any, form: Schema) -> list[Any]:
        def make(v: Variable) -> Any:
            if v.name in scalars:
                return file.create_dataset(v.name, data=np.asarray(scalars[v.name], v.dtype))
            if 0 in v.shape:
                return dataset_in(file, v)
            return show(file, v.name, v.dtype, parts[v.name])

        return create(file, form, make)

    most = check_room(job.path, job.form, lay=lay)
    with made(job.partial, libver=LIBVER, locking=job.locking) as file:
        hold(file, most)
        _held = lay(file, job.form)
    if job.lost:
        raise job.lost[0]
    # last: a folder without it never had a file
    tell(job.parts, plan, parts)
    job.settle(job.parts / LAYOUTS)
    job.settle(job.parts)
    finish(job)
