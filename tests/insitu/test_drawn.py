"""Simulations drawn at random, against the gathered truth: decompositions, arrays, ghost layers, models, mistakes.

``MPISHARD_VARIANTS=300`` draws so many, in place of the few of every day; ``MPISHARD_SEED`` others.
"""

from __future__ import annotations

import math
import os
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.insitu.hosts import WORLD
from tests.insitu.test_adopt import Celsius, Interface

SIZE = WORLD.size
VARIANTS = int(os.environ.get("MPISHARD_VARIANTS", "24"))
SEED = int(os.environ.get("MPISHARD_SEED", "0"))
DTYPES = ("float64", "float64", "float32", "float16", "int32", "int16", "uint8", "bool", "complex128", "complex64")
HANDED = {
    "numpy": lambda a: a,
    "torch": torch.from_numpy,
    "dlpack": lambda a: Interface("__dlpack__", a),
    "array interface": lambda a: Interface("__array_interface__", a),
    "address": lambda a: (a.ctypes.data, a.dtype, a.shape, a.strides),
    "subclass": lambda a: a.view(Celsius),
}


class Drawn:
    """A domain that all ranks draw alike, and what this rank has of it."""

    def __init__(self, rng: random.Random) -> None:
        self.ndim = ndim = rng.randint(1, 3)
        grids = [g for g in np.ndindex(*[SIZE + 1] * ndim) if math.prod(g) == SIZE]
        self.grid = grid = rng.choice(grids)
        self.names = ("x", "y", "z")[:ndim]
        self.periodic = tuple(rng.random() < 0.4 for _ in grid)
        self.sizes = [[rng.choice((0, 1, 2, 3, 5)) if p > 1 else rng.randint(1, 6) for _ in range(p)] for p in grid]
        for along in self.sizes:
            along[rng.randrange(len(along))] += 1  # some cell there is
        self.shape = tuple(map(sum, self.sizes))
        self.halo = self.widths(rng)
        # ranks in any order
        order = rng.sample(range(SIZE), SIZE) if rng.random() < 0.3 else range(SIZE)
        self.coords = tuple(int(c) for c in np.unravel_index(order[WORLD.rank], grid))
        self.own = [along[c] for along, c in zip(self.sizes, self.coords)]
        self.starts = [sum(along[:c]) for along, c in zip(self.sizes, self.coords)]

    def widths(self, rng):
        """(lo, hi) per mesh dim and position."""
        if rng.random() < 0.5:
            return [[(rng.randint(0, 3), rng.randint(0, 3))] * p for p in self.grid]
        return [[(rng.randint(0, 3), rng.randint(0, 3)) for _ in range(p)] for p in self.grid]

    def mine(self, widths):
        return [along[c] for along, c in zip(widths, self.coords)]

    def __repr__(self):
        return f"grid {self.grid}, cells {self.sizes}, periodic {self.periodic}, halo {self.halo}"


class DrawnField:
    """A field of a drawn domain: all ranks know it whole."""

    def __init__(self, rng: random.Random, at: Drawn) -> None:
        self.at = at
        self.dtype = rng.choice(DTYPES)
        own_widths = rng.random() < 0.3
        self.halo = at.widths(rng) if own_widths else at.halo
        self.given = at.mine(self.halo) if own_widths else None
        on = [m for m in range(at.ndim) if rng.random() < 0.9] or [0]
        self.plain = len(on) == at.ndim and rng.random() < 0.5
        if not self.plain:
            on += [None] * rng.randint(0, 2)
            rng.shuffle(on)
        self.on = on
        self.staggered = [m for m in range(at.ndim) if rng.random() < 0.2]
        # arrays that hold a face between two ranks on both, or on its owner alone
        self.both = [rng.random() < 0.5 for _ in range(at.ndim)]
        extras = [rng.randint(1, 3) for _ in on]
        self.order = [0, *range(1, len(on))]
        if rng.random() < 0.5:
            self.order.reverse()
            if rng.random() < 0.3:
                rng.shuffle(self.order)
        self.pads = [rng.choice((0, 0, 1, 3)) for _ in on]
        self.way = rng.choice(list(HANDED))
        # per array dim: global extent, this rank's first cell, owned cells, ghost layers in the array
        rows = [self._along(m, n) for m, n in zip(on, extras)]
        self.shape, self.starts, self.own, self.lo, self.hi = (list(column) for column in zip(*rows))
        self.noise = np.random.default_rng(1000 * rng.randrange(1000) + WORLD.rank)
        self.renew(rng)

    def renew(self, rng):
        """Draw other cells."""
        self.whole = self.cells(np.random.default_rng(rng.randrange(10**6)), self.shape)

    def _along(self, m, extra):
        if m is None:
            return extra, 0, extra, 0, 0
        at = self.at
        n, start, own, c = at.shape[m], at.starts[m], at.own[m], at.coords[m]
        lo, hi = self.halo[m][c]
        if m in self.staggered:
            if not at.periodic[m]:
                n += 1
                own += c == at.grid[m] - 1
            if self.both[m] and (at.periodic[m] or c < at.grid[m] - 1):
                hi += 1
        return n, start, own, lo, hi

    def cells(self, rng, shape):
        # whole numbers: sums of a few are exact in every dtype
        return rng.integers(0, 2 if self.dtype == "bool" else 8, shape).astype(self.dtype)

    def array(self):
        """A new array of this rank, with noise in its ghost cells; and the memory around it."""
        extents = [lo + n + hi for lo, n, hi in zip(self.lo, self.own, self.hi)]
        roomy = [extents[d] + self.pads[d] for d in self.order]
        memory = self.cells(self.noise, roomy)
        array = memory.transpose(np.argsort(self.order))[tuple(map(slice, extents))]
        array[self.interior] = self.whole[self.box]
        return array, memory

    @property
    def interior(self):
        return tuple(slice(lo, lo + n) for lo, n in zip(self.lo, self.own))

    @property
    def box(self):
        return tuple(slice(a, a + n) for a, n in zip(self.starts, self.own))

    def exchanged(self, array):
        out, index, inside = array.copy(), [], []
        for d, m in enumerate(self.on):
            cells = np.arange(self.starts[d] - self.lo[d], self.starts[d] + self.own[d] + self.hi[d])
            around = m is not None and self.at.periodic[m]
            there = np.ones(len(cells), bool) if around else (cells >= 0) & (cells < self.shape[d])
            index.append(cells[there] % self.shape[d])
            inside.append(np.flatnonzero(there))
        out[np.ix_(*inside)] = self.whole[np.ix_(*index)]
        return out

    def made(self, sim, name, array):
        location = [self.at.names[m] for m in self.staggered] or "cell"
        dims = None if self.plain else [None if m is None else self.at.names[m] for m in self.on]
        return sim.field(name, HANDED[self.way](array), self.given, dims, location)

    def __repr__(self):
        return (
            f"{self.dtype}, on {self.on}, {self.way}, staggered {self.staggered} (on both {self.both}), order "
            f"{self.order}, pads {self.pads}, halo {self.halo}"
        )


def raised_alike(call, kind=ms.MpishardError):
    """All ranks raise the same."""
    with pytest.raises(kind) as caught:
        call()
    assert len(set(WORLD.allgather(f"{type(caught.value).__name__}: {caught.value}"))) == 1, caught.value


def checked(field, u, array, memory):
    """The tensor is the host's memory; a refresh fills the ghost cells, and nothing beside them."""
    outside = memory.copy()
    view = outside.transpose(np.argsort(field.order))[tuple(map(slice, array.shape))]
    view[...] = field.exchanged(array)
    np.testing.assert_array_equal(u.tensor.full_tensor().numpy(), field.whole)
    u.exchange()
    assert u.halo_valid
    np.testing.assert_array_equal(memory, outside)
    assert u.array.data_ptr() == array.ctypes.data or not array.size
    again = ~array[field.interior] if field.dtype == "bool" else array[field.interior] + 1
    u.tensor.logical_not_() if field.dtype == "bool" else u.tensor.add_(1)
    np.testing.assert_array_equal(array[field.interior], again)
    array[field.interior] = field.whole[field.box]
    np.testing.assert_array_equal(u.tensor.to_local().numpy(), field.whole[field.box])


def models(rng, field):
    """A model that is exact on whole numbers."""
    d, shift = rng.randrange(len(field.on)), rng.randint(-4, 4)
    out = [lambda x: torch.roll(x, shift, d), lambda x: x.clone(), lambda x: torch.flip(x, (d,))]
    if field.dtype in ("float64", "complex128"):
        out += [lambda x: x * 2 + 1, lambda x: torch.cumsum(x, d), lambda x: x - x.sum(d, keepdim=True)]
    if field.dtype == "float64" and len(field.on) <= 4:  # what pooling takes
        windows = [rng.choice((0, 0, 3, 5)) for _ in field.on]
        out += [lambda x: _windowed(x, windows)] * 3
    return rng.choice(out)


def _windowed(x, windows):
    # sums over windows with zeros beyond the domain, by pooling: it reads the field's own ghost cells
    for d, n in enumerate(windows):
        if n:
            order = [*(k for k in range(x.ndim) if k != d), d]
            moved = x.permute(order)
            lead = moved[None] if moved.ndim == 1 else moved
            y = F.avg_pool1d(lead, n, 1, n // 2) if lead.ndim <= 3 else F.avg_pool2d(lead, (1, n), 1, (0, n // 2))
            y = y * n
            x = (y[0] if moved.ndim == 1 else y).permute([order.index(k) for k in range(x.ndim)])
    return x


def hooked(rng, sim, field, u, array):
    """A hook's result is that of the model on the gathered field."""
    out, _ = field.array()
    v = field.made(sim, "v", out)
    model = models(rng, field)
    hook = sim.hook(model, ["u"], ["v"])
    expected = model(torch.from_numpy(field.whole)).numpy()
    for _ in range(2):
        ghosts = out.copy()
        assert hook()
        close = np.testing.assert_allclose if field.dtype == "float64" else np.testing.assert_array_equal
        close(out[field.interior], expected[field.box])
        ghosts[field.interior] = out[field.interior]
        np.testing.assert_array_equal(out, ghosts)
        np.testing.assert_array_equal(array[field.interior], field.whole[field.box])
    # in place
    inplace = sim.hook(model, ["u"], ["u"])
    inplace()
    np.testing.assert_array_equal(array[field.interior], out[field.interior])
    array[field.interior] = field.whole[field.box]
    v.exchange()


def mistaken(rng, sim, field, u):
    """What one rank does wrong is raised on all, and everything goes on."""
    culprit = rng.randrange(SIZE) == WORLD.rank
    array, _ = field.array()

    def wrong(x):
        if culprit:
            raise ValueError("wrong on one rank")
        return x.clone()

    def unfit(x):
        return torch.cat([x, x], 0)

    def rebinds():
        larger = np.zeros([n + 1 for n in array.shape], array.dtype)
        u.rebind(larger if culprit else array)

    def other_extent():
        given = np.zeros([n + 3 for n in array.shape], array.dtype) if culprit else array
        DrawnField.made(field, sim, "w", given)

    def twice():
        field.made(sim, "u", array)

    calls = [sim.hook(wrong, ["u"], ["u"]), sim.hook(unfit, ["u"], ["u"]), rebinds, twice]
    calls += [lambda: sim.hook(len, ["nobody"]), other_extent]
    raised_alike(rng.choice(calls))
    u.exchange()


def tiles(rng, at, sim):
    """Owned boxes that overlap or leave a gap are refused, and named."""
    m, c = rng.randrange(at.ndim), rng.randrange(SIZE)
    own = list(at.own)
    own[m] += WORLD.rank == c
    raised_alike(lambda: adopted(at, own), ms.LayoutError)
    assert sim.mesh.size == SIZE


def adopted(at, sizes):
    return ms.insitu.adopt(
        WORLD, at.shape, at.mine(at.halo), at.names, at.periodic, grid=at.grid, coords=at.coords, sizes=sizes
    )


@pytest.mark.parametrize("number", range(VARIANTS))
def test_drawn(number):
    rng = random.Random(f"{SEED} {number} {SIZE}")
    at = Drawn(rng)
    field = DrawnField(rng, at)
    told = f"case {number} of seed {SEED}: {at}; field: {field}"
    try:
        sim = adopted(at, at.own)
        array, memory = field.array()
        u = field.made(sim, "u", array)
        checked(field, u, array, memory)
        hooked(rng, sim, field, u, array)
        field.renew(rng)
        other, around = field.array()
        u.rebind(HANDED[field.way](other))
        checked(field, u, other, around)
        mistaken(rng, sim, field, u)
        tiles(rng, at, sim)
        if u.tensor.is_floating_point():
            gradient(field, u)
        sim.release()
        raised_alike(lambda: u.tensor, ms.UnsupportedOperationError)
    except BaseException as e:
        e.add_note(told)
        raise


def gradient(field, u):
    """A loss on a field has the gradient of the loss on the gathered one."""
    w = torch.ones((), requires_grad=True)
    x, whole = u.tensor.double(), torch.from_numpy(field.whole).double()
    (torch.roll(x, 1, 0) * x * w * w).sum().backward()
    assert w.grad.item() == 2 * (torch.roll(whole, 1, 0) * whole).sum().item()
