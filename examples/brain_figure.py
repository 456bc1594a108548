"""The figure of the segmentation: three slices of the image, the truth and the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

# grey matter, white matter
_COLOURS = np.array([[1.0, 0.55, 0.2], [0.35, 0.7, 1.0]])


def draw(path: Path, data: Path, result: Path, borders: Sequence[Sequence[int]], title: str) -> None:
    """Draw the middle slices of two files, with the borders between shards.

    Parameters
    ----------
    path
        The image to write.
    data, result
        HDF5 files with the volumes, and with the predicted maps.
    borders
        Per dim of the volume, the indices at which a shard begins, the first excepted.
    title
        Above the figure.
    """
    import h5py
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 10.5), facecolor="black", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 3)
    figure.suptitle(title, color="white")
    with h5py.File(data, "r") as truth, h5py.File(result, "r") as predicted:
        shape = truth["t1"].shape
        for dim, (row, view) in enumerate(zip(axes, ("sagittal", "coronal", "axial"), strict=True)):
            # a little beside the middle, which is the gap between the hemispheres
            middle = int(shape[dim] * (0.42 if dim == 0 else 0.5))
            at = tuple(middle if d == dim else slice(None) for d in range(3))
            across, up = (d for d in range(3) if d != dim)
            row[0].imshow(truth["t1"][at].T, origin="lower", cmap="gray")
            row[1].imshow(_coloured(truth, at), origin="lower")
            row[2].imshow(_coloured(predicted, at), origin="lower")
            row[0].set_ylabel(f"{view}, voxel {middle}", color="white")
            for axis in row:
                axis.set(xticks=[], yticks=[])
                for border in borders[across]:
                    axis.axvline(border - 0.5, color="white", linewidth=0.8, linestyle="--")
                for border in borders[up]:
                    axis.axhline(border - 0.5, color="white", linewidth=0.8, linestyle="--")
    for axis, name in zip(axes[0], ("T1", "truth: grey and white matter", "prediction"), strict=True):
        axis.set_title(name, color="white")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _coloured(file, at) -> np.ndarray:
    maps = np.stack([file[name][at].T for name in ("gm", "wm")], axis=-1)
    return np.clip(maps @ _COLOURS, 0, 1)
