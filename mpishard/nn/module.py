"""distribute_module: one model, the same on every rank, whose gradients are global."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mpishard.autograd.argument import require, require_functions, require_mesh, valueless
from mpishard.autograd.replica import KEEPER, join_small, replicate
from mpishard.comm import guard
from mpishard.comm.collective import blocking
from mpishard.comm.device_mesh import names_of_dtensor
from mpishard.comm.memory.buffer import uncopied, unfit
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError, UnsupportedOperationError
from mpishard.nn import sharded as sharding
from mpishard.tensor.shard_tensor import ShardTensor

_BROADCAST_NBYTES = 64 << 20


@names_of_dtensor
def distribute_module(
    module: nn.Module,
    mesh: CartMesh,
    partition_fn: Callable[[str, nn.Module, CartMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
    *,
    shard_parameters: str | int | Sequence[str | int] | None = None,
    gather_dtype: torch.dtype | None = None,
    offload: bool = False,
) -> nn.Module:
    """Make a model the same on every rank, and have its gradients summed in buckets while backward goes on.

    Collective.

    Parameters
    ----------
    module
        Any model; moved to ``mesh.device``. Its plain parameters and buffers become those of mesh rank 0; those that
        are ShardTensors on the mesh, such as a field that is learnt, stay as they are and need no sums.
    mesh
        Mesh that its inputs will live on.
    partition_fn
        DTensor's: called with the name of every submodule, the submodule and the mesh, to replace parameters by
        ShardTensors on the mesh (``torch.nn.Parameter(ms.distribute_tensor(...))``), which need no sums.
    input_fn, output_fn
        DTensor's: called with the module, its inputs (a tuple) or its output, and the mesh, before and after each
        forward; what they return takes their place. Functions of two arguments, without the module, as DTensor's were.
    shard_parameters
        Mesh dim, or dims, over which parameters are sharded: they become ShardTensors of which a rank holds its block,
        of gradients and of any optimizer's state too: make that behind this call. A layer's are gathered ahead of its
        forward and backward, freed after each, and its gradients reduce-scattered. A copy of the model
        (``copy.deepcopy``, an average of weights by ``torch.optim.swa_utils.AveragedModel``) holds its share too.
    gather_dtype
        Dtype in which sharded parameters travel and are computed with, such as ``torch.bfloat16``; they, their
        gradients and the optimizer's state stay in their own.
    offload
        Whether blocks of sharded parameters, with gradients and the optimizer's state, lie in host memory.

    Returns
    -------
    torch.nn.Module
        ``module`` itself. After ``loss.backward()`` every parameter's ``.grad`` is the full, identical gradient
        on every rank, as it is without this call; here the sums of many parameters share one message.

    Notes
    -----
    What is summed is what data on the mesh contribute. Data of a rank's own outside it (a plain batch, a ShardTensor
    on some dims of the mesh) must be the same on every rank: else the gradients differ, which raises in the
    backward pass. They are compared in the 1st, 2nd, 4th, 8th ... pass to which such data contribute; under
    ``MPISHARD_DEBUG=1`` in those and every 16th pass of any data, with the parameters. Two ways to train on batches
    that differ between ranks:

    - one ShardTensor of the whole mesh, with ``Shard(0)`` on the dims that hold parts of the batch: means and norms
      are those of the whole batch;
    - ``DistributedDataParallel(ms.distribute_module(model, mesh["y"]), process_group)`` with inputs on
      ``mesh["y"]``: torch averages what the replicas find.

    Raises
    ------
    LayoutError
        Parameters or buffers lie on another mesh, or were sharded by an earlier call; or a module's parameters
        cannot be sharded, or have hooks, which those that take their places would not have.
    MeshError
        ``shard_parameters`` names no dim of the mesh.
    UnsupportedOperationError
        A parameter or buffer is quantized, sparse or nested, or has no values yet (a lazy module's, on meta).
    DesyncError
        They differ in name, shape or dtype between ranks, or are frozen on some of them; in a backward pass: their
        gradients differ.

    Examples
    --------
    >>> model = ms.distribute_module(torch.nn.Conv2d(8, 8, 3, padding=1), mesh)
    >>> model(x).mean().backward()
    """
    require_mesh("distribute_module", mesh)
    group = mesh.all_ranks
    error: Exception | None = None
    named: list[tuple[str, Tensor]] = []
    over: tuple[int, ...] = ()
    signature = "distribute_module"
    try:
        require_functions("distribute_module", partition_fn=partition_fn, input_fn=input_fn, output_fn=output_fn)
        before, after = _with_module(input_fn, "input_fn"), _with_module(output_fn, "output_fn")
        named, over = _checked(module, mesh, shard_parameters, gather_dtype, offload)
        kinds = [("frozen",) if isinstance(t, nn.Parameter) and not t.requires_grad else () for _, t in named]
        told = [
            (name, tuple(t.shape), t.dtype, *getattr(t, "placements", ()), *kind)
            for (name, t), kind in zip(named, kinds)
        ]
        functions = [f is not None for f in (partition_fn, input_fn, output_fn)]
        signature = f"distribute_module over={over} {gather_dtype} offload={offload} functions={functions} {told}"
    except Exception as e:  # noqa: BLE001 (torch's too, of a model that cannot move)
        error = e
    guard.agree(group.comm, error, signature)
    with torch.no_grad():
        for tensors in _by_dtype([t for _, t in named if not isinstance(t, ShardTensor)]):
            flat = blocking.broadcast(torch.cat([t.detach().reshape(-1) for t in tensors]), group, 0)
            for t, values in zip(tensors, flat.split([t.numel() for t in tensors])):
                _write(t, values.view(t.shape))
    if partition_fn is not None:
        try:
            for name, part in module.named_modules():
                partition_fn(name, part, mesh)
        except Exception as e:  # noqa: BLE001 (a user's)
            error = e
        guard.agree(group.comm, error, "distribute_module: partition_fn")
    if over:
        sharding.shard_parameters(module, mesh, over, gather_dtype, offload)
    if before is not None:
        module.register_forward_pre_hook(lambda m, inputs: before(m, inputs, mesh))
    if after is not None:
        module.register_forward_hook(lambda m, _, output: after(m, output, mesh))
    plain = [
        (name, param)
        for name, param in module.named_parameters()
        if not isinstance(param, ShardTensor) and param.is_leaf and (param.is_floating_point() or param.is_complex())
    ]
    for name, param in plain:
        replicate(param, mesh, name)
    vars(module)[KEEPER] = join_small((param for _, param in plain), mesh)
    return module


def _write(t: Tensor, values: Tensor) -> None:
    for d in range(t.ndim):
        if t.shape[d] > 1 and t.stride(d) == 0:  # expanded: one cell stands for all
            t, values = t.narrow(d, 0, 1), values.narrow(d, 0, 1)
    t.copy_(values)


def _with_module(function: Callable[..., Any] | None, argument: str) -> Callable[..., Any] | None:
    """Return a function of a module, its inputs or output, and the mesh; DTensor takes those of the latter two also."""
    if function is None:
        return None
    values = argument.replace("_fn", "s")
    try:
        bind = inspect.signature(function).bind
    except ValueError:  # of what is built in
        return function
    if _takes(bind, 3):
        return function
    if not _takes(bind, 2):
        raise LayoutError(
            f"distribute_module: {argument}= takes other arguments",
            expected=f"a function of (module, {values}, mesh)",
            got=f"{getattr(function, '__name__', type(function).__name__)}{inspect.signature(function)}",
            fix="give one of these three",
        )
    warnings.warn(
        f"distribute_module: {argument}= without the module is deprecated, as DTensor's: take (module, {values}, mesh)",
        FutureWarning,
        stacklevel=4,
    )
    return lambda _, given, mesh: function(given, mesh)


def _takes(bind: Callable[..., Any], count: int) -> bool:
    try:
        bind(*(None,) * count)
    except TypeError:
        return False
    return True


def _checked(
    module: nn.Module, mesh: CartMesh, shard_parameters: Any, gather_dtype: Any, offload: bool
) -> tuple[list[tuple[str, Tensor]], tuple[int, ...]]:
    """Move a model to the mesh's device; return its parameters and buffers, and the mesh dims over which to shard.

    Not collective: it raises where this rank's arguments do not fit.
    """
    require("distribute_module", "module", module, nn.Module, "give the model itself")
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if (is_lazy(t) or mesh.device.type != "meta") and (odd := valueless(t)):
            raise _ungiven(name, "parameters and buffers with values", odd)
    module.to(mesh.device)
    named = [*module.named_parameters(), *module.named_buffers()]
    if sharding.is_sharded(module):
        raise LayoutError(
            "distribute_module: sharded parameters",
            expected="a model that was not distributed with shard_parameters",
            got="one that was",
            fix="call it once",
        )
    elsewhere = [name for name, t in named if isinstance(t, ShardTensor) and t.mesh is not mesh]
    if elsewhere:
        raise LayoutError(
            "distribute_module: parameters or buffers on another mesh",
            expected=f"plain ones, or ShardTensors on {mesh.outline}",
            got=elsewhere,
            fix="distribute them on the mesh that the inputs live on",
        )
    for name, t in named:
        if not isinstance(t, ShardTensor) and (odd := unfit(t) or uncopied(t)):
            raise _ungiven(name, "dense parameters and buffers", odd)
    over = () if shard_parameters is None else sharding.dims_of(mesh, shard_parameters)
    if over:
        sharding.require_unhooked(module, mesh.group(over).size)
    if not over and (gather_dtype is not None or offload):
        raise LayoutError(
            "distribute_module: gather_dtype or offload",
            expected="shard_parameters=, which they belong to",
            got=f"gather_dtype={gather_dtype}, offload={offload}",
            fix="name the mesh dim over which parameters are sharded, or leave them out",
        )
    if gather_dtype is not None and not (isinstance(gather_dtype, torch.dtype) and gather_dtype.is_floating_point):
        raise LayoutError(
            "distribute_module: gather_dtype", expected="a floating-point dtype", got=gather_dtype, fix="torch.bfloat16"
        )
    return named, over


def _ungiven(name: str, expected: str, odd: tuple[str, str]) -> UnsupportedOperationError:
    got, fix = odd
    return UnsupportedOperationError(
        f"distribute_module: {name!r} cannot be given to the other ranks", expected=expected, got=got, fix=fix
    )


def _by_dtype(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype, up to a buffer's worth."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        batch: list[Tensor] = []
        for t in tensors:
            if t.dtype == dtype and t.numel():
                if batch and sum(b.nbytes for b in batch) + t.nbytes > _BROADCAST_NBYTES:
                    yield batch
                    batch = []
                batch.append(t)
        if batch:
            yield batch
