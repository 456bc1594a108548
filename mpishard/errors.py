"""Errors that mpishard raises on purpose: every text says what was expected, what came, and the fix."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence


class MpishardError(Exception):
    """Base class of every error that mpishard raises on purpose.

    Parameters
    ----------
    what
        The call and what is wrong with it, or the whole text.
    expected, got, fix
        As of `described`, which makes the text of them.
    """

    def __init__(self, what: str = "", *, expected: object = None, got: object = None, fix: str = "") -> None:
        super().__init__(described(what, expected=expected, got=got, fix=fix) if fix else what)


class LayoutError(MpishardError, ValueError):
    """Placements, block sizes or shapes do not fit each other."""


class MeshError(MpishardError, ValueError):
    """A mesh is malformed, freed, or not the mesh that the other operands live on."""


class UnsupportedDtypeError(MpishardError, TypeError):
    """An operation cannot carry this dtype."""


class UnsupportedOperationError(MpishardError, RuntimeError):
    """An operation that mpishard refuses because its result could not be right."""


class NoShardingRule(MpishardError, NotImplementedError):  # noqa: N818 (public name of the design)
    """An operation was given ShardTensors and has no sharding rule."""


class GatherWarning(UserWarning):
    """An operation gathers a large sharded tensor on every rank; see `mpishard.tensor.notice`."""


class FileError(MpishardError, OSError):
    """A file is missing, damaged or cannot be written."""


class JobError(MpishardError, ValueError):
    """A job that its site would refuse, or that could not run as it is asked for."""


class MissingPackageError(MpishardError, ImportError):
    """An optional package that the call needs is not installed."""


class DesyncError(MpishardError, RuntimeError):
    """Ranks made different calls where all of them must make the same one."""


class PeerError(MpishardError, ConnectionError):
    """Another program of the job, or a rank, did not come, went away, or said something else than expected."""


def described(what: str, *, expected: object, got: object, fix: str) -> str:
    """Return the house form of an error text.

    Not collective.

    Parameters
    ----------
    what
        The call and what is wrong with it.
    expected, got
        The two values that disagree.
    fix
        What the caller can do.

    Returns
    -------
    str
        One text, the same on every rank for the same arguments. Of a part that is very long, such as a path that
        nobody meant, the middle is left out: every rank says it, and a job's output holds them all.
    """
    parts = (shown(alike(str(part))) for part in (what, expected, got, fix))
    return "{}\n  expected: {}\n  got:      {}\n  fix:      {}".format(*parts)


def text_of(error: BaseException) -> str:
    """Return what an error says, whoever made it: its own text may not come about. Not collective."""
    try:
        return str(error)
    except Exception as e:  # noqa: BLE001 (the other ranks wait to be told)
        return f"(no text: its __str__ raised {type(e).__name__})"


def typed_text(error: BaseException) -> str:
    """Return an error's type and text. Not collective."""
    return f"{type(error).__name__}: {text_of(error)}"


def own_line(error: BaseException) -> traceback.FrameSummary | None:
    """Return where in the user's own program an error rose, or met what is not. Not collective."""
    packages = ("mpishard", "torch", "importlib")
    known = (os.path.dirname(str(sys.modules[name].__file__)) + os.sep for name in packages if name in sys.modules)
    outside = ("<frozen", *known)
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(outside)]
    return own[-1] if own else None


# in what a mesh, a ShardTensor and any object say of themselves
_OF_ONE_RANK = re.compile(r"; rank \d+ at \((\d+(, \d+)*,?)?\)|local_shape=\([\d, ]*\), | at 0x[0-9a-f]+")


def alike(text: str) -> str:
    """Return a text without the coordinates, block shapes and addresses of one rank. Not collective."""
    return _OF_ONE_RANK.sub("", text)


_SHOWN = 2000  # characters of each part: with all four, a text is below 10 kB


def shown(text: str) -> str:
    """Return a text, or of a very long one its ends. Not collective."""
    if len(text) <= _SHOWN:
        return text
    half = _SHOWN // 2 - 16
    return f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"


def ranges_of(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last rank of every run of consecutive ranks. Not collective."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = ranges[-1][0], rank
        else:
            ranges.append((rank, rank))
    return ranges


_LISTED = 16  # ranges


def ranks_text(ranges: Sequence[tuple[int, int]], count: int | None = None) -> str:
    """Return how a text names ranks: "rank 3", "ranks 3, 7-12 and 40".

    Not collective.

    Parameters
    ----------
    ranges
        First and last rank of every run, as of `ranges_of`.
    count
        How many ranks there are, where ``ranges`` are but the first of them.
    """
    known = sum(last - first + 1 for first, last in ranges)
    count = known if count is None else count
    words: list[str] = []
    for first, last in ranges[:_LISTED]:
        words += [f"{first}-{last}"] if last - first > 1 else [str(r) for r in range(first, last + 1)]
    if count > known or len(ranges) > _LISTED:
        words.append("others")
    listed = " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "none"
    return f"rank{'s' * (count > 1)} {listed}{f' ({count} ranks)' * (count > 8)}"
