"""Hook: a model called from the host's time loop, on the ranks that hold the fields."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import copy_context
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from mpishard.autograd.argument import require, require_functions
from mpishard.comm.agreement import threads_may_communicate
from mpishard.comm.memory.buffer import byte_view, dense
from mpishard.comm.thread import guest
from mpishard.errors import LayoutError, UnsupportedDtypeError, UnsupportedOperationError
from mpishard.insitu.field import Field
from mpishard.ops.rule.autocast import autocast_enabled
from mpishard.tensor.shard_tensor import ShardTensor, wrap

if TYPE_CHECKING:
    from mpishard.insitu.simulation import Simulation


# of each thread: whether it runs a hook's model
_models = threading.local()


class _Run:
    """One run of a model: its results or its error, whether that rose inside, and when its phases began and ended."""

    __slots__ = ("error", "inside", "results", "times")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.inside = True
        self.results: Sequence[ShardTensor] = ()
        self.times: list[float] = []


class Hook:
    """A model in a simulation's time loop. Made by `Simulation.hook`; calling it is collective.

    Parameters
    ----------
    simulation, inputs, outputs
        The fields that the model reads, and those that its results are written into.
    model
        Callable on ShardTensors: a module, or a function that trains one and returns what to write.
    pack
        Called with the inputs' tensors; returns the model's argument, or a tuple of them.
    unpack
        Called with what the model returns; returns the outputs' tensors: one, a sequence, or a dict by field name.
    every
        Run at every so-manieth call, the first included; the others do nothing.
    grad
        Whether autograd records in the model: for a function that trains.
    warm_up
        So many runs are not counted in ``times``: the first ones build plans.

    Attributes
    ----------
    times : dict of str to float
        Seconds of this rank in ``"pack"``, ``"model"`` and ``"write"`` (agreement of the ranks, and outputs).
    calls, runs : int
    """

    def __init__(
        self,
        simulation: Simulation,
        model: Callable[..., Any],
        inputs: Sequence[Field],
        outputs: Sequence[Field],
        pack: Callable[..., Any] | None,
        unpack: Callable[..., Any] | None,
        *,
        every: int = 1,
        grad: bool = False,
        warm_up: int = 1,
    ) -> None:
        require("hook", "model", model, Callable, "give a module or a function")  # type: ignore[arg-type]
        require_functions("hook", pack=pack, unpack=unpack)
        require("hook", "grad", grad, bool, "give True where the model trains")
        self._simulation, self._model = simulation, model
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        names = [field.name for field in outputs]
        if len(set(names)) < len(names):
            fix, one_each = "name it once", "a field for each of the model's results"
            raise LayoutError("hook: an output is named twice", expected=one_each, got=names, fix=fix)
        self._pack, self._unpack, self._grad = pack, unpack, grad
        if not hasattr(every, "__index__") or every < 1:
            fix = "give every= an integer above 0"
            raise UnsupportedOperationError("hook: every", expected="1 or more", got=repr(every), fix=fix)
        require("hook", "warm_up", warm_up, Integral, "give a number of runs")
        self.every, self._warm_up = every, warm_up
        self.times = {"pack": 0.0, "model": 0.0, "write": 0.0}
        self.calls = self.runs = 0
        self._flight: tuple[threading.Event | None, _Run | None] | None = None

    def __call__(self) -> bool:
        """Run the model on the fields as they are now; return whether it was its turn. Collective.

        Raises
        ------
        MpishardError
            On every rank, the outputs as they were, unless the model itself writes into its inputs: it raised on one of
            them, or its results do not fit. What is no ``Exception`` (SystemExit, KeyboardInterrupt) goes on as it is
            on the rank where it rose.
        """
        self._require_idle()
        if not self._turn():
            return False
        run = _Run()
        try:
            self._model_on(run, [field._enter() for field in self.inputs])
            self._write(run)
        finally:
            for field in self.inputs:
                field._leave()
        return True

    def start(self) -> bool:
        """Start the model on the fields as they are now, in another thread; return whether it is its turn.

        Collective. The inputs' owned cells are copied, so the solver may go on and write, exchange halos (its own
        way, or by ``u.exchange()``) and `rebind`. Other work on tensors of the simulation that communicates raises
        until `wait`: what it sends would meet what the model sends.
        The model runs as if it were called here: under this thread's autocast, inference mode and context variables.

        Raises
        ------
        UnsupportedOperationError
            On every rank: the last start, of this hook or another of the simulation, was not waited for, the hook
            trains, or MPI was initialised for fewer threads than ``MPI_THREAD_MULTIPLE``.
        """
        self._require_idle()
        if self._grad or (self._simulation.mesh.size > 1 and not threads_may_communicate()):
            raise UnsupportedOperationError(
                "hook.start: the model cannot run beside the solver",
                expected="a model that infers, and MPI initialised with MPI_THREAD_MULTIPLE",
                got="grad=True" if self._grad else "a lower thread level",
                fix="call hook() itself; MPI_Init_thread(MPI_THREAD_MULTIPLE) in the host lets start() work",
            )
        if not self._turn():
            self._flight = (None, None)
            return False
        for field in self._simulation.fields.values():
            field._prepare()
        run = _Run()
        copies: list[Any] = []
        for field in self.inputs:
            tensor = field._enter()
            try:
                copies.append(tensor.clone())
            except Exception as e:  # noqa: BLE001 (memory, which may be short on one rank)
                run.error = e
            finally:
                field._leave()
        act = partial(copy_context().run, self._model_beside, run, copies, _modes(self._simulation.mesh.device))
        self._flight = (self._simulation._worker.start(act), run)
        self._simulation._flying = self
        self._simulation.mesh.lend("a hook's model, from start() to wait(),")
        return True

    def wait(self) -> bool:
        """Wait for what `start` has started, and write its results; return whether it was its turn. Collective.

        Raises
        ------
        MpishardError
            As of a call; or nothing was started.
        """
        if self._flight is None:
            self._simulation._require_alive()
            raise UnsupportedOperationError(
                "hook.wait: nothing was started",
                expected="start() before wait()",
                got="wait() alone",
                fix="call start()",
            )
        done, run = self._flight
        if done is not None:
            done.wait()  # first of all: who is interrupted here may wait again
        self._flight = None
        if done is None or run is None:
            return False
        self._simulation._flying = None
        self._simulation.mesh.lend()
        for field in self._simulation.fields.values():
            field._ready = None
        self._write(run)
        return True

    def _require_idle(self) -> None:
        self._simulation._require_alive()
        if getattr(_models, "run", False):
            raise UnsupportedOperationError(
                "hook: called by the model of a hook",
                expected="a call in the host's time loop",
                got="a hook inside another",
                fix="call that hook's model itself: it runs on the same ranks",
            )
        if self._flight is not None:
            raise UnsupportedOperationError(
                "hook: the last start() was not waited for",
                expected="one run at a time",
                got="a run in flight",
                fix="call hook.wait() first",
            )
        if self._simulation._flying is not None:
            # in two threads of a rank, what they send would go in an order of each rank's own
            raise UnsupportedOperationError(
                "hook: another hook's start() was not waited for",
                expected="one model of a simulation at a time",
                got=f"{self._simulation._flying} in flight",
                fix="call its wait() first, or let one model do the work of both",
            )

    def _turn(self) -> bool:
        turn = self.calls % self.every == 0
        self.calls += 1
        return turn

    def _model_beside(
        self, run: _Run, tensors: list[ShardTensor], modes: Sequence[AbstractContextManager[object]]
    ) -> None:
        if run.error is not None:
            return
        try:
            with ExitStack() as within:
                for mode in modes:
                    within.enter_context(mode)
                self._model_on(run, tensors)
        except BaseException as e:  # noqa: BLE001 (of a mode; no error may end with the thread)
            run.error = e

    def _model_on(self, run: _Run, tensors: list[ShardTensor]) -> None:
        _models.run = True
        try:
            run.times.append(time.perf_counter())
            with torch.set_grad_enabled(self._grad), self._simulation.agreement.lookout(), guest():
                args = tensors if self._pack is None else self._pack(*tensors)
                run.times.append(time.perf_counter())
                out = self._model(*args) if isinstance(args, (tuple, list)) else self._model(args)
                if self._unpack is not None:
                    out = self._unpack(out)
            run.inside = False
            run.results = self._results(out)
            run.times.append(time.perf_counter())
        except BaseException as e:  # noqa: BLE001 (whatever it is, the ranks must agree on it)
            run.error = e
        finally:
            _models.run = False

    def _write(self, run: _Run) -> None:
        begin = time.perf_counter()
        self._simulation.agreement.after(run.error, inside=run.inside)
        if run.results:
            with torch.no_grad():
                for field, result in zip(self.outputs, self._apart(run.results)):
                    field._write(result)
        self.runs += 1
        if self.runs > self._warm_up:
            entered, packed, done = run.times
            self.times["pack"] += packed - entered
            self.times["model"] += done - packed
            self.times["write"] += time.perf_counter() - begin

    def _apart(self, results: Sequence[ShardTensor]) -> Sequence[ShardTensor]:
        """Return results of which writing one changes no other: a model may return its inputs, or views of them."""
        into = [field.tensor.block for field in self.outputs]

        def apart(result: ShardTensor, own: Tensor) -> ShardTensor:
            x = result.block
            is_own = (x.data_ptr(), x.shape, x.stride()) == (own.data_ptr(), own.shape, own.stride())
            if is_own or not any(_meet(x, y) for y in into):
                return result
            return wrap(x.clone(), result.sharding, result.mesh)

        return list(map(apart, results, into))

    def _results(self, out: Any) -> Sequence[ShardTensor]:
        """Return the tensor of every output, all of which fit."""
        if not self.outputs:
            return ()
        names = [field.name for field in self.outputs]
        if isinstance(out, Mapping):
            if set(out) != set(names):
                raise _unfit(f"a dict with the names {names}", sorted(map(str, out)))
            out = [out[name] for name in names]
        elif not isinstance(out, (tuple, list)):
            out = [out]
        if len(out) != len(names) or not all(isinstance(t, ShardTensor) for t in out):
            raise _unfit(f"{len(names)} ShardTensors, for {names}", [type(t).__name__ for t in out])
        for field, result in zip(self.outputs, out):
            into = field.tensor
            if result.shape != into.shape or result.mesh is not into.mesh:
                raise _unfit(
                    f"for {field.name!r} shape {tuple(into.shape)} on {into.mesh.outline}",
                    f"shape {tuple(result.shape)} on {result.mesh.outline}",
                )
            if not torch.can_cast(result.dtype, into.dtype):
                raise UnsupportedDtypeError(
                    f"hook: output {field.name!r} cannot hold the model's result",
                    expected=f"what {into.dtype} can hold",
                    got=result.dtype,
                    fix="convert it in the model, or in unpack=",
                )
        return out  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        given, written = ([field.name for field in fields] for fields in (self.inputs, self.outputs))
        return f"Hook({given}, {written}, every={self.every}, grad={self._grad}, warm_up={self._warm_up})"


def told(hook: Hook) -> str:
    """Return what all ranks must say of a hook: with the values of a module's plain parameters. Not collective."""
    model, crc = hook._model, 0
    if isinstance(model, torch.nn.Module):
        for t in (*model.parameters(), *model.buffers()):
            # what a lazy module will make is not there yet
            if not isinstance(t, ShardTensor) and not is_lazy(t) and t.layout is torch.strided and not t.is_meta:
                crc = zlib.crc32(byte_view(dense(t.detach().cpu())).numpy().data, crc)
    return f"{hook!r} of a model whose parameters and buffers have the checksum {crc:08x}" if crc else repr(hook)


def _modes(device: torch.device) -> list[AbstractContextManager[object]]:
    """Return what another thread enters to compute as this one; torch's modes are each thread's own. Not collective."""
    cached = torch.is_autocast_cache_enabled()
    modes: list[AbstractContextManager[object]] = [
        torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=cached)
        # fields may lie in host memory beside a GPU
        for kind in {"cpu", device.type}
        if autocast_enabled(kind)
    ]
    if torch.is_inference_mode_enabled():
        modes.append(torch.inference_mode())
    return modes


def _meet(x: Tensor, y: Tensor) -> bool:
    """Tell whether the memory of both overlaps, that between their cells too. Not collective."""
    if x.device != y.device:
        return False
    (a, n), (b, m) = ((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in (x, y))
    return a < b + m and b < a + n


def _unfit(expected: object, got: object) -> LayoutError:
    return LayoutError(
        "hook: the model's output does not fit the fields",
        expected=expected,
        got=got,
        fix="shape it in the model, or in unpack=",
    )
