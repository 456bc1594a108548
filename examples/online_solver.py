"""online_solver.f90 in Python: the same equations, differences, fields and arguments.

mpiexec -n 4 python online_solver.py 800 100 64 : -n 2 python online_model.py 800 64
"""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI

import mpishard as ms

RATIO = 4
G, DEPTH, F, NU, DT = 1.0, 1.0, 0.05, 0.02, 0.3
H, U, V = range(3)


class Solver:
    """One rank's part of the plane: arrays [component, x, y] with one ghost layer."""

    def __init__(self, cart: MPI.Cartcomm, cells: int) -> None:
        self.cart = cart
        places = list(zip(cart.dims, cart.coords, strict=True))
        self.first = [c * cells // n for n, c in places]
        self.own = [(c + 1) * cells // n - a for (n, c), a in zip(places, self.first, strict=True)]
        self.cells = cells

    def zeros(self, ratio: int = 1) -> np.ndarray:
        """Return a run's state."""
        return np.zeros((3, ratio * self.own[0] + 2, ratio * self.own[1] + 2))

    def start(self) -> np.ndarray:
        """Return the fine run's first state: hills and hollows of several widths, at rest."""
        q, n = self.zeros(RATIO), self.cells
        x, y = (a + (np.arange(1, RATIO * m + 1) - 0.5) / RATIO for a, m in zip(self.first, self.own, strict=True))
        for hill in range(1, 17):
            center = n * (hill * 0.6180339887 % 1), n * (hill * 0.7548776662 % 1)
            width = 2.5 + 2 * (hill * 0.5698402910 % 1)
            away = [(a - c + n / 2) % n - n / 2 for a, c in zip((x, y), center, strict=True)]
            hump = np.exp(-(away[0][:, None] ** 2 + away[1][None, :] ** 2) / (2 * width**2))
            q[H, 1:-1, 1:-1] += 0.05 * (-1) ** hill * hump
        return q

    def average(self, truth: np.ndarray, out: np.ndarray) -> None:
        """Write the fine run on the coarse cells."""
        blocks = truth[:, 1:-1, 1:-1].reshape(3, self.own[0], RATIO, self.own[1], RATIO)
        out[:, 1:-1, 1:-1] = blocks.mean((2, 4))

    def refresh(self, q: np.ndarray) -> None:
        """Exchange the ghost cells; no corner is read."""
        for dim in range(2):
            low, high = self.cart.Shift(dim, 1)
            a = q if dim == 0 else q.transpose(0, 2, 1)
            for send, to, into, of in ((1, low, -1, high), (-2, high, 0, low)):
                came = np.empty_like(np.ascontiguousarray(a[:, into]))
                self.cart.Sendrecv(np.ascontiguousarray(a[:, send]), to, 0, came, of, 0)
                a[:, into] = came

    def advance(self, q: np.ndarray, dx: float) -> None:
        """Take one step of cells of width ``dx``: first the flow, then, with the new one, the height."""
        self.refresh(q)
        step, h, u, v = DT * dx, *(q[k, 1:-1, 1:-1].copy() for k in range(3))
        q[U, 1:-1, 1:-1], q[V, 1:-1, 1:-1], spread = (
            u + step * (F * v - G * along_x(q[H], dx) - transport(q[U], u, v, dx) + diffusion(q[U], dx)),
            v + step * (-F * u - G * along_y(q[H], dx) - transport(q[V], u, v, dx) + diffusion(q[V], dx)),
            diffusion(q[H], dx),
        )
        self.refresh(q)
        flux = (DEPTH + q[H]) * q[U:]
        q[H, 1:-1, 1:-1] = h - step * (along_x(flux[0], dx) + along_y(flux[1], dx) - spread)


def along_x(a: np.ndarray, dx: float) -> np.ndarray:
    return (a[2:, 1:-1] - a[:-2, 1:-1]) / (2 * dx)


def along_y(a: np.ndarray, dx: float) -> np.ndarray:
    return (a[1:-1, 2:] - a[1:-1, :-2]) / (2 * dx)


def transport(a: np.ndarray, u: np.ndarray, v: np.ndarray, dx: float) -> np.ndarray:
    return u * along_x(a, dx) + v * along_y(a, dx)


def diffusion(a: np.ndarray, dx: float) -> np.ndarray:
    return NU * (a[2:, 1:-1] + a[:-2, 1:-1] + a[1:-1, 2:] + a[1:-1, :-2] - 4 * a[1:-1, 1:-1]) / dx**2


def main() -> None:
    steps, window, cells = map(int, sys.argv[1:4])
    me = ms.insitu.join("water")
    cart = me.comm.Create_cart(MPI.Compute_dims(me.comm.size, 2), periods=(True, True))
    solver = Solver(cart, cells)
    truth, fine = solver.start(), solver.zeros()
    solver.average(truth, fine)
    coarse, alone, closed, closure = fine.copy(), fine.copy(), fine.copy(), solver.zeros()
    sim = ms.insitu.adopt(cart, shape=(cells, cells), halo=1)
    given = {"fine": fine, "coarse": coarse, "alone": alone, "closed": closed, "closure": closure}
    # the model's fields are [x, y, component], as Fortran's are
    fields = {n: sim.field(n, a.transpose(1, 2, 0), dims=(0, 1, None)) for n, a in given.items()}
    back = {"closure": fields.pop("closure")}
    with me.connect("model", out=fields, into=back, timeout=600) as link:
        for step in range(steps):
            if step % window == 0:
                alone[...] = closed[...] = fine
            link.put()
            # the model works meanwhile
            for _ in range(RATIO):
                solver.advance(truth, 1 / RATIO)
            coarse[...] = fine
            for run in (coarse, alone, closed):
                solver.advance(run, 1.0)
            solver.average(truth, fine)
            link.get()
            closed += closure
    sim.release()


if __name__ == "__main__":
    main()
