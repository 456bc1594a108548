"""The tools that check distributed functions: what is right passes, what is wrong fails on every rank."""

from __future__ import annotations

import pytest
import torch

import mpishard as ms
from mpishard.autograd.linear import apply, pair
from mpishard.testing import check_gradient, check_jvp, check_second_gradient


@pytest.fixture
def mesh():
    mesh = ms.init_mesh((-1,), ("x",))
    yield mesh
    mesh.free()


@pytest.fixture
def x(mesh):
    return torch.randn(6, generator=torch.Generator().manual_seed(mesh.rank), dtype=torch.float64)


def wrong(mesh):
    """Return an all-reduce whose adjoint forgets half of the sum on the last rank only."""

    def adjoint(g):
        return ms.all_reduce(g, mesh) / (2 if mesh.rank == mesh.size - 1 else 1)

    return pair(lambda x: ms.all_reduce(x, mesh), adjoint)


def test_passes_and_says_both_sides(mesh, x):
    result = ms.dot_test(lambda x: 2 * x, x, mesh=mesh)
    assert result
    assert float(result) < 1e-14
    assert result.lhs == pytest.approx(result.rhs)
    assert "passed" in repr(result)
    assert ms.dot_test(lambda x: ms.all_reduce(x, mesh), x)
    assert ms.dot_test(lambda x: ms.all_reduce(x, mesh), x, comm=mesh.comm)


def test_zero_error_is_a_pass(x):
    assert ms.dot_test(lambda x: 0 * x, x) == 0.0
    assert ms.dot_test(lambda x: 0 * x, x)


def test_wrong_adjoint_fails_on_every_rank(mesh, x):
    result = ms.dot_test(lambda x: apply(wrong(mesh), x), x, mesh=mesh)
    assert not result
    assert float(result) > 0.01
    assert "FAILED" in repr(result)


def test_affine_function_fails(x):
    assert not ms.dot_test(lambda x: x + 1, x)


def test_not_a_number_fails(x):
    assert not ms.dot_test(lambda x: x * float("nan"), x)


def test_result_without_gradient_is_an_error_on_every_rank(mesh, x):
    with pytest.raises(ms.UnsupportedOperationError, match=f"on 1 of {mesh.size} ranks"):
        ms.dot_test(lambda x: x.detach() if mesh.rank == 0 else x, x, mesh=mesh)


@pytest.mark.parametrize(
    ("f", "given", "said"),
    [
        (3, None, "f= is of another kind"),
        (lambda x: x, 1.5, "x= is of another kind"),
        (lambda x: (x, x), None, r"f\(x\)= is of another kind"),
    ],
)
def test_what_is_no_function_or_no_tensor_on_one_rank_is_an_error_on_every_rank(mesh, x, f, given, said):
    odd = mesh.rank == mesh.size - 1
    with pytest.raises(ms.LayoutError, match=f"dot_test: {said}"):
        ms.dot_test(f if odd else lambda x: x, x if given is None or not odd else given, mesh=mesh)


def test_unused_part_of_the_argument(x):
    assert ms.dot_test(lambda x: x[:2], x)


def test_half_types_pass_within_their_precision(mesh, x):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
        assert ms.dot_test(lambda x: ms.all_reduce(x, mesh), x.to(dtype), mesh=mesh)


def test_sharded_and_replicated_tensors(mesh):
    full = torch.arange(1.0, 11.0, dtype=torch.float64)
    for placement in (ms.Shard(0), ms.Replicate()):
        x = ms.distribute_tensor(full, mesh, (placement,))
        result = ms.dot_test(lambda x: x * 2, x)
        assert result
        # replicated cells count once
        assert result.lhs == pytest.approx(result.rhs)
    assert ms.dot_test(
        lambda x: x.redistribute(placements=(ms.Replicate(),)), ms.distribute_tensor(full, mesh, (ms.Shard(0),))
    )


def test_wrong_first_gradient_is_found_on_every_rank(mesh, x):
    check_gradient(lambda x: ms.all_reduce(x.sin(), mesh), x, mesh=mesh)
    with pytest.raises(AssertionError, match=f"rank {mesh.size - 1}: 6 of 6 elements"):
        check_gradient(lambda x: apply(wrong(mesh), x), x, mesh=mesh)


def test_wrong_second_gradient_is_found(mesh, x):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 3 * x.detach() ** 2 * g

    check_gradient(Cube.apply, x, mesh=mesh)
    with pytest.raises(AssertionError, match="differs from central differences"):
        check_second_gradient(Cube.apply, x, mesh=mesh)


def test_wrong_forward_mode_is_found(mesh, x):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def jvp(ctx, t):
            return 3 * t

    with pytest.raises(AssertionError, match="forward-mode"):
        check_jvp(Double.apply, x, mesh=mesh)
    check_jvp(lambda x: ms.all_reduce(x, mesh) ** 2, x, mesh=mesh)


@pytest.mark.parametrize("check", [check_gradient, check_second_gradient, check_jvp])
def test_what_differences_are_not_taken_of(mesh, x, check):
    """What lies on all ranks together has no elements that one rank could move."""
    shards = ms.ShardTensor.from_local(x, mesh, (ms.Shard(0),))
    with pytest.raises(ms.UnsupportedOperationError, match=r"x: works on plain tensors"):
        check(torch.sin, shards if mesh.rank == mesh.size - 1 else x, mesh=mesh)
    with pytest.raises(ms.UnsupportedOperationError, match=r"f\(x\): works on plain tensors"):
        check(lambda x: ms.ShardTensor.from_local(x, mesh, (ms.Shard(0),)).sin(), x, mesh=mesh)
    with pytest.raises(ms.UnsupportedOperationError, match=r"f\(x\): works on plain tensors"):
        check(lambda x: (x, x), x, mesh=mesh)
    with pytest.raises(ms.errors.UnsupportedDtypeError, match="too coarse for differences"):
        check(torch.sin, x.float() if mesh.rank == 0 else x, mesh=mesh)
