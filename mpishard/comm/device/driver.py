"""What mpishard asks of a GPU, in one place: memory of its own, copies, events, and the copy kernel.

Everything is queued on torch's current stream, so it follows the work that made the data and precedes the
work that uses it. MPI knows nothing of streams. Hence the rule of every exchange: queue the copies that fill
what MPI will read, `mark`, `wait` for that mark on the host, and only then start sends and receives.

The rest of the package sees a `Driver`; `driver_of` says which one serves a device. Host memory has none.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from mpishard.comm.device.kernel import NAMES, SOURCE, THREADS
from mpishard.comm.loaded import libraries
from mpishard.comm.memory.block import Block, DeviceMemory
from mpishard.comm.memory.copy_table import Table
from mpishard.errors import MpishardError, UnsupportedOperationError


class Memory(Protocol):
    """Device memory that MPI may read and write: ours, not torch's.

    Attributes
    ----------
    address, nbytes : int
    tensor : torch.Tensor
        Its bytes.
    """

    address: int
    nbytes: int
    tensor: Tensor

    def free(self, after: Any = None) -> None:
        """Free it: what uses it is queued before the mark ``after``, or done where there is none. Not collective."""


class Driver(Protocol):
    """One device. Nothing here communicates; everything but `wait` returns before the device is done."""

    device: torch.device
    has_kernel: bool
    """Whether `pack` and `unpack` work; else torch copies box by box."""

    def allocate(self, nbytes: int) -> Memory:
        """Return new memory of the device."""

    def check(self) -> None:
        """Raise where what is queued now does not run now."""

    def trim(self) -> None:
        """Give memory that is kept for later use back to the device."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return bytes of host memory that copies from and to the device do not wait for."""

    def mark(self) -> Any:
        """Return an event behind everything queued on the current stream."""

    def wait(self, event: Any) -> None:
        """Wait on the host until the device has passed ``event``."""

    def wait_all(self) -> None:
        """Wait on the host for every stream: for data that others than torch have written."""

    def download(self, host: Tensor, memory: Tensor) -> None:
        """Queue a copy to pinned host memory."""

    def upload(self, memory: Tensor, host: Tensor) -> None:
        """Queue a copy from pinned host memory."""

    def table(self, table: Table) -> Any:
        """Return a segment table in the device's memory."""

    def pack(self, table: Any, base: int, memory: Memory) -> None:
        """Queue the copy of a table's segments of the array at ``base`` to packed memory."""

    def unpack(self, table: Any, base: int, memory: Memory) -> None:
        """Queue the copy of packed memory to a table's segments of the array at ``base``."""

    def lend(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Note that MPI reads and writes this memory, until `take_back`."""

    def take_back(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Note that MPI is done with this memory."""


T = TypeVar("T")

_GRAIN_NBYTES = 1 << 16
_KEPT_NBYTES = 256 << 20  # more freed memory than this goes back to the device

_drivers: dict[torch.device, Driver] = {}


def trim() -> None:
    """Give device memory that is kept for later messages back. Not collective."""
    for driver in _drivers.values():
        driver.trim()


def driver_of(device: torch.device) -> Driver | None:
    """Return the driver of a device, None for the host. Not collective."""
    driver = _drivers.get(device)
    if driver is None and device.type not in ("cpu", "cuda"):
        raise UnsupportedOperationError(
            f"communication of tensors on {device}",
            expected="tensors in host memory or on a CUDA device",
            got=device,
            fix="move them first",
        )
    if driver is None and device.type == "cuda":
        own = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        driver = _drivers[device] = _drivers.get(own) or CudaDriver(own)
        _drivers[own] = driver
    return driver


def driver_at(x: Tensor) -> Driver | None:
    """Return the driver of the device that a tensor lies on, None for the host. Not collective."""
    if x.is_cpu and not _drivers:
        return None  # at a tenth of the cost
    return driver_of(x.device)


def host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tensor in host memory that is to travel to ``device``: pinned for a GPU. Not collective."""
    driver = driver_of(device)
    if driver is None:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return driver.pinned(math.prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))


def captured() -> UnsupportedOperationError:
    """Return the error of communication while a CUDA graph is captured. Not collective."""
    return UnsupportedOperationError(
        "communication inside the capture of a CUDA graph",
        expected="a stream that runs what is queued",
        got="torch.cuda.graph(...) around it",
        fix="capture the parts between the exchanges: the host takes part in them, which no graph can replay",
    )


class Shelf(Generic[T]):
    """Freed memory of a device, for the next of the same size: to allocate costs more than most messages.

    Parameters
    ----------
    driver
        The device, whose marks say when memory may be used again.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._kept: dict[int, list[tuple[T, Any]]] = defaultdict(list)
        self._nbytes = 0

    def put(self, nbytes: int, memory: T, after: Any) -> None:
        """Keep memory that may be used once the device has passed ``after`` (None: at once). Not collective."""
        self._kept[nbytes].append((memory, after))
        self._nbytes += nbytes

    def take(self, nbytes: int) -> T | None:
        """Return memory of this size, None where there is none. Not collective."""
        kept = self._kept[nbytes]
        return self._ready(nbytes, *kept.pop(0)) if kept else None  # the oldest: the device has passed its mark

    def surplus(self, limit: int = _KEPT_NBYTES) -> Iterator[T]:
        """Yield memory to free until at most ``limit`` bytes are kept. Not collective."""
        for nbytes, kept in self._kept.items():
            while kept and self._nbytes > limit:
                yield self._ready(nbytes, *kept.pop(0))

    def _ready(self, nbytes: int, memory: T, after: Any) -> T:
        self._nbytes -= nbytes
        if after is not None:
            self._driver.wait(after)
        return memory


class CudaDriver:
    """A GPU through torch, the CUDA run-time library, and cupy where it is installed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kernels = _kernels(device)
        self.has_kernel = self._kernels is not None
        self._shelf: Shelf[int] = Shelf(self)
        # of memory that nobody freed: who still uses it is not known
        self._lost: list[int] = []

    def allocate(self, nbytes: int) -> CudaMemory:
        """Return memory by ``cudaMalloc``: torch's pools may be of a kind that MPI cannot map."""
        if not nbytes:
            return CudaMemory(0, 0, self.device, lambda _: None, lambda: None)
        room = -(-nbytes // _GRAIN_NBYTES) * _GRAIN_NBYTES
        for address in self._shelf.surplus():
            _cuda_free(address)
        kept = self._shelf.take(room)
        address = _cuda_malloc(room, self.device) if kept is None else kept
        return CudaMemory(
            address, nbytes, self.device, partial(self._shelf.put, room, address), partial(self._lost.append, address)
        )

    def check(self) -> None:
        """Raise where the current stream is being captured."""
        if torch.cuda.is_current_stream_capturing():
            raise captured()

    def trim(self) -> None:
        """Give memory that is kept for the next use back to the device."""
        if self._lost:
            self.wait_all()
        for address in (*self._shelf.surplus(0), *self._lost):
            _cuda_free(address)
        self._lost.clear()

    def pinned(self, nbytes: int) -> Tensor:
        """Return pinned bytes of the host."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def mark(self) -> torch.cuda.Event:
        """Return an event behind everything queued on the current stream."""
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait on the host until the device has passed ``event``."""
        event.synchronize()

    def wait_all(self) -> None:
        """Wait on the host for every stream of the device."""
        torch.cuda.synchronize(self.device)

    def download(self, host: Tensor, memory: Tensor) -> None:
        """Queue a copy to pinned host memory."""
        host.copy_(memory, non_blocking=True)

    def upload(self, memory: Tensor, host: Tensor) -> None:
        """Queue a copy from pinned host memory."""
        memory.copy_(host, non_blocking=True)

    def table(self, table: Table) -> Any:
        """Return a segment table in the device's memory."""
        rows = torch.tensor(table.rows(), dtype=torch.int64, device="cpu").view(-1)
        # the host's copy is done when this returns: the table may serve any stream
        return table, rows.to(self.device)

    def pack(self, table: Any, base: int, memory: Memory) -> None:
        """Queue the kernel that packs."""
        self._launch("pack", table, base, memory)

    def unpack(self, table: Any, base: int, memory: Memory) -> None:
        """Queue the kernel that unpacks."""
        self._launch("unpack", table, base, memory)

    def _launch(self, way: str, table: Any, base: int, memory: Memory) -> None:
        planned, rows = table
        if not planned.segments:
            return
        assert self._kernels is not None
        stream = torch.cuda.current_stream(self.device).cuda_stream
        arguments = (base, memory.address, rows.data_ptr(), len(planned.segments))
        self._kernels.launch(f"{way}_{planned.unit}", planned.first_tiles[-1], stream, arguments)

    def lend(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Do nothing: MPI's use of memory is this driver's caller's to order."""

    def take_back(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Do nothing."""


class CudaMemory:
    """Memory that `free` gives back to its driver; dropped without it, it is lost until the driver's trim."""

    def __init__(
        self,
        address: int,
        nbytes: int,
        device: torch.device,
        give_back: Callable[[Any], None],
        lose: Callable[[], None],
    ) -> None:
        self.address, self.nbytes = address, nbytes
        if nbytes:
            self.tensor = torch.as_tensor(DeviceMemory(Block(address, (nbytes,), (1,), 1)), device=device)
        else:
            self.tensor = torch.empty(0, dtype=torch.uint8, device=device)
        self._give_back = give_back
        self._free = weakref.finalize(self, lose)
        # the CUDA driver takes all memory back at the end, when calls into it no longer work
        self._free.atexit = False

    def free(self, after: Any = None) -> None:
        """Let the driver use the memory again, once the device has passed ``after``. Not collective."""
        if self._free.detach() is not None:
            self._give_back(after)


def _cuda_free(address: int) -> None:
    _runtime().cudaFree(ctypes.c_void_p(address))


def _cuda_malloc(nbytes: int, device: torch.device) -> int:
    pointer = ctypes.c_void_p()
    runtime = _runtime()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # torch's context, before the run-time library makes another
        code = runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
    if code:
        raise MpishardError(
            "no GPU memory for a message buffer",
            expected=f"{nbytes} bytes on {device}",
            got=f"cudaMalloc's error {code}",
            fix="torch may hold freed memory: torch.cuda.empty_cache(), or PYTORCH_CUDA_ALLOC_CONF",
        )
    return pointer.value or 0


@cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA run-time library that torch has loaded."""
    torch.cuda.init()
    loaded = libraries(r"libcudart.*")
    if not loaded:
        raise MpishardError(
            "torch's CUDA run-time library is not to be found",
            expected="libcudart among the libraries of this process",
            got="none (a torch that links it statically)",
            fix="install torch from its own wheels or conda-forge",
        )
    return ctypes.CDLL(loaded[0])


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("packed", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("segments", ctypes.c_int32),
    )


_Pointers = ctypes.c_void_p * len(_Arguments._fields_)
_OFFSETS = tuple(getattr(_Arguments, name).offset for name, _ in _Arguments._fields_)


class _Kernels:
    """The compiled kernels of a device, launched by the CUDA driver: cupy's own launch costs more than the kernel."""

    def __init__(self, cupy: Any, device: torch.device) -> None:
        self._driver = cupy.cuda.driver
        self._device = cupy.cuda.Device(device.index)
        with self._device:
            self._module = cupy.RawModule(code=SOURCE)
            self._functions = {name: self._module.get_function(name).kernel.ptr for name in NAMES}
            self._context = self._driver.ctxGetCurrent()

    def launch(self, name: str, blocks: int, stream: int, arguments: tuple[int, int, int, int]) -> None:
        """Queue a kernel on a stream. Not collective."""
        values = _Arguments(*arguments)
        at = ctypes.addressof(values)
        pointers = _Pointers(*[at + offset for offset in _OFFSETS])
        call = (self._functions[name], blocks, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
        if self._driver.ctxGetCurrent() == self._context:
            self._driver.launchKernel(*call)
            return
        with self._device:  # another device's context, or a thread that has none yet
            self._driver.ctxSetCurrent(self._context)
            self._driver.launchKernel(*call)


@cache
def _kernels(device: torch.device) -> _Kernels | None:
    """Return the compiled kernels, None without cupy."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        return None
    return _Kernels(cupy, device)
