"""The boxes that the ranks of a simulation own: they must tile its domain."""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError


def misplaced(
    mesh: CartMesh, m: int, extent: int, sizes: tuple[int, ...], offsets: Sequence[int] | None, common: bool
) -> LayoutError | None:
    """Return what is wrong with the owned extents along a mesh dim, or with where they begin. Not collective.

    ``common`` says whether all ranks at one coordinate own the same.
    """
    name = mesh.mesh_dim_names[m]
    fix = "pass shape= of the whole domain, and owned extents (arrays less their halo) that tile it"
    at = 0
    for i, n in enumerate(sizes):
        start = at if offsets is None else offsets[i]
        if start != at:
            kind = "overlap" if start < at else "leave a gap"
            return LayoutError(
                f"adopt: owned boxes {kind} along {name!r} before the box [{start}:{start + n})",
                expected=f"a box that begins at {at}, where the one before it ends",
                got=f"coordinate {i} of {name!r} owns [{start}:{start + n})",
                fix=fix,
            )
        at += n
    if at != extent:
        what = "leave a gap" if at < extent else "overlap, or reach past the domain,"
        last = f"[{at - sizes[-1]}:{at})"
        return LayoutError(
            f"adopt: owned boxes {what} along {name!r} at the box {last}",
            expected=f"boxes that end at {extent}",
            got=f"extents {sizes} of the boxes along {name!r}, which end at {at}",
            fix=fix,
        )
    if not common:
        c = mesh.coords[m]
        start = sum(sizes[:c])
        return LayoutError(
            f"adopt: owned boxes overlap or leave a gap along {name!r} at the box [{start}:{start + sizes[c]})",
            expected=f"the same interval on all ranks at coordinate {c} of {name!r}",
            got=f"[{start}:{start + sizes[c]}) on the rank at {mesh.coords}, another one beside it",
            fix="let an extent depend on the coordinate along its own dim only",
        )
    return None
