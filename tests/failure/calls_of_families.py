"""More calls that ranks may make differently: of each family of operations, files and plans one or two.

What only a rank's own numbers tell apart is none: its ``x > 3`` beside ``x > 5`` is no other call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mpishard as ms
from tests.failure.calls import (
    RANK,
    SIZE,
    Make,
    Ready,
    field,
    float_of,
    grad_of,
    kernel,
    on_field,
    place,
    rounded,
)


def of_double(make: Make) -> Make:
    """The same of float64 alone: some sums of float32 are carried as those are, and nothing tells them apart."""
    return lambda mesh, n, bits: make(mesh, n, 64)


def points(n: int, bits: int) -> Tensor:
    return torch.linspace(0, 1, 10).to(float_of(bits)).view(5, 2).sin() + RANK / n


def nearest(mesh: Any, n: int, bits: int) -> Ready:
    x = ms.ShardTensor.from_local(points(n, bits), mesh, (ms.Shard(0),))

    def run() -> Tensor:
        return ms.points.knn(x, x, n - 2).distances.to_local()

    return run


def within(mesh: Any, n: int, bits: int) -> Ready:
    x = ms.ShardTensor.from_local(points(n, bits), mesh, (ms.Shard(0),))

    def run() -> Tensor:
        return ms.points.radius(x, x, 1 / n).distances.full_tensor()

    return run


def graph(mesh: Any, n: int, bits: int) -> Ready:
    x = ms.ShardTensor.from_local(points(n, bits), mesh, (ms.Shard(0),))
    start = torch.arange(5 * SIZE + n) % (5 * SIZE)  # of other numbers of edges: values are those ranks' own
    edges = ms.distribute_tensor(torch.stack([start, (start + n) % (5 * SIZE)]), mesh, (ms.Shard(1),))

    def run() -> Tensor:
        plan = ms.graph.halo(edges, x)
        return plan.sum(plan.ends(x)[0]).to_local()

    return run


def planned_graph(mesh: Any, n: int, bits: int) -> Ready:
    x = ms.ShardTensor.from_local(points(n, bits), mesh, (ms.Shard(0),))
    edges = torch.stack([torch.arange(5 * SIZE), (torch.arange(5 * SIZE) + n) % (5 * SIZE)])
    plan = ms.graph.halo(ms.distribute_tensor(edges, mesh, (ms.Shard(1),)), x)
    return lambda: plan(x).clone()


def gathered(x: Tensor, n: int) -> Tensor:
    return x.gather(2, torch.full((1, 1, 2, 6), n))


def written_into(x: Any, n: int) -> Any:
    y = x.clone()
    y[:, :, n - 2 : n] = -1
    y.index_fill_(2, torch.tensor([0, n]), 2)
    return y.to_local()


def whole_model(mesh: Any, n: int, bits: int, **how: Any) -> Any:
    model = torch.nn.Linear(6, n, dtype=float_of(bits))
    for p in model.parameters():
        torch.nn.init.constant_(p, 0.5)
    return ms.distribute_module(model, mesh, **how)


def made_model(mesh: Any, n: int, bits: int) -> Ready:
    return lambda: whole_model(mesh, n, bits).weight.detach().clone()


def clipped(mesh: Any, n: int, bits: int) -> Ready:
    x, model = field(mesh, 4, 64), whole_model(mesh, 4, 64, shard_parameters="x")

    def run() -> Tensor:
        model.zero_grad()
        model(x).sum().backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, 2.0 if n == 3 else torch.inf).detach().clone()

    return run


def tested(mesh: Any, n: int, bits: int) -> Ready:
    x = field(mesh, n, bits).double()
    return lambda: torch.tensor(bool(ms.dot_test(lambda x: x.cumsum(2) * n, x, mesh=mesh)))


def compared(mesh: Any, n: int, bits: int) -> Ready:
    model, x = torch.nn.AvgPool1d(n, 1, n // 2), torch.ones(1, 1, 4 * SIZE, dtype=float_of(bits))

    def run() -> Tensor:
        found = ms.compare_module(model, x, mesh=mesh, placements=(ms.Shard(2),))
        return torch.tensor(float(all(apart < 1e-3 for apart in found.values())))

    return run


def written_by(backend: str) -> Make:
    def ready(mesh: Any, n: int, bits: int) -> Ready:
        x = field(mesh, n, bits)

        def run() -> Tensor:
            ms.io.write(place(n, bits, backend) + ".h5", {"x": x}, backend=backend)
            return torch.zeros(1)

        return run

    return ready


def saved_beside(mesh: Any, n: int, bits: int) -> Ready:
    x = field(mesh, n, bits)

    def run() -> Tensor:
        ms.io.save_checkpoint(place(n, bits, "beside"), n, tensors={"x": x}, mesh=mesh, asynchronous=True).wait()
        return torch.zeros(1)

    return run


def exported(mesh: Any, n: int, bits: int) -> Ready:
    x = field(mesh, n, bits)

    def run() -> Tensor:
        ms.io.export_safetensors(place(n, bits, "exported") + ".safetensors", {"x": x}, mesh=mesh)
        return torch.zeros(1)

    return run


def crossed(x: Any, n: int) -> Tensor:
    target = ms.ShardTensor.from_local(torch.full((1, 5, 6), 0), x.mesh, (ms.Shard(1),))
    return F.cross_entropy(x.expand(1, 3, -1, -1), target, reduction="mean" if n == 3 else "sum").full_tensor()


FAMILIES: dict[str, Make] = {
    "conv_transpose2d": on_field(lambda x, n: F.conv_transpose2d(x, kernel(x, n)).to_local()),
    "neighborhood_attention": on_field(
        lambda x, n: ms.neighborhood_attention(
            *(x.permute(0, 2, 3, 1)[..., None, :] / 9,) * 3, kernel_size=n
        ).to_local()
    ),
    "graph.halo": graph,
    "rows of a graph": planned_graph,
    "points.knn": nearest,
    "points.radius": within,
    "second derivative": on_field(
        lambda x, n: torch.autograd.functional.hvp(lambda t: F.avg_pool2d(t, n, 1, n // 2).pow(3).sum(), x, x)[
            1
        ].to_local()
    ),
    "gradient": on_field(lambda x, n: torch.gradient(x, spacing=float(n), dim=2)[0].to_local()),
    "rebalance": on_field(lambda x, n: x.rebalance({2: [float(n)] + [1.0] * (SIZE - 1)}).to_local()),
    "gather": on_field(lambda x, n: gathered(x, n).full_tensor()),
    "a write into a part": on_field(written_into),
    "masked_select": on_field(lambda x, n: x[x > 9].full_tensor(), None),
    "nonzero": on_field(lambda x, n: x.nonzero().full_tensor().double(), None),
    "unique": rounded(lambda x, n: x.unique(), None),
    "topk": rounded(lambda x, n: x.topk(n - 2, 2).values),
    "median": rounded(lambda x, n: x.median(2).values if n == 3 else x.median()),
    "argmax": rounded(lambda x, n: x.argmax(2 if n == 3 else None).double()),
    "norm": of_double(rounded(lambda x, n: x.norm(2 if n == 3 else torch.inf))),
    "item": on_field(lambda x, n: torch.tensor([x.sum().item() if n == 3 else x.amax().item()])),
    "histc": rounded(lambda x, n: torch.histc(x, n, 0, 99)),
    "einsum": rounded(lambda x, n: ms.einsum("abij,abkj->abik" if n == 3 else "abij,abik->abjk", x, x)),
    "mse_loss": of_double(rounded(lambda x, n: F.mse_loss(x, x * 2, reduction="mean" if n == 3 else "none"))),
    "cross_entropy": of_double(on_field(crossed)),
    "batch_norm": of_double(on_field(lambda x, n: F.batch_norm(x, None, None, training=True, eps=1.0 / n).to_local())),
    "backward of std": grad_of(lambda x, n: x.std(2 if n == 3 else None) * x),
    "backward of softmax": grad_of(lambda x, n: x.softmax(2 if n == 3 else 3)),
    "distribute_module": made_model,
    "clip_grad_norm_": clipped,
    "dot_test": tested,
    "compare_module": compared,
    "io.write, root": written_by("root"),
    "io.write, virtual": written_by("virtual"),
    "save_checkpoint, beside": saved_beside,
    "export_safetensors": exported,
}
