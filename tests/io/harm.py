"""Damage drawn at random: flipped bits, cuts, bytes that go, come or change places.

``MPISHARD_VARIANTS=300`` draws so many of each kind, in place of the few of every day; ``MPISHARD_SEED`` others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

VARIANTS = int(os.environ.get("MPISHARD_VARIANTS", "8"))
SEED = int(os.environ.get("MPISHARD_SEED", "0"))


def harmed(raw: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Return what was done, in words, and the bytes after it."""
    at = draw.randrange(len(raw))
    n = min(draw.choice((1, 8, 100, 4096)), len(raw) - at)
    kind = draw.choice(("flip", "flip", "flip", "flips", "cut", "zero", "noise", "lost", "more", "moved"))
    new = bytearray(raw)
    if kind == "flip":
        new[at] ^= 1 << draw.randrange(8)
    elif kind == "flips":
        for _ in range(20):
            new[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del new[at:]
    elif kind == "zero":
        new[at : at + n] = bytes(n)
    elif kind == "noise":
        new[at : at + n] = draw.randbytes(n)
    elif kind == "lost":
        del new[at : at + n]
    elif kind == "more":
        new[at:at] = draw.randbytes(n)
    else:
        to = draw.randrange(len(raw))
        new[at : at + n], new[to : to + n] = new[to : to + n], new[at : at + n]
    return f"{kind} of {n} at {at}", bytes(new)


def variants(path: Path, kinds: int = 1) -> Iterator[tuple[str, bytes]]:
    """Give damaged contents of a file, the same on every rank and in every run."""
    raw = path.read_bytes()
    draw = random.Random(f"{path.name} {SEED}")
    for i in range(max(2, VARIANTS // kinds)):
        what, new = harmed(raw, draw)
        yield f"variant {i} of {path.name}: {what}", new
