"""Environment variables that change which messages ranks send: compared where ranks first meet."""

from __future__ import annotations

from mpi4py import MPI

from mpishard.comm import disagreement, guard
from mpishard.comm.environment import switch
from mpishard.errors import MeshError

DETERMINISTIC = bool(switch("MPISHARD_DETERMINISTIC"))


def first_agreement(comm: MPI.Intracomm, error: BaseException | None, signature: str = "") -> None:
    """Do what `guard.agree` does, and raise where the variables are not the same on all ranks.

    Collective, and the same messages whatever the variables say.

    Parameters
    ----------
    comm, error, signature
        As of `guard.agree`.

    Raises
    ------
    MeshError
        On every rank: a variable differs.
    """
    mine = _settings()
    bits = sum(on << i for i, on in enumerate(mine.values()))
    if guard.agree(comm, error, signature, (bits, -bits), first=True) == (bits, -bits):
        return
    with guard.waiting("comparison of environment variables", (), comm):
        found = {name: disagreement.kinds(comm, f"{name}={int(on)}") for name, on in mine.items()}
    odd = {name: kinds for name, kinds in found.items() if len(kinds) > 1}
    raise guard.common(
        MeshError(
            f"environment variables differ between ranks: {', '.join(odd)}",
            expected="the same on all ranks, which send other messages with it",
            got="; ".join(str(kind) for kinds in odd.values() for kind in kinds),
            fix="export it before the launcher, not in a shell's own file",
        ),
        comm,
    )


def _settings() -> dict[str, bool]:
    return {"MPISHARD_DEBUG": guard.DEBUG, "MPISHARD_DETERMINISTIC": DETERMINISTIC}
