"""How a box is cut into slabs of bounded size, in the order in which a row-major array stores them.

Nothing here is collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mpishard.layout.transfer import Box


def slabs(box: Sequence[tuple[int, int]], cells: int) -> Iterator[Box]:
    """Cut a box into boxes of at most ``cells`` cells, in row-major order.

    Trailing dims stay whole as long as they fit, so each slab is as few runs of memory as
    can be. An empty box gives nothing.

    Parameters
    ----------
    box
        Half-open interval of every dim.
    cells
        Largest number of cells of a slab, at least 1.

    Examples
    --------
    >>> list(slabs(((0, 3), (2, 6)), 8))
    [((0, 2), (2, 6)), ((2, 3), (2, 6))]
    """
    whole = tuple((lo, hi) for lo, hi in box)
    sizes = [hi - lo for lo, hi in whole]
    if 0 in sizes:
        return
    if math.prod(sizes) <= cells:
        yield whole
        return
    row = math.prod(sizes[1:])
    step = max(1, cells // row)
    lo, hi = whole[0]
    for start in range(lo, hi, step):
        part = (start, min(start + step, hi))
        for rest in slabs(whole[1:], cells // (part[1] - part[0])):
            yield (part, *rest)
