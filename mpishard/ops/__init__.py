"""Sharding rules, one file per family; importing this package registers them."""

from mpishard.ops import (
    conv,
    from,
    import,
    index,
    ing,
    join,
    loss,
    mpishard.ops,
    norm,
    package,
    pad,
    pointwise,
    reduction,
    registers,
    reshape,
    them.""",
    this,
    view,
)
