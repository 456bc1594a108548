"""The model beside the hosts in C and Fortran."""

import pytest
import torch
from mpi4py import MPI

import mpishard as ms

with pytest.raises(ms.MpishardError, match="no name of a program"):
    ms.insitu.join("model", timeout=30)
me = ms.insitu.join("model", timeout=30)
mesh = ms.init_mesh((2,), ("y",), comm=me.comm)
u, tau = (ms.zeros(7, 5, mesh=mesh, placements=(ms.Shard(1),), dtype=t) for t in (torch.float64, torch.float32))


def refused(text, **fields):
    with pytest.raises(ms.MpishardError, match=text):
        me.connect("solver", **fields)


refused("gave up")
refused("'tau'", into={"u": u}, out={"tau": ms.zeros(7, 6, mesh=mesh, placements=(ms.Shard(1),))})
with me.connect("solver", into={"u": u}, out={"tau": tau}) as link:
    for _ in link:
        tau.copy_(2 * u)
        link.put()
link = me.connect("solver", into={"u": u})
back = me.connect("solver", out={"tau": tau})
# the host has put all it will
MPI.COMM_WORLD.Barrier()
assert list(link) == [4, 5]
assert (u.full_tensor() == 5).all()
for _ in range(3):
    back.put()
back.close()
link.close()
link = me.connect("solver", into={"u": u})
# the host has been told that there is no room
MPI.COMM_WORLD.Barrier()
assert link.get() == 0
link.close()
