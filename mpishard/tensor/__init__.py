"""ShardTensor, the registry of its rules, and the ways in and out."""

from mpishard.tensor import compiler, dual, gradient, metadata, spec
from mpishard.tensor.convert import distribute_tensor, halo_exchange, scatter_tensor
from mpishard.tensor.factory import arange, empty, full, ones, rand, randn, zeros
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap
