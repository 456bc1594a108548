"""Where a profile looks: what it puts in place when it begins, and takes away when it ends.

Nothing of it is in the way of a program without a profile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from mpishard.comm import counter, guard
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.memory.buffer import transforms_active
from mpishard.profiling.recorder import Recorder
from mpishard.tensor.compiler import Compiled
from mpishard.tensor.registry import BACKWARD, name_of
from mpishard.tensor.shard_tensor import ShardTensor

# module, class, name of its rows, methods; "" for the call itself
_METHODS = (
    ("comm.halo.exchanger", "HaloExchanger", "HaloExchanger", "__call__ start finish"),
    ("tensor.shard_tensor", "ShardTensor", "", "redistribute full_tensor rebalance"),
    ("insitu.link", "Link", "Link", "put get"),
)
# the same, of calls that have other operations inside
_OUTER_METHODS = (
    ("nn.pipeline", "Pipeline", "Pipeline", "step"),
    ("insitu.hook", "Hook", "Hook", "__call__ start wait"),
)


def load() -> None:
    """Import what is looked at, before a clock runs. Not collective."""
    for module, *_ in (*_METHODS, *_OUTER_METHODS):
        import_module(f"mpishard.{module}")


class _Operations(TorchFunctionMode):
    """Enters every function that torch is called with on ShardTensors, and every backward pass."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer = func in BACKWARD
        if not outer and not any(issubclass(kind, ShardTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        name = _short_name(func)
        recorder = self._recorder
        if not recorder.enter(name, outer=outer):
            return func(*args, **(kwargs or {}))
        before = [x.block.grad_fn for x in args if isinstance(x, ShardTensor)]
        try:
            out = func(*args, **(kwargs or {}))
            if torch.is_grad_enabled() and not outer and not transforms_active():
                # waits for a sum that is under way: the wait counts as its own
                _announce(out, name, recorder, before)
            return out
        finally:
            recorder.leave()


def _announce(out: Any, name: str, recorder: Recorder, before: list[Any]) -> None:
    """Have autograd say when it comes to the backward of an operation."""
    if isinstance(out, ShardTensor):
        node = out.block.grad_fn
        # what returns its input, as contiguous() may, has no backward: the node is that of an operation before
        if node is not None and node not in before:
            node.register_prehook(lambda _: recorder.backward(name))
    elif isinstance(out, (tuple, list)):
        for x in out:
            _announce(x, name, recorder, before)


@functools.lru_cache(1024)
def _short_name(function: Any) -> str:
    parts = name_of(function).split(".")
    name = parts[-2] if parts[-1] in ("__get__", "__set__") and len(parts) > 1 else parts[-1]
    return name.strip("_") if name.startswith("__") else name


@contextmanager
def looking(recorder: Recorder) -> Iterator[None]:
    """Tell a recorder what this rank does. Not collective."""
    undo: list[Callable[[], None]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        before = vars(owner)[name]
        undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    for outer, table in ((False, _METHODS), (True, _OUTER_METHODS)):
        for module, kind, prefix, methods in table:
            owner = getattr(import_module(f"mpishard.{module}"), kind)
            for method in methods.split():
                dot = f"{prefix}." if prefix else ""
                name = prefix if method == "__call__" else f"{dot}{method}"
                replace(owner, method, _entered(vars(owner)[method], name, outer, recorder))
    replace(WindowOp, "__call__", _entered_window(WindowOp.__call__, recorder))
    begin, end = guard.waiting.__init__, guard.waiting.__exit__

    def __init__(self: guard.waiting, op: str, peers: Any = (), comm: Any = None) -> None:  # noqa: N807
        begin(self, op, peers, comm)
        recorder.wait_begins(op)

    def __exit__(  # noqa: N807
        self: guard.waiting, kind: object, error: BaseException | None, trace: object
    ) -> None:
        recorder.wait_ends()
        end(self, kind, error, trace)

    replace(guard.waiting, "__init__", __init__)
    replace(guard.waiting, "__exit__", __exit__)
    replace(counter, "around", recorder.operation)
    counter.active.append(recorder)
    operations = _Operations(recorder)
    replace(Compiled, "run", _compiled(Compiled.run, recorder, operations))
    try:
        with operations:
            yield
    finally:
        counter.active.remove(recorder)
        for restore in reversed(undo):
            restore()


def _entered(method: Any, name: str, outer: bool, recorder: Recorder) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.enter(name, outer=outer):
            return method(*args, **kwargs)
        try:
            return method(*args, **kwargs)
        finally:
            recorder.leave()

    return call


def _entered_window(method: Any, recorder: Recorder) -> Any:
    @functools.wraps(method)
    def call(self: WindowOp, x: torch.Tensor) -> torch.Tensor:
        with recorder.operation(self.op):
            return method(self, x)  # type: ignore[no-any-return]

    return call


def _compiled(method: Any, recorder: Recorder, mode: TorchFunctionMode) -> Any:
    """Be one operation for a compiled call. Dynamo does not see the mode: it would read it, and refuse all calls."""

    @functools.wraps(method)
    def call(self: Compiled, args: Any, kwargs: Any) -> Any:
        counts = recorder.enter("compiled")
        stack = _get_current_function_mode_stack()
        _stand([m for m in stack if m is not mode])
        try:
            out = method(self, args, kwargs)
            if counts and torch.is_grad_enabled():
                _announce(out, "compiled", recorder, [])
            return out
        finally:
            _stand(stack)
            if counts:
                recorder.leave()

    return call


def _stand(stack: list[TorchFunctionMode]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in stack:
        _push_mode(mode)
