"""Dims reordered, split, joined, repeated: cells that stay or move, none computed."""

from mpishard.ops.shape import cat, diagonal, pixel_shuffle, repeat, reshape, roll, view, view_copy
