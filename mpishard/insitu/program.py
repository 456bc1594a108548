"""Programs of one MPI job that find each other by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpishard.comm import guard
from mpishard.comm.coupling import wire
from mpishard.comm.coupling.meeting import Meeting, meet
from mpishard.comm.main_thread import require_allowed
from mpishard.errors import MpishardError, PeerError, UnsupportedOperationError
from mpishard.insitu.link import Link


class Program:
    """A program among those of its job: made by `join`.

    Attributes
    ----------
    name : str
    comm : mpi4py.MPI.Intracomm
        Of this program's ranks, in the order of MPI_COMM_WORLD: the program's own, for meshes and all else.
    programs : dict
        Name -> number of ranks, of all programs of the job.
    """

    def __init__(self, name: str, meeting: Meeting) -> None:
        self.name = name
        self.comm = meeting.comm
        self.programs = meeting.programs
        self._meeting = meeting
        self._counts = dict.fromkeys(meeting.others, 0)

    def connect(
        self,
        other: str,
        out: Mapping[str, Any] | None = None,
        into: Mapping[str, Any] | None = None,
        *,
        policy: str | None = None,
        depth: int | None = None,
        timeout: float | None = None,
    ) -> Link:
        """Make a link to another program.

        Collective over both programs, each of which calls it; the first call here meets the first call there, and
        so on. Two programs may have several links, and links to several programs, made in an order that does not
        go in a circle.

        Parameters
        ----------
        other
            Name of the other program.
        out, into
            Per name the tensor (or adopted field) that is put, and the one that is filled; or a layout, of which the
            link makes a tensor on this program's ranks, in the other side's dtype. What is ``out`` on one side is
            ``into`` on the other.
        policy
            What `Link.put` of this side does when all slots are full: ``"block"`` (default) waits,
            ``"drop_newest"`` drops the step, ``"latest"`` drops the oldest that was not read. Where this side only
            reads, its policy and depth count if the writer gives none.
        depth
            Slots: steps that may be under way, 2 if not given, and 65,536 at most.
        timeout
            Seconds after which the other side counts as gone, here and in every call of the link: more than its
            longest step takes. 60 if not given.

        Returns
        -------
        Link

        Raises
        ------
        LayoutError, UnsupportedDtypeError
            On all ranks of both programs: names, global shapes or dtypes differ.
        PeerError
            There is no such program, or it did not come in time.
        UnsupportedOperationError
            On all ranks: this would be the 4,097th link of two programs, or the 16,384th of one.

        Examples
        --------
        >>> me = ms.insitu.join("solver")
        >>> link = me.connect("model", out={"u": u}, into={"tau": tau}, policy="block", depth=2, timeout=60)
        """
        require_allowed("connect")
        error: MpishardError | None = None
        if not isinstance(other, str) or other not in self._counts:
            error = PeerError(
                "connect: no such program",
                expected=f"another program of the job: {sorted(self._counts) or 'there is none'}",
                got=f"{other!r}, in program {self.name!r}",
                fix="name it as it names itself in join, and start it in the same job",
            )
        elif self._counts[other] >= wire.MOST_LINKS or sum(self._counts.values()) >= wire.MOST_OF_PROGRAM:
            error = UnsupportedOperationError(
                f"connect: no tags are left for one more link to {other!r}",
                expected=f"{wire.MOST_LINKS} links of two programs at most, and {wire.MOST_OF_PROGRAM} of one, "
                "closed ones too",
                got=f"{self._counts[other]} to this one, {sum(self._counts.values())} in all",
                fix="keep a link, and call put and get many times, in place of a link for every step",
            )
        # one rank may have misspelt it
        guard.agree(self._meeting.circle.comm, error, f"connect({other!r})")
        number, self._counts[other] = self._counts[other], self._counts[other] + 1
        serial = sum(self._counts.values()) - 1
        return Link(self._meeting, self.name, other, number, serial, out or {}, into or {}, policy, depth, timeout)

    def __repr__(self) -> str:
        others = ", ".join(f"{name}: {ranks}" for name, ranks in self.programs.items())
        return f"Program({self.name!r} of {{{others}}})"


def join(name: str, *, timeout: float | None = None) -> Program:
    """Join the other programs of this MPI job, by name.

    Collective over MPI_COMM_WORLD, in all programs of the job (``mpiexec -n 4 solver : -n 2 python model.py``, or
    ``srun --multi-prog``): ranks that give the same name are one program, wherever they are.

    Parameters
    ----------
    name
        Of this program.
    timeout
        Seconds to wait for the others; 60 if not given.

    Returns
    -------
    Program

    Raises
    ------
    PeerError
        On all ranks: some did not come, two programs have one name, or a name or timeout is none. They may call again.

    Examples
    --------
    >>> me = ms.insitu.join("solver")
    >>> mesh = ms.init_mesh((2, 2), ("y", "x"), comm=me.comm)
    """
    return Program(name, meet(name, timeout))
