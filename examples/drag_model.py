"""A drag where the water is fast, from a convolution: the model of shallow_water.f90, on its ranks or beside it.

mpiexec -n 4 ./shallow_water 100 drag_model.py:drag
mpiexec -n 4 ./shallow_water 100 : -n 2 python drag_model.py [strength]
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import mpishard as ms

NX, NY = 48, 36


KERNEL = torch.full((1, 1, 3, 3), 1 / 9, dtype=torch.float64)


def drag(_h, u, v, strength=0.5):
    speed = (u * u + v * v).sqrt()
    return strength * F.conv2d(F.pad(speed[None, None], (1, 1, 1, 1), mode="circular"), KERNEL)[0, 0]


def nothing(h, u, v):
    return drag(h, u, v, 0.0)


def main() -> None:
    strength = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    me = ms.insitu.join("model")
    mesh = ms.init_mesh((-1,), ("x",), periodic=True, comm=me.comm)
    h, u, v, tau = (ms.zeros(NX, NY, mesh=mesh, placements=(ms.Shard(0),), dtype=torch.float64) for _ in range(4))
    with torch.no_grad(), me.connect("water", into={"h": h, "u": u, "v": v}, out={"tau": tau}) as link:
        for _ in link:
            tau.copy_(drag(h, u, v, strength))
            link.put()


if __name__ == "__main__":
    main()
