"""Copies of a link, by numpy or by torch: cells arrive bit by bit, whatever the dtype and the strides."""

from __future__ import annotations

import pytest
import torch

from mpishard.comm.coupling.channel import Copies

pytestmark = pytest.mark.ranks(1)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.bool, torch.int8)
DTYPES += (torch.uint16, torch.int64, torch.complex64, torch.complex128)
BLOCKS = {
    "none": lambda x: x[:0],
    "one": lambda x: x[0, 0],
    "few rows": lambda x: x[:40, 3:40],
    "many rows": lambda x: x[:, :1],
    "transposed": lambda x: x[:8, :8].T,
    "every other": lambda x: x[:20:2, ::2],
    "many bytes": lambda x: x,
}


def bits(x):
    return x.contiguous().view(torch.uint8) if x.ndim else x[None].view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_bits(dtype, block):
    field = torch.randint(0, 2, (1024, 256 * dtype.itemsize), dtype=torch.uint8)
    if dtype != torch.bool:
        field.random_()  # not-a-numbers, too
    of = block(field.view(dtype))
    memory = torch.zeros_like(of, memory_format=torch.contiguous_format)
    back = torch.zeros_like(field).view(dtype)
    out, into = Copies([memory], [of]), Copies([block(back)], [memory])
    for _ in range(2):
        out.run()
        into.run()
        assert torch.equal(bits(memory), bits(of))
        assert torch.equal(bits(block(back)), bits(of))
        field.logical_not_() if dtype == torch.bool else field.add_(1)


@pytest.mark.parametrize("view", [torch.conj, lambda x: torch.conj(x).imag], ids=["conjugate", "negative"])
def test_values_that_torch_puts_off(view):
    z = torch.randn(4, 8, dtype=torch.complex64)
    lazy = view(z)
    assert lazy.is_conj() or lazy.is_neg()
    memory = torch.empty_like(lazy.resolve_conj().resolve_neg())
    Copies([memory], [lazy]).run()
    assert torch.equal(memory, lazy)
    back = torch.zeros_like(z)
    Copies([view(back)], [memory]).run()
    assert torch.equal(view(back), lazy)


def test_inference():
    with torch.inference_mode():
        x = torch.zeros(3)
    with pytest.raises(RuntimeError, match="nference tensor"):
        Copies([x], [torch.ones(3)]).run()
    with torch.inference_mode():
        Copies([x], [torch.ones(3)]).run()
    assert x.tolist() == [1, 1, 1]
