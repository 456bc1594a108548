"""Losses: summed over the global tensor, divided by global counts."""

from mpishard.ops.loss import loss, torch_loss
