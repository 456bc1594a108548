"""A sample of the table of operations on GPU memory: torch on the whole tensor on the same GPU, and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpishard as ms
from tests.compare import compare, mesh_shapes
from tests.gpu.conftest import REHEARSAL, ROUTES


def values(*shape, seed=5):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CASES = {
    "conv2d": lambda x, w: F.conv2d(x, w, padding=1),
    "conv2d strided": lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=2),
    "conv_transpose2d": lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), stride=2, padding=1, output_padding=1),
    "max_pool2d": lambda x, w: F.max_pool2d(x, 3, 2, 1),
    "avg_pool2d": lambda x, w: F.avg_pool2d(x, 3, 1, 1),
    "adaptive": lambda x, w: F.adaptive_avg_pool2d(x, (3, 2)),
    "interpolate": lambda x, w: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "pad": lambda x, w: F.pad(x, (2, 1, 0, 3), mode="circular"),
    "group_norm": lambda x, w: F.group_norm(x, 2),
    "layer_norm": lambda x, w: F.layer_norm(x, x.shape[2:]),
    "softmax": lambda x, w: x.softmax(2),
    "sum": lambda x, w: x.sum((2, 3), keepdim=True) * x,
    "var": lambda x, w: x.var((1, 2)),
    "amax": lambda x, w: x.amax(2),
    "cumsum": lambda x, w: x.cumsum(2),
    "sort": lambda x, w: x.sort(2)[0],
    "matmul": lambda x, w: x @ x.transpose(2, 3),
    "fft": lambda x, w: torch.fft.rfft2(x).abs(),
    "attention": lambda x, w: F.scaled_dot_product_attention(x, x, x),
    "attention of odd blocks": lambda x, w: F.scaled_dot_product_attention(*[x[:, :1, :, :7]] * 3),
    "index": lambda x, w: x[:, :, torch.tensor([3, 0, 3])],
    "cat": lambda x, w: torch.cat([x, x.flip(2)], 2),
    "gelu": lambda x, w: F.gelu(x) * x.roll(1, 2),
    "reshape": lambda x, w: x.reshape(x.shape[0], -1, x.shape[3]),
    "mse": lambda x, w: F.mse_loss(x, x.detach().flip(3)),
}


@pytest.mark.parametrize(
    ("name", "make_mesh"),
    # in a rehearsal the routes take turns: what an operation sends is the same on each
    [(name, route) for i, name in enumerate(CASES) for route in (ROUTES[i % 4 :][:1] if REHEARSAL else ROUTES)],
    indirect=["make_mesh"],
)
def test_equal_to_torch(device, make_mesh, name):
    weight = values(4, 4, 3, 3).to(device).requires_grad_()
    for shape in mesh_shapes(2):
        mesh = make_mesh(shape)
        placements = (ms.Shard(2), ms.Shard(3))[: len(shape)]

        def f(x):
            return CASES[name](x, weight)

        compare(
            f, [(values(2, 4, 13, 11).to(device), mesh, placements, None)], [weight], rtol=1e-8, atol=1e-9, what=name
        )


def test_training_steps(device, make_mesh):
    """A small network and an optimizer: the same losses as on one GPU."""

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 1, 3)).to(
            device
        )

    x, losses = values(1, 2, 24, 20).float().to(device), []
    mesh = make_mesh((-1,))
    for sharded in (False, True):
        model = network()
        batch = x
        if sharded:
            model = ms.distribute_module(model, mesh)
            batch = ms.distribute_tensor(x, mesh, (ms.Shard(2),))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        own = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = (model(batch) ** 2).mean()
            loss.backward()
            optimizer.step()
            own.append(loss.item())
        losses.append(own)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
