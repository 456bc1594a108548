"""Errors that mpishard raises on purpose: every text says what was expected, what came, and the fix."""

from __future__ import annotations


class MpishardError(Exception):
    """Base class of every error that mpishard raises on purpose."""


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
    """Another program of the job did not come, went away, or said something else than expected."""


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
        One text, the same on every rank for the same arguments.
    """
    return f"{what}\n  expected: {expected}\n  got:      {got}\n  fix:      {fix}"
