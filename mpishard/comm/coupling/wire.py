"""The wire format of coupled programs: what join, connect, put and get send; docs/coupling.md has it all.

Everything is in the machine's own byte order, in structures of 64-bit integers and texts of fixed length, so that C
reads it as it is.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC = 0x4D5053
VERSION = 1
NAME_NBYTES = 64
TEXT_NBYTES = 1024

# tags: of the meeting on MPI_COMM_WORLD, and of the messages of a link, which has so many
MEETING_TAG = 32101
LINK_TAGS = 8
# of two programs, and of one: MPI guarantees tags up to 32767, and those of a program's own messages are two a link
MOST_LINKS, MOST_OF_PROGRAM = 4096, (1 << 14) - 1
# of a link; all are made with it
MOST_SLOTS = 1 << 16
HELLO, PRESENCE, DATA, REQUEST, STOP, SERVE = range(6)

# what a data message is
STEP, END, GONE = range(3)
# what a greeting is
OFFER, ACCEPT, WITHDRAW = range(3)

HEAD = struct.Struct("=8q")
_ROLL = struct.Struct(f"=8q{TEXT_NBYTES}s")
_ENTRY = struct.Struct(f"={NAME_NBYTES}s256s8q")


class Entry(NamedTuple):
    """What ranks that join say of a program: merged on the way to rank 0.

    Attributes
    ----------
    name, file : str
        Its name, and what it runs.
    ranks, first : int
        How many, and the lowest of them in MPI_COMM_WORLD.
    appnum, command : int
        What the launcher calls it, and a hash of the command line, both of rank ``first``.
    """

    name: str
    file: str
    ranks: int
    first: int
    appnum: int
    command: int


class Roll(NamedTuple):
    """Who joins: the message of a meeting, both ways. A text says what went wrong.

    Attributes
    ----------
    attempt : int
        Of the rank that asks, how often it has; an answer has that of its question.
    withdrawn : bool
        Whether the rank that asked waits no longer.
    """

    attempt: int
    entries: tuple[Entry, ...] = ()
    text: str = ""
    withdrawn: bool = False


def pack_roll(roll: Roll) -> bytes:
    """Return the message. Not collective."""
    numbers = MAGIC, VERSION, roll.attempt, len(roll.entries), roll.withdrawn, 0, 0, 0
    head = _ROLL.pack(*numbers, clipped(roll.text, TEXT_NBYTES))
    rows = [
        _ENTRY.pack(
            clipped(e.name, NAME_NBYTES), clipped(e.file, 256), e.ranks, e.first, e.appnum, e.command, *(0,) * 4
        )
        for e in roll.entries
    ]
    return b"".join([head, *rows])


def unpack_roll(message: bytes) -> Roll:
    """Return what a message says; of another version, its text says so. Not collective."""
    magic, version, attempt, count, withdrawn, *_, text = _ROLL.unpack_from(message)
    if (magic, version) != (MAGIC, VERSION):
        return Roll(-1, (), other_version(version if magic == MAGIC else None))
    rows = [_ENTRY.unpack_from(message, _ROLL.size + i * _ENTRY.size) for i in range(count)]
    entries = tuple(Entry(text_of(r[0]), text_of(r[1]), *r[2:6]) for r in rows)
    return Roll(attempt, entries, text_of(text), bool(withdrawn))


def other_version(version: int | None) -> str:
    """Return what to say of a message in another format. Not collective."""
    return f"a program speaks {'no' if version is None else f'version {version} of'} this wire format (here: {VERSION})"


def clipped(text: str, nbytes: int) -> bytes:
    """Return a text that fits with a zero byte behind it. Not collective."""
    return text.encode(errors="replace")[: nbytes - 1].decode(errors="ignore").encode()


def is_name(name: object) -> bool:
    """Tell whether there is room for a name, and the other side can read it: half a surrogate pair is no text.

    Not collective.
    """
    if not isinstance(name, str) or "\0" in name:
        return False
    data = name.encode(errors="ignore")
    return 0 < len(data) < NAME_NBYTES and data.decode() == name


def text_of(field: bytes) -> str:
    """Return the text before the first zero byte. Not collective."""
    return field.split(b"\0", 1)[0].decode(errors="replace")
