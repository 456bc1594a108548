"""What a host in C or Fortran calls, by way of native/python.c: operations on numbers and a text."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from mpishard.comm.agreement import Abandoned
from mpishard.errors import MpishardError, UnsupportedOperationError, own_line, text_of, typed_text
from mpishard.insitu.field import Field
from mpishard.insitu.hook import Hook
from mpishard.insitu.offer import DTYPES
from mpishard.insitu.simulation import Simulation, adopt

# of mpishard.h
OK, NO_TURN = 0, 3
ERR_ARGUMENT, ERR_ORDER, ERR_MODEL = -1, -2, -7


class Host:
    """The operations that native/python.c numbers, in its order; called with one's number, its numbers, and a text.

    Objects have numbers from 1 on. An error is told as a text in ``door``, and returned as a negative status.
    """

    def __init__(self, door: Any) -> None:
        self._door = door
        self._made: dict[int, Simulation | Field | Hook] = {}
        self._numbers = itertools.count(1)
        # of hooks that were waited for when one of their fields was released: the status of the `wait` to come
        self._ended: dict[int, int | BaseException] = {}
        # of fields of which this rank owns no cell and the host gave no array: memory for what ghost cells they have
        self._rooms: dict[int, torch.Tensor] = {}
        self._operations: tuple[Callable[..., int], ...] = (
            self.adopt,
            self.field,
            self.rebind,
            self.hook,
            self.step,
            self.start,
            self.wait,
            self.release,
        )

    def __call__(self, operation: int, numbers: Any, text: bytes | None) -> int:
        """Return what an operation does, or a status below 0."""
        run = self._operations[operation]
        try:
            return run(numbers) if text is None else run(numbers, os.fsdecode(text))
        except BaseException as error:  # noqa: BLE001 (it must not end the host, whatever it is)
            if run in (self.step, self.wait, self.hook, self.release):
                return self._fails(error, ERR_MODEL)
            return self._fails(error, ERR_ORDER if isinstance(error, UnsupportedOperationError) else ERR_ARGUMENT)

    def _fails(self, error: BaseException, status: int) -> int:
        self._door.text = _fitted(_told(error))
        return status

    def adopt(self, numbers: Any) -> int:
        """Take a communicator's handle, dims; per dim shape, ranks, own coordinate and cells, periodic. Collective."""
        comm, ndim = numbers[:2]
        shape, grid, coords, sizes, periodic = (_column(numbers, 2, ndim, i) for i in range(5))
        made = adopt(comm, shape, periodic=[bool(p) for p in periodic], grid=grid, coords=coords, sizes=sizes)
        return self._number(made)

    def field(self, numbers: Any, text: str) -> int:
        """Take simulation, dtype, address, dims, faces (bits); per array dim mesh dim or -1, extent, ghosts, stride.

        Collective.
        """
        simulation, dtype, address, ndim, faces = numbers[:5]
        on, extents, low, high, strides = (_column(numbers, 5, ndim, i) for i in range(5))
        sim = self._made[simulation]
        assert isinstance(sim, Simulation)
        halo = [(low[on.index(m)], high[on.index(m)]) for m in range(sim.mesh.ndim)]
        dims = [None if m < 0 else m for m in on]
        kind = list(DTYPES.values())[dtype]
        room = None if address else _room(kind, extents, strides)
        # without room it is an address that is none, which all ranks are told of
        array = (address if room is None else room.data_ptr(), kind, extents, strides)
        between = [name for m, name in enumerate(sim.mesh.mesh_dim_names) if faces >> m & 1]
        number = self._number(sim.field(text, array, halo=halo, dims=dims, location=between or "cell"))
        if room is not None:
            self._rooms[number] = room
        return number

    def rebind(self, numbers: Any) -> int:
        """Take field, address. Collective."""
        field = self._made[numbers[0]]
        assert isinstance(field, Field)
        old = field.array
        strides = [s * old.element_size() for s in old.stride()]
        address = numbers[1]
        if not address:
            room = self._rooms.get(numbers[0])
            if room is None:
                room = _room(old.dtype, old.shape, strides)
            if room is not None:
                self._rooms[numbers[0]] = room
                address = room.data_ptr()
        field.rebind((address, old.dtype, tuple(old.shape), strides))
        return OK

    def hook(self, numbers: Any, text: str) -> int:
        """Take simulation, every, whether it trains, counts of inputs and outputs, their fields. Collective."""
        simulation, every, trains, inputs, outputs = numbers[:5]
        sim: Any = self._made[simulation]
        fields: list[Any] = [self._made[number] for number in numbers[5 : 5 + inputs + outputs]]
        model: Callable[..., Any] = len
        error: MpishardError | None = None
        try:
            model = _located(_found(text), text)
        except BaseException as e:  # noqa: BLE001 (it is agreed on)
            error = e if isinstance(e, MpishardError) else MpishardError(f"hook: {text}: {_told(e)}{_at(own_line(e))}")
        sim.agreement.on(error, "hook", text)
        made = sim.hook(model, fields[:inputs], fields[inputs:], every=every, grad=bool(trains))
        return self._number(made)

    def step(self, numbers: Any) -> int:
        """Take a hook. Collective."""
        hook: Any = self._made[numbers[0]]
        try:
            hook._require_idle()
        except UnsupportedOperationError as e:
            return self._fails(e, ERR_ORDER)
        return OK if hook() else NO_TURN

    def start(self, numbers: Any) -> int:
        """Take a hook. Collective."""
        return OK if self._made[numbers[0]].start() else NO_TURN  # type: ignore[union-attr]

    def wait(self, numbers: Any) -> int:
        """Take a hook. Collective."""
        ended = self._ended.pop(numbers[0], None)
        if isinstance(ended, BaseException):
            raise ended
        return self._waited(self._made[numbers[0]]) if ended is None else ended

    def release(self, numbers: Any) -> int:
        """Take a simulation, which goes with its fields and hooks, or one of these. Collective.

        What runs on it is waited for; its error is raised here, after the release, where no `wait` can follow.
        """
        released = self._made.pop(numbers[0])
        simulation = released if isinstance(released, Simulation) else released._simulation
        own = {n: o for n, o in self._made.items() if not isinstance(o, Simulation) and o._simulation is simulation}
        ended: list[int | BaseException] = []
        for number, hook in {numbers[0]: released, **own}.items():
            if not isinstance(hook, Hook) or hook._flight is None:
                continue
            if released in (hook, simulation, *hook.inputs, *hook.outputs):
                try:
                    ended.append(self._waited(hook))
                except MpishardError as e:
                    ended.append(e)
                self._ended[number] = ended[-1]
        if isinstance(released, Field) and simulation is not None:
            del simulation.fields[released.name]
            released._release()
            self._rooms.pop(numbers[0], None)
            return OK
        gone = own if isinstance(released, Simulation) else {}
        for number in (numbers[0], *gone):
            self._made.pop(number, None)
            self._ended.pop(number, None)
            self._rooms.pop(number, None)
        if isinstance(released, Simulation):
            released.release()
        for error in ended:
            if isinstance(error, BaseException):
                raise error
        return OK

    @staticmethod
    def _waited(hook: Any) -> int:
        return OK if hook.wait() else NO_TURN

    def _number(self, made: Simulation | Field | Hook) -> int:
        number = next(self._numbers)
        self._made[number] = made
        return number


def _room(dtype: torch.dtype, extents: Sequence[int], strides: Sequence[int]) -> torch.Tensor | None:
    """Return memory for an array, None where there is not as much. Not collective."""
    last = sum((n - 1) * s for n, s in zip(extents, strides))
    try:
        return torch.zeros(max(0, last + dtype.itemsize) if all(extents) else 0, dtype=torch.uint8, device="cpu")
    except (RuntimeError, MemoryError):
        return None


_opened: list[object] = []


def open_door(door: Any) -> None:
    """Let the library call. ``door`` is native/start.py's view of its memory. Not collective."""
    callback = type(door.call)(Host(door))
    _opened.append((door, callback))
    door.call = callback


def _column(numbers: Any, first: int, rows: int, i: int) -> list[int]:
    return [numbers[first + 5 * row + i] for row in range(rows)]


def _told(error: BaseException) -> str:
    return text_of(error) if isinstance(error, MpishardError) else typed_text(error)


_TEXT_NBYTES = 1023  # of ``door``, without the zero behind it


def _fitted(text: str) -> bytes:
    """Return a text for C. Of a long one the middle is left out: where it rose, and on which ranks, is its end."""
    told = text.replace("\0", "\\0").encode(errors="replace")
    if len(told) <= _TEXT_NBYTES:
        return told
    half = _TEXT_NBYTES // 2 - 4
    head, end = (part.decode(errors="ignore").encode() for part in (told[:half], told[-half:]))
    return head + b" ... " + end


def _located(model: Callable[..., Any], named: str) -> Callable[..., Any]:
    """Return a model whose errors say where they rose, and end nothing."""

    def located(*fields: Any) -> Any:
        try:
            return model(*fields)
        except Abandoned:
            raise
        except BaseException as error:
            place = _at(own_line(error)) or f"\n  at: {_home(model, named)}"
            if not isinstance(error, MpishardError):
                raise MpishardError(f"the model raised {_told(error)}{place}") from error
            # as it is: the ranks may have agreed on it
            if "\n  at: " not in text_of(error):
                error.args = (f"{text_of(error)}{place}",)
            raise

    return located


def _at(line: traceback.FrameSummary | None) -> str:
    return f"\n  at: {line.filename}:{line.lineno}, in {line.name}" if line else ""


def _home(model: Callable[..., Any], named: str) -> str:
    """Return where a model is that did not begin, as it takes other arguments, or is not Python's. Not collective."""
    called = type(model).forward if isinstance(model, torch.nn.Module) else type(model).__call__
    code = getattr(model, "__code__", None) or getattr(called, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}" if code else named


_files: dict[str, ModuleType] = {}


def _found(named: str) -> Callable[..., Any]:
    """Return what ``file.py:function`` or ``module:function`` names. Not collective."""
    where, _, name = named.rpartition(":")
    if not where or not name:
        raise _unknown(named, "no ':'" if not where else "no name of a function")
    module = _loaded(named, where) if where.endswith(".py") else _imported(where)
    model = getattr(module, name, None)
    if not callable(model):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise _unknown(named, f"there are {public}" if model is None else f"{name!r} of type {type(model).__name__}")
    return model  # type: ignore[no-any-return]


def _loaded(named: str, path: str) -> ModuleType:
    path = os.path.realpath(path)
    if path in _files:
        return _files[path]  # hooks of one file share what it makes
    if not os.path.isfile(path):
        raise _unknown(named, f"no file {path}")
    spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(module.__name__, module)
    _beside(os.path.dirname(path))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if sys.modules[module.__name__] is module:
            del sys.modules[module.__name__]
        raise
    _files[path] = module
    return module


def _imported(name: str) -> ModuleType:
    _beside(os.getcwd())
    return importlib.import_module(name)


def _beside(folder: str) -> None:
    """Let imports find what lies in a folder, as a script's do."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _unknown(named: str, got: str) -> MpishardError:
    return MpishardError(
        f"hook: no model {named!r}",
        expected="'file.py:function' or 'package.module:function'",
        got=got,
        fix="name a function that takes the input fields and returns the outputs",
    )
