"""Attention: scaled dot products, heads, rings and neighbourhoods."""

from mpishard.ops.attention import multihead, scaled_dot_product
