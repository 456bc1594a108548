"""Parameters sharded over mesh dims: what `distribute_module` does with ``shard_parameters``."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from mpishard.autograd.argument import require
from mpishard.autograd.gathered import Gathered, Schedule, Turn, Unit, saving
from mpishard.autograd.linear import in_transform
from mpishard.autograd.padded import sharded_dim
from mpishard.autograd.replica import Replica
from mpishard.comm import traced
from mpishard.comm.memory.buffer import followed
from mpishard.comm.mesh import CartMesh
from mpishard.comm.mesh_argument import listed
from mpishard.errors import LayoutError, MeshError, UnsupportedOperationError
from mpishard.layout import Layout, Replicate, Shard
from mpishard.tensor.by_data import written
from mpishard.tensor.convert import distribute_tensor
from mpishard.tensor.exporter import refused
from mpishard.tensor.function import block_of
from mpishard.tensor.shard_tensor import ShardTensor

# their forward reads parameters of modules inside, which are not called
_WHOLE = (nn.MultiheadAttention,)


def dims_of(mesh: CartMesh, given: str | int | Iterable[str | int]) -> tuple[int, ...]:
    """Return the mesh dims that are meant, ascending.

    Not collective.

    Raises
    ------
    MeshError
        There is no such dim.
    """
    names = listed(given)
    if any(isinstance(name, bool) for name in names):  # to Python an integer
        raise MeshError(
            "shard_parameters: no such mesh dim",
            expected=f"one or some of {mesh.mesh_dim_names}, or None",
            got=given,
            fix="name the mesh dim over which parameters are sharded, or leave it out",
        )
    return tuple(sorted({mesh.mesh_dim(name) for name in names}))


def parameter_memory(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Return the bytes that this rank holds for the parameters of a model.

    Not collective.

    Parameters
    ----------
    module
        Any model; of one with ``shard_parameters``, the blocks count.
    optimizer
        Whose state counts too.

    Returns
    -------
    dict of str to int
        ``parameters``, ``gradients``, ``optimizer``, and of whole parameters gathered for layers ``gathered`` now and
        the most so far, ``gathered_peak`` (of models inside that were distributed one by one: of all).

    Examples
    --------
    >>> ms.parameter_memory(model, optimizer)
    """
    require("parameter_memory", "module", module, nn.Module, "give the model")
    parameters = list(module.parameters())
    states = [] if optimizer is None else [v for state in optimizer.state.values() for v in state.values()]
    schedules = _schedules(module)
    return {
        "parameters": _nbytes(parameters),
        "gradients": _nbytes([p.grad for p in parameters]),
        "optimizer": _nbytes(states),
        "gathered": sum(schedule.nbytes for schedule in schedules),
        "gathered_peak": sum(schedule.peak_nbytes for schedule in schedules),
    }


def _nbytes(values: Iterable[Any]) -> int:
    return sum((x.block if isinstance(x, ShardTensor) else x).nbytes for x in values if isinstance(x, Tensor))


class _Layer(Turn):
    """The parameters of one module that are gathered while it computes."""

    def __init__(self, module: nn.Module, unit: Unit) -> None:
        self._rest(unit)
        # before hooks that make a weight of parameters, as `torch.nn.utils.weight_norm`
        module.register_forward_pre_hook(self._before, prepend=True)
        module.register_forward_hook(self._behind, always_call=True)

    def _rest(self, unit: Unit) -> None:
        self.unit = unit
        self.places: list[tuple[nn.Module, str, Gathered]] = []
        self._contexts: list[saving] = []
        # before forward: versions of the parameters, and their sums, which tell of what is written by ``.data`` too
        self._before_it: list[Any] = []
        self._sums_are_known = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layer:
        """Return what is done around the copy of the module, which copies its hooks; that one gathers for itself."""
        memo[id(self)] = new = _Layer.__new__(_Layer)
        new._rest(copy.deepcopy(self.unit, memo))
        new.places = copy.deepcopy(self.places, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _cannot_be_pickled()

    def _before(self, called: nn.Module, _inputs: Any) -> None:
        if odd := followed():
            # its graph would hold what was gathered, in memory that is used again
            raise refused("a trace of a model with shard_parameters", odd[0])
        for module, name, gathered in self.places:
            # found before the parameter of that name, which stays what optimizers and checkpoints know
            module.__dict__[name] = gathered.tensor()
        self._before_it = [self._mark(module.__dict__[name]) for module, name, _ in self.places]
        _list_anew(called)
        if torch._C._current_graph_task_id() == -1:  # type: ignore[attr-defined]
            self.unit.schedule.forward(self)
        context = saving(self.unit.schedule)
        context.__enter__()
        self._contexts.append(context)

    def _behind(self, called: nn.Module, inputs: Any, output: Any) -> None:
        if not self._contexts:
            return  # what comes before failed
        self._contexts.pop().__exit__()
        if self._contexts:
            return  # it was called by itself
        unit = self.unit
        # of data, the first of linear layers saves no weight on any rank; what others do is their kernels' affair
        is_needed = not isinstance(called, nn.Linear) or any(x.requires_grad for x in _blocks(inputs))
        for y in _blocks(output) if is_needed and traced.recording is None else ():
            if y.grad_fn is not None:
                # on every rank; what autograd saved asks on some
                y.register_hook(lambda _: unit.schedule.backward(unit))
        written = [
            name
            for (module, name, _), before in zip(self.places, self._before_it)
            if (whole := module.__dict__.pop(name, None)) is not None and self._mark(whole) != before
        ]
        self._sums_are_known = True
        _list_anew(called)
        unit.schedule.computed(self)
        if written:
            raise LayoutError(
                f"shard_parameters: forward of a {type(called).__name__} writes into {written[0]!r}",
                expected="parameters that forward only reads: what it sees of them is gathered, and dropped behind it",
                got="a write in place, which would be lost",
                fix="write into the parameter outside of forward, where it is a ShardTensor, or keep parameters whole",
            )

    def _mark(self, whole: Tensor) -> Any:
        """Return what a write changes; sums in the layer's first forward only. Not collective."""
        if self._sums_are_known:
            return whole._version
        has_values = type(whole) is Tensor and not whole.is_meta and traced.recording is None and not in_transform()
        return whole._version, repr(whole.detach().sum().item() if has_values else None)


class _Whole:
    """What is done around a forward of the whole model."""

    def __init__(self, module: nn.Module, schedule: Schedule) -> None:
        self.schedule = schedule
        module.register_forward_pre_hook(self._before, prepend=True)
        module.register_forward_hook(self._behind, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Whole:
        memo[id(self)] = new = _Whole.__new__(_Whole)
        new.schedule = copy.deepcopy(self.schedule, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _cannot_be_pickled()

    def _before(self, *_: Any) -> None:
        self.schedule.rest()

    def _behind(self, *_: Any) -> None:
        self.schedule.rest()


def _cannot_be_pickled() -> UnsupportedOperationError:
    return UnsupportedOperationError(
        "a pickle of a model with shard_parameters",
        expected="a model whose parameters are whole",
        got="one that gathers them layer by layer, from the ranks of a mesh",
        fix="save it with mpishard.io.save_checkpoint",
    )


def _schedules(module: nn.Module) -> list[Schedule]:
    """Return those of the models in a module that were distributed with ``shard_parameters``. Not collective."""
    hooks = [hook for part in module.modules() for hook in part._forward_pre_hooks.values()]
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    return [owner.schedule for owner in owners if isinstance(owner, _Whole)]


def _blocks(values: Any) -> list[Tensor]:
    """Return the tensors in what a module takes or returns, of ShardTensors this rank's blocks."""
    return [x for x in map(block_of, tree_leaves(values)) if isinstance(x, Tensor)]


def _list_anew(module: nn.Module) -> None:
    # recurrent layers compute with a list of their parameters
    if isinstance(module, nn.RNNBase):
        module.__dict__["_flat_weights"] = [getattr(module, name) for name in module._flat_weights_names]


def is_sharded(module: nn.Module) -> bool:
    """Tell whether parameters of a model, or of a part of it, are sharded already. Not collective."""
    return bool(_schedules(module))


# a module, the parameter's name, and what it is now
_Places = list[tuple[nn.Module, str, ShardTensor]]


def shard_parameters(
    module: nn.Module, mesh: CartMesh, mesh_dims: tuple[int, ...], gather_dtype: torch.dtype | None, offload: bool
) -> None:
    """Replace the parameters of a model by ShardTensors over some mesh dims, and have them gathered where needed.

    Collective. Plain ones stay where there are fewer cells than ranks.
    """
    schedule = Schedule()
    found = _replaced(module, mesh, mesh_dims, offload)
    for some in _neighbours(found):
        unit, last = Unit(schedule), None
        for part, places in some:
            layer = _Layer(part, unit)
            if last is not None:
                last.after = layer
            last = layer
            for owner, name, shard in places:
                dtype = gather_dtype if shard.dtype.is_floating_point else None
                block = partial(_block_of, owner, name, shard.sharding, mesh)
                gathered = Gathered(block, partial(_written, owner, name), shard.sharding, mesh, unit, dtype)
                layer.places.append((owner, name, gathered))
    for part in module.modules():
        _list_anew(part)

    _Whole(module, schedule)


def _replaced(
    module: nn.Module, mesh: CartMesh, mesh_dims: tuple[int, ...], offload: bool
) -> list[tuple[nn.Module, _Places]]:
    """Replace parameters by ShardTensors, and return those of each layer. Collective."""
    count = mesh.group(mesh_dims).size
    found: list[tuple[nn.Module, _Places]] = []
    # those that several modules have; they live until the end, so that an id means one
    owned = [p for part in module.modules() for p in part._parameters.values() if p is not None]
    tied = {i: [p for p in owned if id(p) == i] for i, n in Counter(map(id, owned)).items() if n > 1}
    del owned
    made: dict[int, ShardTensor] = {}
    inside: set[int] = set()
    for part in module.modules():
        if id(part) in inside:
            continue
        parts = list(part.modules()) if isinstance(part, _WHOLE) else [part]
        inside.update(map(id, parts))
        places: _Places = []
        for owner in parts:
            for name, param in list(owner._parameters.items()):
                if param is None or isinstance(param, ShardTensor):
                    continue
                shard = made.get(id(param))
                shard = _shard(param, mesh, mesh_dims, count, offload) if shard is None else shard
                if shard is None:
                    continue
                if id(param) in tied:
                    made[id(param)] = shard
                owner._parameters[name] = shard  # type: ignore[assignment]
                places.append((owner, name, shard))
        if places:
            found.append((part, places))
    return found


def _neighbours(found: list[tuple[nn.Module, _Places]]) -> list[list[tuple[nn.Module, _Places]]]:
    """Join layers that are gathered together: neighbours that have hardly more than the largest one. Not collective.

    Not those with layers inside: they compute on while what these need is dropped.
    """
    sizes = [sum(p.numel() * p.element_size() for _, _, p in places) for _, places in found]
    most = max(sizes, default=0) * 17 // 16
    joined: list[list[tuple[nn.Module, _Places]]] = []
    room = 0
    for layer, size in zip(found, sizes):
        part = layer[0]
        is_whole = isinstance(part, _WHOLE) or not list(part.children())
        if joined and is_whole and size <= room:
            joined[-1].append(layer)
        else:
            joined.append([layer])
            room = most
        room = room - size if is_whole else 0
    return joined


def _block_of(owner: nn.Module, name: str, layout: Layout, mesh: CartMesh) -> Tensor:
    """Return this rank's block of the parameter that a module has by now: it may have been replaced. Not collective."""
    found = owner._parameters.get(name)
    if isinstance(found, ShardTensor) and found.mesh is mesh and (found.sharding is layout or found.sharding == layout):
        return found.block
    raise LayoutError(
        f"shard_parameters: the parameter {name!r} of a {type(owner).__name__} was replaced",
        expected=f"a ShardTensor of {layout}",
        got="no parameter of that name"
        if found is None
        else f"a ShardTensor of {found.sharding}"
        if isinstance(found, ShardTensor)
        else type(found).__name__,
        fix="copy the values into the parameter (under torch.no_grad(), or load_state_dict without assign=True), or "
        "put a ShardTensor with the placements of the old one in its place (by torch.func.functional_call for one "
        "call); prune and parametrize, and take that back, before distribute_module: later, load the state_dict into a "
        "plain model to do so",
    )


def _written(owner: nn.Module, name: str) -> int:
    return written(owner._parameters[name])


def _cut_dim(param: Tensor, count: int) -> int | None:
    is_number = param.is_floating_point() or param.is_complex()
    return sharded_dim(param.shape, count) if count > 1 and param.is_leaf and is_number else None


def _shard(param: Tensor, mesh: CartMesh, mesh_dims: tuple[int, ...], count: int, offload: bool) -> ShardTensor | None:
    dim = _cut_dim(param, count)
    if dim is None:
        return None
    placements = [Shard(dim) if m in mesh_dims else Replicate() for m in range(mesh.ndim)]
    x = distribute_tensor(param.detach(), mesh, placements)
    if offload:
        x.block = x.block.cpu()
    # a ShardTensor too: torch makes it of the same class
    new: ShardTensor = nn.Parameter(x, requires_grad=param.requires_grad)  # type: ignore[assignment]
    for name, value in vars(param).items():  # by which a program knows its parameters
        if not hasattr(new, name):
            setattr(new, name, new if value is param else value)
    _note_sharded(param)
    return new


# parameters in whose places there are sharded ones, and which something else holds
_sharded: dict[int, weakref.ref[Tensor]] = {}
_step_hook: Any = None


def _note_sharded(param: Tensor) -> None:
    global _step_hook  # noqa: PLW0603
    if _step_hook is None:
        _step_hook = register_optimizer_step_pre_hook(_refuse_step)
    number = id(param)
    _sharded[number] = weakref.ref(param, lambda _: _sharded.pop(number, None))


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _sharded and any(id(param) in _sharded for group in optimizer.param_groups for param in group["params"]):
        raise UnsupportedOperationError(
            "an optimizer of parameters that were sharded since",
            expected="the parameters that the model has now",
            got="some that distribute_module(shard_parameters=) has replaced: a step would not change the model",
            fix="make the optimizer behind distribute_module: torch.optim.AdamW(model.parameters())",
        )


def require_unhooked(module: nn.Module, count: int) -> None:
    """Raise where a parameter that is to be sharded has hooks, which would not be called any more. Not collective."""
    for name, x in module.named_parameters():
        if isinstance(x, ShardTensor) or _cut_dim(x, count) is None:
            continue
        both: Any = (x._backward_hooks, x._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
        if any(not isinstance(hook, Replica) for hooks in both for hook in (hooks or {}).values()):
            raise LayoutError(
                f"distribute_module: {name!r} is to be sharded, and has hooks",
                expected="parameters without hooks",
                got="one that would be replaced by a ShardTensor, and its hooks with it",
                fix="register them behind distribute_module, on the parameters that the model has then",
            )
