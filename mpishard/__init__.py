"""Domain parallelism for torch on plain MPI: shard the spatial dims of a sample over a Cartesian mesh."""

import sys as _sys
from contextlib import nullcontext as _nullcontext
from importlib import import_module as _import_module
from importlib.machinery import PathFinder as _PathFinder
from threading import RLock as _RLock
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from mpishard.comm.exit import install as _install

_install()

if _TYPE_CHECKING:
    from mpishard import (
        autograd,
        comm,
        errors,
        graph,
        insitu,
        io,
        layout,
        nn,
        ops,
        physicsnemo,
        planning,
        points,
        tensor,
        testing,
    )
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
        FileError,
        GatherWarning,
        JobError,
        LayoutError,
        MeshError,
        MissingPackageError,
        MpishardError,
        NoShardingRule,
        PeerError,
        UnsupportedDtypeError,
        UnsupportedOperationError,
    )
    from mpishard.layout import Layout, Partial, Placement, Replicate, Shard
    from mpishard.nn import Pipeline, compare_module, distribute_module, parameter_memory
    from mpishard.ops.attention.neighborhood import neighborhood_attention
    from mpishard.ops.attention.scaled_dot_product import attention_method
    from mpishard.ops.linear.array_module import einsum, tensordot, transpose
    from mpishard.planning import plan
    from mpishard.profiling import profile
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
    from mpishard.tensor.balance import Balancer, balance
    from mpishard.testing import dot_test

__version__ = "0.1.0"

# where each public name lives: what a program does not use, hundreds of ranks need not open
_HOMES = {
    "autograd.collective": "all_gather all_reduce all_to_all broadcast reduce_scatter",
    "autograd.point_to_point": "send_recv shift",
    "autograd.withhold": "no_sync",
    "comm.counter": "CommCounter comm_counter",
    "comm.halo.exchanger": "HaloExchanger",
    "comm.mesh": "CartMesh init_mesh",
    "comm.torch_distributed.device_mesh": "init_device_mesh",
    "comm.torch_distributed.process_group": "process_group",
    "errors": "DesyncError FileError GatherWarning JobError LayoutError MeshError MissingPackageError MpishardError"
    " NoShardingRule PeerError UnsupportedDtypeError UnsupportedOperationError",
    "layout": "Layout Partial Placement Replicate Shard",
    "nn": "Pipeline compare_module distribute_module parameter_memory",
    "ops.attention.neighborhood": "neighborhood_attention",
    "ops.attention.scaled_dot_product": "attention_method",
    "ops.linear.array_module": "einsum tensordot transpose",
    "planning": "plan",
    "profiling": "profile",
    "tensor": "ShardTensor arange distribute_tensor empty full halo_exchange implements ones rand randn"
    " scatter_tensor zeros",
    "tensor.balance": "Balancer balance",
    "testing": "dot_test",
}
_HOME_OF = {name: f"mpishard.{home}" for home, names in _HOMES.items() for name in names.split()}
_MODULES = frozenset(
    "autograd comm errors graph insitu io layout nn ops physicsnemo planning points tensor testing".split()
)
_importing = _RLock()


def _load(module: str) -> _Any:
    """Return a module; what modules try of torch as they are read is nothing that an exporter or a counter has seen."""
    dispatch = _sys.modules.get("torch.utils._python_dispatch")
    at_work = dispatch is not None and dispatch._len_torch_dispatch_stack()
    # threads that begin at different ends of a circle would see modules half made
    with _importing, dispatch._disable_current_modes() if dispatch is not None and at_work else _nullcontext():
        return _import_module(module)


def _attend_compile(torch: _Any) -> None:
    """Have `torch.compile` load what compiles ShardTensors: in a function made without it, Dynamo reads the package."""
    known = torch.compile

    def compile(*args: _Any, **kwargs: _Any) -> _Any:
        _load("mpishard.tensor")  # which puts its own in place
        return torch.compile(*args, **kwargs)

    compile.of_torch = known  # type: ignore[attr-defined]
    torch.compile = compile


class _TorchFinder:
    """Finds torch where it is imported later: where imports are sorted, this package is first."""

    def find_spec(self, name: str, *_: _Any) -> _Any:
        if name != "torch":
            return None
        _sys.meta_path.remove(self)
        spec = _PathFinder.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: _Any) -> None:
                execute(module)
                _attend_compile(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "torch" in _sys.modules:
    _attend_compile(_sys.modules["torch"])
else:
    _sys.meta_path.insert(0, _TorchFinder())


def __getattr__(name: str) -> _Any:
    if name not in _HOME_OF and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        return _load(f"mpishard.{name}")
    home = _HOME_OF[name]
    if home.startswith("mpishard.ops"):
        _load("mpishard.tensor")
    found = globals()[name] = getattr(_load(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_MODULES})


__all__ = [
    "Balancer",
    "CartMesh",
    "CommCounter",
    "DesyncError",
    "FileError",
    "GatherWarning",
    "HaloExchanger",
    "JobError",
    "Layout",
    "LayoutError",
    "MeshError",
    "MissingPackageError",
    "MpishardError",
    "NoShardingRule",
    "Partial",
    "PeerError",
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
    "balance",
    "broadcast",
    "comm_counter",
    "compare_module",
    "distribute_module",
    "distribute_tensor",
    "dot_test",
    "einsum",
    "empty",
    "full",
    "graph",
    "halo_exchange",
    "implements",
    "init_device_mesh",
    "init_mesh",
    "neighborhood_attention",
    "no_sync",
    "ones",
    "parameter_memory",
    "plan",
    "points",
    "process_group",
    "profile",
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
