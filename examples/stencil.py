#!/usr/bin/env python
"""Heat in a plate: a solver in plain numpy, whose halos `HaloExchanger` refreshes in place.

    mpiexec -n 4 python examples/stencil.py --cells 256 --steps 2000 --figure heat.png

The plate is a ring along x and insulated along y. A rank holds its cells and one halo cell on each side of them.
"""

import argparse

import numpy as np
import torch

import mpishard as ms

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--cells", type=int, default=128, help="of the plate, along each dim")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--figure", help="file for a picture of the result")
args = parser.parse_args()

# which cells are mine: a mesh as square as the number of ranks allows
mesh = ms.init_mesh((-1, -1), ("y", "x"), periodic=(False, True))
placements = (ms.Shard(0), ms.Shard(1))
layout = ms.zeros(args.cells, args.cells, mesh=mesh, placements=placements).sharding
y, x = (slice(start, start + n) for start, n in zip(layout.offset(mesh.coords), layout.local_shape(mesh.coords)))

plate = (np.indices((args.cells, args.cells)) + 0.5) / args.cells
hot = np.hypot(plate[0] - 0.5, plate[1] - 0.1) < 0.2
u = np.pad(hot[y, x].astype(float), 1, mode="edge")
new = u.copy()
exchange = ms.HaloExchanger(mesh, u.shape, 1, u.dtype)

for _ in range(args.steps):
    exchange(u)
    # beyond the ends of y no heat flows
    if mesh.coords[0] == 0:
        u[0] = u[1]
    if mesh.coords[0] == mesh.shape[0] - 1:
        u[-1] = u[-2]
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    new[1:-1, 1:-1] = u[1:-1, 1:-1] + 0.2 * (around - 4 * u[1:-1, 1:-1])
    u, new = new, u

# the cells of all ranks as one tensor: no copy, ready for a model or a file
result = ms.ShardTensor.from_local(torch.from_numpy(u[1:-1, 1:-1]), mesh, placements)
heat, hottest = result.sum().item() / args.cells**2, result.max().item()
picture = result.full_tensor() if args.figure else None
if mesh.rank == 0:
    print(f"mesh {mesh.shape}: after {args.steps} steps mean {heat:.12f}, hottest {hottest:.12f}")
    if picture is not None:
        import matplotlib.image

        matplotlib.image.imsave(args.figure, picture.numpy(), cmap="inferno")
