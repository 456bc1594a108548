"""What the two sides of a link tell each other when it is made, and what is wrong with it. Pure, no MPI."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpishard.comm.coupling import wire
from mpishard.errors import LayoutError, MpishardError, UnsupportedDtypeError
from mpishard.layout import Layout, Replicate, Shard, bounds, layout_of, sizes_of

_FIELD = struct.Struct(f"={wire.NAME_NBYTES}s16s4q")
UNSET = -1

NAMES = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES.split()}


class Offer(NamedTuple):
    """A field as one side has it.

    Attributes
    ----------
    name : str
    dtype : str
        torch's name of it, "" where the other side's counts.
    layout : Layout
        On the mesh of that side's program.
    ranks : tuple of int
        Per rank of the mesh the rank of the program; empty where they are the same.
    """

    name: str
    dtype: str
    layout: Layout
    ranks: tuple[int, ...] = ()

    @property
    def outline(self) -> str:
        """The field in words."""
        return f"{self.name!r} {self.dtype or 'any dtype'} {self.layout.shape}"


class Side(NamedTuple):
    """All that one side says: ``out`` and ``into`` by ascending name; `UNSET` where it leaves a number to the other."""

    policy: int
    depth: int
    out: tuple[Offer, ...]
    into: tuple[Offer, ...]


def pack(side: Side) -> bytes:
    """Return the greeting that says it. Not collective."""
    head = wire.HEAD.pack(
        wire.MAGIC, wire.VERSION, wire.OFFER, side.policy, side.depth, len(side.out), len(side.into), 0
    )
    return b"".join([head, *map(_packed, (*side.out, *side.into))])


def _packed(offer: Offer) -> bytes:
    layout = offer.layout
    shards = [p.dim if type(p) is Shard else -1 for p in layout.placements]
    numbers = [*layout.shape, *layout.mesh_shape, *shards]
    for sizes in layout.sizes:
        borders = () if sizes is None else bounds(sizes)
        numbers += [len(borders), *borders]
    numbers += offer.ranks
    name, dtype = offer.name.encode(), offer.dtype.encode()
    head = _FIELD.pack(name, dtype, layout.ndim, len(layout.mesh_shape), len(offer.ranks), len(numbers))
    return head + struct.pack(f"={len(numbers)}q", *numbers)


def unpack(message: bytes) -> Side:
    """Return what a greeting says. Not collective."""
    *_, policy, depth, outs, intos, _ = wire.HEAD.unpack_from(message)
    at, offers = wire.HEAD.size, []
    for _ in range(outs + intos):
        name, dtype, ndim, mesh_ndim, known, count = _FIELD.unpack_from(message, at)
        at += _FIELD.size
        numbers = list(struct.unpack_from(f"={count}q", message, at))
        at += 8 * count
        shape, mesh_shape, shards = (_taken(numbers, n) for n in (ndim, mesh_ndim, mesh_ndim))
        sizes = []
        for _ in range(ndim):
            borders = _taken(numbers, _taken(numbers, 1)[0])
            sizes.append(sizes_of(borders) if borders else None)
        placements = [Shard(d) if d >= 0 else Replicate() for d in shards]
        layout = layout_of(mesh_shape, placements, shape, sizes)
        offers.append(Offer(wire.text_of(name), wire.text_of(dtype), layout, _taken(numbers, known)))
    return Side(policy, depth, tuple(offers[:outs]), tuple(offers[outs:]))


def _taken(numbers: list[int], count: int) -> tuple[int, ...]:
    out = tuple(numbers[:count])
    del numbers[:count]
    return out


def compare(own: str, mine: Side, other: str, theirs: Side) -> None:
    """Raise where the two sides do not fit: the same text on both. Not collective.

    Raises
    ------
    LayoutError
        Names or global shapes differ, or nothing would travel.
    UnsupportedDtypeError
        Dtypes differ.
    """
    sides = sorted([(own, mine), (other, theirs)])
    for (writer, one), (reader, two) in (sides, sides[::-1]):
        gives, takes = {o.name: o for o in one.out}, {o.name: o for o in two.into}
        link = f"connect: {writer!r} and {reader!r}"
        if gives.keys() != takes.keys():
            raise LayoutError(
                f"{link} name other fields",
                expected=f"what {writer!r} gives out: {sorted(gives)}",
                got=f"what {reader!r} takes in: {sorted(takes)}",
                fix="give both sides the same names, out on one and into on the other",
            )
        for name, given in gives.items():
            taken = takes[name]
            if given.layout.shape != taken.layout.shape:
                raise LayoutError(
                    f"{link} have field {name!r} in other global shapes",
                    expected=f"{given.layout.shape}, as {writer!r} gives it",
                    got=f"{taken.layout.shape} in {reader!r}",
                    fix="give both the same global shape, in the index order of their arrays",
                )
            if given.dtype and taken.dtype and given.dtype != taken.dtype:
                raise UnsupportedDtypeError(
                    f"{link} have field {name!r} in other dtypes",
                    expected=f"{given.dtype}, as {writer!r} gives it",
                    got=f"{taken.dtype} in {reader!r}",
                    fix="convert on one side",
                )
    if not mine.out and not mine.into:
        raise LayoutError(
            f"connect: {sides[0][0]!r} and {sides[1][0]!r} name no field",
            expected="at least one, out on one side and into on the other",
            got="none",
            fix="give out= or into=",
        )


def agreed(writer: Side, reader: Side) -> tuple[int, int]:
    """Return policy and depth of a direction: the writer's, else those of a reader that does nothing but read."""
    policy, depth = writer.policy, writer.depth
    if not reader.out:
        policy = reader.policy if policy == UNSET else policy
        depth = reader.depth if depth == UNSET else depth
    return (0 if policy == UNSET else policy), (2 if depth == UNSET else depth)


def dtype_of(mine: Offer, theirs: Sequence[Offer]) -> torch.dtype:
    """Return the dtype of a field: that of the side which has one, else torch's default. Not collective."""
    name = mine.dtype or next(o.dtype for o in theirs if o.name == mine.name)
    return DTYPES[name] if name else torch.get_default_dtype()


def name_of(dtype: torch.dtype) -> str:
    """Return what a dtype is called on the wire. Not collective."""
    name = str(dtype).removeprefix("torch.")
    if name in DTYPES:
        return name
    raise UnsupportedDtypeError(
        "connect: a dtype that does not travel", expected=NAMES, got=name, fix="convert the field first"
    )


def checked_name(name: object) -> str:
    """Return a name that is one. Not collective."""
    if wire.is_name(name):
        return str(name)
    raise MpishardError(
        "connect: no name of a field",
        expected=f"a text of 1 to {wire.NAME_NBYTES - 1} bytes",
        got=repr(name)[:80],
        fix="give one, the same on both sides",
    )
