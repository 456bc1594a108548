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
    figure, axes = plt.subplot_mosaic(
        [["error"] * 3, ["fine", "alone", "closed"]], figsize=(10, 7), layout="constrained"
    )
    without, closed = zip(*errors, strict=True)
    axes["error"].plot(without, color="tab:red", label="coarse run")
    axes["error"].plot(closed, color="tab:blue", label="coarse run with the closure, which learns meanwhile")
    axes["error"].set(
        xlabel="step; at each tooth both begin anew from the fine run", ylabel="relative error", ylim=(0, None)
    )
    figure.legend(loc="outside upper center", ncols=2)
    fine = heights[0]
    shown = {
        "fine": ("height of the fine run, averaged", fine),
        "alone": ("error of the coarse run", heights[1] - fine),
        "closed": ("error with the closure", heights[2] - fine),
    }
    most = {"fine": float(fine.abs().max())}
    most["alone"] = most["closed"] = float(shown["alone"][1].abs().max())
    for name, (title, values) in shown.items():
        picture = axes[name].imshow(values.T, origin="lower", vmin=-most[name], vmax=most[name], cmap="RdBu_r")
        axes[name].set(title=title, xticks=[], yticks=[])
        figure.colorbar(picture, ax=axes[name], shrink=0.8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
