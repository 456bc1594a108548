"""QR and singular values of matrices whose rows are sharded, against torch on the whole matrix."""

from __future__ import annotations

import random

import pytest
import torch
from torch import linalg

import mpishard as ms
from mpishard.ops.linear import tall
from tests.compare import WORLD, compare, drawn_sizes, gathered, layouts, mesh_of, shard
from tests.ops.windows import field
from tests.release import RELEASE

P = WORLD.size


@pytest.fixture(autouse=True)
def _nothing_is_few(monkeypatch):
    monkeypatch.setattr(tall, "FEW", 0)


def rows(n, *batch, dtype=torch.float64):
    """Matrices with rows for all ranks, whose columns are independent."""
    x = field(*batch, P * n + 3, n).to(dtype)
    return x + x.flip(-2) * 1j if dtype.is_complex else x


def projected(x):
    u = linalg.svd(x[..., :2], full_matrices=False).U
    return u @ (u.mH @ x)


def older_svd(x):
    u, s, v = torch.svd(x)
    return (u * s.unsqueeze(-2)) @ v.mH, s


FUNCTIONS = {
    "qr": linalg.qr,
    "r": lambda x: linalg.qr(x.detach(), "r").R,
    "U": projected,
    "V": lambda x: linalg.svd(x, full_matrices=False).Vh.square() @ x.mH,
    "older svd": older_svd,
    "svdvals": linalg.svdvals,
}
if RELEASE < (2, 15):  # removed since
    FUNCTIONS["older qr"] = lambda x: torch.qr(x)[1]


@pytest.mark.filterwarnings("ignore:torch.qr is deprecated")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_tall(name):
    for full, dims in ((rows(3), (0, 1)), (rows(2, 3), (0, 1, 2))):
        for k, (mesh, placements, sizes) in enumerate(layouts(full.shape, dims)):
            if (k + len(name)) % 3 < 2:
                where = (full, mesh, placements, sizes)
                compare(FUNCTIONS[name], [where], rtol=1e-8, atol=1e-9, second=k % 3 == 0, what=f"{where[1:]}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128])
def test_dtypes(dtype):
    full, mesh = rows(3, dtype=dtype), mesh_of((P,))
    whole, x = (t.requires_grad_() for t in (full.clone(), shard(full, mesh, (ms.Shard(0),))))
    near = {"rtol": 1e-4, "atol": 1e-4}
    for f in (lambda x: linalg.qr(x).R, lambda x: linalg.qr(x).Q, linalg.svdvals, lambda x: older_svd(x)[0]):
        y, expected = f(x), f(whole)
        torch.testing.assert_close(gathered(y), expected.detach(), **near)
        found, wanted = (
            torch.autograd.grad(t[..., -1].abs().sum(), leaf)[0] for t, leaf in ((y, x), (expected, whole))
        )
        torch.testing.assert_close(gathered(found), wanted, **near)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 30), (torch.float64, 300)], ids=str)
def test_columns_of_very_different_size(dtype, size):
    full = rows(5, dtype=dtype) * torch.tensor([10.0**k for k in (size, -size, size // 2, -size // 2, 0)], dtype=dtype)
    for got, expected in zip(linalg.qr(shard(full, mesh_of((P,)), (ms.Shard(0),))), linalg.qr(full)):
        torch.testing.assert_close(gathered(got), expected, rtol=1e-4, atol=1e-6 if got.shape == full.shape else 0)


def test_blocks_that_are_short_or_empty():
    rng = random.Random(P)
    full = rows(4)
    for _ in range(8):
        sizes = {0: drawn_sizes(rng, len(full), P)}
        x = shard(full, mesh_of((P,)), (ms.Shard(0),), sizes)
        q, r = linalg.qr(x)
        for got, expected in zip((q, r), linalg.qr(full)):
            torch.testing.assert_close(gathered(got), expected)
        if P > 1:
            assert q.sharding == x.sharding


def test_columns_that_depend_on_each_other():
    """Their Q is orthonormal, as torch's is; so is that of zeros."""
    full, mesh = rows(4), mesh_of((P,))
    full[:, 2] = full[:, 0] - 2 * full[:, 1]
    for given in (full, torch.zeros_like(full)):
        q, r = map(gathered, linalg.qr(shard(given, mesh, (ms.Shard(0),))))
        torch.testing.assert_close(q @ r, given)
        torch.testing.assert_close(q.mT @ q, torch.eye(4, dtype=q.dtype))
        s = linalg.svdvals(shard(given, mesh, (ms.Shard(0),)))
        torch.testing.assert_close(gathered(s), linalg.svdvals(given))


def test_rows_of_zeros_in_front_have_the_signs_of_lapack():
    for n in (1, 3):
        full = rows(n)
        full[: n + 1] = 0
        for got, expected in zip(linalg.qr(shard(full, mesh_of((P,)), (ms.Shard(0),))), linalg.qr(full)):
            torch.testing.assert_close(gathered(got), expected)


def test_equal_singular_values_without_their_vectors():
    full, mesh = torch.eye(3 * P, 3, dtype=torch.float64), mesh_of((P,))
    x = shard(full, mesh, (ms.Shard(0),)).requires_grad_()
    linalg.svd(x, full_matrices=False).S.sum().backward()
    torch.testing.assert_close(gathered(x.grad), full)


@pytest.mark.ranks(2, 3, 4)
def test_a_loss_that_depends_on_a_phase_is_refused():
    x = shard(rows(2, dtype=torch.complex128), mesh_of((P,)), (ms.Shard(0),)).requires_grad_()
    loss = linalg.svd(x, full_matrices=False).U.imag.sum()
    with pytest.raises(RuntimeError, match="depends on this phase"):
        loss.backward()


@pytest.mark.ranks(2, 3, 4)
def test_sums_of_two_rows_for_each_column_travel():
    x = shard(rows(3), mesh_of((P,)), (ms.Shard(0),))
    with ms.comm_counter() as count:
        linalg.qr(x)
    # and the largest of each column, two triangles for Q, and its first rows
    assert set(count.by_op) == {"all_reduce"}
    assert count.nbytes == 8 * (3 + 2 * (3 + 2 + 1) + 2 * 9 + 9)
