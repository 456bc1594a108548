"""Which ranks save or load a checkpoint together: all of a mesh, or the stages of a pipeline, each its own part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpishard.comm import guard
from mpishard.comm.mesh import CartMesh, Group
from mpishard.errors import LayoutError, MpishardError, UnsupportedOperationError
from mpishard.io.file.trust import shown


@dataclass(frozen=True)
class Stages:
    """The ranks that save or load together.

    Attributes
    ----------
    mesh
        All of them.
    own
        Those of this rank's stage, of a pipeline; else None.
    index, count
        Which stage that is, and of how many; 0 of 0 without a pipeline.
    """

    mesh: CartMesh
    own: CartMesh | None = None
    index: int = 0
    count: int = 0

    @property
    def group(self) -> Group:
        """All ranks."""
        return self.mesh.all_ranks

    def folder(self, checkpoint: Path) -> Path:
        """Return the folder of this rank's stage. Not collective."""
        return checkpoint / _name(self.index) if self.count else checkpoint

    def folders(self, checkpoint: Path) -> list[Path]:
        """Return the folders of all stages. Not collective."""
        return [checkpoint / _name(i) for i in range(self.count)]

    def agree(self, error: BaseException | None, common: str = "", own: str = "") -> None:
        """Raise on every rank where any has an error, or where their calls differ. Collective.

        Parameters
        ----------
        error
            What this rank found wrong, or None.
        common, own
            What all ranks must have in common, and what those of a stage must.
        """
        if self.own is not None:
            try:
                guard.agree(self.own.all_ranks.comm, error, common + own)
            except MpishardError as e:
                error = e
            own = ""
        guard.agree(self.group.comm, error, common + own)

    def check(self, checkpoint: Path, state: Mapping[str, Any]) -> str:
        """Raise where a checkpoint is of other stages. Not collective.

        Parameters
        ----------
        checkpoint
            Its folder.
        state
            What it says of itself: how many stages it has, or nothing of them, of no pipeline.

        Returns
        -------
        str
            Which save it is of, for `odd_part`.
        """
        saved = state.get("stages")
        if saved != (self.count or None):
            raise LayoutError(
                f"load_checkpoint: {checkpoint} has other stages",
                expected=f"that of a Pipeline of {self.count} stages" if self.count else "that of a model in one piece",
                got="that of a model in one piece" if saved is None else f"that of a Pipeline of {saved} stages",
                fix="load it into what was saved: a Pipeline of as many stages, or a model in one piece",
            )
        return json.dumps(_save_of(state))

    def odd_part(self, state: Mapping[str, Any], save: str) -> str | None:
        """Return why a folder is not that of this stage in a checkpoint, None where it is. Not collective.

        Stages may be alike: by its tensors alone one would be taken for another.
        """
        if _save_of(state) != json.loads(save):
            return "it is of another save than the checkpoint that it lies in"
        # of older versions it says nothing
        stage = state.get("stage", self.index)
        return None if stage == self.index else f"it is that of stage {shown(stage)}, not of stage {self.index}"


def _save_of(state: Mapping[str, Any]) -> list[Any]:
    return [state.get("step"), state.get("save")]


def _name(index: int) -> str:
    return f"stage_{index}"


def stages_of(call: str, model: Any, mesh: CartMesh | None) -> Stages | None:
    """Return the stages of a model that is a pipeline, on the mesh of all of them. Not collective.

    Returns
    -------
    Stages or None
        None of other models, and where the mesh is that of a stage.

    Raises
    ------
    UnsupportedOperationError
        The mesh is neither: of plain parameters those of one stage would be saved for all.
    """
    pipe: Any
    for pipe in model.modules() if isinstance(model, torch.nn.Module) else ():
        whole = getattr(pipe, "pipeline_mesh", None)
        if whole is None or mesh is pipe.stage_mesh:
            continue
        if mesh is not None and mesh is not whole:
            raise UnsupportedOperationError(
                f"{call}: a pipeline, and a mesh that is not its own",
                expected="mesh=pipe.pipeline_mesh, or pipe.stage_mesh for one stage in a folder of its own",
                got=mesh,
                fix="leave mesh out",
            )
        return Stages(whole, pipe.stage_mesh, pipe.index, pipe.count)
    return None
