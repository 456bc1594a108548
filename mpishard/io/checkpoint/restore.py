"""Reading a checkpoint back: which tensor goes where, and whether it is what was written."""

from __future__ import annotations

import json
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
from mpishard.errors import FileError, LayoutError, MpishardError, described
from mpishard.io.checkpoint.background import broadcast_text
from mpishard.io.checkpoint.checksum import tile_sums, wrong_tile
from mpishard.io.checkpoint.folder import TENSORS, damaged, read_state
from mpishard.io.checkpoint.snapshot import stored_dtype, the_mesh
from mpishard.io.checkpoint.state import DTYPES, Keys, decode
from mpishard.io.file.dtype import NUMPY
from mpishard.io.file.open import opened
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
class Wanted:
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
    ) -> Wanted:
        """Gather what the arguments say. Not collective."""
        current = {} if model is None else dict(model.state_dict())
        groups = getattr(optimizer, "param_groups", [])
        params = [p for group in groups for p in group["params"]]
        given = [x[0] if type(x) is tuple and x and isinstance(x[0], CartMesh) else x for x in (tensors or {}).values()]
        meshes = {id(m): m for m in given if isinstance(m, CartMesh)}
        if mesh is None and len(meshes) == 1:
            mesh = next(iter(meshes.values()))
        mesh = the_mesh("load_checkpoint", mesh, [*current.values(), *params, *given])
        return cls(mesh, model, optimizer, scheduler, tensors, placements, rng, strict, current, params)

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
        if self.tensors is not None:
            lacking += [f"tensors[{name!r}]" for name in self.tensors if name not in fields]
            fields = {name: fields[name] for name in self.tensors if name in fields}
        if lacking:
            raise FileError(
                described(
                    f"load_checkpoint: {path} does not have {', '.join(lacking)}",
                    expected=f"some of {', '.join([*tree, *tree.get('tensors', {})])}",
                    got=", ".join(lacking),
                    fix="load only what was saved",
                )
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
        missing = [k for k in self.current if k not in tree["model"]]
        unexpected = [k for k in tree["model"] if k not in self.current]
        if missing or unexpected:
            raise LayoutError(
                described(
                    f"load_checkpoint: {path} is of another model",
                    expected=f"the parameters and buffers of this one; not in the file: {missing or 'none'}",
                    got=f"in the file only: {unexpected or 'none'}",
                    fix="load the model that was saved, or use strict=False",
                )
            )

    def _check_optimizer(self, tree: Mapping[str, Any], path: Path) -> None:
        if not self.params:
            return
        saved = [len(group["params"]) for group in tree["optimizer"]["param_groups"]]
        own = [len(group["params"]) for group in self.optimizer.param_groups]
        if saved != own:
            raise LayoutError(
                described(
                    f"load_checkpoint: {path} is of another optimizer",
                    expected=f"groups of {own} parameters",
                    got=f"groups of {saved}",
                    fix="make the optimizer as it was made when it was saved",
                )
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
        if section == "optimizer" and keys[1] == "state" and self.params:
            p = self.params[keys[2]]
            fits = tuple(p.shape) == shape and (shape or sharded is not None)
            return p.layout if fits and isinstance(p, ShardTensor) else None
        if section == "rng":
            rows = shape[0] == mesh.size
            return layout_of(mesh.shape, [Shard(0)] * mesh.ndim, shape, {0: (1,) * mesh.size}) if rows else None
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
        same = len(sharded) == mesh.ndim
        own = [Replicate() if d is None or not same else Shard(d) for d in (sharded if same else mesh.shape)]
        return layout_of(mesh.shape, own, shape)

    def _like(self, keys: Keys, current: Any, shape: tuple[int, ...]) -> Layout | None:
        if not isinstance(current, Tensor) or torch.nn.parameter.is_lazy(current):
            return None
        if tuple(current.shape) != shape:
            raise LayoutError(
                described(
                    f"load_checkpoint: {'/'.join(map(str, keys))} has another shape",
                    expected=tuple(current.shape),
                    got=f"{shape} in the file",
                    fix="make the model as it was made when it was saved",
                )
            )
        return _without_partial(keys, current.layout) if isinstance(current, ShardTensor) else None


def _without_partial(keys: Keys, layout: Layout) -> Layout:
    if layout.partial_dims:
        raise LayoutError(
            described(
                f"load_checkpoint: {'/'.join(map(str, keys))} cannot be read as a Partial",
                expected="Shard(dim) or Replicate() for every mesh dim",
                got=layout.placements,
                fix="use Replicate() where every rank shall have the whole",
            )
        )
    return layout


def restored(path: Path, wanted: Wanted) -> dict[str, Any]:
    """Read the wanted state of one checkpoint. Collective.

    Raises
    ------
    FileError
        It is damaged, or lacks what is wanted; on every rank.
    LayoutError
        It does not fit; on every rank.
    """
    mesh = wanted.mesh
    group = mesh.group(tuple(range(mesh.ndim)))
    error: MpishardError | None = None
    file: Any = None
    text = ""
    if group.rank == 0:
        try:
            state = read_state(path)
            text = json.dumps(state)
            if state.get("tensors"):
                file = opened(path / TENSORS)
        except FileError as e:
            error = damaged(path, str(e)) if "load_checkpoint" not in str(e) else e
    try:
        guard.agree(group.comm, error)
        return _decoded(path, broadcast_text(text, group), file, wanted, group)
    finally:
        if file is not None:
            file.close()


def _decoded(path: Path, text: str, file: Any, wanted: Wanted, group: Any) -> dict[str, Any]:
    state = json.loads(text)
    try:
        infos, tree = state["tensors"], wanted.sections(state["state"], path)
        step = int(state["step"])

        def tensor(name: str, keys: Keys) -> Tensor:
            info = infos[name]
            shape, dtype = tuple(map(int, info["shape"])), DTYPES[info["dtype"]]
            layout = wanted.place(keys, shape, info["sharded"])
            if layout is None:
                x: Any = _plain(path, file, name, shape, dtype, info["checksums"], wanted.mesh, group)
            else:
                x = _sharded(path, name, layout, dtype, info["checksums"], wanted.mesh, group)
            return x if layout is not None or keys[0] != "tensors" else x.to(wanted.mesh.device)

        found: dict[str, Any] = {key: decode(value, (key,), tensor) for key, value in tree.items()}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
        if isinstance(e, MpishardError):
            raise
        raise damaged(path, f"its state cannot be understood ({type(e).__name__}: {e})") from e
    return found | {"step": step}


def _plain(
    path: Path, file: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, sums: str, mesh: CartMesh, group: Any
) -> Tensor:
    stored = stored_dtype(dtype)
    error: MpishardError | None = None
    x = torch.empty(shape, dtype=stored)
    if group.rank == 0:
        try:
            dataset: Any = None if file is None else file.get(name)
            if getattr(dataset, "shape", None) != shape or dataset.dtype != np.dtype(NUMPY[stored]):
                raise damaged(path, f"no dataset {name!r} of shape {shape} and {stored}")
            if x.numel():
                dataset.read_direct(x.numpy())
            wrong = wrong_tile(tile_sums(x, replicated_layout(mesh, shape), mesh.coords), sums, shape, stored)
            if wrong is not None:
                raise damaged(path, f"{name!r} is not what was written: {wrong}")
        except FileError as e:
            error = e
        except (OSError, RuntimeError) as e:
            error = damaged(path, f"{name!r}: {type(e).__name__}: {e}")
    guard.agree(group.comm, error)
    return blocking.broadcast(x, group, 0, in_place=True).view(dtype)


def _sharded(
    path: Path, name: str, layout: Layout, dtype: torch.dtype, sums: str, mesh: CartMesh, group: Any
) -> ShardTensor:
    stored = stored_dtype(dtype)
    sizes = {d: s for d, s in enumerate(layout.sizes) if s is not None}
    x = read(path / TENSORS, name, mesh, layout.placements, sizes=sizes)
    error: MpishardError | None = None
    if tuple(x.shape) != layout.shape or x.dtype != stored:
        error = damaged(path, f"{name!r} has shape {tuple(x.shape)} and {x.dtype}, not {layout.shape} and {stored}")
    guard.agree(group.comm, error)
    # every copy of the whole is checked by the ranks that hold it together
    found = tile_sums(x._local, layout, mesh.coords)
    if layout.sharded_mesh_dims:
        found = blocking.all_reduce(found, mesh.group(layout.sharded_mesh_dims))
    wrong = wrong_tile(found, sums, layout.shape, stored)
    if wrong is not None:
        error = damaged(path, f"{name!r} is not what was written: {wrong}")
    guard.agree(group.comm, error)
    return wrap(x._local.view(dtype), layout, mesh)


def apply(found: dict[str, Any], wanted: Wanted) -> None:
    """Give the model, the optimizer, the scheduler and the generators their state. Collective."""
    if wanted.model is not None:
        state = OrderedDict(found["model"])
        if "metadata" in found:
            state._metadata = found["metadata"]  # type: ignore[attr-defined]
        wanted.model.load_state_dict(state, strict=wanted.strict)
    for key, thing in (("optimizer", wanted.optimizer), ("scheduler", wanted.scheduler)):
        if thing is not None:
            thing.load_state_dict(found[key])
    for kind, x in found.get("rng", {}).items():
        own = (x._local if isinstance(x, ShardTensor) else x)[0].cpu()
        if kind == "cpu":
            torch.set_rng_state(own)
        elif kind == "cuda" and wanted.mesh.device.type == "cuda":
            torch.cuda.set_rng_state(own, wanted.mesh.device)
