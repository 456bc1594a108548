"""Linear algebra: products, contractions and factorisations."""

from mpishard.ops.linear import linalg, low_rank, matmul, product
