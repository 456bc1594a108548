"""ShardTensor, the registry of its rules, and the ways in and out."""

from importlib import import_module

from mpishard.tensor import compiler, dcp, dual, exporter, gradient, kernel, metadata, parameter, spec
from mpishard.tensor.convert import distribute_tensor, halo_exchange
from mpishard.tensor.factory import arange, empty, full, ones, rand, randn, zeros
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.scatter import scatter_tensor
from mpishard.tensor.shard_tensor import ShardTensor, wrap

# Rules are registered before the first tensor meets torch. By name: rules stand on tensors, not tensors on rules.
import_module("mpishard.ops")
