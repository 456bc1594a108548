"""Sharding rules, one file per family; importing this package registers them."""

from mpishard.ops import (
    attention,
    conv,
    embedding,
    extremum,
    foreach,
    index,
    join,
    linear,
    loss,
    norm,
    order,
    pad,
    pick,
    pointwise,
    pool,
    reduction,
    reshape,
    scan,
    statistic,
    view,
)
