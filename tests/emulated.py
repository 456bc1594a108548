"""A device without a GPU: streams that run late, memory that knows who uses it, the kernel compiled for the host.

Nothing that is queued happens before someone waits for it, or queues torch's next operation behind it. So an
exchange that forgets to wait sends what was in the buffer before; and `lend` says so, for it knows of every
byte whether the host may believe that the device is done with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import subprocess
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpishard.comm.device import driver as drivers
from mpishard.comm.device.kernel import SOURCE
from mpishard.comm.memory.copy_table import Table

HOST = torch.device("cpu")


class OutOfOrder(AssertionError):
    """A buffer was used before those who used it last were known to be done."""


class Span(NamedTuple):
    start: int
    stop: int

    def meets(self, other: Span) -> bool:
        return self.start < other.stop and other.start < self.stop


def span(x: Tensor) -> Span:
    return Span(x.data_ptr(), x.data_ptr() + x.nbytes)


@functools.cache
def host_kernels() -> ctypes.CDLL:
    """Compile the kernel's source for the host."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "no C compiler: install gcc"
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernel.c"), Path(folder, "kernel.so")
        source.write_text(SOURCE)
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
        return ctypes.CDLL(str(library))


def launch(way: str, table: Table, base: int, packed: int) -> None:
    """Run the kernel for every tile of a table."""
    if not table.segments:
        return
    rows = array("q", [number for row in table.rows() for number in row])
    kernels = host_kernels()
    kernels.launch(
        getattr(kernels, f"{way}_{table.unit}"),
        ctypes.c_uint(table.first_tiles[-1]),
        ctypes.c_void_p(base),
        ctypes.c_void_p(packed),
        ctypes.c_void_p(rows.buffer_info()[0]),
        ctypes.c_int(len(table.segments)),
    )


class EmulatedMemory:
    def __init__(self, driver: EmulatedDriver, nbytes: int) -> None:
        self.driver, self.nbytes = driver, nbytes
        self.tensor = torch.full((nbytes,), 0xAB, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        if nbytes:
            driver.own[self.address] = span(self.tensor)

    def free(self, after: tuple[int, int] | None = None) -> None:
        self.driver.free(self, after)


class Queued(NamedTuple):
    number: int
    what: str
    reads: list[Span]
    writes: list[Span]
    run: Callable[[], None]


class EmulatedDriver(TorchDispatchMode):
    """A driver for tensors in host memory; inside ``with driver:`` torch's operations follow what is queued."""

    def __init__(self, *, kernel: bool) -> None:
        super().__init__()
        self.device, self.has_kernel = HOST, kernel
        self.stream = 0
        self.number = 0
        self.queues: dict[int, list[Queued]] = defaultdict(list)
        # of every stream, what the host knows to be done
        self.known: dict[int, int] = defaultdict(int)
        # (stream, number, whether it writes, where) of everything that touched our memory
        self.uses: list[tuple[int, int, bool, Span]] = []
        self.lent: list[tuple[bool, Span]] = []
        self.own: dict[int, Span] = {}
        self.pins: list[Tensor] = []
        self.launches = self.waits = self.allocated = 0
        self.capturing = False
        self.shelf: drivers.Shelf[EmulatedMemory] = drivers.Shelf(self)

    # what mpishard calls

    def allocate(self, nbytes: int) -> EmulatedMemory:
        self.allocated += nbytes
        memory = self.shelf.take(nbytes) if nbytes else None
        if memory is None:
            return EmulatedMemory(self, nbytes)
        self._check_unused(memory)
        ctypes.memset(memory.address, 0xAB, nbytes)
        return memory

    def trim(self) -> None:
        pass

    def check(self) -> None:
        if self.capturing:
            raise drivers.captured()

    def pinned(self, nbytes: int) -> Tensor:
        memory = torch.full((nbytes,), 0xCD, dtype=torch.uint8)
        self.own[memory.data_ptr()] = span(memory)
        self.pins.append(memory)  # its address is never another tensor's
        return memory

    def mark(self) -> tuple[int, int]:
        return self.stream, self.number

    def wait(self, event: tuple[int, int]) -> None:
        stream, number = event
        self.waits += 1
        self._run(stream, number)
        self.known[stream] = max(self.known[stream], number)

    def wait_all(self) -> None:
        for stream in list(self.queues):
            self.wait((stream, self.number))

    def download(self, host: Tensor, memory: Tensor) -> None:
        self._queue("download", [span(memory)], [span(host)], lambda: ctypes_copy(host, memory))

    def upload(self, memory: Tensor, host: Tensor) -> None:
        self._queue("upload", [span(host)], [span(memory)], lambda: ctypes_copy(memory, host))

    def table(self, table: Table) -> Table:
        return table

    def pack(self, table: Table, base: int, memory: EmulatedMemory) -> None:
        self.launches += bool(table.segments)
        self._queue("pack", [], _packed(table, memory), lambda: launch("pack", table, base, memory.address))

    def unpack(self, table: Table, base: int, memory: EmulatedMemory) -> None:
        self.launches += bool(table.segments)
        self._queue("unpack", _packed(table, memory), [], lambda: launch("unpack", table, base, memory.address))

    def lend(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        for writing, tensors in ((False, reads), (True, writes)):
            for own in map(span, tensors):
                for stream, number, wrote, used in self.uses:
                    if number > self.known[stream] and (writing or wrote) and used.meets(own):
                        raise OutOfOrder(f"MPI {'writes' if writing else 'reads'} what stream {stream} still uses")
                for wrote, used in self.lent:
                    if (wrote or writing) and used.meets(own):
                        raise OutOfOrder("MPI already uses this memory")
                if own.stop > own.start:
                    self.lent.append((writing, own))

    def take_back(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        for writing, tensors in ((False, reads), (True, writes)):
            for own in map(span, tensors):
                left = []
                for wrote, used in self.lent:
                    if wrote != writing or not used.meets(own):
                        left.append((wrote, used))
                        continue
                    rest = (Span(used.start, own.start), Span(own.stop, used.stop))
                    left += [(wrote, part) for part in rest if part.stop > part.start]
                self.lent = left

    # what the tests call

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Make another stream the current one."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def follow(self, stream: int) -> None:
        """Let the current stream wait for another, as ``torch.cuda.Stream.wait_stream`` does."""
        self._run(stream, self.number)

    def free(self, memory: EmulatedMemory, after: tuple[int, int] | None) -> None:
        self.allocated -= memory.nbytes
        if not memory.nbytes:
            return
        if any(used.meets(self.own[memory.address]) for _, used in self.lent):
            raise OutOfOrder("memory freed while MPI uses it")
        if after is None:
            self._check_unused(memory)
        self.shelf.put(memory.nbytes, memory, after)

    def _check_unused(self, memory: EmulatedMemory) -> None:
        own = self.own[memory.address]
        if any(number > self.known[stream] and used.meets(own) for stream, number, _, used in self.uses):
            raise OutOfOrder("memory freed while a stream uses it")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._run(self.stream, self.number)
        if not func.is_view:
            touched = [
                span_of_strided(x)
                for x in tensors_of((args, *(kwargs or {}).values()))
                if x.device == HOST and x.layout == torch.strided and x.numel()
            ]
            self._note([], touched)
        return func(*args, **(kwargs or {}))

    def _queue(self, what: str, reads: list[Span], writes: list[Span], run: Callable[[], None]) -> None:
        self._note(reads, writes)
        self.queues[self.stream].append(Queued(self.number, what, reads, writes, run))

    def _note(self, reads: list[Span], writes: list[Span]) -> None:
        self.number += 1
        for writing, spans in ((False, reads), (True, writes)):
            for own in spans:
                if not any(ours.start < own.stop and own.start < ours.stop for ours in self.own.values()):
                    continue  # torch's, whose memory is another's when torch frees it
                if any((wrote or writing) and used.meets(own) for wrote, used in self.lent):
                    raise OutOfOrder("the device uses memory that MPI has")
                self.uses.append((self.stream, self.number, writing, own))
        # what the host knows to be done is no use any more
        self.uses = [use for use in self.uses if use[1] > self.known[use[0]]]

    def _run(self, stream: int, number: int) -> None:
        queue = self.queues[stream]
        while queue and queue[0].number <= number:
            queue.pop(0).run()


def ctypes_copy(to: Tensor, source: Tensor) -> None:
    ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)


def tensors_of(given: Iterable[Any]) -> Iterator[Tensor]:
    """Return the tensors among the arguments of an operation, as they are or in lists."""
    for x in given:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors_of(x)


def span_of_strided(x: Tensor) -> Span:
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride())) + 1
    return Span(x.data_ptr(), x.data_ptr() + reach * x.itemsize)


def _packed(table: Table, memory: EmulatedMemory) -> list[Span]:
    return [Span(memory.address + s.packed, memory.address + s.packed + s.units * table.unit) for s in table.segments]


@contextlib.contextmanager
def emulated(*, kernel: bool) -> Iterator[EmulatedDriver]:
    """Let host memory be a device's."""
    driver = EmulatedDriver(kernel=kernel)
    assert HOST not in drivers._drivers
    drivers._drivers[HOST] = driver
    try:
        with driver:
            yield driver
    finally:
        del drivers._drivers[HOST]
