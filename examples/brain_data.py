"""The ICBM152 brain at 1 mm, which nilearn ships: T1 image, grey- and white-matter maps, as one HDF5 file."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np

# nilearn's file names
_FILES = {name: f"mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz" for name in ("t1", "gm", "wm")}


def brain_path(folder: Path, every: int) -> Path:
    """Return the path of the file that `write_brain` writes."""
    return folder / ("icbm152.h5" if every == 1 else f"icbm152_every{every}.h5")


def write_brain(path: Path, every: int = 1) -> None:
    """Write the volumes as datasets ``t1``, ``gm`` and ``wm``, float32, 197 x 233 x 189.

    The T1 image is clipped at 1.5 deviations of the brain below its mean and 3 above, and then gets mean 0 and
    deviation 1: otherwise the distance of the dark background dwarfs that of grey and white matter, and a
    network takes many steps to tell them apart. The maps are probabilities. The file appears under its name
    when it is complete.

    Parameters
    ----------
    path
        What to write.
    every
        Keep every n-th voxel along each dim: a small volume for tests.
    """
    import h5py

    volumes = {name: _volume(file)[::every, ::every, ::every] for name, file in _FILES.items()}
    inside = volumes["t1"][volumes["t1"] > 0]
    t1 = np.clip((volumes["t1"] - inside.mean()) / inside.std(), -1.5, 3)
    volumes["t1"] = (t1 - t1.mean()) / t1.std()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with h5py.File(partial, "w") as f:
            f.attrs["title"] = "ICBM 2009a nonlinear symmetric, from nilearn"
            f.attrs["voxel_mm"] = float(every)
            for name, volume in volumes.items():
                f.create_dataset(name, data=volume, dtype=np.float32)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _volume(file: str) -> np.ndarray:
    import nibabel

    # found, not imported: its files are all that is needed, not what it depends on
    package = importlib.util.find_spec("nilearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("nilearn, which ships the volumes, is not installed: pip install --no-deps nilearn")
    image = nibabel.load(Path(package.origin).parent / "datasets" / "data" / file)
    return np.asarray(image.dataobj, np.float32) / 255
