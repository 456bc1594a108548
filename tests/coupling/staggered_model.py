"""The program beside staggered.c: it reads the fields with their faces."""

import torch

import mpishard as ms

NX, NY = 7, 6
me = ms.insitu.join("model")
mesh = ms.init_mesh((-1,), ("y",), comm=me.comm)
shapes = {"h": (NX, NY), "u": (NX + 1, NY), "v": (NX, NY), "node": (NX + 1, NY)}
into = {n: ms.zeros(*s, mesh=mesh, placements=(ms.Shard(1),), dtype=torch.float64) for n, s in shapes.items()}
with me.connect("solver", into=into, timeout=30) as link:
    assert list(link) == [0]
i, j = torch.arange(NX + 1)[:, None], torch.arange(NY)
value = (i * i + 3 * i * j * j).double()
for name, (n, _) in shapes.items():
    assert torch.equal(into[name].full_tensor(), value[:n]), name
