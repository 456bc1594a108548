"""Windows of neighbouring cells: convolution, pooling, padding, interpolation."""

from mpishard.ops.window import (
    adaptive_pool,
    conv,
    fractional_pool,
    gradient,
    grid_sample,
    interpolate,
    pad,
    pool,
    unfold,
    unpool,
)
