"""Linear algebra of matrices in sharded batches, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch
from torch import linalg

import mpishard as ms
from tests.compare import compare, shard
from tests.ops.windows import check, field, sampled
from tests.release import RELEASE

SQUARE = {
    "inv": linalg.inv,
    "inverse": torch.inverse,
    "inv_ex": lambda a: linalg.inv_ex(a).inverse,
    "det": linalg.det,
    "slogdet": linalg.slogdet,
    "logdet": lambda a: torch.logdet(a @ a.mT),
    "cholesky": lambda a: linalg.cholesky(a @ a.mT),
    "eigh": lambda a: linalg.eigh(a + a.mT).eigenvalues,
    "eigvalsh": lambda a: linalg.eigvalsh(a + a.mT),
    "eigvals": lambda a: linalg.eigvals(a).abs().sum(-1),
    "matrix_power": lambda a: linalg.matrix_power(a, 3),
    "matrix_exp": linalg.matrix_exp,
    "matrix_exp by name": lambda a: linalg.matrix_exp(input=a),
    "inv by name": lambda a: linalg.inv(A=a),
    "cond": linalg.cond,
    "lu": lambda a: linalg.lu(a)[1:],
    "lu_factor": lambda a: linalg.lu_factor(a)[0],
    "rank": lambda a: linalg.matrix_rank(a, rtol=1e-3),
}
OBLONG = {
    "qr": lambda a: linalg.qr(a)[1].abs(),
    "svd": lambda a: torch.svd(a)[1],
    "svdvals": linalg.svdvals,
    "pinv": linalg.pinv,
    "pinverse": torch.pinverse,
    "nuc": lambda a: linalg.matrix_norm(a, "nuc"),
    "spectral": lambda a: linalg.matrix_norm(a, 2, keepdim=True),
    "norm": lambda a: linalg.norm(a, -2, dim=(1, 2)),
    "fro": lambda a: torch.frobenius_norm(a, (1, 2)),
    "nuclear": lambda a: torch.nuclear_norm(a, (1, 2), True),
    "vector": lambda a: linalg.vector_norm(a, 3, (0, 2)),
}
if RELEASE >= (2, 15):
    SQUARE["matrix_sqrth"] = lambda a: linalg.matrix_sqrth(a @ a.mT)
    SQUARE["matrix_sqrth by name"] = lambda a: linalg.matrix_sqrth(input=a @ a.mT)
    OBLONG["polar"] = linalg.polar


def matrices(*shape):
    """Well-conditioned matrices."""
    return field(*shape) + 3 * torch.eye(shape[-2], shape[-1], dtype=torch.float64)


@pytest.mark.parametrize("name", SQUARE)
def test_square(name):
    check(SQUARE[name], matrices(4, 3, 3), (0, 1, 2), len(name), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", OBLONG)
@pytest.mark.filterwarnings("ignore:at::")
def test_oblong(name):
    check(OBLONG[name], matrices(3, 5, 3), (0, 1, 2), len(name), rtol=1e-8, atol=1e-9)


def test_one_matrix():
    check(linalg.inv, matrices(4, 4), (0, 1), 0, rtol=1e-8)
    check(linalg.det, matrices(4, 4), (0, 1), 1, rtol=1e-8)
    check(lambda a: linalg.tensorinv(a.reshape(2, 3, 6), ind=2), matrices(6, 6), (0, 1), 2, rtol=1e-8)
    check(lambda a: linalg.tensorsolve(a, a[:, 0]), matrices(5, 5), (0, 1), 3, rtol=1e-8)


TWO = {
    "solve": (linalg.solve, (4, 3, 3), (4, 3, 2)),
    "solve a vector": (linalg.solve, (4, 3, 3), (4, 3)),
    "solve broadcast": (linalg.solve, (4, 3, 3), (3, 2)),
    "solve one vector": (linalg.solve, (3, 3), (3,)),
    "solve right": (lambda a, b: linalg.solve(a, b, left=False), (4, 3, 3), (4, 2, 3)),
    "triangular": (lambda a, b: linalg.solve_triangular(a.triu(), b, upper=True), (4, 3, 3), (4, 3, 2)),
    "cholesky": (lambda a, b: torch.cholesky_solve(b, linalg.cholesky(a @ a.mT)), (4, 3, 3), (4, 3, 2)),
    "lu": (lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b), (4, 3, 3), (4, 3, 2)),
    "lstsq": (lambda a, b: linalg.lstsq(a, b).solution, (4, 5, 3), (4, 5, 2)),
}


@pytest.mark.parametrize("name", TWO)
def test_systems(name):
    f, left, right = TWO[name]
    a, b = matrices(*left), field(*right)
    for k, (mesh, placements, sizes) in enumerate(sampled(left, range(len(left)), len(name), 5)):
        other = [(ms.Shard(b.ndim - 1),) * mesh.ndim, None, (ms.Shard(0),) * mesh.ndim][k % 3]
        compare(f, [(a, mesh, placements, sizes), (b, mesh, other, None)], rtol=1e-8, atol=1e-9)
        compare(lambda y, x: f(x, y), [(b, mesh, (ms.Shard(0),) * mesh.ndim, None), (a, mesh, None, None)], rtol=1e-8)


def test_a_sharded_batch_stays():
    x = next(iter(sampled((6, 3, 3), (0,), 0)))
    a = ms.distribute_tensor(matrices(6, 3, 3), *x[:2], sizes=x[2])
    with ms.comm_counter() as counter:
        y = linalg.inv(a)
    assert y.sharding == a.sharding
    assert counter.nbytes == 0


VARIANTS = {
    "qr": lambda a: linalg.qr(a, mode="complete")[1].abs(),
    "eigh": lambda a: linalg.eigvalsh(a @ a.mT, UPLO="U"),
    "svd": lambda a: linalg.svd(A=a, full_matrices=False)[1],
    "svd, older": lambda a: a.svd(False, True)[1],
    "rank": lambda a: linalg.matrix_rank(a, tol=torch.full((3,), 0.1).double()),
    "norm": linalg.norm,
    "norm of columns": lambda a: linalg.norm(a, float("inf"), (1, 2)),
    "norm of a plane": lambda a: linalg.norm(a, "nuc", dim=(0, 2)),
    "spectral norm of a plane": lambda a: linalg.matrix_norm(a, 2, dim=(2, 0), keepdim=True),
    "older norm": lambda a: torch.norm(a, "nuc", dim=(0, 1)),
    "least squares": lambda a: list(linalg.lstsq(a, a[..., :2] + 1)[:1]),
    "determinant of a method": lambda a: (a @ a.mT).det(),
    "power of a method": lambda a: (a @ a.mT).matrix_power(-1),
    "orthogonal": lambda a: linalg.householder_product(a, a[..., 0, :] * 0.1),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_arguments(name):
    check(VARIANTS[name], matrices(3, 3, 3), (0, 1, 2), len(name), rtol=1e-7, atol=1e-8)


def test_complex_matrices():
    a = torch.complex(matrices(4, 3, 3), field(4, 3, 3))
    check(linalg.inv, a, (0, 1, 2), 0, rtol=1e-8)
    check(lambda x: linalg.eigvalsh(x + x.mH), a, (0, 1, 2), 1, rtol=1e-8)


def test_forward_mode():
    a, v = matrices(5, 3, 3), field(5, 3, 3)
    fwd = torch.autograd.forward_ad
    for mesh, placements, sizes in sampled(a.shape, (0, 1), 1):
        # whoever has no matrices takes part in the sum of the tangents
        s, t = (shard(full, mesh, placements, sizes) for full in (a, v))
        with fwd.dual_level():
            expected = fwd.unpack_dual(linalg.det(fwd.make_dual(a, v)).sum()).tangent
            dual = ms.ShardTensor.from_local(fwd.make_dual(s.to_local(), t.to_local()), mesh, placements)
            tangent = fwd.unpack_dual(linalg.det(dual).sum().to_local()).tangent
        torch.testing.assert_close(tangent, expected)
