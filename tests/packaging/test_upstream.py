"""Faults of torch that the package works around: a test here fails when torch is mended.

Then the workaround can go, once no supported version of torch needs it: docs/upstream.md says where it is.
"""

import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.release import RELEASE

DOCS = Path(__file__).parents[2] / "docs" / "upstream.md"
# right from these releases of torch on, as the table says; older ones are supported, so what works around them stays
MENDED = {"fft", "pixel_shuffle factor"} if RELEASE >= (2, 15) else set()
MENDED |= {"negative strides"} if RELEASE >= (2, 14) else set()
# the kernel that writes past the end is one for AVX-512
MENDED |= set() if "AVX512" in torch.backends.cpu.get_cpu_capability() else {"convolution"}
# and those of one column, and of few, ones for AMX
MENDED |= set() if torch.cpu._is_amx_tile_supported() else {"one column", "few columns"}

ENDS_THE_PROCESS = {
    "convolution": """
        import torch
        torch.manual_seed(0)
        for n in (5, 6, 7, 8):
            x, weight = torch.randn(1, 1, n, 5, 5), torch.randn(3, 1, 7, 7, 7, requires_grad=True)
            exact = weight.detach().double().requires_grad_()
            for _ in range(5):
                junk = [torch.full((7, 7, 7), 1e30) for _ in range(40)]
                del junk
                g, = torch.autograd.grad(torch.conv3d(x, weight, stride=2, padding=3).square().sum(), weight)
                e, = torch.autograd.grad(torch.conv3d(x.double(), exact, stride=2, padding=3).square().sum(), exact)
                assert torch.allclose(g.double(), e, 1e-3, 1e-3 * float(e.abs().max()))
    """,
    "few columns": """
        import torch
        for seed in range(200):
            torch.manual_seed(seed)
            x = torch.randn(2, 3, 2 - seed % 2, dtype=torch.bfloat16)
            weight = torch.randn(8, 3, 3, dtype=torch.bfloat16, requires_grad=True)
            exact = weight.double().detach().requires_grad_()
            y, z = (torch.conv1d(a, w, stride=3, padding=1) for a, w in ((x, weight), (x.double(), exact)))
            g, = torch.autograd.grad(y.sum(), weight)
            e, = torch.autograd.grad(z.sum(), exact)
            assert torch.allclose(g.double(), e, 0.02, 0.05)
    """,
    "negative strides": """
        import numpy, torch
        try:
            torch.from_dlpack(numpy.zeros((3, 4))[:, ::-1])
        except Exception:
            pass
    """,
}


def one_column() -> bool:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 24, 4, dtype=torch.bfloat16), torch.randn(8, 3, 4, 4, dtype=torch.bfloat16)
    exact = F.conv2d(x.double(), weight.double(), stride=4)
    return torch.allclose(F.conv2d(x, weight, stride=4).double(), exact, atol=0.3)


def batch_norm() -> bool:
    x, g = torch.randn(1, 4, 3, 5, requires_grad=True), torch.randn(1, 15, 4)
    y = F.batch_norm(x, torch.zeros(4), torch.ones(4)).flatten(2).transpose(1, 2)
    return torch.allclose(torch.autograd.grad(y, x, g)[0].flatten(2), g.mT, atol=1e-4)


def as_strided_scatter() -> bool:
    x = torch.zeros(4, 6, requires_grad=True)
    torch.as_strided_scatter(x, torch.zeros(2, 3), (2, 3), (6, 1), 7).sum().backward()
    return float(x.grad.sum()) == 18 and not bool(x.grad[1:3, 1:4].any())


def ihfftn_out() -> bool:
    x, out = torch.arange(6.0).reshape(2, 3), torch.zeros(2, 2, dtype=torch.complex64)
    return torch.allclose(torch.fft.ihfftn(x, dim=(1,), out=out), torch.fft.ihfftn(x, dim=(1,)))


def all_out() -> bool:
    return bool(torch.all(torch.tensor([0.5, 0.5]), out=torch.zeros((), dtype=torch.uint8)))


def logsumexp_out() -> bool:
    x, out = torch.tensor([1 + 2j, 3 - 1j]), torch.zeros(())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the imaginary part
        return torch.allclose(torch.logsumexp(x, 0, out=out), torch.logsumexp(x, 0).real)


def scale() -> bool:
    x = torch.tensor([[[1.0, 2.0, 3.0]]])
    return not torch.equal(F.interpolate(x, scale_factor=1.3, mode="linear", align_corners=False), x)


def antialias() -> bool:
    x, size = torch.arange(30.0).reshape(1, 1, 6, 5) ** 2, (3, 1)
    one, other = (F.interpolate(t, s, mode="bilinear", antialias=True) for t, s in ((x, size), (x.mT, size[::-1])))
    return torch.allclose(one, other.mT)


def pixel_shuffle() -> bool:
    x = torch.zeros(0, 4, 2, 2, requires_grad=True)
    try:
        return torch.autograd.grad(F.pixel_shuffle(x, 2).sum(), x)[0].shape == x.shape
    except RuntimeError:
        return False


def pixel_unshuffle() -> bool:
    return F.pixel_unshuffle(torch.zeros(0, 1, 4, 4), 2).shape == (0, 4, 2, 2)


def pixel_shuffle_factor() -> bool:
    try:
        F.pixel_shuffle(torch.zeros(1, 4, 2, 2, device="meta"), 0)
    except (RuntimeError, ZeroDivisionError) as e:
        return "positive" in str(e)
    return False


def fft() -> bool:
    try:
        return torch.fft.fft(torch.zeros(0, 3)).shape == (0, 3)
    except RuntimeError:
        return False


def bilinear() -> bool:
    try:
        return F.bilinear(torch.zeros(2, 0), torch.zeros(2, 3), torch.zeros(4, 0, 3)).shape == (2, 4)
    except RuntimeError:
        return False


def einsum() -> bool:
    with torch.autocast("cpu"):
        one, two = (torch.einsum("ij,jk->ik", torch.ones(2, n), torch.ones(n, 2)).dtype for n in (1, 2))
    return one == two


class _Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def conjugates() -> bool:
    x = torch.tensor([[1, 2j, 3], [3 + 1j, 4, 1], [1j, 2, 5 - 2j]])
    with _Seen():
        found = torch.linalg.pinv(x)
    return torch.allclose(found, torch.linalg.pinv(x), atol=1e-4)


def effects() -> bool:
    """Whether inductor keeps the order of operations with an effect."""
    order: list[str] = []
    library = torch.library.Library("upstream", "DEF")
    library.define("read(Tensor x) -> Tensor", tags=(torch.Tag.needs_exact_strides,))
    library.define("draw(int n) -> Tensor")

    def read(x: torch.Tensor) -> torch.Tensor:
        order.append("read")
        return x.clone()

    def draw(n: int) -> torch.Tensor:
        order.append("draw")
        return torch.ones(n)

    for name, run in (("read", read), ("draw", draw)):
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library._register_effectful_op(f"upstream::{name}", torch._library.effects.EffectType.ORDERED)
    torch.library.register_fake("upstream::read", torch.empty_like, lib=library)
    torch.library.register_fake("upstream::draw", torch.empty, lib=library)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, ops = x.sin(), torch.ops.upstream
        s = ops.read((ops.read(y) ** 2).sum())
        z = ops.read(y * ops.draw(64))
        return s + z.sum(), z[:, :1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what inductor imports
        torch.compile(f, fullgraph=True)(torch.ones(64, 64))
    return order == ["read", "read", "draw", "read"]


def reduction() -> bool:
    return (
        torch.kl_div(torch.zeros(2), torch.zeros(2)).ndim == torch.ops.aten.kl_div(torch.zeros(2), torch.zeros(2)).ndim
    )


class Handed(torch.Tensor):
    """It keeps by which names the last function of torch handed arguments on."""

    named: frozenset[str] = frozenset()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.named = frozenset(kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)


def index_reduce() -> bool:
    x = torch.full((2, 1), 3.0, dtype=torch.bfloat16)
    try:
        return x.index_reduce(0, torch.tensor([0, 0]), x, "prod").tolist() == [[27.0], [3.0]]
    except RuntimeError as e:
        return "INTERNAL ASSERT" not in str(e)


def l1_loss() -> bool:
    x = torch.ones(2).as_subclass(Handed)
    F.l1_loss(x, x, weight=torch.ones(2))
    return "weight" in Handed.named


def chain_matmul() -> bool:
    x = torch.ones(2, 2).as_subclass(Handed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        torch.chain_matmul(x, x, out=torch.zeros(2, 2))
    return "out" in Handed.named


RIGHT: dict[str, Callable[[], bool]] = {
    "one column": one_column,
    "batch norm": batch_norm,
    "as_strided_scatter": as_strided_scatter,
    "ihfftn into out": ihfftn_out,
    "all into out": all_out,
    "logsumexp into out": logsumexp_out,
    "scale": scale,
    "antialias": antialias,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "pixel_shuffle factor": pixel_shuffle_factor,
    "fft": fft,
    "bilinear": bilinear,
    "einsum": einsum,
    "conjugates": conjugates,
    "effects": effects,
    "reduction": reduction,
    "index_reduce": index_reduce,
    "l1_loss": l1_loss,
    "chain_matmul": chain_matmul,
}


@pytest.mark.parametrize("name", RIGHT)
def test_torch_is_wrong(name: str) -> None:
    mended = f"torch {torch.__version__} is mended, or no longer: see the row {name!r} of {DOCS}"
    assert RIGHT[name]() == (name in MENDED), mended


@pytest.mark.parametrize("name", ENDS_THE_PROCESS)
def test_torch_ends_the_process(name: str) -> None:
    """Or writes past the end of its arrays, of which that is the usual end."""
    program = textwrap.dedent(ENDS_THE_PROCESS[name])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode <= 0 or "AssertionError" in done.stderr, done.stderr
    mended = f"torch {torch.__version__} is mended, or no longer: see the row {name!r} of {DOCS}"
    assert (done.returncode == 0) == (name in MENDED), mended


def test_every_fault_is_in_the_table() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", DOCS.read_text(), re.MULTILINE)[2:]
    assert sorted(rows) == sorted([*RIGHT, *ENDS_THE_PROCESS])
    assert {*RIGHT, *ENDS_THE_PROCESS} >= MENDED
