"""Sharded parameters beside blocks that take other ways on some ranks: small ones, and those without cells."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import mpishard as ms
from tests.compare import WORLD, skew
from tests.models.twin import close, data, mean_square, run, seeded


class Residual(nn.Module):
    """Two ways of different kernels, which meet."""

    def __init__(self, a, b, dims):
        super().__init__()
        conv, norm = (nn.Conv2d, nn.InstanceNorm2d) if dims == 2 else (nn.Conv3d, nn.InstanceNorm3d)
        self.one, self.norm1, self.two = conv(a, b, 3, padding=1), norm(b, affine=True), conv(b, b, 3, padding="same")
        self.norm2, self.short, self.act = nn.GroupNorm(2, b), conv(a, b, 1), nn.PReLU(b)

    def forward(self, x):
        y = F.leaky_relu(self.norm1(self.one(x)), 0.01, inplace=True)
        return self.act(self.norm2(self.two(y)) + self.short(x))


def cuts(n):
    """Give sizes of blocks: even, one row on the last rank, and a rank without any."""
    if WORLD.size == 1:
        return [(n,)]
    others = WORLD.size - 1
    return [None, (*skew(n - 1, others), 1), (0, *skew(n, others))]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [4, 12])
def test_kernels_that_differ_between_ranks(dims, dtype, channels):
    """Which parameters autograd saves depends on a block's kernel; all are gathered by all ranks."""
    mesh = ms.init_mesh((-1,), ("y",))
    full = data(1, channels, 4 * WORLD.size + 1, *(10, 7)[: dims - 1]).to(dtype)
    reference = seeded(lambda: Residual(channels, 4, dims), dtype)
    expected = run(reference, full.clone().requires_grad_(), mean_square)[0]
    for sizes in cuts(full.shape[2]):
        model = ms.distribute_module(
            seeded(lambda: Residual(channels, 4, dims), dtype, mesh.rank), mesh, shard_parameters="y"
        )
        x = ms.distribute_tensor(full, mesh, (ms.Shard(2),), sizes=None if sizes is None else {2: sizes})
        for _ in range(2):
            model.zero_grad()
            found = run(model, x.detach().requires_grad_(), mean_square)[0]
        rtol = 1e-9 if dtype == torch.float64 else 1e-3
        close(found, expected, str(sizes), rtol)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            g = p.grad.full_tensor() if isinstance(p, ms.ShardTensor) else p.grad
            torch.testing.assert_close(g, q.grad, rtol=rtol, atol=rtol * float(q.grad.abs().max()) + rtol, msg=name)


class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.product = nn.Bilinear(6, 6, 6)

    def forward(self, x):
        return self.product(x, 2 * x)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


TOKENS, IMAGES = (2, 2 * WORLD.size + 1, 6), (2, 6, 2 * WORLD.size + 1, 5)
# layer, shape of its input, dim that is cut
LAYERS = {
    "linear": (lambda: nn.Linear(6, 6), TOKENS, 1),
    "features": (lambda: nn.Linear(6, 6), TOKENS, 2),
    "bilinear": (Squared, TOKENS, 1),
    "attention": (Attends, TOKENS, 1),
    "layer norm": (lambda: nn.LayerNorm(6), TOKENS, 1),
    "convolution": (lambda: nn.Conv2d(6, 6, 3, padding=1), IMAGES, 2),
    "of channels": (lambda: nn.Conv2d(6, 6, 3, padding=1), IMAGES, 1),
    "one cell": (lambda: nn.Conv2d(6, 6, 1), IMAGES, 2),
    "transposed": (lambda: nn.ConvTranspose2d(6, 6, 3, padding=1), IMAGES, 2),
    "batch norm": (lambda: nn.BatchNorm2d(6), IMAGES, 2),
    "group norm": (lambda: nn.GroupNorm(3, 6), IMAGES, 1),
    "slopes": (lambda: nn.PReLU(6), IMAGES, 2),
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("of_data", [True, False], ids=["data", "activations"])
@pytest.mark.parametrize("name", LAYERS)
def test_blocks_without_cells(name, of_data):
    """Kernels of such blocks save nothing, and ask for no parameter in backward; the others do."""
    layer, shape, dim = LAYERS[name]
    mesh, full = ms.init_mesh((-1,), ("y",)), data(*shape)

    def build():
        return nn.Sequential(layer(), nn.Tanh(), layer())

    reference = seeded(build, torch.float64)
    run(reference, full.clone().requires_grad_(not of_data), mean_square)
    for sizes in cuts(shape[dim]):
        model = ms.distribute_module(seeded(build, torch.float64, mesh.rank), mesh, shard_parameters="y")
        x = ms.distribute_tensor(full, mesh, (ms.Shard(dim),), sizes=None if sizes is None else {dim: sizes})
        for _ in range(2):
            model.zero_grad()
            run(model, x.requires_grad_(not of_data), mean_square)
        for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            g = p.grad.full_tensor() if isinstance(p, ms.ShardTensor) else p.grad
            close(g, q.grad, f"{sizes}: {key}", 1e-8)


class Masked(nn.Linear):
    by_data = False

    def forward(self, x):
        with torch.no_grad():
            weight = self.weight.data if self.by_data else self.weight
            weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("by_data", [False, True])
def test_what_forward_writes_into_a_parameter_is_not_lost_in_silence(by_data):
    mesh = ms.init_mesh((-1,), ("y",))
    model = ms.distribute_module(Masked(8, 8), mesh, shard_parameters="y")
    model.by_data = by_data
    with pytest.raises(ms.LayoutError, match="writes into 'weight'"):
        model(torch.ones(2, 8))
    assert "weight" not in vars(model)


@pytest.mark.ranks(2, 3, 4)
def test_what_a_program_had_done_with_parameters_before():
    mesh, x = ms.init_mesh((-1,), ("y",)), torch.ones(2, 8)
    model = nn.Linear(8, 8)
    model.weight.options = {"lr": 1.0}
    before = torch.optim.SGD(model.parameters(), 0.1)
    handle = model.bias.register_hook(lambda g: None)
    with pytest.raises(ms.LayoutError, match="'bias' is to be sharded, and has hooks"):
        ms.distribute_module(model, mesh, shard_parameters="y")
    handle.remove()
    ms.distribute_module(model, mesh)  # has hooks of its own
    ms.distribute_module(model, mesh, shard_parameters="y")
    assert model.weight.options == {"lr": 1.0}
    model(ms.distribute_tensor(x, mesh, (ms.Replicate(),))).sum().backward()
    with pytest.raises(ms.UnsupportedOperationError, match="sharded since"):
        before.step()
    torch.optim.SGD(model.parameters(), 0.1).step()
    small = nn.Linear(8, 1)
    small.bias.register_hook(lambda g: None)
    ms.distribute_module(small, mesh, shard_parameters="y")  # stays as it is


class Constrained(nn.Module):
    """Writes into its layers by ``.data`` before it calls them, as norms of weights are bounded."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.first(x)
        self.second.weight.data.mul_(1.25)
        y = self.second(y)
        self.third.weight.data = self.third.weight.data * 0.5
        return self.third(y)


@pytest.mark.ranks(2, 3, 4)
def test_what_is_written_by_data_before_a_layer_computes():
    """Torch does not count such writes, and from the second forward on the layer was gathered before them."""
    mesh, full = ms.init_mesh((-1,), ("y",)), data(5, 8)
    reference = seeded(Constrained, torch.float64)
    model = ms.distribute_module(seeded(Constrained, torch.float64), mesh, shard_parameters="y")
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0),))
    for _ in range(3):
        for net, batch in ((reference, full), (model, x)):
            net.zero_grad()
            net(batch).square().mean().backward()
        close(model(x).detach(), reference(full).detach(), "output")
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            close(p.grad.full_tensor() if isinstance(p, ms.ShardTensor) else p.grad, q.grad, name)
    alias, own = model.third.weight.data, reference.third.weight.data  # before the layer is sent for
    for net, batch, weight in ((reference, full, own), (model, x, alias)):
        y = net.second(net.first(batch))
        weight.mul_(3)
        net.output = net.third(y).detach()
    close(model.output, reference.output, "layers called one by one")


@pytest.mark.ranks(2, 3, 4)
def test_a_vector_of_all_parameters():
    """One that is whole on every rank has its part of a sharded vector whole: a read ended the process."""
    mesh = ms.init_mesh((-1,), ("y",))
    x = ms.distribute_tensor(data(2, 8), mesh, (ms.Replicate(),))
    for outputs in (8, 1):
        model = ms.distribute_module(seeded(lambda: nn.Linear(8, outputs), torch.float64), mesh, shard_parameters="y")
        vector_to_parameters(2 * parameters_to_vector(model.parameters()).detach(), model.parameters())
        reference = seeded(lambda: nn.Linear(8, outputs), torch.float64)
        close(model(x).detach(), 2 * reference(data(2, 8)).detach(), "twice")


@pytest.mark.ranks(2, 3, 4)
def test_parameters_from_a_vector_are_written_into():
    """A part of a vector that came to lie as the parameter was a view to refuse: an optimizer's step raised."""
    mesh = ms.init_mesh((-1,), ("y",))
    n = 2 * mesh.size  # so that even cuts of the vector's part are those of the parameter
    reference = seeded(lambda: nn.Conv2d(3, n, 3), torch.float64)
    model = ms.distribute_module(seeded(lambda: nn.Conv2d(3, n, 3), torch.float64), mesh, shard_parameters="y")
    for net in (reference, model):
        vector_to_parameters(2 * parameters_to_vector(net.parameters()).detach(), net.parameters())
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(3)
    for name, p in reference.named_parameters():
        close(model.get_parameter(name).detach(), p.detach(), name)
