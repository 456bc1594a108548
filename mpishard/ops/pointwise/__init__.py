"""Functions of single cells."""

from mpishard.ops.pointwise import foreach, pointwise, quantize, special
