"""Linear algebra: products, contractions and factorisations."""

from mpishard.ops.linear import linalg, matmul, product
