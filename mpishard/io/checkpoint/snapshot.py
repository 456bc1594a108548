"""What a checkpoint holds: the state of the training program, cut into named tensors and JSON."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.argument import require, require_mesh, valueless
from mpishard.autograd.replica import meshes_of
from mpishard.comm.memory.buffer import unfit
from mpishard.comm.mesh import CartMesh, Group
from mpishard.errors import MeshError, MpishardError
from mpishard.io.checkpoint import folder as folder_of
from mpishard.io.checkpoint.checksum import tile_count, tile_sums, to_text
from mpishard.io.checkpoint.stages import Stages
from mpishard.io.checkpoint.state import encode
from mpishard.io.file.dtype import NUMPY
from mpishard.io.file.open import import_h5py, opened, source_name
from mpishard.io.file.parts import gives, parts_of
from mpishard.layout import Layout, Shard, layout_of
from mpishard.tensor import ShardTensor, wrap
from mpishard.tensor.function import block_of
from mpishard.tensor.operand import replicated_layout, resolved

# of the generators: that of rank 0
FIRST = "first "
# the bits of what HDF5 has no type for are stored as integers of the same length; so were those of these
_NEW = {torch.uint16, torch.uint32, torch.uint64}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor has in the file. Not collective."""
    return dtype if dtype in NUMPY and dtype not in _NEW else _BITS[dtype.itemsize]


class Snapshot(NamedTuple):
    """A checkpoint on its way to the disk.

    Attributes
    ----------
    mesh
        Ranks of the tensors: all that save, or those of a pipeline's stage.
    folder, step, keep
        As given to `save_checkpoint`.
    stages
        All that save, and which of several stages these ranks have.
    hidden
        Name of the folder in it that the checkpoint is written in; empty until that is made.
    tree
        Everything but the tensors, in JSON's types.
    tensors
        Name in the file -> tensor, in a dtype that the file knows. A plain one is replicated.
    info
        Name -> what the file says of it.
    """

    mesh: CartMesh
    folder: Path
    step: int
    keep: int | None
    stages: Stages
    hidden: str
    tree: dict[str, Any]
    tensors: dict[str, ShardTensor]
    info: dict[str, dict[str, Any]]

    @property
    def partial(self) -> Path:
        """The hidden folder in which it is written."""
        return self.folder / self.hidden

    @property
    def own(self) -> Path:
        """The folder in it of these ranks."""
        return self.stages.folder(self.partial)

    @property
    def group(self) -> Group:
        """Ranks of the tensors."""
        return self.mesh.all_ranks

    def signature(self) -> tuple[str, str]:
        """Return what all ranks must have in common, and what those of a stage. Not collective."""
        return f"save_checkpoint {self.step} {self.folder} keep={self.keep}", f" {[*self.tree]} {self.info}"

    def shares(self, pause: Callable[[], object] = lambda: None) -> Tensor:
        """Return this rank's shares of all checksums, one after the other. Not collective."""
        parts = [
            tile_sums(x.block, x.sharding, self.mesh.coords, pause)
            if gives(x.sharding, self.mesh.coords)
            else torch.zeros(len_of(x), dtype=torch.int64, device="cpu")
            for x in self.tensors.values()
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device="cpu")

    def complete(self, sums: Tensor) -> None:
        """Write what is missing in the folder of these ranks, and verify all of it. For one rank; not collective."""
        parts = sums.split([len_of(x) for x in self.tensors.values()]) if self.tensors else ()
        info = {name: {**i, "checksums": to_text(part)} for (name, i), part in zip(self.info.items(), parts)}
        part = {"stage": self.stages.index} if self.stages.count else {}
        self._write_state(self.own, self.mesh, **part, state=self.tree, tensors=info)
        if self.tensors:
            verify(self.own, self.tensors)

    def commit(self) -> Path:
        """Give the checkpoint its name, when all stages are complete. For one rank; not collective."""
        if self.stages.count:
            self._write_state(self.partial, self.stages.mesh, stages=self.stages.count)
        return folder_of.commit(self.partial, self.step, self.keep)

    def _write_state(self, folder: Path, mesh: CartMesh, **state: Any) -> None:
        files = folder_of.sizes(folder)
        # the same in the folders of all stages, and in no other checkpoint
        save = hashlib.blake2b(self.hidden.encode(), digest_size=8).hexdigest()
        folder_of.write_state(folder, {"step": self.step, "save": save, "ranks": mesh.size, **state, "files": files})
        folder_of.read_state(folder)


def len_of(x: ShardTensor) -> int:
    """Return the number of tiles of a tensor. Not collective."""
    return tile_count(tuple(x.shape), x.dtype)


def snapshot(
    folder: Path,
    step: int,
    keep: int | None,
    mesh: CartMesh | None,
    stages: Stages | None,
    rng: bool,
    model: Any,
    sections: Mapping[str, Any],
) -> Snapshot:
    """Cut the state into tensors and JSON; nothing is copied. Not collective.

    Raises
    ------
    MeshError
        Tensors on several meshes, or none given and nothing sharded.
    MpishardError
        Something that cannot be stored.
    """
    plain: dict[str, Tensor] = {}
    tree = {key: encode(value, (key,), plain) for key, value in sections.items()}
    mesh = the_mesh("save_checkpoint", mesh if stages is None else stages.own, plain.values(), model)
    if rng:
        tree["rng"] = encode(generators(mesh), ("rng",), plain)
    tensors: dict[str, ShardTensor] = {}
    info: dict[str, dict[str, Any]] = {}
    x: Any
    for name, x in plain.items():
        sharded = isinstance(x, ShardTensor)
        block = x.block if sharded else x
        if odd := unfit(block) or valueless(block):
            got, fix = odd
            raise MpishardError(
                f"save_checkpoint: {name} cannot be stored", expected="a dense tensor with values", got=got, fix=fix
            )
        dims = [p.dim if isinstance(p, Shard) else None for p in x.sharding.placements] if sharded else None
        dtype = str(x.dtype).removeprefix("torch.")
        info[name] = {"shape": list(x.shape), "dtype": dtype, "sharded": dims}
        tensors[name] = x if sharded else wrap(x.detach(), replicated_layout(mesh, x.shape), mesh)
    return Snapshot(mesh, folder, step, keep, stages or Stages(mesh), "", tree, tensors, info)


def storable(taken: Snapshot) -> Snapshot:
    """Return the snapshot with Partial tensors summed and in dtypes that the file knows. Collective."""
    tensors = {}
    with torch.no_grad():
        for name, x in taken.tensors.items():
            x = resolved(x)
            local = x.block.detach()
            local = (local.resolve_conj() if local.is_complex() else local).resolve_neg()
            tensors[name] = wrap(local.view(stored_dtype(local.dtype)), x.sharding, taken.mesh)
    return taken._replace(tensors=tensors)


def lie_as_parameters(optimizer: Any) -> None:
    """Bring what was read of an optimizer's state to the order in memory of its parameters, whose files know none.

    Not collective. Fused optimizers walk through both alike.
    """
    for param, values in getattr(optimizer, "state", {}).items():
        if not isinstance(param, Tensor) or not isinstance(values, dict):
            continue
        own = block_of(param)
        for name, x in list(values.items()) if not own.is_contiguous() else ():
            if isinstance(x, Tensor) and (read := block_of(x)).shape == own.shape:
                moved = torch.empty_like(own, dtype=read.dtype, device=read.device).copy_(read)
                values[name] = wrap(moved, x.sharding, x.mesh) if isinstance(x, ShardTensor) else moved


def state_of(call: str, model: Any, mesh: Any) -> tuple[dict[Any, Any], CartMesh, Exception | None]:
    """Return the state dict of a model, or the one that is given; its mesh; and what is wrong with them, or None.

    Not collective. Where it is not known which ranks must hear of that, it is raised.
    """
    try:
        if mesh is not None:
            require_mesh(call, mesh)
        if not isinstance(model, torch.nn.Module):
            require(call, "model", model, Mapping, "give a torch.nn.Module, or {name: tensor}")
        state = dict(model.state_dict() if isinstance(model, torch.nn.Module) else model)
        return state, the_mesh(call, mesh, state.values(), model), None
    except Exception as e:
        found = likely_mesh(mesh, model, None, model)
        if found is None:
            raise
        return {}, found, e


def the_mesh(what: str, mesh: CartMesh | None, given: Iterable[Any], model: Any) -> CartMesh:
    """Return the one mesh that is given: itself, by tensors that live on it, or else by a model. Not collective."""
    found = (x.mesh if isinstance(x, ShardTensor) else x for x in (mesh, *given))
    meshes = {id(m): m for m in found if isinstance(m, CartMesh)} or {id(m): m for m in meshes_of(model)}
    if len(meshes) == 1:
        return next(iter(meshes.values()))
    raise MeshError(
        f"{what}: one mesh is needed",
        expected="tensors of one mesh, a model that was distributed on one, or mesh=",
        got=[m.outline for m in meshes.values()] or "nothing that is sharded, and no mesh",
        fix="save and load what lives on each mesh by itself"
        if meshes
        else "give mesh=, the mesh of the model's inputs",
    )


def likely_mesh(mesh: Any, model: Any, optimizer: Any, tensors: Any) -> CartMesh | None:
    """Return whose ranks wait for one that failed before its mesh was found, or None. Not collective."""
    if isinstance(mesh, CartMesh):
        return mesh
    try:
        module = isinstance(model, torch.nn.Module)
        given = [*model.parameters(), *model.buffers()] if module else []
        given += [p for group in getattr(optimizer, "param_groups", []) for p in group["params"]]
        named = [*tensors.values()] if isinstance(tensors, Mapping) else []
        given += [x[0] if type(x) is tuple and x else x for x in named]
        return the_mesh("", None, given, model if module else None)
    except Exception:  # noqa: BLE001 (of arguments of any kind; the first error is told)
        return None


def generators(mesh: CartMesh) -> dict[str, Tensor]:
    """Return the states of torch's generators, a row per rank, and that of one rank for all. Not collective."""
    states = {"cpu": torch.get_rng_state()}
    if mesh.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(mesh.device)
    out: dict[str, Tensor] = {}
    for kind, state in states.items():
        row = state.view(1, -1)
        out[kind] = wrap(row, rows_of(mesh, (mesh.size, row.numel())), mesh)
        out[FIRST + kind] = row
    return out


def own_generators(saved: Any, alike: bool) -> dict[str, Any]:
    """Return which state to take of each generator: this rank's, if there are as many ranks and each has its own.

    Not collective.
    """
    own = {kind: state for kind, state in saved.items() if not kind.startswith(FIRST)}
    first = {kind.removeprefix(FIRST): state for kind, state in saved.items() if kind.startswith(FIRST)}
    return own if alike and own else first or own


def rows_of(mesh: CartMesh, shape: Sequence[int]) -> Layout:
    """Return the layout of as many rows as there are ranks, one each. Not collective."""
    return layout_of(mesh.shape, [Shard(0)] * mesh.ndim, shape)


def generators_hash(taken: Snapshot) -> int:
    """Return a number that is the same on ranks whose generators have the same state. Not collective."""
    states = [x.block.cpu().numpy().tobytes() for name, x in taken.tensors.items() if _is_row(name)]
    return int.from_bytes(hashlib.blake2b(b"".join(states), digest_size=7).digest(), "little")


def without_rows(taken: Snapshot) -> Snapshot:
    """Return the snapshot where all ranks' generators have the same state: that of one is enough. Not collective."""
    tree = dict(taken.tree)
    if "rng" in tree:
        tree["rng"] = {kind: state for kind, state in tree["rng"].items() if kind.startswith(FIRST)}
    tensors = {name: x for name, x in taken.tensors.items() if not _is_row(name)}
    return taken._replace(tree=tree, tensors=tensors, info={name: taken.info[name] for name in tensors})


def _is_row(name: str) -> bool:
    return name.startswith("rng/") and not name.startswith(f"rng/{FIRST}")


def verify(partial: Path, tensors: Mapping[str, ShardTensor]) -> None:
    """Open the finished file again and check that every dataset is there, in full. Not collective.

    Raises
    ------
    FileError
        It is not.
    """
    h5py = import_h5py()
    # of a whole checkpoint: looked for once, not for every tensor
    absent = cache(lambda folder, plan: plan.absent(partial / folder))
    with opened(partial / folder_of.TENSORS) as file:
        for name, x in tensors.items():
            dataset, nbytes = file.get(name), math.prod(x.shape) * x.dtype.itemsize
            if not isinstance(dataset, h5py.Dataset) or dataset.shape != tuple(x.shape):
                raise folder_of.damaged(partial, f"no dataset {name!r} of shape {tuple(x.shape)} right after writing")
            known = parts_of(dataset, partial / folder_of.TENSORS)
            if known is not None:
                parts = known[0]
                if missing := parts.among(absent(parts.folder, parts.plan)):
                    raise folder_of.damaged(partial, f"{name!r} without its part {missing!r} right after writing")
            elif dataset.is_virtual:
                sources = (source_name(s.file_name) or s.file_name for s in dataset.virtual_sources())
                if missing := next((at for at in sources if not (partial / at).exists()), None):
                    raise folder_of.damaged(partial, f"{name!r} without its part {missing!r} right after writing")
            elif dataset.id.get_storage_size() < nbytes:
                raise folder_of.damaged(partial, f"{name!r} is not complete right after writing")
