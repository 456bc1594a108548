"""Autograd's own functions on ShardTensors: each is the same function on the local blocks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinMethodType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionMeta, _SingleLevelFunction
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from mpishard.autograd.batch import batch_refused, refuse_batched
from mpishard.autograd.bucket import bucketed, finish_withheld, unbucketed
from mpishard.autograd.graph import packs
from mpishard.errors import UnsupportedOperationError
from mpishard.tensor.function import apply_function, as_it_was, block_of, kind_of
from mpishard.tensor.hook import apply_backward_hook, local_cotangent
from mpishard.tensor.registry import implements
from mpishard.tensor.resident import notice_writes
from mpishard.tensor.shard_tensor import ShardTensor, end_of_graph, global_cotangent, root_of


def _end(x: Any) -> Any:
    """Return the local tensor that autograd starts from; of a Partial too, as a sum hands its cotangent on.

    It may have no value yet.
    """
    return end_of_graph(x) if isinstance(x, ShardTensor) else x


def _output_gradient(x: Any, local: Any, g: Any) -> Any:
    """Return the local gradient of an output, which is ``local`` here; implicit ones where torch would create them."""
    if not isinstance(x, ShardTensor):
        return g
    if g is None:
        if x.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return torch.ones_like(local)
    return local_cotangent(g, x.sharding, x.mesh)


def _notice_writes(roots: Sequence[Any]) -> None:
    for mesh in dict.fromkeys(x.mesh for x in roots if isinstance(x, ShardTensor)):
        notice_writes(mesh)


def _as_list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, Sequence) and not isinstance(x, Tensor) else [x]


def _input(x: Any) -> Any:
    return root_of(x)[0] if isinstance(x, ShardTensor) else x


@implements(torch.Tensor.backward, sharded="local")
def backward(
    self: ShardTensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Differentiate the local blocks; communication in the graph makes the result global. Collective."""
    autograd_backward(self, gradient, retain_graph, create_graph, inputs=inputs)


@implements(torch.autograd.backward, sharded="local")
def autograd_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Differentiate the local blocks of all roots. Collective."""
    roots = _as_list(tensors)
    _notice_writes(roots)
    given = grad_tensors if grad_tensors is not None else grad_variables
    grads = [None] * len(roots) if given is None else _as_list(given)
    if create_graph:
        finish_withheld()
    # first: of a root among them all of autograd must see one tensor
    leaves = None if inputs is None else [_input(i) for i in _as_list(inputs)]
    ends = [_end(t) for t in roots]
    # sums of parameter gradients may wait for the end of the pass where nothing reads them before
    with unbucketed() if create_graph or inputs is not None else bucketed():
        torch.autograd.backward(
            ends,
            [_output_gradient(*each) for each in zip(roots, ends, grads)],
            retain_graph,
            create_graph,
            inputs=leaves,
        )


@implements(torch.autograd.grad, sharded="local")
def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """Return gradients in the layouts of ``inputs``. Collective."""
    roots, leaves = _as_list(outputs), _as_list(inputs)
    _notice_writes(roots)
    grads = [None] * len(roots) if grad_outputs is None else _as_list(grad_outputs)
    refuse_batched(grads)
    # first: of a root among them all of autograd must see one tensor
    into = [_input(i) for i in leaves]
    ends = [_end(t) for t in roots]

    def of(given: Sequence[Any], retain_graph: bool | None) -> tuple[Any, ...]:
        with unbucketed():
            out = torch.autograd.grad(
                ends,
                into,
                [_output_gradient(*each) for each in zip(roots, ends, given)],
                retain_graph,
                create_graph,
                only_inputs,
                allow_unused,
                materialize_grads=materialize_grads,
            )
        return tuple(
            global_cotangent(g, root_of(i)[1], i.mesh) if isinstance(i, ShardTensor) and g is not None else g
            for i, g in zip(leaves, out)
        )

    if not is_grads_batched:
        return of(grads, retain_graph)
    # one by one: what communicates is not batched
    batch = list(zip(*map(_unbound, grads), strict=True))
    found = [of(given, True) for given in batch[:-1]] + [of(given, retain_graph) for given in batch[-1:]]
    return tuple(None if each[0] is None else torch.stack(each) for each in zip(*found))


def _unbound(g: Any) -> Any:
    if g is None:
        raise RuntimeError("is_grads_batched=True needs a batch of cotangents for every output")
    return g.unbind(0)


@implements(torch._add_batch_dim, sharded="local")  # type: ignore[attr-defined]
def add_batch_dim(*_: Any) -> NoReturn:
    """Refuse what ``vectorize=True`` does with tangents."""
    raise batch_refused()


@implements(torch.Tensor.retain_grad, sharded="local")
def retain_grad(self: ShardTensor) -> None:
    """Keep the gradient of a tensor that is not a leaf. Not collective."""
    root_of(self)[0].retain_grad()


@implements(torch.Tensor.requires_grad_, sharded="local")
def requires_grad_(self: ShardTensor, requires_grad: bool = True) -> ShardTensor:
    """Set whether autograd records operations on this tensor. Not collective."""
    root_of(self)[0].requires_grad_(requires_grad)
    if not requires_grad and self._root is not None:
        self.block, self._root = self.block.detach(), None
    return self


@implements(torch.Tensor.detach_, torch.detach_, sharded="local")
def detach_(self: ShardTensor) -> ShardTensor:
    """Cut this tensor from its graph. Not collective."""
    # not in place: torch refuses that of views, and a block may be one on this rank alone
    self.block, self._root = self.block.detach(), None
    return self


# -- what an autograd.Function computes is seen by the graph of the blocks alone


def holds_shards(values: Any) -> bool:
    """Tell whether arguments hold a ShardTensor, in lists and dicts too. Not collective."""
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return isinstance(values, ShardTensor)
    return any(map(holds_shards, values))


# torch's own, of non-reentrant checkpoints before torch 2.12: it keeps its arguments, for when they are asked back
_SAVING = "torch.utils.checkpoint._NoopSaveInputs"


def _save_inputs(apply: Any, args: Sequence[Any]) -> Any:
    """Keep blocks, and give them back as the ShardTensors that they were. Not collective."""
    saver = apply(*map(block_of, args))
    node, kinds = saver.grad_fn, list(map(kind_of, args[1:]))
    if node is not None:
        kept = node.get_args
        node.get_args = lambda saved: list(map(as_it_was, kept(saved), kinds))
    return saver


def _keep_blocks(frame: Any) -> None:
    """Have the frames of checkpoints do the same, since torch 2.12. Not collective.

    Of blocks torch sees whether they were written into, and, where one checkpoint lies in another, they can be packed:
    of what is packed torch makes a plain tensor.
    """
    save, give = frame.save_inputs, frame.get_inputs

    def save_inputs(self: Any, *args: Any) -> None:
        packed = packs()
        self.mpishard_again = [_again(x, packed) for x in args]
        save(self, *map(block_of, args))

    def get_inputs(self: Any) -> list[Any]:
        inputs, again = give(self), getattr(self, "mpishard_again", None)  # none of what is older than this package
        return inputs if again is None else [f(x) for f, x in zip(again, inputs)]

    frame.save_inputs, frame.get_inputs = save_inputs, get_inputs


def _again(x: Any, packed: bool) -> Callable[[Any], Any]:
    """Return what makes an argument of a checkpoint of what was kept of it. Not collective.

    That is the argument itself, unless it is to be freed, or may be summed before the checkpoint runs again.
    """
    if not isinstance(x, ShardTensor):
        return lambda kept: kept
    if not packed and not x.sharding.partial_dims:
        return lambda _: x
    kind = kind_of(x)
    return lambda block: as_it_was(block, kind)


def _checkpointed(apply: Any, function: Callable[..., Any], keeps_random_state: bool, *args: Any) -> Any:
    """Run a reentrant checkpoint on blocks: its function, now and again in backward, sees ShardTensors.

    Collective as the function is; in backward, too, as its backward is.
    """
    kinds = list(map(kind_of, args))
    found: list[Any] = []
    _refuse_nested(args)

    def on_blocks(*locals_: Any) -> Any:
        results = function(*map(as_it_was, locals_, kinds))
        parts = results if isinstance(results, tuple) else (results,)
        _refuse_nested(parts)
        found[:] = map(kind_of, parts)
        blocks = tuple(map(block_of, parts))
        return blocks if isinstance(results, tuple) else blocks[0]

    results = apply(on_blocks, keeps_random_state, *map(block_of, args))
    parts = results if isinstance(results, tuple) else (results,)
    out = tuple(map(as_it_was, parts, found))
    return out if isinstance(results, tuple) else out[0]


def _refuse_nested(values: Sequence[Any]) -> None:
    for x in values:
        if not isinstance(x, Tensor) and holds_shards(x):
            raise UnsupportedOperationError(
                "torch.utils.checkpoint with use_reentrant=True and ShardTensors inside a list, tuple or dict: "
                "their gradients would be lost in silence",
                expected="tensors as arguments, a tensor or a tuple of tensors as the result",
                got=f"a {type(x).__name__} that holds ShardTensors",
                fix="pass use_reentrant=False, or hand them over one by one",
            )


def _guarded_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    apply = super(_SingleLevelFunction, cls).apply
    if cls.__module__.startswith("mpishard."):
        return apply(*args, **kwargs)
    got = "ShardTensors inside a list, tuple or dict"
    if not holds_shards((args, kwargs)):
        result = apply(*args, **kwargs)
        if not holds_shards(result):
            return result
        got = "a ShardTensor as its result"
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls is CheckpointFunction:
        return _checkpointed(apply, *args)
    if cls.__name__ == "_DDPSink":
        raise UnsupportedOperationError(
            "DistributedDataParallel with find_unused_parameters=True or static_graph=True, of a model that "
            "returns ShardTensors: it looks for the parameters that they were made of, and finds none",
            expected="neither of the two",
            got="ShardTensors as results",
            fix="leave them out, and add (parameter * 0).sum() of a parameter that is not always used to the loss",
        )
    if cls is BackwardHookFunction:
        return apply_backward_hook(args)
    if name == _SAVING:
        return _save_inputs(apply, args)
    args = _positional(cls, args, kwargs)
    if any(isinstance(x, ShardTensor) for x in args) and not any(
        holds_shards(x) for x in args if not isinstance(x, Tensor)
    ):
        return apply_function(cls, args)
    raise UnsupportedOperationError(
        f"autograd.Function {name} with ShardTensors: its gradient would be lost in silence",
        expected="tensors as arguments",
        got=got,
        fix=f"hand them to {cls.__name__}.apply one by one",
    )


def _positional(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments in the order of ``forward``, with its defaults for ``setup_context``, as torch does."""
    apart = function.setup_context is not _SingleLevelFunction.setup_context
    if not apart and not kwargs:
        return args
    bound = inspect.signature(function.forward).bind(*(() if apart else (None,)), *args, **kwargs)
    bound.apply_defaults()
    return bound.args if apart else bound.args[1:]


def _install() -> None:
    """Put `_guarded_apply` where every ``Function.apply`` passes, and have checkpoints keep blocks."""
    if hasattr(checkpoint._CheckpointFrame, "save_inputs"):
        _keep_blocks(checkpoint._CheckpointFrame)
    if isinstance(vars(Function)["apply"], classmethod):
        # not Function.apply itself: many a program has its bound method, op = MyFunction.apply, from before this import
        _SingleLevelFunction.apply = classmethod(_guarded_apply)  # type: ignore[attr-defined]
        return
    # from torch 2.15 on it is one function in C, which asks nobody; nor does what is bound to it
    Function.apply = classmethod(_guarded_apply)  # type: ignore[assignment, method-assign]
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name, bound in list(names.items()):
            cls = bound.__self__ if type(bound) is BuiltinMethodType else None
            if isinstance(cls, FunctionMeta) and not cls.__module__.startswith("mpishard."):
                names[name] = cls.apply  # type: ignore[attr-defined]


_install()
