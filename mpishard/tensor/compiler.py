"""Where torch's compiler meets ShardTensors: `torch.compile` compiles what it can.

What a compiled function is given is looked at first. ShardTensors are replaced by tensors without data of the same
global shape; torch's Dynamo reads the function with them, guards what it has seen of the Python around it, and hands
over a graph of torch functions. That graph, on the ShardTensors, becomes a `mpishard.tensor.program.Program`. What
Dynamo does not take as one graph, or a compiler does not take at all, runs eagerly, on all ranks alike, with one
warning.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mpishard.autograd.linear import in_transform
from mpishard.comm import traced
from mpishard.comm.agreement import most_of
from mpishard.comm.mesh import CartMesh
from mpishard.errors import UnsupportedOperationError
from mpishard.tensor.program import CannotCompileError, Program, SharedMemoryError, compare, key_of, why_not
from mpishard.tensor.shard_tensor import ShardTensor
from mpishard.tensor.stand_in import Call, attributes_of, write

_warned = False
# where the package was loaded, it put another one in its place
_torch_compile = getattr(torch.compile, "of_torch", torch.compile)

# what a rank is ready for, and what is done is the most of all: eager this time alone, or from now on, or an error, or
# eager because a rank's program has said so: no error then, nor a warning
_READY, _NEW, _EAGERLY_NOW, _EAGERLY, _FORBIDDEN, _OFF = range(6)
_ANOTHER = "another rank runs it eagerly"
_RECOMPILED = "Detected recompile when torch.compile stance is 'fail_on_recompile'"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# what a plain tensor answers otherwise than a ShardTensor, or than the block behind it
_TELLING = frozenset(
    "placements sharding device_mesh to_local full_tensor redistribute rebalance from_local ShardTensor DTensor "
    "_local_tensor _spec grad grad_fn retain_grad is_leaf _version data_ptr untyped_storage storage stride "
    "is_contiguous storage_offset is_conj is_neg _base register_hook register_post_accumulate_grad_hook".split()
)
_ASKS = frozenset(("hasattr", "getattr"))
_ATTRIBUTES = _TELLING | {"mesh", "block"}


class _Running(threading.local):
    """The call that runs now, in this thread: a hook's model has its own."""

    call: Call | None = None


_running = _Running()


class Compiled:
    """A function or module under `torch.compile`, for calls with ShardTensors.

    Parameters
    ----------
    function
        What runs eagerly.
    compiled
        What Dynamo reads: the function, or its module.
    compiler
        Of torch's.
    strict
        Whether what cannot be compiled is an error (``fullgraph=True``).
    """

    def __init__(self, function: Callable[..., Any], read: Any, compiler: _Compiler, *, strict: bool) -> None:
        self._function, self._read, self._compiler, self._strict = function, read, compiler, strict
        self._optimized: dict[bool, Callable[..., Any]] = {}
        self._stand_ins: dict[Any, list[Tensor]] = {}
        # of each mesh, for its ranks are those that agree: where it runs eagerly, and where it did the last time, for
        # good unless it raised, and whether it did here
        self._refused: WeakSet[CartMesh] = WeakSet()
        self._raised: WeakKeyDictionary[CartMesh, bool] = WeakKeyDictionary()
        self._keeps = False  # whether the function keeps one of its arguments, as was seen in a call
        self._runs = False

    def __call__(self, mesh: CartMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call with arguments that hold ShardTensors, the first one on ``mesh``. Collective."""
        if mesh in self._refused or self._runs or _is_inside():
            return self._function(*args, **kwargs)
        if mesh in self._raised and not most_of(mesh, self._raised.pop(mesh), "compiled call"):
            self._refused.add(mesh)
            return self._function(*args, **kwargs)
        from torch.utils import _pytree as pytree

        leaves = pytree.tree_leaves((args, kwargs))
        shards = {id(x): x for x in leaves if isinstance(x, ShardTensor)}
        # in something that only its owner can look into
        hidden = "" if shards else "ShardTensors within an object among the arguments"
        reason, forbidden = hidden or why_not(list(shards.values()), mesh), None
        if reason and not self._strict:
            return self._eagerly(reason, args, kwargs)
        outer, call = _running.call, Call(mesh, self._stand_ins)
        self._runs, _running.call = True, call
        try:
            if _is_off():  # here: other ranks may compile
                call.decide(_OFF)
                raise _RunEagerlyError
            if reason:
                call.decide(_EAGERLY_NOW)
                raise _RunEagerlyError(reason)
            if self._keeps:
                call.decide(_EAGERLY)
                raise _RunEagerlyError("the function keeps one of its arguments")
            if names := [name for x in shards.values() for name in attributes_of(x)]:
                call.decide(_EAGERLY_NOW)
                raise _RunEagerlyError(f"a ShardTensor that has an attribute {names[0]!r}")
            if _get_current_dispatch_mode() is not None:  # Dynamo reads nothing, nor ever again what it met there
                call.decide(_EAGERLY_NOW)
                raise _RunEagerlyError("a TorchDispatchMode, as of a counter of operations, is active")
            a, k = call.given((args, kwargs))
            try:
                out = self.run(a, k)
            except _RunEagerlyError:
                raise
            except Exception as e:  # whatever Dynamo or a compiler raises
                if call.decided == _READY:
                    raise  # the program's own
                reason = _told(e)
                if call.decided is None:
                    forbidden = e if _forbids(e) else None
                    at_limit = isinstance(e, torch._dynamo.exc.FailOnRecompileLimitHit)
                    call.decide(_FORBIDDEN if forbidden else _EAGERLY_NOW if at_limit else _EAGERLY)
            else:
                out, written = call.returned(out), call.written()
                unread = any(call.is_unknown(y) for y in pytree.tree_leaves((out, written)))
                if call.decided is None:
                    if call.decide(_EAGERLY if unread else _READY) == _NEW:
                        # of the other ranks, which begin by comparing their graphs
                        compare(mesh, "no graph")
                elif unread:
                    # on all ranks: they have run the same program
                    call.decided = _EAGERLY
                if call.decided not in (_READY, _NEW):
                    reason = "Dynamo does not read it" if unread else _ANOTHER
            del a, k
            if not reason:
                for into, content in written:
                    write(into, content)
                del written
                self._keeps = not call.release()
                return out
        except (_RunEagerlyError, CannotCompileError) as e:
            reason = str(e)
        finally:
            self._runs, _running.call = False, outer
        if call.decided == _OFF:
            return self._function(*args, **kwargs)
        if call.decided == _FORBIDDEN:
            raise forbidden or torch._dynamo.exc.RecompileError(f"{_RECOMPILED}, or with error_on_recompile: {reason}")
        try:
            return self._eagerly(reason, args, kwargs, for_good=mesh if call.decided == _EAGERLY else None)
        except Exception:
            # of values, maybe: others may be good
            call.forget()
            raise

    def _eagerly(self, reason: str, args: Any, kwargs: Any, *, for_good: CartMesh | None = None) -> Any:
        if self._strict:
            raise UnsupportedOperationError(
                "torch.compile(fullgraph=True) with ShardTensors",
                expected="a function that compiles as one graph",
                got=reason,
                fix="leave out fullgraph=True, and it runs eagerly; what compiles by itself (torch.cond, while_loop, "
                "flex_attention): write it in Python; docs/compile.md says what is compiled",
            )
        if for_good is not None:
            self._raised[for_good] = True
        out = self._function(*args, **kwargs)
        _warn(reason)
        if for_good is not None:
            self._raised[for_good] = False
        return out

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what Dynamo makes of the function, with tensors without data. Collective."""
        hooked = _is_hooked(self._function)
        if hooked not in self._optimized:
            import torch._dynamo

            self._optimized[hooked] = torch._dynamo.optimize(
                self._compiler.of(hooked), nopython=True, dynamic=False, guard_filter_fn=_looked_at
            )(_framed(self._read) if hooked else self._read)
        if not hooked:
            return self._optimized[hooked](*args, **kwargs)
        # else a hook that comes, or goes, later is not seen
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            return self._optimized[hooked](*args, **kwargs)


class _Compiler:
    """What Dynamo gives its graphs to: equal for all that `torch.compile` was asked for in the same words.

    So, as torch's own, modules that run the same code, as the blocks of a model, are read and compiled once.
    """

    def __init__(self, backend: Any, mode: Any, options: Any, *, hooked: bool = False) -> None:
        self._asked = backend, mode, options, hooked

    def of(self, hooked: bool) -> _Compiler:
        """Return that for modules with hooks: what is read without looks for none. Not collective."""
        return _Compiler(*self._asked[:3], hooked=True) if hooked else self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Compiler) and self._asked == other._asked

    def __hash__(self) -> int:
        return hash(self._asked[1])

    def __call__(self, graph: torch.fx.GraphModule, _examples: Sequence[Any]) -> Callable[..., Any]:
        """Return what Dynamo calls for a graph. Not collective."""
        _check_code()
        if any(node.meta.get("unbacked_bindings") for node in graph.graph.nodes):
            raise CannotCompileError("a shape that depends on values")
        # torch would do again in backward what communicates, and not on all ranks alike
        if any("checkpoint" in str(node.target) for node in graph.graph.nodes):
            raise CannotCompileError("a checkpoint inside")
        programs: dict[Any, Program | CannotCompileError] = {}

        def run(*inputs: Any) -> Any:
            call = _running.call
            assert call is not None
            real = [call.real(x) for x in inputs]
            reason = why_not(real, call.mesh)
            key = key_of(real)
            program = programs.get(key)
            if reason or isinstance(program, CannotCompileError):
                state = _EAGERLY_NOW if isinstance(program, SharedMemoryError) and not reason else _EAGERLY
            else:
                state = _READY if program else _FORBIDDEN if _is_forbidden(anew=bool(programs)) else _NEW
                reason = "" if state != _FORBIDDEN else "another layout of the arguments"
            decided = call.decide(state)
            if decided == _NEW:
                try:
                    program = Program(graph, self._compile, real, call.mesh)
                except CannotCompileError as e:
                    program = e
                    call.forget = lambda: programs.pop(key, None)
                programs[key] = program
            if isinstance(program, CannotCompileError):
                raise _RunEagerlyError(reason or str(program))
            if program is None or decided >= _EAGERLY_NOW:
                raise _RunEagerlyError(reason or _ANOTHER)
            call.decided = _READY
            return program(real)

        return torch._dynamo.disable(run)  # type: ignore[no-any-return,attr-defined]

    def _compile(self, graph: Any, examples: Any) -> Any:
        """Do what the compiler that was asked for does. Not collective."""
        backend, mode, options, _ = self._asked
        if backend == "inductor":
            given = {k: v for k, v in (options or {}).items() if k != "guard_filter_fn"}
            mode = mode if mode or given else "default"
            return torch._TorchCompileInductorWrapper(mode, given or None, False)(graph, examples)  # type: ignore[attr-defined]
        return torch._TorchCompileWrapper(backend, mode, options, False)(graph, examples)  # type: ignore[attr-defined]


class _RunEagerlyError(Exception):
    """A call is not compiled, on any rank."""


def _is_inside() -> bool:
    """Tell whether something else of this program is being traced or transformed, on all ranks. Not collective."""
    return in_transform() or traced.recording is not None or torch.compiler.is_compiling()


def _is_off() -> bool:
    """Tell whether nothing is compiled now, on this rank. Not collective."""
    import torch._dynamo

    return torch._dynamo.config.disable or torch._dynamo.eval_frame._stance.stance not in (
        "default",
        "fail_on_recompile",
    )


def _is_hooked(function: Callable[..., Any]) -> bool:
    """Tell whether a module's call, if it is one, has hooks, which torch runs around what it reads. Not collective."""
    model = getattr(function, "__self__", None)
    return isinstance(model, torch.nn.Module) and bool(
        model._forward_hooks
        or model._forward_pre_hooks
        or model._backward_hooks
        or model._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def _is_forbidden(*, anew: bool) -> bool:
    """Tell whether the program wants an error where something is compiled, anew or at all. Not collective."""
    import torch._dynamo

    return torch._dynamo.eval_frame._stance.stance == "fail_on_recompile" or (
        anew and torch._dynamo.config.error_on_recompile
    )


def _forbids(error: Exception) -> bool:
    """Tell whether Dynamo raised it for that reason. Not collective."""
    return isinstance(error, torch._dynamo.exc.RecompileError) or str(error).startswith(_RECOMPILED)


def _check_code() -> None:
    """Raise where the code that Dynamo has just read asks what a ShardTensor is. Not collective."""
    context = torch._guards.TracingContext.try_get()
    for code in getattr(context, "traced_code", ()):
        if code.co_filename.startswith(os.path.dirname(torch.__file__)):
            continue
        names = set(code.co_names)
        found = names & _TELLING
        if names & _ASKS:
            found |= _ATTRIBUTES & {c for c in code.co_consts if isinstance(c, str)}
        if found:
            raise CannotCompileError(f"{code.co_name} asks a tensor for {sorted(found)[0]}")


def _looked_at(guards: Sequence[Any]) -> list[bool]:
    """Keep all guards; raise where one is on something of mpishard's. Not collective."""
    for guarded in guards:
        value = guarded.value if guarded.has_value else None
        name = getattr(value, "__module__", None) or getattr(value, "__name__", None)
        if isinstance(name, str) and (name == "mpishard" or name.startswith("mpishard.")):
            raise CannotCompileError(f"{guarded.name} is of mpishard's own")
    return [True] * len(guards)


def _told(error: BaseException) -> str:
    """Return in one line why a compiler failed."""
    while not isinstance(error, CannotCompileError):
        inner = getattr(error, "inner_exception", None) or error.__cause__
        if inner is None:
            break
        error = inner
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # see `_leave_out_package`
    return (
        "a call of mpishard's own, or a ShardTensor that is no argument"
        if any(f"file `{_PACKAGE}" in line for line in lines)
        else lines[0]
    )


def _warn(reason: str) -> None:
    global _warned  # noqa: PLW0603
    if not _warned:
        _warned = True
        text = f"torch.compile: a call with ShardTensors is not compiled, it runs eagerly: {reason} (mpishard)"
        warnings.warn(text, stacklevel=4)


def _given_shards(compiled: Callable[..., Any], for_shards: Compiled) -> Any:
    """Return what calls ``for_shards`` where it is given ShardTensors, else ``compiled``."""

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        first = _first_shard((args, kwargs))
        if first is None:
            return compiled(*args, **kwargs)
        return for_shards(first.mesh, args, kwargs)

    return run


def _first_shard(values: Any) -> ShardTensor | None:
    """Return the first ShardTensor of arguments, in lists and dicts too. Not collective."""
    if isinstance(values, ShardTensor):
        return values
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return None
    for value in values:
        found = _first_shard(value)
        if found is not None:
            return found
    return None


def _leave_out_package() -> None:
    """Have Dynamo break its graphs where the package's code is called, never read it. Not collective.

    It comes there by ShardTensors that are no arguments, which it takes for tensors of this process: what communicates
    would be traced with tensors that have no data, or be compiled line by line.
    """
    rules = torch._dynamo.trace_rules
    if _PACKAGE not in rules.SKIP_DIRS:
        rules.add(__name__.partition(".")[0])


def _compile(model: Any = None, **given: Any) -> Any:
    if model is None:  # a decorator with arguments
        return lambda function: torch.compile(function, **given)
    compiled = _torch_compile(model, **given)
    if "torch._dynamo" in sys.modules:
        _leave_out_package()
    if compiled is model or given.get("disable"):
        return compiled
    compiler = _Compiler(given.get("backend", "inductor"), given.get("mode"), given.get("options"))
    strict = given.get("fullgraph", False)
    if not isinstance(compiled, torch.nn.Module):
        return _given_shards(compiled, Compiled(model, _readable(model), compiler, strict=strict))
    # what its __call__ runs
    eager = model.__call__
    compiled.forward = _given_shards(compiled.forward, Compiled(eager, model, compiler, strict=strict))
    # torch makes the copy from its own parts alone; past the setter, which hands on to the model
    compiled.__dict__["__deepcopy__"] = lambda memo: _compile(copy.deepcopy(model, memo), **given)
    # so do pickle and copy.copy; torch's name is there without this package, too
    compiled.__dict__["__reduce__"] = lambda: (functools.partial(torch.compile, **given), (model,))
    return compiled


def _readable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what Dynamo reads for a function: of torch's own, which ``Module.compile`` gives, it reads none."""
    return _framed(function) if getattr(function, "__name__", "") == "_call_impl" else function


def _framed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, or a module's call with its hooks, with a frame around it that Dynamo reads as a whole."""
    from torch._dynamo.external_utils import wrap_inline

    return wrap_inline(function)


torch.compile = functools.wraps(_torch_compile)(_compile)  # type: ignore[assignment]
