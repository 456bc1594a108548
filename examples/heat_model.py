"""The model beside heat.c: a source of heat from a convolution of the temperature, on ranks of its own.

mpiexec -n 4 ./heat 100 : -n 2 python heat_model.py [strength]
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import mpishard as ms

N = 24


def main() -> None:
    strength = float(sys.argv[1]) if len(sys.argv) > 1 else 0.1
    me = ms.insitu.join("model")
    mesh = ms.init_mesh((-1,), ("z",), comm=me.comm)
    # another decomposition than the solver's: along the last dim alone
    u, q = (ms.zeros(N, N, N, mesh=mesh, placements=(ms.Shard(2),), dtype=torch.float64) for _ in range(2))
    kernel = torch.full((1, 1, 3, 3, 3), 1 / 27, dtype=torch.float64)
    with torch.no_grad(), me.connect("heat", into={"u": u}, out={"q": q}) as link:
        for _ in link:
            q.copy_(strength * (F.conv3d(u[None, None], kernel, padding=1)[0, 0] - u))
            link.put()


if __name__ == "__main__":
    main()
