"""The models that embedded.c and embedded.f90 name."""

import signal
import sys
import time

import torch
import torch.nn.functional as F
from mpi4py import MPI

LAST = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
weight = torch.ones(1, 1, 3, 3, dtype=torch.float64)
scale = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
optimizer = torch.optim.SGD([scale], lr=0.1)
losses = []
not_callable = 3


def box(u):
    return F.conv2d(u[None, None], weight, padding=1)[0, 0]


class Box:
    def __call__(self, u):
        return box(u)


instance = Box()


def around(u):
    return F.conv2d(F.pad(u[None, None], (1, 1, 1, 1), mode="circular"), weight)[0, 0]


def staggered(h, u, v, node):
    gradient = F.pad(h, (0, 0, 0, 1)) - F.pad(h, (0, 0, 1, 0))
    return {"h": u[1:] - u[:-1], "u": gradient, "v": v.roll(-1, 1), "node": box(node)}


def ring(u):
    return u * all(u.mesh.periodic)


def slow_box(u):
    time.sleep(0.3)
    return box(u)


def both(u, tau):
    return {"tau": box(u) + 0 * tau, "u": u + 1}


def handles(u):
    signal.signal(signal.SIGCHLD, lambda *_: None)  # as a DataLoader with workers does
    return box(u)


def summed(u):
    assert u.shape[0] == 3
    return u.sum(0, keepdim=True).expand(u.shape)


def summed_last(u):
    assert u.shape[2] == 3
    return u.sum(2, keepdim=True).expand(u.shape)


def raises_on_one(u):
    if LAST:
        raise ValueError("no such regime")
    return box(u)


def raises_late(u):
    y = box(u)
    if LAST:
        raise ValueError("no such regime")
    return y * u.sum()


class Untold(BaseException):
    def __str__(self):
        raise RuntimeError


def raises_long(u):
    raise ValueError("no such regime" + "é" * 3000)


def raises_untold(u):
    if LAST:
        raise Untold
    return box(u) * u.sum()


def raises_in_torch(u):
    return u.view(7)


def refused(u):
    return u.redistribute(placements=("no",))


def leaves(u):
    sys.exit(3)


def misshapen(u):
    return u[1:]


def two(u):
    return u, u


def plain(u):
    return u.to_local()


def not_numbers(u):
    y = torch.zeros(3, dtype=torch.float64)
    assert (y / y).isnan().all()
    assert (1 / y).isinf().all()
    return (u - u) / (u - u)


def learn(u):
    assert torch.is_grad_enabled()
    optimizer.zero_grad()
    loss = ((scale - 1) * torch.ones_like(u)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


def learned(u):
    assert not torch.is_grad_enabled()
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    print("LEARNED")
    return scale * box(u)
