"""Under autocast results have torch's dtype, on shards as on whole tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, flat, gathered, mesh_of, shard, skew
from tests.ops.windows import field
from tests.release import RELEASE


def plain(*shape):
    return field(*shape, dtype=torch.float32)


LABELS = torch.arange(7) % 6
W, B, ROWS = plain(5, 6), plain(5), plain(7, 6)
NORM_1, NORM_2 = plain(4), plain(4) + 1

# of x (7, 6)
ROWWISE = {
    "linear": lambda x: F.linear(x, W, B),
    "linear without bias": lambda x: F.linear(x, W),
    "mm": lambda x: torch.mm(x, W.T),
    "matmul": lambda x: x @ W.T,
    "mv": lambda x: torch.mv(x, W[0].to(x.dtype)),
    "dot": lambda x: torch.dot(x[:, 0], x[:, 1]),
    "outer": lambda x: torch.outer(x[:, 0], x[0]),
    "inner": lambda x: torch.inner(x, W),
    "tensordot": lambda x: torch.tensordot(x, W, ([1], [1])),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, W),
    "einsum of one": lambda x: torch.einsum("ij->j", x),
    "addmm": lambda x: torch.addmm(B, x, W.T),
    "addmm scaled": lambda x: torch.addmm(B, x, W.T, beta=0.5, alpha=2.0),
    "addmm without input": lambda x: torch.addmm(B, x, W.T, beta=0),
    "addmm to x": lambda x: torch.addmm(x, plain(7, 3), plain(3, 6)),
    "addmm_": lambda x: (x * 1).addmm_(plain(7, 3).to(x.dtype), plain(3, 6).to(x.dtype)),
    "addmv": lambda x: torch.addmv(plain(7).to(x.dtype), x, W[0].to(x.dtype)),
    "addr": lambda x: torch.addr(x, plain(7), plain(6)),
    "bilinear": lambda x: F.bilinear(x, x * 2, plain(3, 6, 6), plain(3)),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, W.T, plain(5, 3)]),
    "chain_matmul": lambda x: torch.chain_matmul(x, W.T),
    "vecdot": lambda x: torch.linalg.vecdot(x, ROWS),
    "cdist": lambda x: torch.cdist(x, ROWS),
    "pdist": F.pdist,
    "cosine": lambda x: F.cosine_similarity(x, ROWS),
    "pairwise distance": lambda x: F.pairwise_distance(x, ROWS),
    "trace": torch.trace,
    "prod": torch.prod,
    "prod of a dim": lambda x: torch.prod(x, 0),
    "quantile": lambda x: torch.quantile(x.float(), 0.3, 0),
    "sum": lambda x: x.sum(),
    "sum of a dim": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "var": lambda x: x.var(0),
    "std": lambda x: x.std(),
    "norm": lambda x: x.norm(),
    "vector norm": lambda x: torch.linalg.vector_norm(x, 3, 0),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "logsumexp": lambda x: x.logsumexp(0),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "logcumsumexp": lambda x: x.float().logcumsumexp(0),
    "cummax": lambda x: x.cummax(0).values,
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "softmax with dtype": lambda x: x.softmax(0, dtype=torch.float32),
    "normalize": lambda x: F.normalize(x, dim=0),
    "amax": lambda x: x.amax(0),
    "max": lambda x: x.max(0).values,
    "sort": lambda x: x.sort(0).values,
    "median": lambda x: x.median(0).values,
    "topk": lambda x: x.topk(2, 0).values,
    "cat": lambda x: torch.cat([x, ROWS]),
    "cat of halves": lambda x: torch.cat([x, ROWS.bfloat16()]),
    "stack": lambda x: torch.stack([x, ROWS], 1),
    "hstack": lambda x: torch.hstack([x, ROWS]),
    "index_copy": lambda x: x.index_copy(0, torch.tensor([2, 0]), plain(2, 6)),
    "index_add": lambda x: x.index_add(0, torch.tensor([2, 0]), plain(2, 6).to(x.dtype)),
    "where": lambda x: torch.where(x > 0, x, ROWS),
    "gather": lambda x: x.gather(0, torch.zeros(2, 6, dtype=torch.int64)),
    "index_select": lambda x: x.index_select(0, torch.tensor([4, 1])),
    "embedding": lambda x: F.embedding(LABELS, x),
    "embedding_bag": lambda x: F.embedding_bag(LABELS.view(1, -1), x),
    "prelu": lambda x: F.prelu(x, plain(1)),
    "cosine_similarity of two dtypes": lambda x: F.cosine_similarity(x, x.double() + 1),
    "triplet_margin_loss of two dtypes": lambda x: F.triplet_margin_loss(x, x.double() + 1, x * 2),
    "gelu": F.gelu,
    "glu": lambda x: F.glu(x, 1),
    "exp": lambda x: x.exp(),
    "pow": lambda x: x**2,
    "add": lambda x: x + ROWS,
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.5),
    "cov": torch.cov,
    "corrcoef": torch.corrcoef,
    "diff": lambda x: x.diff(dim=0),
    "trapezoid": lambda x: torch.trapezoid(x, dim=0),
    "gradient": lambda x: torch.gradient(x, dim=0)[0],
    "layer_norm": lambda x: F.layer_norm(x, (6,), plain(6), plain(6)),
    "rms_norm": lambda x: F.rms_norm(x, (6,), plain(6)),
    "fft": lambda x: torch.fft.fft(x, dim=0),
    "rfft": torch.fft.rfft2,
    "view_as_complex": lambda x: torch.view_as_complex(x.reshape(7, 3, 2)),
    "polar": lambda x: torch.polar(x, ROWS.to(x.dtype)),
    "rnn_tanh_cell": lambda x: torch.rnn_tanh_cell(x, plain(7, 4), plain(4, 6), plain(4, 4)),
    "nansum": lambda x: x.nansum(0),
    "aminmax": lambda x: x.aminmax(dim=0),
    "sigmoid": lambda x: x.sigmoid(),
    "kron": lambda x: torch.kron(x, plain(2, 2)),
    "windows": lambda x: x.unfold(0, 3, 2),
}
if RELEASE < (2, 13):  # torch 2.8 has no derivative of it
    del ROWWISE["aminmax"]

# of x (7, 6), all between 0 and 1, and the kind of reduction
LOSSES = {
    "cross_entropy": lambda x, r: F.cross_entropy(x, LABELS, reduction=r),
    "cross_entropy weighted": lambda x, r: F.cross_entropy(x, LABELS, plain(6).abs(), reduction=r),
    "cross_entropy smoothed": lambda x, r: F.cross_entropy(x, LABELS, label_smoothing=0.1, reduction=r),
    "cross_entropy of shares": lambda x, r: F.cross_entropy(x, ROWS.softmax(1), reduction=r),
    "nll": lambda x, r: F.nll_loss(x, LABELS, reduction=r),
    "mse": lambda x, r: F.mse_loss(x, ROWS.to(x.dtype), reduction=r),
    "mse to float32": lambda x, r: F.mse_loss(x, ROWS, reduction=r),
    "mse weighted": lambda x, r: F.mse_loss(x, ROWS.to(x.dtype), weight=ROWS.abs().to(x.dtype), reduction=r),
    "l1": lambda x, r: F.l1_loss(x, ROWS.to(x.dtype), reduction=r),
    "huber": lambda x, r: F.huber_loss(x, ROWS.to(x.dtype), reduction=r),
    "smooth_l1": lambda x, r: F.smooth_l1_loss(x, ROWS.to(x.dtype), reduction=r),
    "kl": lambda x, r: F.kl_div(x, ROWS.abs().to(x.dtype), reduction="batchmean" if r == "mean" else r),
    "bce": lambda x, r: F.binary_cross_entropy(x, ROWS.sigmoid().to(x.dtype), reduction=r),
    "bce_logits": lambda x, r: F.binary_cross_entropy_with_logits(x, ROWS.sigmoid().to(x.dtype), reduction=r),
    "bce_logits with pos_weight": lambda x, r: F.binary_cross_entropy_with_logits(
        x, ROWS.sigmoid().to(x.dtype), pos_weight=plain(6).abs().to(x.dtype), reduction=r
    ),
    "soft_margin": lambda x, r: F.soft_margin_loss(x, ROWS.sign().to(x.dtype), reduction=r),
    "poisson": lambda x, r: F.poisson_nll_loss(x, ROWS.abs().to(x.dtype), reduction=r),
    "hinge": lambda x, r: F.hinge_embedding_loss(x, ROWS.sign().to(x.dtype), reduction=r),
    "margin_ranking": lambda x, r: F.margin_ranking_loss(x, ROWS.to(x.dtype), ROWS.sign().to(x.dtype), reduction=r),
    "multi_margin": lambda x, r: F.multi_margin_loss(x, LABELS, reduction=r),
    "multilabel_margin": lambda x, r: F.multilabel_margin_loss(x, (torch.arange(42).view(7, 6) % 6) - 1, reduction=r),
    "multilabel_soft_margin": lambda x, r: F.multilabel_soft_margin_loss(x, (ROWS > 0).to(x.dtype), reduction=r),
    "gaussian_nll": lambda x, r: F.gaussian_nll_loss(x, ROWS.to(x.dtype), ROWS.abs().to(x.dtype) + 1, reduction=r),
    "cosine_embedding": lambda x, r: F.cosine_embedding_loss(
        x, ROWS.to(x.dtype), torch.tensor([1, -1, 1, -1, 1, -1, 1]), reduction=r
    ),
    "triplet_margin": lambda x, r: F.triplet_margin_loss(x, ROWS.to(x.dtype), (ROWS * 2).to(x.dtype), reduction=r),
    "ctc": lambda x, r: F.ctc_loss(
        x.log().unsqueeze(0).expand(4, -1, -1),
        torch.ones(7, 2, dtype=torch.int64).cumsum(1),
        torch.full((7,), 4),
        torch.full((7,), 2),
        reduction=r,
    ),
}

# of x (2, 4, 8, 6)
IMAGES = {
    "conv1d": lambda x: F.conv1d(x[0], plain(5, 8, 3), plain(5), padding=1),
    "conv2d": lambda x: F.conv2d(x, plain(5, 4, 3, 3), plain(5), padding=1),
    "conv2d strided": lambda x: F.conv2d(x, plain(4, 1, 2, 2), plain(4), stride=2, groups=4),
    "conv3d": lambda x: F.conv3d(x.unsqueeze(1), plain(2, 1, 1, 3, 3), plain(2), padding=(0, 1, 1)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, plain(4, 3, 3, 3), plain(3), stride=2, padding=1),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x[0], plain(8, 3, 3), plain(3)),
    "bmm": lambda x: torch.bmm(x[0], plain(4, 6, 3)),
    "baddbmm": lambda x: torch.baddbmm(plain(8, 3), x[0], plain(4, 6, 3)),
    "baddbmm scaled": lambda x: torch.baddbmm(plain(8, 3), x[0], plain(4, 6, 3), beta=2.0, alpha=0.5),
    "addbmm": lambda x: torch.addbmm(plain(8, 3), x[0], plain(4, 6, 3)),
    "linear": lambda x: F.linear(x, W, B),
    "matmul": lambda x: x @ plain(6, 3),
    "einsum": lambda x: torch.einsum("bchw,cd->bdhw", x, plain(4, 3)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x * 3),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "max_pool3d": lambda x: F.max_pool3d(x.unsqueeze(1), (1, 2, 2)),
    "avg_pool3d": lambda x: F.avg_pool3d(x.unsqueeze(1), (1, 2, 2)),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "adaptive_avg_pool2d to one": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x.unsqueeze(1), (2, 3, 2)),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x.unsqueeze(1), (2, 3, 2)),
    "lp_pool2d": lambda x: F.lp_pool2d(x.abs() + 1, 2.0, 2),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(
        x, 2, (4, 3), _random_samples=torch.full((2, 4, 2), 0.5).to(x.dtype)
    ),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "max_unpool3d": lambda x: F.max_unpool3d(*F.max_pool3d(x.unsqueeze(1), (1, 2, 2), return_indices=True), (1, 2, 2)),
    "reflection_pad1d": lambda x: F.pad(x[0], (2, 1), "reflect"),
    "reflection_pad2d": lambda x: F.pad(x, (2, 1, 1, 2), "reflect"),
    "replication_pad1d": lambda x: F.pad(x[0], (2, 1), "replicate"),
    "replication_pad2d": lambda x: F.pad(x, (2, 1, 1, 2), "replicate"),
    "reflection_pad3d": lambda x: F.pad(x.unsqueeze(1), (1, 1, 1, 1, 1, 1), "reflect"),
    "replication_pad3d": lambda x: F.pad(x.unsqueeze(1), (1, 1, 1, 1, 1, 1), "replicate"),
    "circular pad": lambda x: F.pad(x, (2, 1, 1, 2), "circular"),
    "constant pad": lambda x: F.pad(x, (2, 1, 1, 2)),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "interpolate nearest": lambda x: F.interpolate(x, scale_factor=2),
    "grid_sample": lambda x: F.grid_sample(x, plain(2, 5, 3, 2).tanh().to(x.dtype), align_corners=False),
    "affine_grid": lambda x: F.affine_grid(x[:, 0, :2, :3], [2, 3, 4, 5], align_corners=False),
    "unfold": lambda x: F.unfold(x, 3),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, NORM_1, NORM_2, True),
    "batch_norm with statistics": lambda x: F.batch_norm(x, NORM_1, NORM_2.abs(), NORM_1, NORM_2),
    "group_norm": lambda x: F.group_norm(x, 2, NORM_1, NORM_2),
    "instance_norm": lambda x: F.instance_norm(x, weight=NORM_1, bias=NORM_2),
    "layer_norm": lambda x: F.layer_norm(x, (8, 6)),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
    "prelu": lambda x: F.prelu(x, plain(4)),
    "fftn": lambda x: torch.fft.fftn(x, dim=(2, 3)),
    "stft": lambda x: torch.stft(x.flatten(1).repeat(1, 2), 16, window=torch.ones(16), return_complex=True),
    "lstm": lambda x: torch.lstm(
        x[0],
        [plain(1, 8, 5) * 0] * 2,
        [plain(20, 6), plain(20, 5), plain(20), plain(20)],
        True,
        1,
        0.0,
        False,
        False,
        False,
    ),
    "gru": lambda x: torch.gru(
        x[0], plain(1, 8, 5) * 0, [plain(15, 6), plain(15, 5), plain(15), plain(15)], True, 1, 0.0, False, False, False
    ),
    "cross": lambda x: torch.linalg.cross(x[..., :3], x[..., 3:]),
    "matrix norm": torch.linalg.matrix_norm,
    "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
}


def _square(x):
    s = x[..., :6, :]
    return s @ s.transpose(-1, -2) + 4 * torch.eye(6)


# of x (2, 4, 8, 6)
MATRICES = {
    "cholesky": lambda x: torch.linalg.cholesky(_square(x)),
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(_square(x)).L,
    "torch.cholesky": lambda x: torch.cholesky(_square(x)),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(x[..., :6, :].tril() + 4 * torch.eye(6).to(x.dtype)),
    "cholesky_solve": lambda x: torch.cholesky_solve(x[..., :6, :2], torch.eye(6).to(x.dtype)),
    "inv": lambda x: torch.linalg.inv(_square(x)),
    "inverse": lambda x: torch.inverse(_square(x)),
    "inv_ex": lambda x: torch.linalg.inv_ex(_square(x)).inverse,
    "pinv": lambda x: torch.linalg.pinv(x.detach().float()),
    "pinverse": torch.pinverse,
    "solve": lambda x: torch.linalg.solve(_square(x), plain(6, 2)),
    "lstsq": lambda x: torch.linalg.lstsq(x, plain(2, 4, 8, 2).to(x.dtype)).solution,
    "svd": lambda x: torch.linalg.svd(x, full_matrices=False).S,
    "svdvals": torch.linalg.svdvals,
    "qr": lambda x: torch.linalg.qr(x).R.abs(),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(_square(x)),
    "eigh": lambda x: torch.linalg.eigh(_square(x)).eigenvalues,
    "eigvals": lambda x: torch.linalg.eigvals(_square(x)).abs().sort().values,
    "cond": lambda x: torch.linalg.cond(_square(x)),
    "matrix_rank": torch.linalg.matrix_rank,
    "det": lambda x: torch.linalg.det(_square(x).float()),
    "slogdet": lambda x: torch.linalg.slogdet(_square(x).float()).logabsdet,
    "householder": lambda x: torch.linalg.householder_product(x, torch.ones(6).to(x.dtype).expand(2, 4, 6)),
    "lu_solve": lambda x: torch.lu_solve(x[..., :6, :2].float(), *torch.linalg.lu_factor(plain(6, 6))),
    "triangular_solve": lambda x: torch.triangular_solve(x[..., :6, :2], torch.eye(6).to(x.dtype)).solution,
    "solve_triangular": lambda x: torch.linalg.solve_triangular(torch.eye(6), x[..., :6, :2].float(), upper=True),
    "tensorinv": lambda x: torch.linalg.tensorinv(x[0, 0, :6, :].reshape(6, 2, 3), 1),
    "matrix_power": lambda x: torch.linalg.matrix_power(x[..., :6, :], 3),
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x[..., :6, :].float() / 6),
}
if RELEASE >= (2, 14):  # torch has it no more
    del MATRICES["torch.cholesky"]


def _run(f, x):
    """Results, and the gradient of their sum weighted by random numbers."""
    with torch.autocast("cpu", torch.bfloat16):
        out = flat(f(x))
    roots = [t for t in out if t.requires_grad]
    if not roots:
        return out, None
    generator = torch.Generator().manual_seed(1)
    weights = []
    for t in roots:
        w = torch.randn(t.shape, generator=generator).to(t.dtype)
        if isinstance(t, ms.ShardTensor):
            placements = [ms.Replicate() if p.is_partial() else p for p in t.placements]
            sizes = {d: s for d, s in enumerate(t.sharding.sizes) if s is not None}
            w = ms.distribute_tensor(w, t.mesh, placements, sizes=sizes)
        weights.append(w)
    return out, torch.autograd.grad(roots, x, weights, allow_unused=True)[0]


def _close(got, expected, what):
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, torch {expected.dtype}"
    got, expected = (t.double() if t.is_floating_point() else t for t in (gathered(got), expected.detach()))
    if expected.is_floating_point() or expected.is_complex():
        near = 0.02 + 0.05 * expected.abs().max().item()
        torch.testing.assert_close(got, expected, rtol=0, atol=near, msg=lambda m: f"{what}: {m}")
    else:
        assert got.shape == expected.shape


def _compare(f, full, case):
    mesh = mesh_of((WORLD.size,))
    for dtype in (torch.float32, torch.bfloat16):
        x, refused = full.to(dtype), None
        try:
            expected, slope = _run(f, x.clone().requires_grad_())
        except (RuntimeError, NotImplementedError) as e:
            refused = e
        if refused is not None:
            # of mixed dtypes, or one without a kernel, be it on this processor
            assert dtype == torch.bfloat16 or "could not create a primitive" in str(refused)
            with pytest.raises(type(refused)):
                _run(f, shard(x, mesh, (ms.Shard(case % full.ndim),), None, True))
            continue
        for dim, uneven in ((case % full.ndim, False), ((case + 1) % full.ndim, True)):
            sizes = {dim: skew(full.shape[dim], WORLD.size)} if uneven and WORLD.size > 1 else None
            what = f"{dtype} cut along {dim} {sizes}"
            got, own = _run(f, shard(x, mesh, (ms.Shard(dim),), sizes, True))
            for e, g in zip(expected, got, strict=True):
                _close(g, e, what)
                assert g.requires_grad == e.requires_grad, what
            assert (own is None) == (slope is None), what
            if slope is not None:
                _close(own, slope, f"{what}: gradient")


def _cases(table):
    return pytest.mark.parametrize(("name", "case"), [(name, k) for k, name in enumerate(table)], ids=list(table))


@_cases(ROWWISE)
@pytest.mark.filterwarnings("ignore")
def test_rows(name, case):
    _compare(ROWWISE[name], field(7, 6), case)


@_cases(IMAGES)
@pytest.mark.filterwarnings("ignore")
def test_images(name, case):
    _compare(IMAGES[name], field(2, 4, 8, 6), case)


@_cases(MATRICES)
@pytest.mark.filterwarnings("ignore")
def test_matrices(name, case):
    _compare(MATRICES[name], field(2, 4, 8, 6), case)


@_cases(LOSSES)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides", "ignore:Using a target size")
def test_losses(name, case):
    for k, how in enumerate(("mean", "none", "sum")):
        _compare(lambda x, how=how: LOSSES[name](x, how), field(7, 6).sigmoid(), case + k)


def test_float64_and_no_autocast_stay():
    mesh = mesh_of((WORLD.size,))
    x = shard(field(7, 6), mesh, (ms.Shard(0),))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.trace(x).dtype == F.pad(x, (1, 1), "replicate").dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert torch.nanmean(x.bfloat16()).dtype == torch.bfloat16


def test_parameters_get_the_whole_gradient():
    """A bias that autocast narrows is summed over ranks in its own dtype."""
    torch.manual_seed(0)
    layer, full = torch.nn.Linear(6, 3), plain(7, 6)
    found = []
    for x in (full, shard(full, mesh_of((WORLD.size,)), (ms.Shard(0),))):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        y.float().square().sum().backward()
        found.append([p.grad.clone() for p in layer.parameters()])
    for expected, got in zip(*found):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize(("own", "cast"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_windows_of_the_half_type_that_autocast_does_not_cast_to(own, cast):
    # torch joins no such tensors under autocast: ranks that join something would raise, and the others wait for them
    full = field(2, 3, 8).to(own)
    mesh = mesh_of((WORLD.size,))
    calls = {
        "pool": lambda x: F.max_pool1d(x, 3, 2, 1),
        "pad": lambda x: F.pad(x, (1, 1)),
        "normalise": lambda x: F.local_response_norm(x, 3),
    }
    for name, call in calls.items():
        with torch.autocast("cpu", cast):
            expected = call(full)
        for sizes in (None, {2: skew(8, WORLD.size)}):
            x = shard(full, mesh, (ms.Shard(2),), sizes)
            with torch.autocast("cpu", cast):
                got = call(x)
            assert got.dtype == expected.dtype
            torch.testing.assert_close(gathered(got), expected, msg=name)
