"""Fourier transforms over whole and sharded dims, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, gathered, layouts, mesh_of, shard, skew
from tests.ops.windows import check, field, refused_alike, same

FFT = torch.fft
REAL = torch.float64
COMPLEX = torch.complex128


def cells(*shape: int, dtype: torch.dtype = COMPLEX):
    return torch.complex(field(*shape), field(*shape).flip(-1)).to(dtype) if dtype.is_complex else field(*shape)


# function, dtype of the argument, shape, arguments
CASES = [
    (FFT.fft, COMPLEX, (3, 8), {}),
    (FFT.fft, REAL, (7, 4), {"dim": 0, "norm": "ortho"}),
    (FFT.fft, COMPLEX, (11,), {}),  # nothing else to cut: gathered
    (FFT.fft, COMPLEX, (6, 5), {"n": 9, "dim": -1}),
    (FFT.ifft, COMPLEX, (6, 5), {"n": 3, "dim": 0, "norm": "forward"}),
    (FFT.ifft, REAL, (2, 1, 9), {}),
    (FFT.rfft, REAL, (4, 9), {}),
    (FFT.rfft, REAL, (8, 5), {"n": 5, "dim": 0, "norm": "ortho"}),
    (FFT.irfft, COMPLEX, (4, 5), {}),
    (FFT.irfft, COMPLEX, (5, 6), {"n": 9, "dim": 0}),
    (FFT.irfft, REAL, (5, 6), {"n": 7, "norm": "forward"}),
    (FFT.hfft, COMPLEX, (4, 5), {"norm": "ortho"}),
    (FFT.hfft, COMPLEX, (5, 3), {"n": 7, "dim": 0}),
    (FFT.ihfft, REAL, (4, 7), {}),
    (FFT.ihfft, REAL, (7, 4), {"n": 10, "dim": -2, "norm": "forward"}),
    (FFT.fft2, COMPLEX, (2, 6, 5), {}),
    (FFT.ifft2, COMPLEX, (6, 5, 2), {"s": (4, 7), "dim": (1, 0), "norm": "ortho"}),
    (FFT.rfft2, REAL, (2, 6, 7), {}),
    (FFT.rfft2, REAL, (6, 2, 7), {"s": (-1, 9), "dim": (0, 2)}),
    (FFT.irfft2, COMPLEX, (2, 6, 4), {"s": (6, 7)}),
    (FFT.irfft2, COMPLEX, (4, 2, 6), {"dim": (2, 0), "norm": "forward"}),
    (FFT.hfft2, COMPLEX, (2, 6, 4), {}),
    (FFT.ihfft2, REAL, (2, 6, 4), {"norm": "ortho"}),
    (FFT.fftn, COMPLEX, (4, 3, 5), {}),
    (FFT.fftn, REAL, (2, 4, 3, 5), {"s": (6, 2)}),
    (FFT.fftn, COMPLEX, (4, 5), {"dim": ()}),
    (FFT.ifftn, COMPLEX, (2, 6, 4, 5), {"dim": (1, 2, 3), "norm": "forward"}),
    (FFT.rfftn, REAL, (4, 3, 6), {}),
    (FFT.rfftn, REAL, (2, 2, 4, 5, 6), {"dim": (-3, -2, -1)}),
    (FFT.irfftn, COMPLEX, (4, 3, 4), {}),
    (FFT.irfftn, COMPLEX, (2, 2, 4, 5, 3), {"s": (3, 5, 5), "dim": (2, 3, 4)}),
    (FFT.irfftn, COMPLEX, (2, 4, 5), {"s": -1, "dim": 1}),
    (FFT.hfftn, COMPLEX, (4, 3, 4), {"dim": (2, 0)}),
    (FFT.ihfftn, REAL, (4, 3, 6), {"dim": (2, 0)}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_transforms(case):
    func, dtype, shape, arguments = CASES[case]
    check(lambda x: func(x, **arguments), cells(*shape, dtype=dtype), range(len(shape)), case, count=6)


@pytest.mark.parametrize("case", [6, 15, 17, 24, 28])
def test_second_derivatives(case):
    func, dtype, shape, arguments = CASES[case]

    def real_to_real(x):
        y = func(x.to(dtype), **arguments)
        return y.real**3 + y.imag**2

    check(real_to_real, field(*shape), range(len(shape)), case, count=3, second=True)


def test_there_and_back():
    def filtered(x):
        f = FFT.fftfreq(x.shape[-2], dtype=x.dtype)[:, None] ** 2 + FFT.rfftfreq(x.shape[-1], dtype=x.dtype) ** 2
        return FFT.irfft2(FFT.rfft2(x) / (1 + f), s=x.shape[-2:])

    check(filtered, field(2, 9, 7), (0, 1, 2), 3, count=8, second=True)


@pytest.mark.parametrize("shift", [FFT.fftshift, FFT.ifftshift])
@pytest.mark.parametrize("dims", [None, 1, (0, -1)])
def test_shifts(shift, dims):
    check(lambda x: shift(x, dims), cells(4, 5, 3), (0, 1, 2), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_other_dtypes(dtype):
    full = field(6, 4, 5).mul(9).to(dtype)
    same(lambda x: FFT.fft2(x, dim=(0, 2)), full, (0, 1, 2), 2, exact=False)
    same(lambda x: FFT.irfftn(x, dim=(0, 2)), full, (0, 1, 2), 4, exact=False)
    if not dtype.is_complex:
        same(lambda x: FFT.rfft(x, dim=0), full, (0, 1, 2), 5, exact=False)


def test_a_partial_is_summed():
    x = shard(field(6, 8), mesh_of((WORLD.size,)), (ms.Shard(0),)).sum(0)
    torch.testing.assert_close(FFT.rfft(x).full_tensor(), FFT.rfft(field(6, 8).sum(0)))


def test_conjugated_cells():
    check(lambda x: FFT.fft(x.conj(), dim=0).conj(), cells(8, 6), (0, 1), 2)


@pytest.mark.parametrize("transform", [FFT.ifft, FFT.ihfft, FFT.ihfft2, FFT.ifft2, FFT.ifftn])
def test_no_rank_leaves_a_conjugate_for_later(transform):
    # torch has no view of such a one as real numbers
    for mesh, placements, sizes in layouts((8, 6), (0, 1)):
        x = shard(field(8, 6), mesh, placements, sizes)
        y = torch.view_as_real(transform(x))
        torch.testing.assert_close(y.full_tensor(), torch.view_as_real(transform(field(8, 6)).resolve_conj()))


def test_the_result_is_cut_as_evenly_as_the_argument():
    for mesh, placements, sizes in layouts((8, 6, 5), (0, 1, 2)):
        x = shard(field(8, 6, 5), mesh, placements, sizes)
        for y in (FFT.fftn(x), FFT.rfftn(x), FFT.ifft(x, dim=0)):
            assert [type(p) for p in y.placements] == [type(p) for p in x.placements]


@pytest.mark.ranks(2, 3, 4)
def test_an_inverse_transform_starts_where_the_first_one_ended():
    n, mesh = WORLD.size, mesh_of((WORLD.size,))
    x = shard(field(2, 3, 4 * n, 8 * n - 2), mesh, (ms.Shard(2),))
    spectrum = FFT.rfft2(x)
    assert spectrum.placements == (ms.Shard(3),)
    assert FFT.irfft2(spectrum, x.shape[2:]).sharding is x.sharding


@pytest.mark.ranks(2, 3, 4)
def test_one_exchange():
    n, mesh = WORLD.size, mesh_of((WORLD.size,))
    shape = (4 * n, 3, 2 * n)
    x = shard(cells(*shape), mesh, (ms.Shard(0),), requires_grad=True)
    block = x.to_local().nbytes
    # the result stays; of one dim there is no other to cut it along, and it comes back
    for transform, calls in ((FFT.fftn, 1), (FFT.fft2, 0), (lambda t: FFT.fft(t, dim=0), 2)):
        expected = (calls, calls * (n - 1), calls * block * (n - 1) // n)
        with ms.comm_counter() as count:
            y = transform(x)
        assert (count.calls, count.messages, count.nbytes) == expected
        with ms.comm_counter() as count:
            torch.autograd.grad(y, x, y.detach())
        assert (count.calls, count.messages, count.nbytes) == expected


@pytest.mark.ranks(2, 3, 4)
def test_what_travels_before_a_real_transform_is_real():
    n, mesh = WORLD.size, mesh_of((WORLD.size,))
    x = shard(field(4 * n, 6 * n - 2), mesh, (ms.Shard(1),))
    with ms.comm_counter() as count:
        y = FFT.rfft2(x)
    assert count.calls == 2
    # real blocks there, and half as many complex ones back
    assert y.shape == (4 * n, 3 * n)
    there = x.to_local().nbytes - x.to_local()[:4].nbytes
    assert count.nbytes == there + 4 * 3 * (n - 1) * 16


@pytest.mark.ranks(4)
def test_a_mesh_of_two_dims_transposes_both_at_once():
    x = shard(cells(8, 8, 8), mesh_of((2, 2)), (ms.Shard(0), ms.Shard(1)))
    with ms.comm_counter() as count:
        FFT.fftn(x)
    assert count.calls == 1
    # too few planes to be cut by both mesh dims
    x = shard(cells(64, 64, 2), mesh_of((2, 2)), (ms.Shard(0), ms.Shard(1)))
    with ms.comm_counter() as count:
        FFT.fftn(x)
    assert count.calls == 2
    # batch dims stay where they are
    x = shard(cells(8, 8, 8), mesh_of((2, 2)), (ms.Shard(0), ms.Shard(1)))
    with ms.comm_counter() as count:
        FFT.fft2(x)
    assert (count.calls, count.messages) == (1, 1)


def test_torchs_own_errors():
    refused_alike(lambda t: FFT.fft(t, n=0), cells(4, 5))
    refused_alike(lambda t: FFT.fft(t, norm="none"), cells(4, 5))
    refused_alike(FFT.rfft, cells(4, 5))
    refused_alike(lambda t: FFT.fft2(t, dim=(0, 0)), cells(4, 5))
    refused_alike(lambda t: FFT.fftn(t, s=(2, 3), dim=(0,)), cells(4, 5))
    refused_alike(lambda t: FFT.rfftn(t, dim=()), field(4, 5))
    refused_alike(FFT.irfft, cells(4, 1))
    refused_alike(FFT.fft, field(4, 5).half())
    x = shard(cells(4, 5), mesh_of((WORLD.size,)), (ms.Shard(0),))
    with pytest.raises(IndexError, match="Dimension out of range"):
        FFT.fft(x, dim=2)
    with pytest.raises(ms.UnsupportedOperationError):
        FFT.fft(x, out=cells(4, 4))


def test_repeated_calls_use_one_plan():
    x = shard(cells(6, 5), mesh_of((WORLD.size,)), (ms.Shard(0),))
    compare(lambda t: FFT.fft(t, dim=0), [(cells(6, 5), x.mesh, x.placements, None)])
    before = len(x.mesh.plans)
    FFT.fft(x, dim=0)
    FFT.fft(x, None, 0)
    assert len(x.mesh.plans) == before


@pytest.mark.ranks(2, 3, 4)
def test_a_large_gather_warns(monkeypatch):
    monkeypatch.setenv("MPISHARD_GATHER_WARN", "0")
    mesh = mesh_of((WORLD.size,))
    FFT.fft(shard(cells(6, 5), mesh, (ms.Shard(0),)), dim=0)
    with pytest.raises(ms.GatherWarning, match="fft gathers a ShardTensor of shape"):
        FFT.fft(shard(cells(11), mesh, (ms.Shard(0),)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.int16, torch.int64])
def test_whole_numbers_of_any_kind(dtype):
    full = torch.arange(20).reshape(5, 4).to(dtype)
    mesh = mesh_of((WORLD.size,))
    for sizes in (None, {0: skew(5, WORLD.size)}):
        for dim in (0, 1):
            x = shard(full, mesh, (ms.Shard(0),), sizes)
            torch.testing.assert_close(gathered(torch.fft.fft(x, dim=dim)), torch.fft.fft(full, dim=dim))
