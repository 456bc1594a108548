"""Collectives by NCCL, where every rank of a group has a GPU of its own and cupy is there to call it.

NCCL queues its work on the current stream and does not make the host wait, so it never runs beside MPI on the
same data. It refuses two ranks on one GPU, as it does ranks without one: these stage through the host.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mpishard.comm import guard, thread
from mpishard.comm.device.driver import captured
from mpishard.comm.environment import switch
from mpishard.comm.mesh import Group
from mpishard.errors import MpishardError

LEAST_NBYTES = 1 << 16  # below it, the way through the host is as short

_OPS = {"sum": "NCCL_SUM", "prod": "NCCL_PROD", "max": "NCCL_MAX", "min": "NCCL_MIN"}
_DTYPES = {
    torch.int8: "NCCL_INT8",
    torch.uint8: "NCCL_UINT8",
    torch.int32: "NCCL_INT32",
    torch.int64: "NCCL_INT64",
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
}


def wanted() -> bool:
    """Return what ``MPISHARD_NCCL`` says: 0 never, 1 (as without it) where it works. Not collective."""
    return switch("MPISHARD_NCCL") is not False


def link_of(group: Group, x: Tensor, nbytes: int) -> Link | None:
    """Return the NCCL communicator of a group that serves ``nbytes`` on the device of ``x``, or None.

    Collective over the group on its first call with a tensor on a GPU; ``nbytes`` agrees on all ranks.
    """
    if x.device.type != "cuda" or group.size == 1 or nbytes < LEAST_NBYTES:
        return None
    thread.require(group.comm)
    return connect(group, x.device)


def connect(group: Group, device: torch.device) -> Link | None:
    """Return the communicator of a group, None where NCCL cannot serve it. Collective on the first call."""
    if "nccl" not in group.links:
        group.links["nccl"] = _connect(group, device)
    return group.links["nccl"]  # type: ignore[no-any-return]


def _connect(group: Group, device: torch.device) -> Link | None:
    error: MpishardError | None = None
    own = link = None
    try:
        own = _identity(device)
    except MpishardError as e:
        error = e
    guard.agree(group.comm, error, "")
    with guard.waiting("NCCL set-up", (), group.comm):
        every = group.comm.allgather(own)
    if None in every or len(set(every)) < group.size:
        return None
    nccl = _library()
    identity = nccl.get_unique_id() if group.rank == 0 else None
    with guard.waiting("NCCL set-up", (), group.comm):
        identity = group.comm.bcast(identity)
    try:
        with torch.cuda.device(device):
            link = Link(nccl.NcclCommunicator(group.size, identity, group.rank), group, device)
    except (RuntimeError, OSError) as e:
        error = MpishardError(
            "NCCL does not start", expected="a communicator", got=e, fix="set MPISHARD_NCCL=0 to do without"
        )
    guard.agree(group.comm, error, "")
    return link


def _identity(device: torch.device) -> str | None:
    """Return which GPU this is, None where NCCL cannot be used on this rank."""
    nccl = _library() if wanted() else None
    if nccl is None or not nccl.available:
        return None
    runtime = importlib.import_module("cupy.cuda.runtime")
    index = torch.cuda.current_device() if device.index is None else device.index
    return bytes(runtime.getDeviceProperties(index)["uuid"]).hex()


@cache
def _library() -> Any:
    try:
        return importlib.import_module("cupy.cuda.nccl")
    except ImportError:
        return None


class Link:
    """NCCL's communicator of a group, on torch's current stream.

    Every method is collective over the group; the caller counts.
    """

    def __init__(self, communicator: Any, group: Group, device: torch.device) -> None:
        self._communicator, self._group, self._device = communicator, group, device

    def serves(self, dtype: torch.dtype, op: str = "sum") -> bool:
        """Whether NCCL reduces a dtype as mpishard does: extrema of floats lose NaN there, sums of half types bits."""
        return dtype in _DTYPES and (op in ("sum", "prod") or not dtype.is_floating_point)

    def all_reduce(self, x: Tensor, y: Tensor, op: str) -> None:
        """Reduce contiguous tensors into ``y``, which may be ``x``."""
        self._communicator.allReduce(
            x.data_ptr(), y.data_ptr(), x.numel(), self._code(_DTYPES[x.dtype]), self._code(_OPS[op]), self._stream()
        )

    def all_gather(self, x: Tensor, whole: Tensor, sizes: Sequence[int]) -> None:
        """Fill ``whole``, 1-D, with the ranks' tensors one after the other; ``sizes`` are their lengths."""
        self.all_to_all([x] * self._group.size, whole.split(list(sizes)))

    def all_to_all(self, blocks: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Send every rank its block and receive one from each; dense."""
        self.exchange(list(enumerate(blocks)), list(enumerate(into)))

    def broadcast(self, x: Tensor, root: int) -> None:
        """Fill contiguous tensors with the root's."""
        at, byte = x.data_ptr(), self._code("NCCL_UINT8")
        self._communicator.broadcast(at, at, x.nbytes, byte, root, self._stream())

    def exchange(self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive dense tensors, (peer, tensor) each. Neighborwise collective."""
        byte, stream, nccl = self._code("NCCL_UINT8"), self._stream(), _library()
        nccl.groupStart()
        for peer, x in sends:
            if x.nbytes:
                self._communicator.send(x.data_ptr(), x.nbytes, byte, peer, stream)
        for peer, x in recvs:
            if x.nbytes:
                self._communicator.recv(x.data_ptr(), x.nbytes, byte, peer, stream)
        nccl.groupEnd()

    def _code(self, name: str) -> int:
        return int(getattr(_library(), name))

    def _stream(self) -> int:
        if torch.cuda.is_current_stream_capturing():
            raise captured()
        return int(torch.cuda.current_stream(self._device).cuda_stream)
