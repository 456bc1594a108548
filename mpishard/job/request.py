"""What a job asks for, checked against its site before a script is made of it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mpishard.errors import JobError
from mpishard.job.site import Site

_RANKS = re.compile("0*[1-9][0-9]{0,9}")
_TIME = re.compile(r"(?:([0-9]{1,4})-)?([0-9]{1,3}):([0-5][0-9]):([0-5][0-9])")
# each step, and the number behind %, is at least 1: of 0 at a time nothing would ever start
_SPAN, _COUNT = "[0-9]{1,9}-[0-9]{1,9}", "[1-9][0-9]{0,8}"
_INDICES = f"([0-9]{{1,9}}|{_SPAN}(:{_COUNT})?)"
_ARRAY = re.compile(f"{_INDICES}(,{_INDICES})*(%{_COUNT})?")
_PBS_ARRAY = re.compile(f"{_SPAN}(:{_COUNT})?(%{_COUNT})?")
# how long before its end a job is told at most
_NOTICE_S = 120
# PBS has no quoting for these, and names files by the job
_PBS_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+=:/-]*")
_PBS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.+-]{0,229}")


@dataclass(frozen=True)
class Program:
    """One of the programs of a job: how many ranks it has, and its command."""

    ranks: int
    command: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """A job, by the names of the command line's options. What is 0, empty or None is left to the site.

    Parameters
    ----------
    site
        Where it runs.
    scheduler
        ``"slurm"``, ``"pbs"`` or ``"mpirun"``.
    command
        The program and its arguments, or with ``multi_prog`` several in mpiexec's form, as
        ``-n 4 ./solver : -n 2 python model.py``.
    """

    site: Site
    scheduler: str
    command: tuple[str, ...]
    nodes: int = 1
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_rank: int | None = None
    time: str = "00:30:00"
    job_name: str = "mpishard"
    account: str = ""
    partition: str = ""
    env: str = ""
    checkpoints: str = ""
    max_requeues: int | None = None
    array: str = ""
    multi_prog: bool = False
    container: str = ""
    mesh: tuple[int, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs of each node."""
        if self.gpus_per_node is None:
            return int(self.site.fact("gpus_per_node", 1))
        return self.gpus_per_node

    @property
    def ranks_on_node(self) -> int:
        """Ranks on each node: one per GPU, or one, where the request says nothing."""
        return self.ranks_per_node or self.gpus or 1

    @property
    def ranks(self) -> int:
        """All ranks of the job."""
        return self.nodes * self.ranks_on_node

    @property
    def time_s(self) -> int:
        """The time of the job in seconds, once it is checked."""
        days, hours, minutes, seconds = (int(part or 0) for part in _TIME.fullmatch(self.time).groups())  # type: ignore[union-attr]
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def notice_s(self) -> int:
        """How many seconds before its end a job that saves is told."""
        return min(_NOTICE_S, self.time_s // 2)

    @property
    def notice(self) -> str:
        """The same in words, for comments."""
        return "two minutes" if self.notice_s == _NOTICE_S else f"{self.notice_s} s"

    @property
    def cpus(self) -> int:
        """Cores of each rank: the request's, what the site's binding gives, or an even share of the node."""
        if self.cpus_per_rank:
            return self.cpus_per_rank
        if self.fills_gpus and self.site.fact("cpu_bind_cores"):
            return int(self.site.fact("cpu_bind_cores"))
        return max(1, int(self.site.fact("cores_per_node", 1)) // self.ranks_on_node)

    @property
    def fills_gpus(self) -> bool:
        """Whether every GPU of the node has one rank, as the site's binding expects."""
        return self.gpus > 0 and self.gpus == self.ranks_on_node == self.site.fact("gpus_per_node")

    @property
    def cpu_bind(self) -> str:
        """The value of the launcher's ``--cpu-bind``, or nothing."""
        if self.fills_gpus and self.cpus <= self.site.fact("cpu_bind_cores", 0):
            return str(self.site.fact("cpu_bind", ""))
        return str(self.site.fact("cpu_bind_else", ""))

    @property
    def requeues(self) -> int:
        """How often the job may be started again."""
        if self.max_requeues is None:
            return 10 if self.checkpoints else 0
        return self.max_requeues

    @property
    def saves(self) -> bool:
        """Whether the program knows what to do when it is told to stop."""
        return bool(self.checkpoints or self.requeues)

    @property
    def programs(self) -> list[Program]:
        """The programs of the job in the order of their ranks; one, unless ``multi_prog``."""
        if not self.multi_prog:
            return [Program(self.ranks, self.command)]
        found = []
        words: list[str] = []
        for word in (*self.command, ":"):
            if word != ":":
                words.append(word)
                continue
            if len(words) < 3 or words[0] not in ("-n", "-np") or not _RANKS.fullmatch(words[1]):
                raise JobError(
                    "several programs in one job",
                    expected="-n RANKS PROGRAM ARGUMENTS... : -n RANKS PROGRAM ARGUMENTS...",
                    got=" ".join(words) or "nothing between two colons",
                    fix="write each program as mpiexec takes it, with a colon between",
                )
            found.append(Program(int(words[1]), tuple(words[2:])))
            words = []
        return found

    def check(self) -> None:
        """Raise a `JobError` unless the job can run on its site. Not collective."""
        for problem in (self._of_site, self._of_resources, self._of_words, self._of_programs, self._of_mesh):
            problem()

    def _of_site(self) -> None:
        runs = self.site.fact("scheduler", self.scheduler)
        if runs != self.scheduler and self.scheduler != "mpirun":
            raise _wrong(f"{self.site.title}: its scheduler", runs, self.scheduler, f"mpishard {runs} render")
        if self.site.fact("account", False) and not self.account:
            raise _wrong(f"{self.site.title} charges every job", "--account", "none", "name your project")

    def _of_resources(self) -> None:
        for name, least in (("nodes", 1), ("ranks_per_node", 1), ("cpus_per_rank", 1), ("gpus_per_node", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise _wrong(f"--{name.replace('_', '-')}", f"at least {least}", value, "ask for more")
        if self.ranks > 2**31 - 1:
            raise _wrong("ranks", "as many as MPI can count: 2147483647", self.ranks, "ask for fewer nodes")
        most = self.site.fact("gpus_per_node")
        if most is not None and self.gpus > most:
            raise _wrong(
                f"--gpus-per-node on {self.site.title}",
                f"at most {most}",
                self.gpus,
                "ask for more nodes" if most else "take a site with GPUs, such as generic-gpu",
            )
        cores, needed = self.site.fact("cores_per_node"), self.ranks_on_node * self.cpus
        if cores is not None and needed > cores:
            raise _wrong(
                f"--ranks-per-node times --cpus-per-rank on {self.site.title}",
                f"at most {cores} cores",
                f"{self.ranks_on_node} x {self.cpus} = {needed}",
                "ask for fewer ranks or cores of each node, and more nodes",
            )
        if not 0 <= self.requeues <= 1000:
            raise _wrong("--max-requeues", "0 to 1000", self.requeues, "a job without a cap may never end")

    def _of_words(self) -> None:
        found = _TIME.fullmatch(self.time)
        if not found or not any(int(part or 0) for part in found.groups()):
            raise _wrong("--time", "HH:MM:SS, more than nothing", repr(self.time), "such as 02:30:00")
        for name in ("job_name", "account", "partition"):
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            if any(ord(c) < 32 or ord(c) == 127 for c in value):
                raise _wrong(option, "one line, without control characters", repr(value), "give another one")
            if self.scheduler == "pbs" and value and not _PBS_WORD.fullmatch(value):
                raise _wrong(option, "letters, digits and _ . @ + = : / -", repr(value), "PBS knows no quotes here")
        if not self.job_name:
            raise _wrong("--job-name", "a name", "nothing", "leave the option out")
        if self.scheduler == "pbs" and not _PBS_NAME.fullmatch(self.job_name):
            raise _wrong("--job-name", "a letter, then letters, digits and _ . + -", repr(self.job_name), "rename it")
        spans = [(int(first), int(last)) for first, last in re.findall("([0-9]{1,9})-([0-9]{1,9})", self.array)]
        if self.array and self.scheduler == "pbs":
            if not _PBS_ARRAY.fullmatch(self.array) or any(first >= last for first, last in spans):
                raise _wrong("--array", "a range of PBS, such as 0-9, 0-8:2 or 0-9%2", repr(self.array), "see man qsub")
        elif self.array and (not _ARRAY.fullmatch(self.array) or any(first > last for first, last in spans)):
            raise _wrong("--array", "indices such as 0-9 or 1,3,5-7%2", repr(self.array), "see man sbatch")
        for word in (*self.command, self.env, self.checkpoints, self.container):
            if "\0" in word:
                raise _wrong("a word of the job", "text", "a null byte", "no program can be given one")

    def _of_programs(self) -> None:
        programs = self.programs
        for program in programs:
            if not program.command or not program.command[0] or program.command[0].startswith("-"):
                raise _wrong(
                    "the command",
                    "a program and its arguments after --",
                    repr(program.command[:1]),
                    "mpishard slurm render ... -- python train.py",
                )
        if self.scheduler != "slurm" and any(":" in p.command for p in programs):
            raise _wrong("the command", "no word that is a colon alone", "':'", "mpiexec begins a program behind it")
        total = sum(p.ranks for p in programs)
        if total != self.ranks:
            raise _wrong(
                "ranks of the programs",
                f"{self.ranks}: {self.nodes} nodes x {self.ranks_on_node}",
                " + ".join(str(p.ranks) for p in programs),
                "let the numbers after -n add up to --nodes times --ranks-per-node",
            )

    def _of_mesh(self) -> None:
        if not self.mesh:
            return
        known = prod(extent for extent in self.mesh if extent != -1)
        fits = known == self.ranks if -1 not in self.mesh else known > 0 and self.ranks % known == 0
        if not fits or self.mesh.count(-1) > 1 or any(extent < 1 and extent != -1 for extent in self.mesh):
            raise _wrong(
                "--mesh",
                f"extents with the product {self.ranks}: {self.nodes} nodes x {self.ranks_on_node} ranks",
                "x".join(map(str, self.mesh)),
                "leave one extent to mpishard with -1, or ask for other nodes and ranks",
            )


def _wrong(what: str, expected: object, got: object, fix: str) -> JobError:
    return JobError(what, expected=expected, got=got, fix=fix)


def quoted(word: str) -> str:
    r"""Return a word as bash reads it, in one line of text. Not collective.

    Examples
    --------
    >>> quoted("two words"), quoted("it's")
    ("'two words'", "$'it\\\\x27s'")
    """
    if word.isascii() and word.isprintable() and not set(word) & set("'$`\\~"):
        return shlex.quote(word)
    # $'...' takes any byte by its number, also what is not text
    shown = (chr(b) if 32 <= b < 127 and b not in b"'\\" else f"\\x{b:02x}" for b in os.fsencode(word))
    return f"$'{''.join(shown)}'"


def joined(words: Sequence[str]) -> str:
    """Return words as one line of bash. Not collective."""
    return " ".join(map(quoted, words))
