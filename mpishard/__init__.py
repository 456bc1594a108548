"""Domain parallelism for torch on plain MPI: shard the spatial dims of a sample over a Cartesian mesh."""

from importlib import import_module as _import_module
from typing import Any as _Any

from mpishard.comm.exit import install as _install

_install()

from mpishard import io, ops, testing
from mpishard.autograd.collective import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from mpishard.autograd.point_to_point import send_recv, shift
from mpishard.autograd.withhold import no_sync
from mpishard.comm.counter import CommCounter, comm_counter
from mpishard.comm.halo.exchanger import HaloExchanger
from mpishard.comm.mesh import CartMesh, init_mesh
from mpishard.comm.torch_distributed.device_mesh import init_device_mesh
from mpishard.comm.torch_distributed.process_group import process_group
from mpishard.errors import (
    DesyncError,
    GatherWarning,
    LayoutError,
    MeshError,
    MpishardError,
    NoShardingRule,
    UnsupportedDtypeError,
    UnsupportedOperationError,
)
from mpishard.layout import Layout, Partial, Placement, Replicate, Shard
from mpishard.nn import Pipeline, compare_module, distribute_module, parameter_memory
from mpishard.ops.attention.neighborhood import neighborhood_attention
from mpishard.ops.attention.scaled_dot_product import attention_method
from mpishard.ops.linear.array_module import einsum, tensordot, transpose
from mpishard.tensor import (
    ShardTensor,
    arange,
    distribute_tensor,
    empty,
    full,
    halo_exchange,
    implements,
    ones,
    rand,
    randn,
    scatter_tensor,
    zeros,
)
from mpishard.testing import dot_test

__version__ = "0.1.0"


def __getattr__(name: str) -> _Any:
    # imported where it is used: batch jobs need none of it
    if name == "insitu":
        return _import_module("mpishard.insitu")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CartMesh",
    "CommCounter",
    "DesyncError",
    "GatherWarning",
    "HaloExchanger",
    "Layout",
    "LayoutError",
    "MeshError",
    "MpishardError",
    "NoShardingRule",
    "Partial",
    "Pipeline",
    "Placement",
    "Replicate",
    "Shard",
    "ShardTensor",
    "UnsupportedDtypeError",
    "UnsupportedOperationError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "arange",
    "attention_method",
    "broadcast",
    "comm_counter",
    "compare_module",
    "distribute_module",
    "distribute_tensor",
    "dot_test",
    "einsum",
    "empty",
    "full",
    "halo_exchange",
    "implements",
    "init_device_mesh",
    "init_mesh",
    "neighborhood_attention",
    "no_sync",
    "ones",
    "parameter_memory",
    "process_group",
    "rand",
    "randn",
    "reduce_scatter",
    "scatter_tensor",
    "send_recv",
    "shift",
    "tensordot",
    "testing",
    "transpose",
    "zeros",
]
