"""Tensors of a planning mesh: what would travel is told, and nothing does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpishard.comm import counter
from mpishard.comm.memory.buffer import pieces
from mpishard.comm.null import no_values
from mpishard.comm.transport.device_message import Envelope
from mpishard.comm.transport.host import Buffers, Parcels, Storage

if TYPE_CHECKING:
    from mpishard.comm.memory.reduction_type import Rule
    from mpishard.comm.mesh import Group
    from mpishard.comm.tag import Label


class Null:
    """How tensors do not travel among the ranks of a group of a planning mesh; as `host.Host`.

    What a reduction gives is what this rank gave; what others would send is zero.
    """

    driver = None
    has_kernel = False

    def __init__(self, group: Group) -> None:
        self.group, self.comm = group, group.comm
        self.device: torch.device = group.comm.device  # type: ignore[attr-defined]
        self._note: Callable[..., None] = group.comm.note  # type: ignore[attr-defined]

    def _collective(self, op: str, x: Tensor) -> None:
        self._check(x)
        self._note("collective", op, nbytes=x.nbytes)

    def _fill(self, y: Tensor, x: Tensor | None = None) -> None:
        """Give memory that others would have filled values that cost what any do, none where there is no memory."""
        if y.is_meta:
            return
        if x is None or not x.numel() or y.numel() % x.numel():
            y.zero_()
        else:
            y.view(-1, x.numel()).copy_(x.reshape(1, -1))

    def _check(self, x: Tensor) -> None:
        if x.device != self.device:
            raise no_values(f"a tensor on {x.device}")

    def all_reduce(self, x: Tensor, y: Tensor, rule: Rule, op: str) -> None:  # noqa: ARG002
        """Copy ``x`` to ``y``, which may be ``x``. Not collective."""
        self._collective("all_reduce", x)
        if y is not x:
            self._fill(y, x)

    def start_sum(self, x: Tensor, rule: Rule) -> tuple[list[MPI.Request], Callable[[], object]]:  # noqa: ARG002
        """Leave ``x``. Not collective."""
        self._check(x)
        key = object()
        self._note("begin", "all_reduce", key, nbytes=x.nbytes)
        return [], lambda: self._note("end", "all_reduce", key)

    def on_host(self, x: Tensor) -> Tensor:
        """Return ``x``. Not collective."""
        return x

    def all_gather(self, x: Tensor, flat: Tensor, counts: Sequence[int], common: Hashable) -> None:  # noqa: ARG002
        """Copy to every rank's place. Not collective."""
        self._collective("all_gather", x)
        self._fill(flat, x)

    def reduce_scatter(self, flat: Tensor, result: Tensor, counts: Sequence[int], rule: Rule) -> None:  # noqa: ARG002
        """Leave what is there. Not collective."""
        self._collective("reduce_scatter", flat)
        self._fill(result)

    def all_to_all(
        self,
        flat: Tensor,
        out: Sequence[int],  # noqa: ARG002
        into: Tensor,
        counts: Sequence[int],  # noqa: ARG002
        bound_nbytes: int,  # noqa: ARG002
    ) -> None:
        """Leave what is there. Not collective."""
        self._collective("all_to_all", flat)
        self._fill(into)

    def broadcast(self, x: Tensor, root: int) -> None:  # noqa: ARG002
        """Leave what is there. Not collective."""
        self._collective("broadcast", x)

    def reduce(self, x: Tensor, y: Tensor, rule: Rule, root: int) -> None:  # noqa: ARG002
        """Copy ``x`` to ``y``. Not collective."""
        self._collective("reduce", x)
        self._fill(y, x)

    def messages(
        self,
        sends: Sequence[Envelope],
        recvs: Sequence[Envelope],
        op: str,
        label: Label,  # noqa: ARG002
        storages: list[Storage],
    ) -> NullMessages:
        """Return messages to nobody, with their buffers. Not collective."""
        return NullMessages(self, sends, recvs, op, storages)

    def post(self, sends: Parcels, recvs: Parcels, op: str, tag: int, **_how: Any) -> NullPosted:  # noqa: ARG002
        """Send nothing; what comes is zero. Not collective."""
        for _, x in (*sends, *recvs):
            self._check(x)
        for _, y in recvs:
            self._fill(y)
        cut = [n for _, x in sends for _, n in pieces(x.nbytes) if n]
        return NullPosted(self._note, op.partition(" ")[0], len(cut), sum(cut))

    def send_recv(self, x: Tensor, y: Tensor, to: int, of: int, tag: int, call: str) -> int:  # noqa: ARG002
        """Send nothing; what comes is zero. Not collective."""
        self._check(x)
        self._fill(y)
        NullPosted(self._note, "send_recv", int(to != MPI.PROC_NULL), x.nbytes if to != MPI.PROC_NULL else 0).wait()
        return y.nbytes


class NullPosted:
    """Messages that are not under way."""

    __slots__ = ("_key", "_note", "_op")

    def __init__(self, note: Callable[..., None], op: str, messages: int, nbytes: int) -> None:
        self._note, self._op, self._key = note, op, object()
        note("start", op, self._key, messages, nbytes)

    def poke(self) -> None:
        """Do nothing. Not collective."""

    def wait(self) -> None:
        """Say that they are waited for. Not collective."""
        self._note("finish", self._op, self._key)

    def lengths(self) -> list[int] | None:
        """Return None: nothing comes. Not collective."""
        return None


class NullMessages(Buffers):
    """Persistent messages to nobody, in buffers of their own; as `host.Messages`."""

    __slots__ = ("_note", "_op", "_travel")

    def __init__(
        self, transport: Null, sends: Sequence[Envelope], recvs: Sequence[Envelope], op: str, storages: list[Storage]
    ) -> None:
        super().__init__(sends, recvs, storages, transport.device)
        self._note, self._op = transport._note, op
        transport._fill(self.storage.memory)
        cut = [[k for message in side for _, k in pieces(message.nbytes) if k] for side in (sends, recvs)]
        self._travel = tuple((len(side), sum(side)) for side in cut)

    def start(self, adjoint: bool = False) -> None:
        """Say that they are started. Not collective."""
        if counter.active:
            counter.record(self._op, *self._travel[adjoint])
        self._note("start", self._op, self, *self._travel[adjoint])
        self.storage.busy = True

    def finish(self, adjoint: bool = False) -> None:  # noqa: ARG002
        """Say that they are waited for. Not collective."""
        self._note("finish", self._op, self)

    def free(self) -> None:
        """Do nothing. Not collective."""
