"""The figure of a sweep: efficiency over the number of ranks, and where the rest of a step goes."""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.errors import JobError, MissingPackageError
from mpishard.planning.predict import Plan
from mpishard.planning.timeline import Parts

_COLOURS = ("#4c72b0", "#55a868", "#c44e52", "#8c8c8c")


def draw(plans: Sequence[Plan], path: str) -> None:
    """Write a figure of plans, one a number of ranks, in the format that the file's ending says. Not collective.

    Raises
    ------
    MissingPackageError
        matplotlib is not installed.
    JobError
        The file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackageError(
            "--plot", expected="matplotlib", got="none installed", fix="pip install 'mpishard[plot]'"
        ) from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    ranks = [p.ranks for p in plans]
    shares = [[getattr(p.parts, name) / p.seconds for p in plans] for name in Parts._fields]
    axes.stackplot(ranks, shares, labels=Parts._fields, colors=_COLOURS, alpha=0.75)
    axes.plot(ranks, [p.efficiency for p in plans], "k.-", label="efficiency")
    axes.set_xscale("log", base=2)
    axes.set_xlim(ranks[0], max(ranks[-1], ranks[0] + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("ranks")
    axes.set_ylabel("share of a step")
    axes.set_title(f"predicted: {plans[0].machine}")
    axes.legend(loc="lower left")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise JobError(
            "--plot",
            expected="a file that can be written, .png, .pdf or .svg",
            got=error,
            fix="make its folder, or end its name in .png, .pdf or .svg",
        ) from None
