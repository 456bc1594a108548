"""A step on all ranks against one process of plain torch, and against what the machine allows: training, inference.

Per model, a step of one process while the other ranks sleep (the floor); of plain torch on the blocks alone, on all
ranks at once (no communication, so not the same results: what the machine allows); and ours, with what it consists of.
Strong scaling: one field, for one process or for all ranks. Weak: one process has what each rank has. The speed-ups are
of the same rounds. Processor time is that of all ranks, relative to that of the one process (waiting for
messages counts as processor time). On the blocks alone, queries of a block attend to as many keys as there are in the
field, those of the block once more for every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench, Unfit
from mpishard.comm.wait_meter import WaitMeter

WAYS = ("training-strong", "training-weak", "inference-strong", "inference-weak")
OPTIONS = {
    "ways": "of training-strong, training-weak, inference-strong, inference-weak: which (default: all)",
    "models": "which, with commas between (default: all)",
    "round_s": "seconds a round of one kind (default 0.2)",
}


class DoubleConv(nn.Sequential):
    """Two convolutions with norms."""

    def __init__(self, a: int, b: int) -> None:
        layers: list[nn.Module] = []
        for i, o in ((a, b), (b, b)):
            layers += [nn.Conv3d(i, o, 3, padding=1), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU(0.1)]
        super().__init__(*layers)


class UNet(nn.Module):
    """Three levels: strided convolutions down, transposed ones up, skips joined by channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.first = DoubleConv(1, width)
        self.down = nn.ModuleList(nn.Conv3d(a, b, 2, stride=2) for a, b in zip(widths, widths[1:]))
        self.encode = nn.ModuleList(DoubleConv(w, w) for w in widths[1:])
        self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, stride=2) for a, b in zip(widths, widths[1:]))
        self.decode = nn.ModuleList(DoubleConv(2 * w, w) for w in widths[:-1])
        self.last = nn.Conv3d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        skips = []
        for down, encode in zip(self.down, self.encode):
            skips.append(x)
            x = encode(down(x))
        for up, decode in zip(reversed(self.up), reversed(self.decode)):
            x = decode(torch.cat([skips.pop(), up(x)], 1))
        return self.last(x)


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.layers(x))


class SpectralConv(nn.Module):
    """Complex weights for the low modes of both signs."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        shape = (width, width, modes, modes)
        self.low, self.high = (nn.Parameter(torch.randn(shape, dtype=torch.cfloat) / width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m, spectrum = self.modes, torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(out, s=x.shape[-2:])


class FNO(nn.Module):
    """Three spectral layers with shortcuts."""

    def __init__(self, width: int, modes: int = 12) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        self.spectral = nn.ModuleList(SpectralConv(width, modes) for _ in range(3))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x)


class Attention(nn.Module):
    """Self-attention by torch's fused function."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.times = 1  # that every key is there

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.times > 1:
            k, v = (torch.cat([t] * self.times, 2) for t in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class Encoder(nn.Module):
    """A pre-norm encoder layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches as tokens, four encoder layers, a value per token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.layers = nn.Sequential(*(Encoder(width) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.patches(x).flatten(2).transpose(1, 2))))


def resnet(width: int) -> nn.Module:
    """Stem, four residual blocks, head."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *(Residual(width) for _ in range(4)), nn.Conv2d(width, 1, 1)
    )


def conv1d(width: int) -> nn.Module:
    """Four convolutions of a signal."""
    layers: list[nn.Module] = []
    for i in range(4):
        layers += [nn.Conv1d(1 if i == 0 else width, width, 9, padding=4), nn.GELU()]
    return nn.Sequential(*layers)


# name: model, shape of its input; both again for a quick run
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (lambda: UNet(8), (1, 1, 64, 64, 64), lambda: UNet(2), (1, 1, 16, 8, 8)),
    "fno": (lambda: FNO(16), (1, 1, 256, 256), lambda: FNO(2, 3), (1, 1, 16, 16)),
    "vit": (lambda: ViT(128), (1, 3, 256, 256), lambda: ViT(8), (1, 3, 32, 32)),
    "resnet": (lambda: resnet(16), (1, 3, 256, 256), lambda: resnet(2), (1, 3, 16, 16)),
    "conv1d": (lambda: conv1d(32), (1, 1, 65536), lambda: conv1d(2), (1, 1, 64)),
}


def trainer(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return one step of training on ``x``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (model(x) ** 2).mean().backward()
        optimizer.step()

    return step


def inference(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """Return one step of inference on ``x``."""
    return torch.no_grad()(lambda: model(x))


def rest() -> None:
    """Wait for all ranks, asleep: a barrier that spins would take the core of a rank that works."""
    request = WORLD.Ibarrier()
    while not request.Test():
        time.sleep(5e-4)


def timed(step: Callable[[], object], count: int, alone: bool) -> tuple[float, float]:
    """Return seconds a step on the slowest rank, and processor seconds on all ranks; ``alone``: on rank 0 only."""
    rest()
    spent = (0.0, 0.0)
    if not alone or WORLD.rank == 0:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            step()
        spent = (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count
    rest()
    return WORLD.allreduce(spent[0], op=MPI.MAX), WORLD.allreduce(spent[1])


def split(step: Callable[[], object], count: int, blocks_s: float) -> dict[str, float]:
    """Return what a step consists of, in seconds that add up to it.

    ``compute`` is the same on the blocks alone. Of the waits, those of the rank that waits least are the ``exchange``:
    nobody is late for it. What the others wait longer is ``imbalance``. The rest is the ``host``'s: planning, packing,
    Python.
    """
    meter = WaitMeter(time.perf_counter)
    rest()
    meter.start()
    begun = time.perf_counter()
    for _ in range(count):
        step()
    whole, waited = (time.perf_counter() - begun) / count, meter.stop() / count
    whole, mean = WORLD.allreduce(whole) / WORLD.size, WORLD.allreduce(waited) / WORLD.size
    least = WORLD.allreduce(waited, op=MPI.MIN)
    return {"compute": blocks_s, "exchange": least, "imbalance": mean - least, "host": whole - mean - blocks_s}


def measure(bench: Bench, name: str, work: str, scaling: str, round_s: float) -> None:
    """Note the rows of one model: the same field for all ranks, or, weakly, the same field for each."""
    make, shape, small, small_shape = MODELS[name]
    if bench.quick:
        make, shape = small, small_shape
    rows = shape[2]
    share = shape
    if scaling == "weak":
        shape = (*shape[:2], rows * WORLD.size, *shape[3:])
    what = f"{name}, {work}, {'x'.join(map(str, shape))}, {scaling}"
    if shape[2] % (8 * WORLD.size):
        # plain torch on a block would not be the same layers: strides and patches do not fit it
        bench.failed(what, "ours", f"{shape[2]} rows are not {WORLD.size} blocks of a multiple of 8")
        return
    torch.manual_seed(0)
    full = torch.randn(shape)
    models = []
    for _ in range(3):
        torch.manual_seed(1)
        models.append(make())
    for layer in models[1].modules():
        if isinstance(layer, Attention):
            layer.times = WORLD.size
    mesh = ms.init_mesh((-1,), ("d",))
    x = ms.distribute_tensor(full, mesh, (ms.Shard(2),))
    made = trainer if work == "training" else inference
    steps = {
        "one process": made(models[0], full[:, :, : share[2]].clone()),
        "blocks": made(models[1], x.to_local().clone()),
        "ours": made(ms.distribute_module(models[2], mesh), x),
    }
    for kind, step in steps.items():
        timed(step, 2, kind == "one process")
    count = max(1, int(round_s / timed(steps["ours"], 1, False)[0]))
    wall: dict[str, list[float]] = {kind: [] for kind in steps}
    cpu: dict[str, list[float]] = {kind: [] for kind in steps}
    parts: dict[str, list[float]] = {}
    for _ in range(bench.rounds):
        for kind, step in steps.items():
            a, b = timed(step, count, kind == "one process")
            wall[kind].append(a)
            cpu[kind].append(b)
        for part, spent in split(steps["ours"], count, wall["blocks"][-1]).items():
            parts.setdefault(part, []).append(spent)

    tags = {"model": name, "work": work, "scaling": scaling}
    bench.add(what, wall, floor="one process", **tags)
    # of the work that all ranks do together, in the time of one process for the work that it has
    more = WORLD.size if scaling == "weak" else 1
    for kind in ("blocks", "ours"):
        gains = [more * a / b for a, b in zip(wall["one process"], wall[kind])]
        bench.figure(f"{what}: speed-up", gains, f"of {WORLD.size}", kind, **tags)
    for part, spent in parts.items():
        shares = [100 * s / sum(each) for s, each in zip(spent, zip(*parts.values()))]
        bench.figure(f"{what}: parts of ours", shares, "%", part, **tags)
    spent = [b / (more * a) for a, b in zip(cpu["one process"], cpu["ours"])]
    bench.figure(f"{what}: processor time", spent, "of one process", **tags)
    best = more * min(wall["one process"]) / min(wall["ours"])
    bench.figure(f"{what}: speed-up of the best rounds", best, f"of {WORLD.size}", **tags)


def run(bench: Bench) -> None:
    """Measure each model."""
    round_s = 0.0 if bench.quick else bench.setting("round_s", 0.2)
    names = bench.setting("models", list(MODELS))
    if unknown := [name for name in names if name not in MODELS]:
        raise Unfit(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    ways = bench.setting("ways", ["training-strong", "inference-weak"] if bench.quick else list(WAYS))
    if unknown := [way for way in ways if way not in WAYS]:
        raise Unfit(f"no way {unknown[0]!r}; there are {', '.join(WAYS)}")
    for name in names:
        for way in ways:
            measure(bench, name, *way.split("-"), round_s)
