"""Hilbert's curve: cells of a grid in an order in which those that follow each other lie side by side.

Nothing here is collective. Source: J. Skilling, Programming the Hilbert curve, AIP Conference Proceedings 707 (2004).
"""

from __future__ import annotations

from typing import Any

import numpy as np

_BITS = 62  # of a place on the curve


def bits_of(ndim: int) -> int:
    """Return how many bits of each coordinate a place on the curve has.

    Examples
    --------
    >>> bits_of(2), bits_of(3)
    (31, 20)
    """
    return min(31, _BITS // ndim)


def along_curve(cells: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Return the places of cells on the curve that fills a cube.

    Parameters
    ----------
    cells
        Coordinates, integers of shape (cells, dims).
    bits
        The cube has ``2 ** bits`` cells along each dim.

    Examples
    --------
    >>> along_curve(np.array([[0, 0], [0, 1], [1, 1], [1, 0]]), 1)
    array([0, 1, 2, 3])
    """
    axes = cells.T.astype(np.int64)
    ndim = len(axes)
    for bit in reversed(range(1, bits)):
        q, low = 1 << bit, (1 << bit) - 1
        for i in range(ndim):
            far = (axes[i] & q) != 0
            swapped = np.where(far, 0, (axes[0] ^ axes[i]) & low)
            axes[0] ^= np.where(far, low, swapped)
            axes[i] ^= swapped
    for i in range(1, ndim):
        axes[i] ^= axes[i - 1]
    turned = np.zeros_like(axes[0])
    for bit in reversed(range(1, bits)):
        turned ^= np.where(axes[-1] & (1 << bit), (1 << bit) - 1, 0)
    axes ^= turned
    places = np.zeros_like(turned)
    for bit in reversed(range(bits)):
        for axis in axes:
            places = (places << 1) | ((axis >> bit) & 1)
    return np.asarray(places)


def places_of(positions: np.ndarray[Any, Any], low: np.ndarray[Any, Any], high: np.ndarray[Any, Any]) -> Any:
    """Return the places on the curve of points between two corners, int64. Its cells are cubes."""
    bits = bits_of(positions.shape[1])
    # by a power of two, which rounds nothing: extents near the ends of a double have no inverse, or are none themselves
    exponent = -int(np.frexp(np.maximum(np.abs(low), np.abs(high)).max(initial=0))[1])
    positions, low, high = (np.ldexp(x, exponent) for x in (positions, low, high))
    # a dim that is short is short on the curve too
    extent = float((high - low).max(initial=0)) or 1.0
    cells = np.floor((positions - low) * ((2**bits - 1) / extent)).clip(0, 2**bits - 1).astype(np.int64)
    return along_curve(cells, bits)
