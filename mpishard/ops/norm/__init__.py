"""Normalization layers."""

from mpishard.ops.norm import normalization
