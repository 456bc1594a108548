"""Checkpoints: the state of a training program, saved from any mesh and loaded onto any other."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mpishard.autograd.argument import require, require_mesh, require_state
from mpishard.comm import counter, guard
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh
from mpishard.errors import FileError, LayoutError, MpishardError, UnsupportedOperationError
from mpishard.io.checkpoint import folder as folder_of
from mpishard.io.checkpoint.background import Saving, broadcast_text, finish, in_background
from mpishard.io.checkpoint.restore import Checkpoint, ReadRequest, apply, restored
from mpishard.io.checkpoint.snapshot import Snapshot, generators_hash, likely_mesh, snapshot, storable, without_rows
from mpishard.io.checkpoint.stages import Stages, stages_of
from mpishard.io.file.trust import absolute, require_text, told
from mpishard.io.write import write
from mpishard.tensor import ShardTensor


@counter.named("io.save_checkpoint")
def save_checkpoint(
    path: str | os.PathLike[str],
    step: int,
    *,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    tensors: Mapping[str, Any] | None = None,
    extra: Any = None,
    rng: bool = True,
    keep: int | None = 3,
    mesh: CartMesh | None = None,
    asynchronous: bool = False,
    backend: str | None = None,
) -> Saving:
    """Save the state of a training program, so that whatever ends the job, a complete checkpoint is there.

    Collective over the mesh. Nothing is pickled: tensors become HDF5 datasets (of global shape), the rest JSON.
    The checkpoint is written under a hidden name, opened again and checked, flushed to the disk and then renamed;
    only after that the oldest ones go. A folder belongs to the job that saves into it first, until its process ends
    (``.lock`` in it tells which). Of plain tensors (the parameters of `distribute_module`) those of rank 0 are saved.
    Of a `Pipeline` each stage saves its own, with its optimizer and the rest, all into one checkpoint.

    Parameters
    ----------
    path
        Folder of the checkpoints; made if it is missing. Every rank must see it.
    step
        Number of the step, >= 0: what to do next after loading.
    model, optimizer, scheduler
        Anything with ``state_dict`` and ``load_state_dict``.
    tensors
        Name -> tensor, sharded or plain: fields that belong to none of these.
    extra
        Anything else of numbers, strings, tensors, and dicts, lists and tuples of them, e.g. the state of a
        GradScaler or ``random.getstate()``. Of what is not sharded, that of rank 0: all ranks get it when they load.
    rng
        Whether to save torch's random generators, those of every rank.
    keep
        How many checkpoints stay; None: all. One that has lost its state or one of its files, or a part of them,
        does not count, and those that are older than it stay for it.
    mesh
        Needed where no tensor is sharded, and the model neither distributed by `distribute_module` nor a `Pipeline`.
    asynchronous
        Copy the state and return; the files are written in the background. The copy is the only extra memory (on
        each rank, of what it would write): the next save in this folder waits for this one. The background takes
        a sixteenth of a core of each rank, until something waits for it.
    backend
        As of `write`; not with ``asynchronous``.

    Returns
    -------
    Saving
        ``.path`` of the checkpoint; ``.wait()`` where it is asynchronous.

    Raises
    ------
    FileError
        It cannot be written (also: the asynchronous one before it could not), or another job, which the text
        names, saves into this folder. Older checkpoints stay as they are.
    MeshError
        Tensors on several meshes, or no mesh at all.
    MpishardError
        State that can only be pickled.

    Examples
    --------
    >>> ms.io.save_checkpoint("checkpoints", step, model=model, optimizer=optimizer, mesh=mesh)
    """
    error: Exception | None = None
    taken: Snapshot | None = None
    stages: Stages | None = None
    how = ""
    try:
        how = f"asynchronous={bool(asynchronous)} backend={backend}"
        if mesh is not None:
            require_mesh("save_checkpoint", mesh)
        stages = stages_of("save_checkpoint", model, mesh)
        _check_numbers(step, keep)
        require_state("save_checkpoint", model=model, optimizer=optimizer, scheduler=scheduler)
        if tensors is not None:
            require("save_checkpoint", "tensors", tensors, Mapping, "give {name: tensor}")
        if asynchronous and backend is not None:
            raise MpishardError(
                "save_checkpoint: backend and asynchronous=True",
                expected="one of them: in the background every rank writes a file of its own, without MPI",
                got=f"backend={backend!r}",
                fix="leave backend out",
            )
        if asynchronous:
            require_text(absolute(path), "save_checkpoint")
        sections = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        state = {name: thing.state_dict() for name, thing in sections.items() if thing is not None}
        if model is not None:
            # versions of the modules, which torch hangs on the dict
            state["metadata"] = getattr(state["model"], "_metadata", {})
        state |= {k: v for k, v in (("tensors", tensors), ("extra", extra)) if v is not None}
        taken = snapshot(absolute(path), step, keep, mesh, stages, rng, model, state)
    except Exception as e:  # noqa: BLE001 (Python's too, of other kinds of arguments)
        error = e
    # without one it is not known who the other ranks are
    if taken is not None:
        stages = taken.stages
    elif stages is None:
        stages = _likely("save_checkpoint", mesh, model, optimizer, tensors)
    if stages is None:
        assert error is not None
        raise error
    signature = ("save_checkpoint", "") if taken is None else taken.signature()
    stages.agree(error, f"{signature[0]} {how}", signature[1])
    assert taken is not None
    finish(taken.folder)
    hidden = ""
    if stages.group.rank == 0:
        try:
            hidden = folder_of.begin(taken.folder, step, stages)
        except Exception as e:  # noqa: BLE001 (the others wait for this rank)
            error = e if isinstance(e, MpishardError) else folder_of.unwritable(taken.folder, e)
    own = generators_hash(taken)
    if guard.agree(stages.group.comm, error, "", (own, -own)) == (own, -own):
        taken = without_rows(taken)
    taken = storable(taken._replace(hidden=broadcast_text(hidden, stages.group)))
    return in_background(taken) if asynchronous else Saving(taken, _saved(taken, backend))


def _likely(call: str, mesh: Any, model: Any, optimizer: Any, tensors: Any) -> Stages | None:
    try:
        stages = stages_of(call, model, mesh)
    except UnsupportedOperationError:
        # whatever this rank calls the mesh, the others wait on the pipeline's own
        return stages_of(call, model, None)
    found = likely_mesh(mesh, model, optimizer, tensors)
    return stages or (None if found is None else Stages(found))


def _saved(taken: Snapshot, backend: str | None) -> Path:
    stages, group = taken.stages, taken.group
    name = ""
    try:
        with _agreed(taken):
            if taken.tensors:
                write(taken.own / folder_of.TENSORS, taken.tensors, attrs={"step": taken.step}, backend=backend)
            sums = blocking.all_reduce(taken.shares(), group)
            if group.rank == 0:
                taken.complete(sums)
        with _agreed(taken):
            if stages.group.rank == 0:
                name = taken.commit().name
    except BaseException:
        if stages.group.rank == 0:
            folder_of.discard(taken.partial)
        raise
    return taken.folder / broadcast_text(name, stages.group)


@contextmanager
def _agreed(taken: Snapshot) -> Iterator[None]:
    """Raise on all ranks what happens on any. Collective."""
    error: MpishardError | None = None
    try:
        yield
    except Exception as e:  # noqa: BLE001 (the others wait for this rank)
        error = e if isinstance(e, MpishardError) else folder_of.unwritable(taken.folder, e)
    guard.agree(taken.stages.group.comm, error)


def _check_numbers(step: int, keep: int | None) -> None:
    if type(step) is not int or not 0 <= step < 1 << 63 or (keep is not None and (type(keep) is not int or keep < 1)):
        raise MpishardError(
            "save_checkpoint: step or keep",
            expected="step: an integer >= 0, below 2**63; keep: an integer >= 1, or None for all",
            got=f"step={_shown(step)}, keep={_shown(keep)}",
            fix="count steps from 0, and keep at least the checkpoint that is saved",
        )


def _shown(number: Any) -> str:
    # Python has no text of longer ones
    return f"an integer of {number.bit_length()} bits" if type(number) is int and number >= 1 << 63 else repr(number)


@counter.named("io.load_checkpoint")
def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    tensors: Mapping[str, Any] | None = None,
    placements: Any = None,
    rng: bool = True,
    step: int | None = None,
    fallback: bool = False,
    strict: bool = True,
    mesh: CartMesh | None = None,
) -> Checkpoint:
    """Load a checkpoint, from whatever mesh it was saved, after checking every tile of every tensor.

    Collective over the mesh. Each rank reads its own blocks of what is sharded; rank 0 reads what is not, and
    sends it. Nothing is changed before all of it is read and found right: in the meantime a rank holds, besides the
    model and the rest, what it has read for them. A file cannot run code: there is no pickle in it.

    Parameters
    ----------
    path
        Folder of the checkpoints.
    model, optimizer, scheduler
        What to load into. Their tensors decide how those of the file are laid out, be they sharded or plain.
    tensors
        Name -> ``(mesh, placements)``, a ShardTensor to be laid out like, or None for a plain tensor: which of
        ``tensors`` to read, and how. All of them, if not given. A checkpoint is loaded onto one mesh.
    placements
        Of all ``tensors`` that were sharded, instead; without either, along the dims that they were sharded along.
    rng
        Whether to set torch's random generators: on as many ranks as before every rank gets its own, else all get
        that of rank 0.
    step
        Which one; the latest, if not given.
    fallback
        Where a checkpoint is damaged, whatever is damaged, warn and try the one before it; where ``latest`` is, warn
        and begin with the highest step.
    strict
        As of `torch.nn.Module.load_state_dict`.
    mesh
        Needed where no tensor is sharded, and the model neither distributed by `distribute_module` nor a `Pipeline`.

    Returns
    -------
    Checkpoint
        ``.step``, ``.tensors``, ``.extra``, ``.path``, and ``.skipped`` if it fell back.

    Raises
    ------
    FileError
        There is none, or it is damaged (file, tensor and tile are named), or written by a newer version.
    LayoutError
        The model, optimizer or placements do not fit what was saved.
    MeshError
        Several meshes, or no mesh at all.

    Examples
    --------
    >>> start = ms.io.load_checkpoint("checkpoints", model=model, optimizer=optimizer, mesh=mesh).step
    """
    error: Exception | None = None
    wanted: ReadRequest | None = None
    stages: Stages | None = None
    folder = Path()
    how = signature = ""
    try:
        how = f" step={step} fallback={bool(fallback)}"
        if mesh is not None:
            require_mesh("load_checkpoint", mesh)
        stages = stages_of("load_checkpoint", model, mesh)
        require_state("load_checkpoint", model=model, optimizer=optimizer, scheduler=scheduler)
        if tensors is not None:
            require("load_checkpoint", "tensors", tensors, Mapping, "give {name: tensor}")
            _check_layouts(tensors)
        folder = absolute(path)
        own = mesh if stages is None else stages.own
        wanted = ReadRequest.of(model, optimizer, scheduler, tensors, placements, rng, strict, own)
        stages = stages or Stages(wanted.mesh)
        signature = wanted.signature()
    except Exception as e:  # noqa: BLE001 (Python's too, of other kinds of arguments)
        error = e
    # without one it is not known who the other ranks are
    stages = stages or _likely("load_checkpoint", mesh, model, optimizer, tensors)
    if stages is None:
        assert error is not None
        raise error
    group = stages.group
    stages.agree(error, f"load_checkpoint {told(path)}{how}", signature)
    assert wanted is not None
    finish(folder)
    names: list[str] = []
    if group.rank == 0:
        try:
            names = _candidates(folder, step, fallback)
        except Exception as e:  # noqa: BLE001 (the others wait for this rank; the user's filters make errors of warnings)
            error = e
    guard.agree(group.comm, error)
    names = broadcast_text("\n".join(names), group).split("\n")
    skipped: list[str] = []
    for i, name in enumerate(names):
        try:
            taken = restored(folder / name, wanted, stages)
        except FileError as e:
            if not fallback or i == len(names) - 1:
                raise guard.common(e, group.comm) from None
            skipped.append(str(e))
            if group.rank == 0:
                try:
                    warnings.warn(f"{e}\n  fallback: {names[i + 1]} instead", RuntimeWarning, stacklevel=2)
                except RuntimeWarning as raised:
                    error = raised
            guard.agree(group.comm, error)
            continue
        except LayoutError as e:
            raise guard.common(e, group.comm) from None
        try:
            apply(taken, wanted)
        except Exception as e:  # noqa: BLE001 (of a model's own load_state_dict; the others wait for this rank)
            error = e
        guard.agree(group.comm, error)
        return Checkpoint(folder / name, taken["step"], taken.get("tensors", {}), taken.get("extra"), tuple(skipped))
    raise AssertionError


def _check_layouts(tensors: Mapping[Any, Any]) -> None:
    """Raise where no layout is named: when a checkpoint is read, that would be told as damage of it."""
    for name, like in tensors.items():
        plain = isinstance(like, torch.Tensor) and not isinstance(like, ShardTensor)
        several = isinstance(like, (tuple, list))
        each = like if several else (like,)
        meshes = [isinstance(x, CartMesh) for x in each]
        if plain or (any(meshes) and not (type(like) is tuple and meshes == [True, False])):
            kinds = ", ".join(type(x).__name__ for x in each)
            raise LayoutError(
                f"load_checkpoint: tensors[{name!r}] names no layout",
                expected="(mesh, placements), a ShardTensor to be laid out like, or None for a plain tensor",
                got=f"{type(like).__name__} of {kinds}" if several else kinds,
                fix="give one of them",
            )


def _candidates(folder: Path, step: int | None, fallback: bool) -> list[str]:
    try:
        names, problem, gone = folder_of.look(folder)
    except OSError as e:
        raise _missing(folder, f"{type(e).__name__}: {e}", "give the folder that save_checkpoint was given") from e
    if not names:
        raise _missing(
            folder,
            "no such folder" if not folder.exists() else "no complete checkpoint in it",
            "check the path, and that every node sees it",
        )
    if problem is not None and step is None:
        # which one is the latest is not known
        if not fallback:
            fix = f"fallback=True takes the one of the highest step, {names[0]}; or remove {folder / folder_of.LATEST}"
            raise _missing(folder, problem, fix)
        warnings.warn(f"{folder}: {problem}\n  fallback: {names[0]}, of the highest step", RuntimeWarning, stacklevel=3)
    elif gone and step is None:
        text = f"{folder}: the latest checkpoints {', '.join(gone)} are not there any more; {names[0]} instead"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    if step is None:
        return names
    there = sorted({folder_of.step_of(name) for name in names})
    if step not in there:
        raise _missing(folder, f"step {step}", f"give one of {there}, or none for the latest")
    at = next(i for i, name in enumerate(names) if folder_of.step_of(name) == step)
    return names[at:]


def _missing(folder: Path, got: str, fix: str) -> FileError:
    return FileError(
        f"load_checkpoint: nothing to load in {os.fspath(folder)!r}",
        expected="a folder with a checkpoint of save_checkpoint",
        got=got,
        fix=fix,
    )
