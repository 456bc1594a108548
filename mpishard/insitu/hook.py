"""Hook: a model called from the host's time loop, on the ranks that hold the fields."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpishard.errors import LayoutError, UnsupportedDtypeError, described
from mpishard.insitu.field import Field
from mpishard.tensor.shard_tensor import ShardTensor

if TYPE_CHECKING:
    from mpishard.insitu.simulation import Simulation


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
        Seconds of this rank in ``"pack"``, ``"model"``, ``"write"`` (agreement of the ranks and outputs), over ``runs``.
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
        self._simulation, self._model = simulation, model
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._pack, self._unpack, self._grad = pack, unpack, grad
        self.every, self._warm_up = every, warm_up
        self.times = {"pack": 0.0, "model": 0.0, "write": 0.0}
        self.calls = self.runs = 0

    def __call__(self) -> bool:
        """Run the model on the fields as they are now; return whether it was its turn. Collective.

        Raises
        ------
        MpishardError
            On every rank, the outputs as they were: the model raised on one of them, or its results do not fit.
        """
        turn = self.calls % self.every == 0
        self.calls += 1
        if turn:
            self._run()
        return turn

    def _run(self) -> None:
        clock = time.perf_counter
        begin = packed = done = clock()
        error: Exception | None = None
        results: Sequence[ShardTensor] = ()
        try:
            tensors = [field._enter() for field in self.inputs]
            with torch.set_grad_enabled(self._grad):
                args = tensors if self._pack is None else self._pack(*tensors)
                packed = clock()
                out = self._model(*args) if isinstance(args, (tuple, list)) else self._model(args)
                results = self._results(out if self._unpack is None else self._unpack(out))
                done = clock()
        except Exception as e:  # noqa: BLE001 (whatever it is, the ranks must agree on it)
            error = e
        self._simulation.agreement.on(error, "hook")
        with torch.no_grad():
            for field, result in zip(self.outputs, results):
                field._write(result)
        for field in self.inputs:
            field._halo.disclaim()
        self.runs += 1
        if self.runs > self._warm_up:
            times = self.times
            times["pack"] += packed - begin
            times["model"] += done - packed
            times["write"] += clock() - done

    def _results(self, out: Any) -> Sequence[ShardTensor]:
        """Return the tensor of every output, all of which fit."""
        if not self.outputs:
            return ()
        names = [field.name for field in self.outputs]
        if isinstance(out, Mapping):
            out = [out.get(name) for name in names] if set(out) == set(names) else list(out)
        elif not isinstance(out, (tuple, list)):
            out = [out]
        if len(out) != len(names) or not all(isinstance(t, ShardTensor) for t in out):
            raise _unfit(f"{len(names)} ShardTensors, for {names}", [type(t).__name__ for t in out])
        for field, result in zip(self.outputs, out):
            into = field.tensor
            if result.shape != into.shape or result._mesh is not into._mesh:
                raise _unfit(
                    f"for {field.name!r} shape {tuple(into.shape)} on {into._mesh.outline}",
                    f"shape {tuple(result.shape)} on {result._mesh.outline}",
                )
            if not torch.can_cast(result.dtype, into.dtype):
                raise UnsupportedDtypeError(
                    described(
                        f"hook: output {field.name!r} cannot hold the model's result",
                        expected=f"what {into.dtype} can hold",
                        got=result.dtype,
                        fix="convert it in unpack=",
                    )
                )
        return out  # type: ignore[no-any-return]


def _unfit(expected: object, got: object) -> LayoutError:
    return LayoutError(
        described(
            "hook: the model's output does not fit the fields", expected=expected, got=got, fix="shape it with unpack="
        )
    )
