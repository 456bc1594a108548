"""Fourier transforms of blocks with zeros beside a band of cells: the same numbers, and only the band travels."""

from __future__ import annotations

import ctypes
import random
import struct

import pytest
import torch

import mpishard as ms
from mpishard.ops.spectral.pencils import _band
from mpishard.planning.mesh import mesh_on
from tests.compare import WORLD, mesh_of, shard
from tests.ops.windows import check, field

FFT = torch.fft


def cells(*shape: int):
    return torch.complex(field(*shape), field(*shape).flip(-1))


def kept(x, dim, lo, hi):
    """Return ``x`` with zeros outside of some cells along a dim."""
    y, index = torch.zeros_like(x), (slice(None),) * dim + (slice(lo, hi),)
    y[index] = x[index]
    return y


# function, argument, arguments, what is kept of the argument (dim, from, to) and of the result
CASES = [
    (FFT.irfft2, cells(2, 6, 7), {"s": (6, 12)}, (2, 0, 2), (1, 0, 6)),
    (FFT.rfft2, field(2, 6, 12), {}, (1, 0, 6), (2, 0, 2)),
    (FFT.fft2, cells(2, 7, 8), {}, (2, 3, 5), (1, 2, 4)),
    (FFT.ifft2, cells(7, 8), {"s": (9, 6), "norm": "ortho"}, (1, 6, 8), (0, 0, 3)),
    (FFT.fftn, cells(5, 6, 4), {}, (0, 4, 5), (1, 0, 1)),
    (FFT.ifftn, cells(5, 6, 4), {"dim": (0, 2)}, (0, 0, 0), (2, 0, 0)),
    (FFT.rfftn, field(6, 5, 8), {"norm": "forward"}, (0, 2, 3), (2, 0, 2)),
    (FFT.irfftn, cells(6, 5, 5), {}, (2, 0, 2), (1, 1, 3)),
    (FFT.irfftn, cells(6, 5, 5), {"s": (4, 7, 9)}, (0, 0, 2), (2, 4, 6)),
    (FFT.fft, cells(9, 3), {"dim": 0}, (0, 0, 2), (0, 0, 1)),
    (FFT.fft, field(9, 4), {"dim": 0}, (1, 0, 1), (1, 2, 3)),
    (FFT.hfft2, cells(2, 6, 4), {}, (2, 0, 1), (1, 0, 2)),
    (FFT.ihfft2, field(2, 6, 7), {}, (1, 0, 2), (2, 0, 1)),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_bands(case):
    func, full, arguments, given, wanted = CASES[case]
    check(lambda x: kept(func(kept(x, *given), **arguments), *wanted), full, range(full.ndim), case, count=6)


@pytest.mark.parametrize("case", [0, 1, 2])
def test_second_derivatives(case):
    func, full, arguments, given, wanted = CASES[case]

    def real_to_real(x):
        y = kept(func(kept(x.to(full.dtype), *given), **arguments), *wanted)
        return y.real**3 + (y.imag**2 if y.is_complex() else 0)

    check(real_to_real, full.real, range(full.ndim), case, count=3, second=True)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(("lo", "hi"), [(0, 2), (1, 2), (0, 0)])
def test_the_band_alone_travels(lo, hi):
    n, mesh = WORLD.size, mesh_of((WORLD.size,))
    x = kept(shard(cells(4 * n, 6 * n), mesh, (ms.Shard(1),)), 1, lo, hi).requires_grad_()
    with ms.comm_counter() as count:
        y = FFT.ifft2(x)
    assert y.placements == (ms.Shard(0),)
    own = hi - lo if WORLD.rank == 0 else 0
    assert (count.messages, count.nbytes) == (n - 1, own * 4 * (n - 1) * 16)
    # of the cotangent each rank has all columns of its own rows
    with ms.comm_counter() as count:
        torch.autograd.grad(y, x, y.detach() + 1)
    assert count.nbytes == 4 * 6 * (n - 1) * 16


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -5e-324, 1e-320])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_no_cell_is_taken_for_zero(value, at):
    n = WORLD.size
    full = torch.zeros(4, 3 * n, dtype=torch.complex128)
    full[1, at] = complex(0, value)
    y = FFT.ifft2(shard(full, mesh_of((n,)), (ms.Shard(1),)), norm="forward").full_tensor()
    # where it is NaN and where infinite depends on the order of the dims
    assert y.ne(0).any(0).all()


@pytest.mark.ranks(1)
def test_the_band_of_a_block():
    draw = random.Random(3)
    for _ in range(300):
        shape = [draw.randint(1, 5) for _ in range(3)]
        dim = draw.randrange(3)
        n = shape[dim]
        lo, hi = sorted((draw.randint(0, n), draw.randint(0, n)))
        dims = draw.sample(range(3), 3)
        x = torch.ones([shape[d] for d in dims], dtype=draw.choice([torch.float64, torch.complex64]))
        x = kept(x.permute([dims.index(d) for d in range(3)]), dim, lo, hi)
        guess = draw.choice([None, (lo, hi), tuple(sorted((draw.randint(0, n), draw.randint(0, n))))])
        found = _band(x, dim, guess)
        assert found == ((lo, hi) if lo < hi else (0, 0))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_planning_mesh(device):
    mesh = mesh_on(device, (4,))
    x = ms.ones(2, 8, 12, mesh=mesh, placements=(ms.Shard(1),)).requires_grad_()
    with ms.comm_counter() as count:
        y = FFT.irfft2(FFT.rfft2(x), x.shape[1:])
        y.sum().backward()
    assert y.sharding == x.sharding
    assert x.grad.sharding == x.sharding
    assert count.messages >= 4 * 3


@pytest.mark.ranks(2)
def test_a_message_of_another_length_is_refused(monkeypatch):
    move, ends = ctypes.memmove, struct.Struct("=2q")

    def lie(to, head, nbytes):
        lo, hi = ends.unpack(head)
        return move(to, ends.pack(lo, hi - 1), nbytes)

    x = shard(cells(8, 6), mesh_of((2,)), (ms.Shard(1),))
    monkeypatch.setattr(ctypes, "memmove", lie)
    with pytest.raises(ms.DesyncError, match="ranks made different calls"):
        FFT.ifft2(x)


@pytest.mark.parametrize("call", [FFT.fftn, FFT.ifftn])
def test_nothing_is_padded_with_zeros(call):
    torch.use_deterministic_algorithms(True)  # memory that nothing was written to holds NaN
    try:
        for dim in range(3):
            x = shard(torch.zeros(0, 4, 5, dtype=torch.complex128), mesh_of((WORLD.size,)), (ms.Shard(dim),))
            y = call(x, s=(10, 3), dim=(0, 1)).full_tensor()
            assert torch.equal(y, torch.zeros(10, 3, 5, dtype=torch.complex128))
    finally:
        torch.use_deterministic_algorithms(False)
