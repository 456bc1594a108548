"""The figure of the on-line learning: errors over time, and three snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import torch

mpl.use("Agg")
from matplotlib import pyplot as plt


def draw(path: Path, errors: Sequence[tuple[float, float]], heights: Sequence[torch.Tensor]) -> None:
    """Write the figure.

    Parameters
    ----------
    path
        Of the picture.
    errors
        Per step the error of the coarse run without the closure, and with it.
    heights
        At the end: of the fine run on coarse cells, of the coarse run without, and with the closure.
    """
    figure, axes = plt.subplot_mosaic([["error"] * 3, ["fine", "alone", "closed"]], figsize=(10, 7))
    without, closed = zip(*errors, strict=True)
    axes["error"].plot(without, color="tab:red", label="coarse run")
    axes["error"].plot(closed, color="tab:blue", label="coarse run with the closure that learns meanwhile")
    axes["error"].set(xlabel="step; both begin anew from the fine run at each tooth", ylabel="relative error")
    axes["error"].legend(loc="upper left")
    most = float(heights[0].abs().max())
    titles = ("fine run, averaged", "coarse run", "coarse run with the closure")
    for name, title, height in zip(("fine", "alone", "closed"), titles, heights, strict=True):
        picture = axes[name].imshow(height.T, origin="lower", vmin=-most, vmax=most, cmap="RdBu_r")
        axes[name].set(title=title, xticks=[], yticks=[])
    figure.colorbar(picture, ax=[axes[n] for n in ("fine", "alone", "closed")], label="height")
    figure.savefig(path, dpi=120)
    plt.close(figure)
