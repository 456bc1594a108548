"""The adjoint of a window's fetch in two halves, so that a rank computes while halo cotangents travel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from mpishard.comm.exchange.persistent import Exchange
from mpishard.comm.exchange.window import WindowOp


def start_home(window: WindowOp, g: Tensor) -> Callable[[], Tensor]:
    """Send the halo cotangents of ``g`` home; return what adds those that come, and returns the block's cotangent.

    Neighborwise collective, and so is what is returned. For windows with one round on every rank; where a rank has
    more stages, all is done in the end. ``g`` is written to, and the result may be a view of it.
    """
    if len(window.stages) != 1:
        return partial(window.adjoint, g)
    return partial(_finish, window, window.rounds[0].start_adjoint(g), g)


def _finish(window: WindowOp, exchange: Exchange | None, g: Tensor) -> Tensor:
    (stage,), (one,) = window.stages, window.rounds
    if stage.resident is None:
        own = g.new_zeros([stage.n_in if d == stage.dim else n for d, n in enumerate(g.shape)])
    else:
        own = g.narrow(stage.dim, stage.resident, stage.n_in)
    one.add(g, own)
    one.finish_adjoint(exchange, own)
    return own
