"""Reading a checkpoint back: which tensor goes where, and whether it is what was written."""

from __future__ import annotations

import contextlib
import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh
from mpishard.errors import FileError, LayoutError, MpishardError, UnsupportedDtypeError, typed_text
from mpishard.io.checkpoint.background import broadcast_text
from mpishard.io.checkpoint.checksum import first_wrong_cells, tile_count, tile_sums, wrong_tile
from mpishard.io.checkpoint.folder import TENSORS, damaged, read_state
from mpishard.io.checkpoint.snapshot import lie_as_parameters, own_generators, rows_of, stored_dtype, the_mesh
from mpishard.io.checkpoint.stages import Stages
from mpishard.io.checkpoint.state import DTYPES, Keys, decode, encode, items
from mpishard.io.file.dtype import NUMPY, plain_bools
from mpishard.io.file.open import check_sources, found, opened
from mpishard.io.file.parts import files_at, narrowed
from mpishard.io.file.trust import check_memory, shown
from mpishard.io.read import read
from mpishard.layout import Layout, Replicate, Shard, layout_of
from mpishard.tensor import ShardTensor, wrap
from mpishard.tensor.operand import replicated_layout


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` found.

    Attributes
    ----------
    path
        The checkpoint.
    step
        As it was saved.
    tensors
        Name -> tensor.
    extra
        As it was saved.
    skipped
        Why newer checkpoints were not taken (``fallback=True``).
    """

    path: Path
    step: int
    tensors: dict[str, Any]
    extra: Any = None
    skipped: tuple[str, ...] = ()


@dataclass
class ReadRequest:
    """What to read, and where each tensor goes."""

    mesh: CartMesh
    model: torch.nn.Module | None
    optimizer: Any
    scheduler: Any
    tensors: Mapping[str, Any] | None
    placements: Any
    rng: bool
    strict: bool
    current: dict[str, Any]
    params: list[Any]

    @classmethod
    def of(
        cls,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        tensors: Mapping[str, Any] | None,
        placements: Any,
        rng: bool,
        strict: bool,
        mesh: CartMesh | None,
    ) -> ReadRequest:
        """Gather what the arguments say. Not collective."""
        current = {} if model is None else dict(model.state_dict())
        groups = getattr(optimizer, "param_groups", [])
        params = [p for group in groups for p in group["params"]]
        given = [x[0] if type(x) is tuple and x and isinstance(x[0], CartMesh) else x for x in (tensors or {}).values()]
        mesh = the_mesh("load_checkpoint", mesh, [*current.values(), *params, *given], model)
        return cls(mesh, model, optimizer, scheduler, tensors, placements, rng, strict, current, params)

    def signature(self) -> str:
        """Return what the ranks must have in common. Not collective."""
        parts = [x is not None for x in (self.model, self.optimizer, self.scheduler)]
        tensors = None if self.tensors is None else {name: _told(spec) for name, spec in self.tensors.items()}
        options = f"{parts} tensors={tensors} placements={self.placements} rng={self.rng} strict={self.strict}"
        # what is read, and what does not fit, is decided by these between what the ranks do together
        own = {name: _told(x) if isinstance(x, Tensor) else "" for name, x in self.current.items()}
        groups = [[*map(_told, group["params"])] for group in getattr(self.optimizer, "param_groups", [])]
        return f"{options} into {own}, optimizer of {groups}"

    def sections(self, tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """Return the parts of the state that are wanted.

        Not collective.

        Raises
        ------
        FileError
            It has no such part.
        LayoutError
            It has other parameters.
        """
        named = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        wanted = [key for key, thing in named.items() if thing is not None]
        lacking = [key for key in wanted if key not in tree]
        fields = tree.get("tensors", {})
        there = items(path, fields)
        if self.tensors is not None:
            lacking += [f"tensors[{name!r}]" for name in self.tensors if name not in there]
            own = [name for name in self.tensors if name in there]
            fields = {"$dict": [[encode(name, ("tensors",), {}), there[name]] for name in own]}
        if lacking:
            raise FileError(
                f"load_checkpoint: {path} does not have {', '.join(lacking)}",
                expected=f"some of {', '.join([*tree, *map(str, there)])}",
                got=", ".join(lacking),
                fix="load only what was saved",
            )
        self._check_model(tree, path)
        self._check_optimizer(tree, path)
        if self.model is not None and "metadata" in tree:
            wanted.append("metadata")
        if self.rng and "rng" in tree:
            wanted.append("rng")
        return {key: tree[key] for key in [*wanted, *(["extra"] if "extra" in tree else [])]} | {"tensors": fields}

    def _check_model(self, tree: Mapping[str, Any], path: Path) -> None:
        if self.model is None or not self.strict:
            return
        there = items(path, tree["model"])
        missing = [k for k in self.current if k not in there]
        unexpected = [k for k in there if k not in self.current]
        if missing or unexpected:
            raise LayoutError(
                f"load_checkpoint: {path} is of another model",
                expected=f"the parameters and buffers of this one; not in the file: {missing or 'none'}",
                got=f"in the file only: {unexpected or 'none'}",
                fix="load the model that was saved, or use strict=False",
            )

    def _check_optimizer(self, tree: Mapping[str, Any], path: Path) -> None:
        if not self.params:
            return
        groups = items(path, tree["optimizer"])["param_groups"]
        saved = [len(items(path, group)["params"]) for group in groups]
        own = [len(group["params"]) for group in self.optimizer.param_groups]
        if saved != own:
            raise LayoutError(
                f"load_checkpoint: {path} is of another optimizer",
                expected=f"groups of {own} parameters",
                got=f"groups of {saved}",
                fix="make the optimizer as it was made when it was saved",
            )

    def place(self, keys: Keys, shape: tuple[int, ...], sharded: Sequence[int | None] | None) -> Layout | None:
        """Return the layout that a tensor is read in, None where every rank gets a plain one.

        Not collective.

        Parameters
        ----------
        keys
            Where it lies in the state.
        shape
            Global shape.
        sharded
            What was sharded when it was saved: the tensor dim per mesh dim, or None.

        Raises
        ------
        LayoutError
            It does not fit.
        """
        mesh, section = self.mesh, keys[0]
        if section == "model":
            return self._like(keys, self.current.get(keys[1]), shape)
        if section == "optimizer" and keys[1] == "state" and self.params and type(keys[2]) is int:
            p = self.params[keys[2]]
            fits = tuple(p.shape) == shape and (shape or sharded is not None)
            return p.sharding if fits and isinstance(p, ShardTensor) else None
        if section == "rng":
            return rows_of(mesh, shape) if sharded is not None and shape[0] == mesh.size else None
        if section == "tensors":
            if self.tensors is None:
                spec = None if sharded is None else self.placements
            else:
                spec = self.tensors[keys[1]]
                if spec is None:
                    return None
            if isinstance(spec, ShardTensor):
                return self._like(keys, spec, shape)
            if type(spec) is tuple and spec and isinstance(spec[0], CartMesh):
                spec = spec[1]
            if spec is not None:
                return _without_partial(keys, layout_of(mesh.shape, spec, shape))
        if sharded is None:
            return None
        own = list(sharded)
        if len(own) != mesh.ndim:  # the last one along all mesh dims that are left
            cut = [d for d in dict.fromkeys(own) if d is not None]
            own = [*cut, *cut[-1:] * mesh.ndim, *[None] * mesh.ndim][: mesh.ndim]
        return layout_of(mesh.shape, [Replicate() if d is None else Shard(d) for d in own], shape)

    def _like(self, keys: Keys, current: Any, shape: tuple[int, ...]) -> Layout | None:
        if not isinstance(current, Tensor) or torch.nn.parameter.is_lazy(current):
            return None
        if tuple(current.shape) != shape:
            raise LayoutError(
                f"load_checkpoint: {'/'.join(map(str, keys))} has another shape",
                expected=tuple(current.shape),
                got=f"{shape} in the file",
                fix="make the model as it was made when it was saved",
            )
        return _without_partial(keys, current.sharding) if isinstance(current, ShardTensor) else None


def _told(spec: Any) -> str:
    if isinstance(spec, Tensor):
        lazy = torch.nn.parameter.is_lazy(spec)
        return repr(spec.sharding) if isinstance(spec, ShardTensor) else "lazy" if lazy else str(tuple(spec.shape))
    return repr(spec[1:] if type(spec) is tuple and spec and isinstance(spec[0], CartMesh) else spec)


def _without_partial(keys: Keys, layout: Layout) -> Layout:
    if layout.partial_dims:
        raise LayoutError(
            f"load_checkpoint: {'/'.join(map(str, keys))} cannot be read as a Partial",
            expected="Shard(dim) or Replicate() for every mesh dim",
            got=layout.placements,
            fix="use Replicate() where every rank shall have the whole",
        )
    return layout


def restored(checkpoint: Path, wanted: ReadRequest, stages: Stages) -> dict[str, Any]:
    """Read the wanted state of one checkpoint, and check that all of it can be taken. Collective.

    Raises
    ------
    FileError
        It is damaged, or lacks what is wanted; on every rank.
    LayoutError
        It does not fit; on every rank.
    """
    if not stages.count:
        return _restored(checkpoint, wanted, stages)
    error: MpishardError | None = None
    taken: dict[str, Any] = {}
    save = ""
    if stages.group.rank == 0:
        try:
            save = stages.check(checkpoint, read_state(checkpoint))
        except Exception as e:  # noqa: BLE001 (the others wait for this rank)
            error = e if isinstance(e, MpishardError) else damaged(checkpoint, typed_text(e))
    guard.agree(stages.group.comm, error)
    save = broadcast_text(save, stages.group)
    try:
        taken = _restored(stages.folder(checkpoint), wanted, stages, save)
    except MpishardError as e:
        error = e
    guard.agree(stages.group.comm, error)
    return taken


def _restored(path: Path, wanted: ReadRequest, whole: Stages, save: str | None = None) -> dict[str, Any]:
    """Read what lies in one folder, for a stage that of a ``save``. Collective over the mesh of what is wanted."""
    mesh = wanted.mesh
    group = mesh.all_ranks
    error: MpishardError | None = None
    file: Any = None
    text = ""
    if group.rank == 0:
        try:
            state = read_state(path)
            if save is None:
                whole.check(path, state)
            elif odd := whole.odd_part(state, save):
                raise damaged(path, odd)
            text = json.dumps(state)
            if state.get("tensors"):
                file = opened(path / TENSORS)
        except LayoutError as e:
            error = e
        except FileError as e:
            error = damaged(path, str(e)) if "load_checkpoint" not in str(e) else e
        except Exception as e:  # noqa: BLE001 (the others wait for this rank)
            error = damaged(path, typed_text(e))
    try:
        guard.agree(group.comm, error)
        taken = _decoded(path, broadcast_text(text, group), file, wanted, group)
        try:
            check_fits(path, taken, wanted)
        except (FileError, LayoutError) as e:
            error = e
        except Exception as e:  # noqa: BLE001 (what a state makes an optimizer raise)
            error = damaged(path, f"its state cannot be taken ({typed_text(e)})")
        guard.agree(group.comm, error)
        return taken
    finally:
        if file is not None:
            file.close()


class _Info:
    """What a state says of a tensor, checked: it may be forged."""

    def __init__(self, path: Path, name: Any, told: Any) -> None:
        try:
            shape, self.dtype = tuple(told["shape"]), DTYPES[told["dtype"]]
            self.sharded, self.sums = told["sharded"], told["checksums"]
            counts = all(type(n) is int and 0 <= n < 1 << 60 for n in shape) and len(shape) <= 32
            dims = self.sharded is None or all(
                d is None or (type(d) is int and 0 <= d < len(shape)) for d in self.sharded
            )
            right = counts and dims and isinstance(name, str) and isinstance(self.sums, str)
        except (KeyError, TypeError) as e:
            raise damaged(path, f"what it says of {shown(name)} cannot be understood ({e!r})") from e
        self.shape, self.stored = shape, stored_dtype(self.dtype)
        # so a shape is no larger than its text of checksums: memory is taken by it
        if not right or len(self.sums) != 16 * tile_count(shape, self.stored):
            raise damaged(path, f"what it says of {shown(name)} does not fit together")


def _decoded(path: Path, text: str, file: Any, wanted: ReadRequest, group: Any) -> dict[str, Any]:
    state = json.loads(text)
    taken: set[str] = set()
    try:
        infos, tree = state["tensors"], wanted.sections(state["state"], path)
        step = int(state["step"])
        if "rng" in tree:
            tree["rng"] = own_generators(tree["rng"], state.get("ranks") == wanted.mesh.size)

        def tensor(name: str, keys: Keys) -> Tensor:
            if name in taken:
                raise damaged(path, f"it names the tensor {shown(name)} twice")
            taken.add(name)
            info = _Info(path, name, infos[name])
            layout = wanted.place(keys, info.shape, info.sharded)
            if layout is None:
                x: Any = _plain(path, file, name, info, wanted.mesh, group)
            else:
                x = _sharded(path, name, info, layout, wanted.mesh, group)
            return x if layout is not None or keys[0] != "tensors" else x.to(wanted.mesh.device)

        given: dict[str, Any] = {key: decode(value, (key,), tensor) for key, value in tree.items()}
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as e:
        if isinstance(e, MpishardError):
            raise
        raise damaged(path, f"its state cannot be understood ({typed_text(e)})") from e
    return given | {"step": step}


def _plain(path: Path, file: Any, name: str, info: _Info, mesh: CartMesh, group: Any) -> Tensor:
    error: MpishardError | None = None
    x = torch.empty(0, device="cpu")
    try:
        check_memory(math.prod(info.shape) * info.stored.itemsize, f"load_checkpoint: {name!r}")
        x = torch.empty(info.shape, dtype=info.stored, device="cpu")
        if group.rank == 0:
            dataset: Any = None if file is None else found(file, path / TENSORS, name)
            if getattr(dataset, "shape", None) != info.shape or dataset.dtype != np.dtype(NUMPY[info.stored]):
                raise damaged(path, f"{TENSORS}: no dataset {name!r} of shape {info.shape} and {info.stored}")
            dataset = narrowed(dataset, path / TENSORS, [(0, n) for n in info.shape])
            check_sources(dataset, path / TENSORS)
            if x.numel():
                dataset.read_direct(x.numpy())
            sums = tile_sums(x, replicated_layout(mesh, info.shape), mesh.coords)
            error = _wrong(path, name, info, sums)
            plain_bools(x)
    except FileError as e:
        error = e if "load_checkpoint" in str(e) else damaged(path, str(e))
    except Exception as e:  # noqa: BLE001 (of a damaged file h5py raises anything)
        error = damaged(path, f"{TENSORS}: {name!r}: {typed_text(e)}")
    guard.agree(group.comm, error)
    return blocking.broadcast(x, group, 0, in_place=True).view(info.dtype)


def _sharded(path: Path, name: str, info: _Info, layout: Layout, mesh: CartMesh, group: Any) -> ShardTensor:
    sizes = {d: s for d, s in enumerate(layout.sizes) if s is not None}
    try:
        x = read(path / TENSORS, name, mesh, layout.placements, sizes=sizes)
    except (FileError, LayoutError, UnsupportedDtypeError) as e:
        # on all ranks: what is in the file is not what its state says
        raise damaged(path, str(e)) from None
    error: MpishardError | None = None
    if tuple(x.shape) != info.shape or x.dtype != info.stored:
        got = f"has shape {tuple(x.shape)} and {x.dtype}, not {info.shape} and {info.stored}"
        error = damaged(path, f"{TENSORS}: {name!r} {got}")
    guard.agree(group.comm, error)
    # every copy of the whole is checked by the ranks that hold it together
    sums = tile_sums(x.block, layout, mesh.coords)
    if layout.sharded_mesh_dims:
        sums = blocking.all_reduce(sums, mesh.group(layout.sharded_mesh_dims))
    guard.agree(group.comm, _wrong(path, name, info, sums))
    return wrap(x.block.view(info.dtype), layout, mesh)


def _wrong(path: Path, name: str, info: _Info, sums: Tensor) -> MpishardError | None:
    """Return the error of a tensor whose checksums are not those that were saved, with the file that it lies in."""
    wrong = wrong_tile(sums, info.sums, info.shape, info.stored)
    if wrong is None:
        return None
    files = TENSORS
    cells = first_wrong_cells(sums, info.sums, info.shape, info.stored)
    if cells is not None:
        files = _files_of(path, name, cells)
    return damaged(path, f"{files}: {name!r} is not what was written: {wrong}")


def _files_of(path: Path, name: str, cells: tuple[int, int]) -> str:
    """Return the names of the files that hold some cells, in row-major order, of a tensor."""
    files: list[str] = []
    with contextlib.suppress(Exception), opened(path / TENSORS) as file:  # the error that is told is another one
        dataset = found(file, path / TENSORS, name)
        files = files_at(dataset, path / TENSORS, cells)
    more = f" and {len(files) - 4} more" if len(files) > 4 else ""
    return f"{TENSORS} ({', '.join(files[:4])}{more})" if files else TENSORS


def check_fits(path: Path, taken: dict[str, Any], wanted: ReadRequest) -> None:
    """Look whether all that was read can be given to what it is for, before any of it is. Not collective.

    Raises
    ------
    Exception
        It cannot; of any kind, where an optimizer finds that out.
    """
    if wanted.model is not None:
        plain = [k for k, v in wanted.current.items() if isinstance(v, Tensor) and k in taken["model"]]
        odd = [k for k in plain if not isinstance(taken["model"][k], Tensor)]
        modules = taken.get("metadata", {})
        if odd or not all(isinstance(v, dict) for v in (modules, *modules.values())):
            raise damaged(path, f"its model has no tensor {odd[0]!r}" if odd else "its model's versions are none")
    if isinstance(wanted.optimizer, torch.optim.Optimizer):
        # its own checks, on a copy that shares all but what is loaded
        trial: Any = object.__new__(type(wanted.optimizer))
        hooks: dict[str, Any] = {k: OrderedDict() for k in vars(wanted.optimizer) if k.endswith("_post_hooks")}
        vars(trial).update(vars(wanted.optimizer) | hooks)
        trial.load_state_dict(taken["optimizer"])
    if wanted.scheduler is not None:
        own = wanted.scheduler.state_dict()
        for key, value in taken["scheduler"].items():
            # load_state_dict sets every attribute that it is told
            other = hasattr(wanted.scheduler, key) if key not in own else not _is_like(value, own[key])
            if other:
                raise damaged(path, f"its scheduler's {shown(key)} is {shown(value)}")
    for kind, x in taken.get("rng", {}).items():
        if kind == "cpu" or (kind == "cuda" and wanted.mesh.device.type == "cuda"):
            torch.Generator(wanted.mesh.device if kind == "cuda" else "cpu").set_state(_own_row(x))


def _is_like(value: Any, own: Any) -> bool:
    if value is None or own is None:
        return True
    kind = (int, float) if isinstance(own, (int, float)) else list if isinstance(own, (list, tuple)) else type(own)
    return isinstance(value, kind) or (kind is list and isinstance(value, tuple))


def _own_row(x: Any) -> Tensor:
    row: Tensor = (x.block if isinstance(x, ShardTensor) else x)[0].cpu()
    return row


def apply(found: dict[str, Any], wanted: ReadRequest) -> None:
    """Give the model, the optimizer, the scheduler and the generators their state. Collective."""
    if wanted.model is not None:
        state = OrderedDict(found["model"])
        if "metadata" in found:
            state._metadata = found["metadata"]  # type: ignore[attr-defined]
        # other things with a state dict need not know of it
        options = {"strict": wanted.strict} if isinstance(wanted.model, torch.nn.Module) else {}
        wanted.model.load_state_dict(state, **options)
    for key, thing in (("optimizer", wanted.optimizer), ("scheduler", wanted.scheduler)):
        if thing is not None:
            thing.load_state_dict(found[key])
    lie_as_parameters(wanted.optimizer)
    for kind, x in found.get("rng", {}).items():
        own = _own_row(x)
        if kind == "cpu":
            torch.set_rng_state(own)
        elif kind == "cuda" and wanted.mesh.device.type == "cuda":
            torch.cuda.set_rng_state(own, wanted.mesh.device)
