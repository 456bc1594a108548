"""Sharding rules, one file per family; importing this package registers them."""

from mpishard.ops import (
    attention,
    conv,
    embedding,
    index,
    join,
    linear,
    loss,
    norm,
    pad,
    pointwise,
    pool,
    reduction,
    reshape,
    view,
)
