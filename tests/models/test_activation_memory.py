"""Ways to hold fewer activations: computed again, some of them, or kept on the host; each as one process."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mpishard as ms
from tests.models.convolutional import UNet
from tests.models.transformer import Block
from tests.models.twin import close, data, mean_square, meshes, run, same_state, seeded

CASES = {
    "unet": (lambda: UNet(2, norm="group"), (2, 1, 13, 11), (2, 3)),
    "attention": (lambda: Block(8, 2), (2, 9, 8), (1,)),
}
KEPT = [torch.ops.aten.convolution.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def by_list():
    return create_selective_checkpoint_contexts(KEPT)


def by_policy():
    """Keep the results of every other product and convolution."""
    calls = {True: 0, False: 0}

    def policy(ctx, op, *_args, **_kwargs):
        if op not in KEPT:
            return CheckpointPolicy.PREFER_RECOMPUTE
        calls[ctx.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if calls[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def ways():
    def again(model, x, **options):
        return checkpoint(model, x, use_reentrant=False, **options)

    def on_host(model, x, **options):
        with save_on_cpu(**options):
            return model(x)

    return {
        "checkpoint": again,
        "reentrant checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=True),
        "selective, by a list": functools.partial(again, context_fn=by_list),
        "selective, by a policy": functools.partial(again, context_fn=by_policy),
        "saved on the host": on_host,
        "checkpoint, saved on the host": lambda model, x: on_host(functools.partial(again, model), x),
    }


class Wrapped(nn.Module):
    def __init__(self, build, way):
        super().__init__()
        self.inside, self.way = build(), way

    def forward(self, x):
        return self.way(self.inside, x)


# torch 2.15 says that hooks around a selective checkpoint will see more one day
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", ways())
def test_equals_one_process(name, way):
    build, shape, dims = CASES[name]
    full = data(*shape)
    reference, whole = seeded(build, full.dtype), full.clone().requires_grad_()
    expected, _ = run(reference, whole, mean_square)
    for mesh, placements in meshes(dims):
        for options in ({}, {"shard_parameters": 0}):
            if options and name == "unet":
                continue  # that of attention says as much
            model = ms.distribute_module(seeded(lambda: Wrapped(build, ways()[way]), full.dtype), mesh, **options)
            for _ in range(3 if options else 1):  # layers that follow one another are known from the second on
                model.zero_grad()
                x = ms.distribute_tensor(full, mesh, placements).requires_grad_()
                out, _ = run(model, x, mean_square)
            close(out, expected, f"{way}: output")
            close(x.grad, whole.grad, f"{way}: gradient of the input")
            if options:
                for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                    got = p.grad.full_tensor() if isinstance(p.grad, ms.ShardTensor) else p.grad
                    torch.testing.assert_close(got, q.grad, rtol=1e-9, atol=1e-11)
            else:
                same_state(model.inside, reference, way)


def test_reentrant_checkpoints_of_several_tensors():
    """One inside the other; results of any layout, and no tensors; a plain argument; a loss inside; twice backward."""
    full = data(4, 6)
    plain = torch.linspace(-1, 1, 6, dtype=full.dtype)

    def inner(x, w):
        return torch.tanh(x * w), x.sum(0), "a word"

    def outer(x, w, factor):
        y, total, _ = checkpoint(inner, x, w, use_reentrant=True)
        return y * factor, (total * w).square().sum()

    def loss_of(x, w):
        y, extra = checkpoint(outer, x, w, 3, use_reentrant=True)
        return y.square().sum() + extra

    def gradients(x):
        w = plain.clone().requires_grad_()
        for _ in range(2):
            loss_of(x.requires_grad_(), w).backward()
        return x.grad, w.grad

    expected = gradients(full.clone())
    for mesh, placements in meshes((0, 1)):
        for placed in (placements, [ms.Replicate()] * mesh.ndim):
            got, of_plain = gradients(ms.distribute_tensor(full, mesh, placed))
            torch.testing.assert_close((got.full_tensor(), of_plain), expected)


def test_reentrant_checkpoints_of_nested_tensors_are_refused():
    for mesh, placements in meshes((1,)):
        x = ms.distribute_tensor(data(2, 9, 8), mesh, placements).requires_grad_()
        for call, args in ((lambda xs, y: xs[0] + y, ([x], x)), (lambda y: [y + 1], (x,))):
            with pytest.raises(ms.UnsupportedOperationError, match="a list that holds ShardTensors"):
                checkpoint(call, *args, use_reentrant=True)
