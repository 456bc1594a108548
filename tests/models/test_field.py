"""Networks of coordinates (SIREN, PINN): coordinates are sharded, derivatives are part of the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpishard as ms
from mpishard.ops.window import conv as rules
from mpishard.ops.window.conv_kernel import choose_wide
from tests.models.twin import close, data, meshes, same_state, seeded, twins


class Sine(nn.Module):
    """A linear layer and a sine."""

    def __init__(self, a, b, omega=3.0):
        super().__init__()
        self.linear, self.omega = nn.Linear(a, b), omega
        nn.init.uniform_(self.linear.weight, -((6 / a) ** 0.5) / omega, (6 / a) ** 0.5 / omega)

    def forward(self, x):
        return torch.sin(self.omega * self.linear(x))


class Siren(nn.Module):
    """Coordinates to values."""

    def __init__(self, inputs=2, outputs=1, width=8):
        super().__init__()
        self.net = nn.Sequential(Sine(inputs, width), Sine(width, width), nn.Linear(width, outputs))

    def forward(self, x):
        return self.net(x)


def gradient(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


def laplacian(y, x):
    g = gradient(y, x)
    return sum(gradient(g[..., i], x)[..., i] for i in range(x.shape[-1]))


def poisson(model, x):
    """Residual of Poisson's equation: derivatives of all coordinates at once."""
    u = model(x)
    source = torch.sin(3 * x[..., :1]) * torch.cos(x[..., 1:2])
    return (laplacian(u, x).unsqueeze(-1) - source).pow(2).mean() + u.pow(2).mean()


def burgers(model, x):
    """u_t + u u_x = nu u_xx, with coordinates as columns of their own."""
    t, s = x[..., 0:1].detach().requires_grad_(), x[..., 1:2].detach().requires_grad_()
    u = model(torch.cat([t, s], dim=-1))
    u_t = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
    u_s = torch.autograd.grad(u.sum(), s, create_graph=True)[0]
    u_ss = torch.autograd.grad(u_s.sum(), s, create_graph=True)[0]
    residual = u_t + u * u_s - 0.01 / torch.pi * u_ss
    return nn.functional.mse_loss(residual, torch.zeros_like(residual))


@pytest.mark.parametrize("loss_of", [poisson, burgers])
@pytest.mark.parametrize("shape", [(23, 2), (7, 9, 2)])
def test_pinn(loss_of, shape):
    x = data(*shape)
    reference = seeded(Siren, x.dtype)
    whole = x.clone().requires_grad_()
    expected = loss_of(reference, whole)
    expected.backward()
    for mesh, placements in meshes(range(len(shape) - 1)):
        model = ms.distribute_module(seeded(Siren, x.dtype, mesh.rank), mesh)
        part = ms.distribute_tensor(x, mesh, placements).requires_grad_()
        loss = loss_of(model, part)
        loss.backward()
        close(loss, expected, "loss")
        if whole.grad is not None:
            close(part.grad, whole.grad, "gradient of the coordinates")
        same_state(model, reference, f"mesh {mesh.shape}")


def test_training_with_lbfgs():
    """An optimiser that evaluates the model several times a step, and reads the loss."""
    x = data(19, 2)

    def train(model, x):
        optimiser = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

        def closure():
            optimiser.zero_grad()
            loss = poisson(model, x)
            loss.backward()
            return loss

        for _ in range(2):
            optimiser.step(closure)
        return [p.detach() for p in model.parameters()]

    def made(seed=0):
        model = seeded(Siren, x.dtype, seed)
        model.unused = nn.Parameter(torch.ones(8, 2, dtype=x.dtype))  # of which the gradient is None
        return model

    expected = train(made(), x.clone().requires_grad_())
    for mesh, placements in meshes((0,)):
        for over in (None, mesh.mesh_dim_names[0]):
            model = ms.distribute_module(made(mesh.rank), mesh, shard_parameters=over)
            got = train(model, ms.distribute_tensor(x, mesh, placements).requires_grad_())
            close(got, expected, f"parameters, sharded over {over}", 1e-6)


def test_siren_on_a_grid():
    """A field of coordinates, and a multilayer perceptron of 1 x 1 convolutions beside it."""
    twins(Siren, data(2, 11, 9, 2), (1, 2), sharded=True)


class GradientPenalty(nn.Module):
    """A network whose output contains its own input's gradient: through convolutions and norms."""

    def __init__(self, conv, width, norm):
        super().__init__()
        self.net = nn.Sequential(
            *(conv(2, width, 3, padding=1), norm(width), nn.Softplus()),
            *(conv(width, width, 3, padding=1), norm(width), nn.Softplus()),
            conv(width, 1, 3, stride=2, padding=1),
        )

    def forward(self, x):
        y = self.net(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        g, y = g.flatten(1), y.flatten(1)
        # the weights in a third place
        decay = sum(p.square().sum() for p in self.parameters())
        return (g.square().sum(1) + 1e-9).sqrt() + y.mean(1) + 1e-3 * decay


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("norm", [lambda c: nn.GroupNorm(2, c), nn.Identity], ids=["norms", "no norms"])
@pytest.mark.parametrize(
    ("conv", "width", "shape", "kernel"),
    [(nn.Conv2d, 4, (2, 2, 11, 9), "torch"), (nn.Conv3d, 8, (1, 2, 12, 10, 14), "columns")],
    ids=["2-D", "3-D"],
)
def test_gradient_penalty(conv, width, shape, kernel, norm, large, monkeypatch):
    """The gradient of a weight comes from several places; where sums of a norm travel, one of them is computed last."""
    if large:
        monkeypatch.setattr(rules, "LARGE_CELLS", 0)
    local = ((1,) * len(shape[2:]),) * 3
    assert (
        choose_wide((1, width, *shape[2:]), (width, width, 3, 3, 3)[: len(shape)], (*local, False, (), 1))[0] == kernel
    )
    twins(lambda: GradientPenalty(conv, width, norm), data(*shape), (2, 3))
