"""Sharding rules, one folder per family; importing this package registers them."""

from mpishard.ops import (
    attention,
    autocast,
    index,
    init,
    linear,
    loss,
    native,
    norm,
    pointwise,
    random,
    recurrent,
    reduce,
    shape,
    spectral,
    torchvision,
    window,
)
from mpishard.tensor import direct

autocast.install()
direct.install()
