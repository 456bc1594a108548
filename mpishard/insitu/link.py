"""Link: fields that travel between two programs of a job, each decomposed as it likes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from types import TracebackType
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from mpishard.comm import guard, main_thread
from mpishard.comm.coupling import wire
from mpishard.comm.coupling.channel import Channel, Parcel
from mpishard.comm.coupling.greeting import accept, greet, meet_peers, order_of
from mpishard.comm.coupling.inlet import Inlet
from mpishard.comm.coupling.meeting import Meeting, checked_timeout
from mpishard.comm.coupling.outlet import POLICIES, Outlet
from mpishard.comm.coupling.patience import CLOSE, Ballot, call_of
from mpishard.comm.exit import on_finalize
from mpishard.comm.mesh import CartMesh, init_mesh
from mpishard.errors import DesyncError, LayoutError, MeshError, MpishardError, UnsupportedOperationError, typed_text
from mpishard.insitu import offer
from mpishard.insitu.memory import require_own_cells
from mpishard.insitu.offer import Offer, Side
from mpishard.layout import Box, Layout, Share, is_idle, plan_sources, plan_targets
from mpishard.tensor import ShardTensor, wrap

# an open link holds memory that MPI may write to: it lives until it is closed, or the program ends
_open: set[Link] = set()


class Link:
    """Fields that go to another program, and those that come from it: made by `Program.connect`.

    Attributes
    ----------
    out, into : dict
        Name -> what is put, and what is filled: a ShardTensor, or the field that was given.
    other : str
        Name of the other program.

    Notes
    -----
    Every rank of the program makes every call; an error in one is raised on all, see `put`. Not a step is copied to a
    rank that does not own its cells: one message per pair of ranks and step. This side holds ``depth`` steps of its
    own blocks at most (one more with the policy ``"latest"``, while it is read), the other one step of its own.
    """

    def __init__(
        self,
        meeting: Meeting,
        name: str,
        other: str,
        number: int,
        serial: int,
        out: Mapping[str, Any],
        into: Mapping[str, Any],
        policy: str | None,
        depth: int | None,
        timeout: float | None,
    ) -> None:
        self._circle = circle = meeting.circle
        self._close = call_of(CLOSE, serial)
        self._main_only = main_thread.main_only()
        self.other = other
        wrong: Exception | None = None
        error: MpishardError | None = None
        side, self._timeout_s = Side(-1, -1, (), ()), 60.0
        try:
            self._timeout_s = checked_timeout(timeout, "connect")
            side = Side(_policy(policy), _depth(depth), _offers(out, circle.size), _offers(into, circle.size, True))
        except Exception as e:  # noqa: BLE001 (Python's too, of other kinds of arguments)
            wrong = e
        try:
            guard.agree(circle.comm, wrong, f"connect({other!r}, {side})")
        except MpishardError as e:
            error = e
        if error is None:
            side = Side(
                *side[:2],
                *(
                    tuple(self._ordered(o, given) for o in offers)
                    for offers, given in ((side.out, out), (side.into, into))
                ),
            )
        far, tag = meeting.others[other], number * wire.LINK_TAGS
        message = greet(circle, far, tag, other, error, offer.pack(side), self._timeout_s)
        theirs = offer.unpack(message)
        try:
            offer.compare(name, side, other, theirs)
        except MpishardError as e:
            raise guard.common(e, circle.comm) from None
        dtypes = [
            [offer.dtype_of(o, them) for o in us] for us, them in ((side.out, theirs.into), (side.into, theirs.out))
        ]
        made = [_meshes(x, meeting) for x in (out, into)]
        ballot = Ballot(circle, later=True) if side.out else None
        channel = Channel(far.comm, far.first, tag, serial, circle, other, {}, self._timeout_s)
        self._outlet: Outlet | None = None
        self._inlet: Inlet | None = None
        peers: set[int] = set()
        unready: Exception | None = None
        try:
            ranks = meeting.programs[other]
            going = _outgoing(side.out, theirs.into, circle.rank, circle.size, ranks)
            coming = _incoming(theirs.out, side.into, circle.rank, ranks, circle.size)
            going, coming = ([Parcel(far.first + p.peer, p.boxes) for p in side] for side in (going, coming))
            peers.update(p.peer for p in (*going, *coming))
            self.out, self.into = (
                {o.name: _source(x[o.name], meshes.get(o.name), t) for o, t in zip(offers, of)}
                for x, meshes, offers, of in (
                    (out, made[0], side.out, dtypes[0]),
                    (into, made[1], side.into, dtypes[1]),
                )
            )
            puts, slots = offer.agreed(side, theirs)
            if ballot is not None:
                self._outlet = Outlet(channel, going, dtypes[0], POLICIES[puts], slots, ballot)
            if side.into:
                asks = POLICIES[offer.agreed(theirs, side)[0]] == "latest"
                self._inlet = Inlet(channel, coming, dtypes[1], asks)
        except Exception as e:  # noqa: BLE001 (the others, and the other side, wait for this rank)
            unready = _unready(other, e)
        try:
            accept(circle, far, tag, other, unready, self._timeout_s)
            channel.presences.update(meet_peers(circle, far, tag, other, peers, self._timeout_s))
        except MpishardError:
            if ballot is not None and self._outlet is None:
                ballot.leave()
            self._release()
            raise
        self._places = [[_place(_tensor(x)) for x in xs.values()] for xs in (self.out, self.into)]
        self._dtypes = dtypes
        self._known: list[Sequence[Tensor]] = [(), ()]  # blocks that were found right
        self._closed = False
        self._error: MpishardError | None = None
        if not _open:
            on_finalize(_leave_all)
        _open.add(self)

    def _ordered(self, field: Offer, given: Mapping[str, Any]) -> Offer:
        x = given[field.name]
        return field if isinstance(x, Layout) else field._replace(ranks=order_of(self._circle, _tensor(x).mesh.comm))

    @property
    def ended(self) -> bool:
        """Whether the other side has closed what this side reads from, or writes to. Not collective."""
        return (self._outlet is not None and self._outlet.ended) or (self._inlet is not None and self._inlet.ended)

    def put(self) -> bool:
        """Put the ``out`` fields, as they are now, into a slot; they may be changed at once.

        Collective over this program.

        Returns
        -------
        bool
            Whether the step is in a slot; False where the policy dropped it, or the other side has closed the link.

        Raises
        ------
        PeerError
            On all ranks: the other side died, or took no step in time.
        DesyncError
            On all ranks: they made different calls. No open link of the program is of use then.
        UnsupportedOperationError
            The link is closed, or has no ``out``.

        Notes
        -----
        With the policy ``"block"`` no rank waits for the others of its program. That a peer is gone, that the other
        side has closed the link, and that a field has changed on another rank alone, is therefore told by the next
        call (`put`, `get` or `close`), on all ranks.
        """
        if (outlet := self._outlet) is None or self._closed or self._error is not None:
            raise self._unusable("put", "out")
        if self._main_only:
            main_thread.require_allowed("put")
        blocks, error = self._blocks(0, self.out)
        try:
            return outlet.put(blocks, error)
        except BaseException as e:
            self._end("put", e)
            raise

    def get(self) -> int | None:
        """Fill the ``into`` fields with the oldest step that was not read.

        Collective over this program.

        Returns
        -------
        int or None
            The number of the step: of the other side's calls of `put`, from 0. None where it has closed the link.

        Raises
        ------
        PeerError
            On all ranks: the other side died, or sent nothing in time.
        UnsupportedOperationError
            The link is closed, or has no ``into``.
        """
        if (inlet := self._inlet) is None or self._closed or self._error is not None:
            raise self._unusable("get", "into")
        if self._main_only:
            main_thread.require_allowed("get")
        blocks, error = self._blocks(1, self.into)
        try:
            if self._outlet is not None:
                self._outlet.settle()
            return inlet.get(blocks, error)
        except BaseException as e:
            self._end("get", e)
            raise

    def __iter__(self) -> Iterator[int]:
        while (step := self.get()) is not None:
            yield step

    def close(self) -> None:
        """Close the link: steps that were put are read first, then the other side sees the end. Harmless twice.

        Collective over this program.

        Raises
        ------
        PeerError
            On all ranks: the other side died, or did not take what is left in time.
        """
        if self._closed:
            return
        if self._main_only:
            main_thread.require_allowed("close")
        self._closed = True
        _open.discard(self)
        if self._error is not None:
            self._release(gone=True)
            return
        try:
            self._come_to_end()
        except BaseException as e:
            self._end("close", e)
            self._release(gone=True)
            raise
        self._release()

    def _come_to_end(self) -> None:
        error = None
        if self._outlet is not None:
            self._outlet.settle()
            if self._outlet.policy == "latest":
                # a rank that puts instead serves nobody until it knows: what is drained here would wait for it
                self._circle.agree(None, self._timeout_s, call=self._close)
        try:
            self._drain()
        except MpishardError as e:
            error = e
        self._circle.agree(error, self._timeout_s, call=self._close)

    def _drain(self) -> None:
        ends = [self._inlet.stop()] if self._inlet is not None else []
        if self._outlet is not None:
            ends.append(self._outlet.flush())

        def waits_for() -> list[int]:
            found = [e.waits_for() for e in (self._inlet, self._outlet) if e is not None]
            return sorted(set().union(*found))

        channel = (self._outlet or self._inlet).channel  # type: ignore[union-attr]
        wait = channel.wait(waits_for, "close")
        # both at once: the other side may be closing too
        while not all(done() for done in ends):
            if not wait.pause():
                raise channel.late(waits_for(), "close")

    def _release(self, gone: bool = False) -> None:
        if self._outlet is not None:
            self._outlet.release(gone)
        if self._inlet is not None:
            self._inlet.release(gone)

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _end(self, call: str, error: BaseException) -> None:
        """Have later calls raise; not the ranks' own agreement alone may be under way where a call came to no end."""
        if isinstance(error, MpishardError):
            self._fail(error)
            return
        self._circle.give_up()
        self._fail(
            UnsupportedOperationError(
                f"{call}: it was interrupted, and the link is of no use any more",
                expected="calls that come to their end",
                got=f"{type(error).__name__} inside",
                fix="close the link, and connect again",
            )
        )

    def _fail(self, error: MpishardError) -> None:
        self._error = error
        if isinstance(error, DesyncError):
            # each rank knows of its own call: what the others called may be any of the program's links
            for link in _open:
                if link._circle is self._circle and link._error is None:
                    link._error = error

    def _unusable(self, call: str, side: str) -> MpishardError:
        if self._error is not None:
            return self._error
        if self._closed:
            return UnsupportedOperationError(
                f"{call}: the link is closed", expected="an open link", got="close() before", fix="connect again"
            )
        return UnsupportedOperationError(
            f"{call}: nothing to {call}",
            expected=f"fields in {side}=",
            got=f"a link to {self.other!r} without",
            fix=f"name them in connect, {side}=",
        )

    def _blocks(self, side: int, fields: Mapping[str, Any]) -> tuple[Sequence[Tensor], MpishardError | None]:
        """Return this rank's blocks, the same sequence for the same blocks, and what is wrong. Not collective."""
        known = self._known[side]
        for x, block in zip(fields.values(), known):
            if not isinstance(x, ShardTensor) or x.block is not block:
                break
        else:
            if known:
                return known, None
        try:
            tensors = [_tensor(x) for x in fields.values()]
            blocks = [x.block for x in tensors]
            if known and all(map(is_, blocks, known)):
                return known, None
            for name, x, place, dtype in zip(fields, tensors, self._places[side], self._dtypes[side]):
                if _place(x) != place or x.dtype != dtype:
                    raise LayoutError(
                        f"field {name!r} of the link to {self.other!r} has changed",
                        expected=f"a block {place[0]} of {dtype}, {list(place[1].placements)}",
                        got=f"{tuple(x.block.shape)} of {x.dtype}, {list(x.sharding.placements)}",
                        fix="connect again with the new tensor",
                    )
        except MpishardError as e:
            return (), e
        self._known[side] = blocks
        return blocks, None

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"Link(to {self.other!r}, out={sorted(self.out)}, into={sorted(self.into)}{state})"


def _leave_all() -> None:
    # the program ends with open links: others must not wait for it
    while _open:
        _open.pop()._release(gone=True)


def _policy(policy: object) -> int:
    if policy is None:
        return offer.UNSET
    if policy in POLICIES:
        return POLICIES.index(policy)  # type: ignore[arg-type]
    raise UnsupportedOperationError(
        "connect: unknown policy", expected=", ".join(POLICIES), got=repr(policy), fix="name one of them"
    )


def _depth(depth: object) -> int:
    if depth is None:
        return offer.UNSET
    if isinstance(depth, SupportsIndex) and 1 <= depth.__index__() <= wire.MOST_SLOTS:
        return depth.__index__()
    raise UnsupportedOperationError(
        "connect: depth", expected=f"a number of slots, 1 to {wire.MOST_SLOTS}", got=repr(depth), fix="give a few"
    )


def _offers(given: Mapping[str, Any], size: int, written: bool = False) -> tuple[Offer, ...]:
    """Return what one side has, by ascending name, and refuse what cannot be written where it is. Not collective."""
    if not isinstance(given, Mapping):
        raise LayoutError(
            "connect: out and into", expected="dicts of fields by name", got=type(given).__name__, fix="give names"
        )
    offers = []
    for name in sorted(given, key=offer.checked_name):
        x = given[name]
        if isinstance(x, Layout):
            layout, dtype, ranks = x, "", math.prod(x.mesh_shape)
        else:
            tensor = _tensor(x, name)
            if written:
                require_own_cells(f"connect: into {name!r}", tensor.block)
            layout, dtype, ranks = tensor.sharding, offer.name_of(tensor.dtype), tensor.mesh.size
        if layout.partial_dims:
            raise LayoutError(
                f"connect: field {name!r} has Partial placements",
                expected="Shard and Replicate",
                got=list(layout.placements),
                fix="redistribute it first",
            )
        if ranks != size:
            raise MeshError(
                f"connect: field {name!r} lies on other ranks than the program's",
                expected=f"a mesh of the program's {size} ranks",
                got=f"{ranks} ranks",
                fix="make the mesh with comm=me.comm",
            )
        offers.append(Offer(name, dtype, layout))
    return tuple(offers)


def _tensor(x: Any, name: str = "") -> ShardTensor:
    tensor = x if isinstance(x, ShardTensor) else getattr(x, "tensor", None)
    if isinstance(tensor, ShardTensor):
        return tensor
    raise LayoutError(
        f"connect: field {name!r} is none",
        expected="a ShardTensor, a field of a simulation, or a Layout",
        got=type(x).__name__,
        fix="distribute it first, with mpishard.distribute_tensor or ShardTensor.from_local",
    )


def _place(x: ShardTensor) -> tuple[tuple[int, ...], Layout, tuple[int, ...]]:
    """Return which cells of a field are this rank's. Not collective."""
    return tuple(x.block.shape), x.sharding, tuple(x.mesh.coords)


def _unready(other: str, error: Exception) -> MpishardError:
    if isinstance(error, MpishardError):
        return error
    return MpishardError(
        f"connect: no link to {other!r} can be made here",
        expected="memory for its slots and fields",
        got=typed_text(error),
        fix="give a smaller depth, or more ranks",
    )


def _meshes(given: Mapping[str, Any], meeting: Meeting) -> dict[str, CartMesh]:
    """Return a mesh for every layout. Collective."""
    layouts = {name: given[name] for name in sorted(given) if isinstance(given[name], Layout)}
    return {name: init_mesh(x.mesh_shape, comm=meeting.comm) for name, x in layouts.items()}


def _source(x: Any, mesh: CartMesh | None, dtype: torch.dtype) -> Any:
    """Return what is given, or a new tensor of a layout. Not collective."""
    if mesh is None:
        return x
    return wrap(torch.zeros(x.local_shape(mesh.coords), dtype=dtype, device=mesh.device), x, mesh)


def _mesh_rank(field: Offer, rank: int) -> int:
    return field.ranks.index(rank) if field.ranks else rank


def _collected(shares: Sequence[Sequence[Share]], fields: Sequence[Offer], also: Sequence[int]) -> list[Parcel]:
    """Return the messages, by ascending rank of the other program. Not collective."""
    boxes: dict[int, list[tuple[int, Box]]] = {peer: [] for peer in also}
    for number, (own, field) in enumerate(zip(shares, fields)):
        for peer, box in own:
            boxes.setdefault(field.ranks[peer] if field.ranks else peer, []).append((number, box))
    return [Parcel(peer, tuple(boxes[peer])) for peer in sorted(boxes)]


def _outgoing(out: Sequence[Offer], into: Sequence[Offer], rank: int, writers: int, readers: int) -> list[Parcel]:
    if not out:
        return []
    shares = [plan_targets(w.layout, r.layout, own) for w, r, own in _pairs(out, into, rank, True)]
    first, last = -(-rank * readers // writers), -(-(rank + 1) * readers // writers)
    return _collected(shares, into, [q for q in range(first, last) if _gets_nothing(into, q)])


def _incoming(out: Sequence[Offer], into: Sequence[Offer], rank: int, writers: int, readers: int) -> list[Parcel]:
    if not into:
        return []
    shares = [plan_sources(w.layout, r.layout, own) for w, r, own in _pairs(out, into, rank, False)]
    # who gets no cell still hears of steps and of the end
    return _collected(shares, out, [rank * writers // readers] if _gets_nothing(into, rank) else [])


def _pairs(out: Sequence[Offer], into: Sequence[Offer], rank: int, writes: bool) -> Iterator[tuple[Offer, Offer, int]]:
    for w, r in zip(out, into):
        yield w, r, _mesh_rank(w if writes else r, rank)


def _gets_nothing(into: Sequence[Offer], rank: int) -> bool:
    return all(is_idle(field.layout, _mesh_rank(field, rank)) for field in into)
