"""Communication as one operation of torch's own, ``mpishard::communicate``, in the graphs that its compilers make.

A compiler runs a program once, on tensors without data, and keeps the operations that it meets. What communicates
would read memory that is not there: it is kept as this operation instead, with a name, by which it is found when the
compiled program runs, and with all that is known of its result. The operation has an effect, so a compiler neither
leaves one out, nor does one twice. Each reads a token that the one before has written, so none changes their order: of
effects alone, inductor loses it (docs/upstream.md), by the sizes of a rank's own blocks.

What this rank alone computes, by another kernel than the compiler would call, is ``mpishard::compute``: the same
without the effect, and without a name on which the ranks agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Run = Callable[..., Tensor]

# what is being rehearsed or traced, if anything
recording: Recording | None = None

_runs: dict[str, Run] = {}
_programs = itertools.count()


class Recording:
    """The communication of one program, in order.

    Parameters
    ----------
    tracing
        Whether a compiler traces the program; else it is rehearsed, and communicates.

    Attributes
    ----------
    names
        What was communicated: the same on all ranks that run the same program.
    inputs, uses, aliases
        Inputs by identity; which of them are used with sharded data, over which mesh dims; and what stands for them
        there, if anything does.
    """

    def __init__(self, *, tracing: bool) -> None:
        self.tracing = tracing
        self.names: list[str] = []
        self.kept: list[str] = []
        self.inputs: dict[int, int] = {}
        self.uses: dict[tuple[int, tuple[int, ...]], None] = {}
        self.aliases: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self._program = next(_programs)
        self._token: Tensor | None = None
        self._computed = 0

    def restart(self, inputs: Sequence[Tensor]) -> None:
        """Begin anew, with these inputs: a compiler may run a program more than once. Not collective."""
        self.names.clear()
        self._token, self._computed = None, 0
        self.aliases.clear()
        self.inputs = {id(x): i for i, x in enumerate(inputs)}

    def used(self, x: Tensor, mesh_dims: tuple[int, ...]) -> Tensor | None:
        """Note the use of a value over ``mesh_dims``; return what stands for it, if anything does. Not collective."""
        index = self.inputs.get(id(x))
        if index is None:
            return None
        self.uses[index, mesh_dims] = None
        return self.aliases.get((index, mesh_dims))

    def call(
        self,
        name: str,
        run: Run,
        operands: Sequence[Tensor],
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        channels_last: bool = False,
    ) -> Tensor:
        """Do, or have the compiled program do, ``run(*operands)``, which gives a fresh tensor.

        Collective as it is where the program is rehearsed; else not collective.

        Parameters
        ----------
        name
            What it is called in the graph, the same on all ranks.
        run
            Communicates; sees no autograd.
        operands
            Tensors that it reads.
        shape, dtype, device, channels_last
            Of the result; dtype and device of the first operand where not given.
        """
        if dtype is None or device is None:
            dtype, device = operands[0].dtype, operands[0].device
        self.names.append(f"{name} {dtype}")
        if not self.tracing:
            with paused():
                return run(*operands)
        key = self._keep(f"{name} ({self._program}.{len(self.names)})", run)
        shape = [int(n) for n in shape]
        strides = _strides(shape, channels_last)
        op = torch.ops.mpishard.communicate
        y, self._token = op(list(operands), key, shape, strides, dtype, device, self._token)
        return y  # type: ignore[no-any-return]

    def compute(
        self, name: str, run: Run, operands: Sequence[Tensor], shape: Sequence[int], *, channels_last: bool = False
    ) -> Tensor:
        """Do the same for a ``run`` that does not communicate, and gives what depends on its operands alone.

        Not collective. The result has the dtype and the device of the first operand.
        """
        if not self.tracing:
            with paused():
                return run(*operands)
        self._computed += 1
        key = self._keep(f"{name} ({self._program}, {self._computed})", run)
        shape = [int(n) for n in shape]
        strides = _strides(shape, channels_last)
        dtype, device = operands[0].dtype, operands[0].device
        return torch.ops.mpishard.compute(list(operands), key, shape, strides, dtype, device)  # type: ignore[no-any-return]

    def _keep(self, key: str, run: Run) -> str:
        if key not in _runs:
            self.kept.append(key)
        _runs[key] = run
        return key

    def forget(self) -> None:
        """Drop what the program would run. Not collective."""
        for key in self.kept:
            _runs.pop(key, None)


def _strides(shape: Sequence[int], channels_last: bool) -> list[int]:
    order = [0, *range(2, len(shape)), 1] if channels_last else range(len(shape))
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(1, shape[d])
    return strides


@contextmanager
def recorded(what: Recording) -> Iterator[Recording]:
    """Keep the communication of what runs inside. Not collective."""
    global recording
    _define()
    before, recording = recording, what
    try:
        yield what
    finally:
        recording, what._token = before, None


@contextmanager
def paused() -> Iterator[None]:
    """Communicate as ever inside. Not collective."""
    global recording  # noqa: PLW0603
    before, recording = recording, None
    try:
        yield
    finally:
        recording = before


# -- the operations

_library: torch.library.Library | None = None


def _compute(
    operands: list[Tensor], call: str, shape: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    with paused():
        y = _runs[call](*operands)
    if any(y is x for x in operands):
        y = y.clone()
    if list(y.stride()) == stride or not y.numel():
        return y
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(y)


def _communicate(operands: list[Tensor], *what: Any) -> tuple[Tensor, Tensor]:
    *known, _ = what
    return _compute(operands, *known), torch.empty(1, device="cpu")


def _compute_fake(
    _operands: list[Tensor], _call: str, shape: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _communicate_fake(operands: list[Tensor], *what: Any) -> tuple[Tensor, Tensor]:
    *known, _ = what
    return _compute_fake(operands, *known), torch.empty(1, device="cpu")


def _define() -> None:
    """Make the operations, where one is first needed: torch's compilers take long to import. Not collective."""
    global _library  # noqa: PLW0603
    if _library is not None:
        return
    from torch._higher_order_ops import effects
    from torch.library import Library, register_fake

    library = Library("mpishard", "DEF")
    # no CUDA graph: messages through the host would not be in it
    tags = (torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)
    given = "Tensor[] operands, str call, int[] shape, int[] stride, ScalarType dtype, Device device"
    for name, more, result, run, fake in (
        ("communicate", ", Tensor? after", "(Tensor, Tensor)", _communicate, _communicate_fake),
        ("compute", "", "Tensor", _compute, _compute_fake),
    ):
        library.define(f"{name}({given}{more}) -> {result}", tags=tags)
        library.impl(name, run, "CompositeExplicitAutograd")
        register_fake(f"mpishard::{name}", fake, lib=library)
    if hasattr(effects, "EffectType"):
        torch.library._register_effectful_op("mpishard::communicate", effects.EffectType.ORDERED)
    else:  # torch 2.8
        effects._register_effectful_op(torch.ops.mpishard.communicate.default, effects._EffectType.ORDERED)
    _library = library
