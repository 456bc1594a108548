"""Random numbers by counter: each is a hash of a seed and of its cell's index in the global tensor.

So the values of a tensor do not depend on the mesh, and no rank computes what it does not hold. The seed of a call
is one draw from torch's default CPU generator, of rank 0 of the mesh: ``torch.manual_seed`` decides it, ranks
whose generators differ agree on it, and what restores the generator's state (``torch.utils.checkpoint``) repeats
it. The hash is splitmix64; torch's int64 arithmetic wraps around as it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from mpishard.comm.collective import blocking
from mpishard.comm.memory.buffer import outside
from mpishard.comm.mesh import CartMesh
from mpishard.errors import UnsupportedDtypeError
from mpishard.layout import Layout

_BLOCK = 1 << 15  # cells hashed at once: their integers stay in cache
_MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
Fill = Callable[..., Tensor]


def _signed(bits: int) -> int:
    bits &= (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits


_STEP, _MIX_A, _MIX_B = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def draw_seed(mesh: CartMesh, generator: torch.Generator | None = None) -> int:
    """Return the seed of one call: a draw of rank 0; the generators of all ranks advance alike.

    Collective.
    """
    seed = torch.randint(torch.iinfo(torch.int64).max, (), generator=generator, device="cpu")
    if mesh.size > 1:
        planning = mesh.device.type == "meta"  # it travels, without a value
        came = blocking.broadcast(seed.to("meta") if planning else seed, mesh.all_ranks, 0)
        seed = seed if planning else came
    return int(seed)


def drawn_once(mesh: CartMesh, draw: Callable[[], Tensor]) -> Tensor:
    """Return what rank 0 draws from torch's own generator; the generators of all ranks advance alike. Collective.

    For numbers that every rank needs whole, and that are few.
    """
    own = draw()
    return outside(blocking.broadcast, own, mesh.all_ranks, 0) if mesh.size > 1 else own


def mixed(z: Tensor) -> Tensor:
    """Finish splitmix64 in place."""
    for shift, factor in ((30, _MIX_A), (27, _MIX_B), (31, None)):
        # >> carries the sign along; the mask makes it a logical shift
        z ^= (z >> shift) & ((1 << (64 - shift)) - 1)
        if factor is not None:
            z *= factor
    return z


def runs(layout: Layout, coords: tuple[int, ...]) -> Iterator[tuple[int, Tensor, int]]:
    """Yield (position in the flat block, global indices relative to the first, the first) piece by piece."""
    box = layout.box(coords)
    local = [hi - lo for lo, hi in box]
    if not math.prod(local):
        return
    strides = [math.prod(layout.shape[d + 1 :]) for d in range(layout.ndim)]
    first = sum(lo * s for (lo, _), s in zip(box, strides))
    # the innermost dims that fit a block, and a part of the next one
    split, cells = layout.ndim, 1
    while split and cells * local[split - 1] <= _BLOCK:
        split -= 1
        cells *= local[split]
    rows = max(1, _BLOCK // cells)
    inner = torch.zeros(1, dtype=torch.int64, device="cpu")
    for d in range(split, layout.ndim):
        inner = (inner.unsqueeze(1) + torch.arange(local[d], device="cpu") * strides[d]).reshape(-1)
    if not split:
        yield 0, inner, first
        return
    d = split - 1
    part = (torch.arange(min(rows, local[d]), device="cpu").unsqueeze(1) * strides[d] + inner).reshape(-1)
    at = 0
    for outer in product(*map(range, local[:d])):
        start = first + sum(i * s for i, s in zip(outer, strides))
        for row in range(0, local[d], rows):
            n = min(rows, local[d] - row) * cells
            yield at, part[:n], start + row * strides[d]
            at += n


def drawn_into(
    out: Tensor, layout: Layout, coords: tuple[int, ...], seed: int, fill: Fill, parameters: Sequence[Tensor] = ()
) -> Tensor:
    """Write a random block.

    Not collective.

    Parameters
    ----------
    out
        Contiguous block to write.
    layout, coords
        What it is a block of.
    seed
        As of `draw_seed`.
    fill
        Returns the values of some cells, given a function lane -> their 64 random bits (a fresh int64 tensor;
        different lanes are independent), and their ``parameters``.
    parameters
        Of the distribution: blocks as ``out``.

    Returns
    -------
    torch.Tensor
        ``out``
    """
    flat, given = out.view(-1), [p.reshape(-1) for p in parameters]
    lanes: dict[int, int] = {}

    def base(lane: int) -> int:
        if lane not in lanes:
            # a lane is a stream of its own: the seed hashed with its number
            lanes[lane] = int(mixed(torch.tensor([_signed(seed + (lane + 1) * _STEP)], device="cpu"))[0])
        return lanes[lane]

    for at, index, start in runs(layout, coords):

        def bits(lane: int, index: Tensor = index, start: int = start) -> Tensor:
            return mixed((index + (start + 1)).mul_(_STEP).add_(base(lane)))

        cells = slice(at, at + index.numel())
        flat[cells] = fill(bits, *(p[cells] for p in given))
    return out


def high_bits(z: Tensor, n: int) -> Tensor:
    """Return the ``n`` highest bits as numbers >= 0. Not collective."""
    return (z >> (64 - n)) & ((1 << n) - 1)


def _mantissa(dtype: torch.dtype) -> int:
    if dtype not in _MANTISSA:
        raise UnsupportedDtypeError(
            f"random numbers of {dtype}",
            expected=", ".join(map(str, _MANTISSA)),
            got=dtype,
            fix="draw real numbers and convert them (torch.complex of two tensors)",
        )
    return _MANTISSA[dtype]


def uniform(dtype: torch.dtype) -> Fill:
    """Return the fill of numbers in [0, 1). Not collective."""
    n = _mantissa(dtype)
    wide = torch.float64 if n > 24 else torch.float32
    return lambda bits: high_bits(bits(0), n).to(wide).mul_(2.0**-n)


def open_uniform(bits: Callable[[int], Tensor], lane: int = 0) -> Tensor:
    """Fill with float64 numbers in (0, 1). Not collective."""
    return high_bits(bits(lane), 53).double().mul_(2.0**-53).add_(2.0**-54)


def normal(dtype: torch.dtype) -> Fill:
    """Return the fill of standard normal numbers (Box and Muller, in float64). Not collective."""
    _mantissa(dtype)

    def fill(bits: Callable[[int], Tensor]) -> Tensor:
        radius = high_bits(bits(0), 53).add_(1).double().mul_(2.0**-53).log_().mul_(-2).sqrt_()
        return high_bits(bits(1), 53).double().mul_(2.0**-53 * 2 * math.pi).cos_().mul_(radius)

    return fill


def chosen(p: float) -> Fill:
    """Return the fill of booleans that are true with probability ``p``. Not collective."""
    return lambda bits: high_bits(bits(0), 53) < round(p * 2**53)


def integers(low: int, high: int) -> Fill:
    """Return the fill of integers in [low, high). Not collective."""
    span = high - low
    if span <= 1 << 30:
        # multiply instead of a remainder: no bias that matters, and any range
        return lambda bits: ((high_bits(bits(0), 32) * span) >> 32) + low
    if span < 1 << 63:
        return lambda bits: (high_bits(bits(0), 63) % span) + low

    def fill(bits: Callable[[int], Tensor]) -> Tensor:
        # 64 bits that count from 0, of which those from the span on begin again; all arithmetic wraps around
        z = bits(0)
        return torch.where((z ^ -(1 << 63)) < span - (1 << 63), z, z - _signed(span)) + low

    return fill


def exponential(rate: float) -> Fill:
    """Return the fill of exponentially distributed numbers, in float64. Not collective."""
    return lambda bits: high_bits(bits(0), 53).add_(1).double().mul_(2.0**-53).log_().mul_(-1 / rate)
