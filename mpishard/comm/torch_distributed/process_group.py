"""torch.distributed over plain MPI: for torch's own DDP, fully_shard, DTensor and checkpoints, under any launcher.

A `torch.distributed` backend named ``"mpishard"``: every group of it is a communicator of its own, made from that
of torch's default group by ``MPI_Comm_create_group``, so that only its members take part. No store, port or thread.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpishard.comm import guard
from mpishard.comm.lifetime import made
from mpishard.comm.mesh import CartMesh
from mpishard.comm.null import NullComm, no_values
from mpishard.comm.setting import first_agreement
from mpishard.comm.torch_distributed.group import BACKEND, TAGS, MPIProcessGroup
from mpishard.comm.torch_distributed.store import OwnStore
from mpishard.errors import MeshError, MpishardError


def process_group(where: CartMesh | MPI.Intracomm | None = None) -> dist.ProcessGroup:
    """Return the `torch.distributed` process group of a mesh, of one of its dims, or of a communicator.

    Collective over ``where``. The first call starts `torch.distributed` (there is nothing to launch it with, no
    address to name): its ranks are those of ``where``, of the whole mesh if ``where`` is a sub-mesh, and the call
    is collective over these. Later ones make sub-groups of it.

    Parameters
    ----------
    where
        A mesh or sub-mesh (``mesh["y"]``), or an mpi4py communicator; torch's default group if not given. It is
        duplicated.

    Returns
    -------
    torch.distributed.ProcessGroup
        Group ranks are the ranks of ``where``, in their order. Works wherever torch takes ``group=`` or
        ``process_group=``: collectives, point to point and their ``async_op``, objects, barriers, ``new_group``,
        ``init_device_mesh``, DistributedDataParallel, ``fully_shard``, DTensor, distributed checkpoints.

    Raises
    ------
    MeshError
        `torch.distributed` runs on another backend already, or ``where`` has ranks beyond its default group.

    Notes
    -----
    A collective with ``async_op=True`` that sums runs while the ranks go on; others are over when the call returns,
    and their work handles are done. ``DistributedDataParallel`` asks for a bucket's result when it starts it, so that
    its buckets do not overlap with backward here; those of `mpishard.distribute_module` do.

    Operation, root, dtypes and sizes of a collective are compared before it begins, in a message of 32 bytes: those
    that differ are a `DesyncError` on every rank, of a sum in the background when it is waited for.

    A checkpoint in the background (``async_save``) communicates from a thread: give it a group of its own,
    ``process_group=dist.new_group()``. Torch has ``dist.monitored_barrier`` for gloo and ``bf16_compress_hook`` for
    NCCL alone, and refuses them here; the watchdog names who is missing at any barrier.

    Examples
    --------
    >>> mesh = ms.init_mesh((2, -1), ("data", "y"))
    >>> group = ms.process_group(mesh["data"])
    >>> model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    """
    if where is None and dist.is_initialized():
        return _ours(dist.group.WORLD)
    comm, whole = _comms_of(where)
    if not dist.is_initialized():
        store, rank, size = OwnStore(), whole.Get_rank(), whole.Get_size()
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, pg_options=_Over(whole))
    world = _ours(dist.group.WORLD)
    ranks = _ranks_in(comm, world.comm)
    if len(ranks) == world.comm.size:
        return world
    made = world.parts.get(ranks)
    if made is None or made not in dist.distributed_c10d._world.pg_map:  # new, or destroyed
        # only its members make it
        made = dist.new_group(list(ranks), backend=BACKEND, use_local_synchronization=True)
        world.parts[ranks] = made
    return made


class _Over(NamedTuple):
    """The communicator of torch's default group, on its way through torch."""

    comm: MPI.Intracomm


def _comms_of(where: CartMesh | MPI.Intracomm | None) -> tuple[MPI.Intracomm, MPI.Intracomm]:
    """Return the communicator that is meant, and the one for torch's default group."""
    if where is None:
        return MPI.COMM_WORLD, MPI.COMM_WORLD
    if isinstance(where, CartMesh):
        if isinstance(where.root_comm, NullComm):
            raise no_values("process_group")
        return where.all_ranks.comm, where.root_comm
    if not isinstance(where, MPI.Intracomm) or where == MPI.COMM_NULL:
        raise MeshError(
            "process_group: no ranks to make a group of",
            expected="a CartMesh, or an mpi4py intra-communicator that this rank belongs to",
            got=type(where).__name__,
            fix="give a mesh, one of its dims (mesh['y']), or a communicator",
        )
    return where, where


def _ranks_in(comm: MPI.Intracomm, world: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks in ``world`` of the ranks of ``comm``."""
    own, of = comm.Get_group(), world.Get_group()
    ranks = tuple(own.Translate_ranks(None, of))
    own.Free()
    of.Free()
    if MPI.UNDEFINED in ranks:
        raise MeshError(
            "process_group: ranks that torch.distributed does not know",
            expected=f"ranks of its default group, which has {world.size}",
            got=f"{ranks.count(MPI.UNDEFINED)} of {len(ranks)} beyond it",
            fix="make the group of the largest communicator first: it becomes the default group",
        )
    if list(ranks) != sorted(ranks):
        raise MeshError(
            "process_group: ranks in another order than torch.distributed's",
            expected="ranks in the order of its default group, as torch has them in every group",
            got=f"ranks {ranks[:8]}{', ...' if len(ranks) > 8 else ''} of it",
            fix="make the communicator with keys that keep the order",
        )
    return ranks


def _ours(group: Any) -> MPIProcessGroup:
    if not isinstance(group, MPIProcessGroup):
        raise MeshError(
            "process_group: torch.distributed runs on another backend",
            expected=f"not started yet, or by {BACKEND!r}",
            got=repr(dist.get_backend(group)),
            fix="call mpishard.process_group before (in place of) torch.distributed.init_process_group",
        )
    return group


def _create(options: Any, over: _Over | None) -> MPIProcessGroup:
    """Make the group that torch asks for. Collective over its members."""
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        parent = MPI.COMM_WORLD if over is None else over.comm
        comm = made("a new process group", parent, parent.Dup)
        error = None
        if (comm.Get_rank(), comm.Get_size()) != (options.group_rank, options.group_size):
            error = MeshError(
                "torch.distributed: other ranks than MPI's",
                expected=f"rank {comm.Get_rank()} of {comm.Get_size()}",
                got=f"rank {options.group_rank} of {options.group_size}",
                fix="start it with mpishard.process_group(mesh or communicator)",
            )
        try:
            # of one rank alone, too: the others wait for it
            first_agreement(comm, error, "process_group")
        except MpishardError:
            comm.Free()
            raise
        return MPIProcessGroup(comm)
    world = _ours(dist.group.WORLD)
    whole = world.comm
    every = whole.Get_group()
    members = every.Incl(ranks)
    # groups of overlapping members may be made at the same time. Not by torch's name: it counts the groups that a rank
    # belongs to, which may differ between members; how often these have made a group of just these ranks does not
    number = world.made[tuple(ranks)] = world.made.get(tuple(ranks), 0) + 1
    tag = zlib.crc32(str((ranks, number)).encode()) % TAGS
    with guard.waiting("a new process group", ranks, whole):
        comm = whole.Create_group(members, tag)
    members.Free()
    every.Free()
    return MPIProcessGroup(comm)


# torch's ShardedTensor gathers on a GPU wherever its back-end names them
_DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=_DEVICES)
# torch 2.15 would hang its recorder of calls on the group, which needs a back-end in C++
getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add(BACKEND)
