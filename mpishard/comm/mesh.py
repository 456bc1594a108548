"""CartMesh: a Cartesian MPI communicator of our own, with named dims, sub-meshes and a device per rank."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import torch
from mpi4py import MPI

from mpishard.comm import guard
from mpishard.errors import MeshError, MpishardError, described

T = TypeVar("T")


class Group(NamedTuple):
    """The ranks that share this rank's coordinates outside some mesh dims.

    ``rank`` is this rank's row-major position in those mesh dims, so a peer index of a plan is a rank of
    ``comm``.
    """

    comm: MPI.Intracomm
    rank: int
    size: int


class CartMesh:
    """The Cartesian process topology that tensors are sharded over.

    Build one with `init_mesh` or `CartMesh.from_comm`. It owns a duplicated communicator, so its messages
    never meet the host program's.

    Attributes
    ----------
    shape, coords, periodic : tuple
        Extent, this rank's coordinates and periodicity, one entry per mesh dim.
    rank, size : int
        This rank in the mesh, and the number of ranks.
    mesh_dim_names : tuple of str
    device : torch.device
        The GPU at this rank's position on its node, or the CPU.
    comm : mpi4py.MPI.Cartcomm
        The private communicator.
    """

    def __init__(self, cart: MPI.Cartcomm, names: Sequence[str] | None, device: torch.device | None = None) -> None:
        """Take ownership of ``cart``. Collective."""
        dims, periods, coords = cart.Get_topo()
        self.comm = cart
        self.shape = tuple(dims)
        self.periodic = tuple(bool(p) for p in periods)
        self.coords = tuple(coords)
        self.rank = cart.Get_rank()
        self.size = cart.Get_size()
        self.mesh_dim_names = _checked_names(names, len(self.shape))
        self.plans: dict[Any, Any] = {}
        self.freed = False
        self._groups: dict[tuple[int, ...], Group] = {}
        self._children: dict[tuple[str, ...], CartMesh] = {}
        self._resources: list[Callable[[], None]] = []
        self.device = _local_device(cart) if device is None else device
        # all sub-communicators now: making them is collective over the whole mesh, and an operation on a
        # sub-mesh must not depend on ranks outside it
        every = tuple(range(self.ndim))
        for k in range(1, self.ndim):
            for mesh_dims in combinations(every, k):
                sub = cart.Sub([m in mesh_dims for m in every])
                self._groups[mesh_dims] = Group(sub, sub.Get_rank(), sub.Get_size())
        self._groups[every] = Group(cart, self.rank, self.size)
        ref = weakref.ref(self)
        guard.on_finalize(lambda: mesh.free() if (mesh := ref()) is not None else None)

    @classmethod
    def from_comm(
        cls,
        comm: MPI.Cartcomm | int,
        mesh_dim_names: Sequence[str] | None = None,
        *,
        handle: str = "fortran",
        device: torch.device | str | None = None,
    ) -> CartMesh:
        """Adopt an existing Cartesian communicator (it is duplicated; the caller keeps its own).

        Collective over ``comm``.

        Parameters
        ----------
        comm
            An mpi4py communicator with a Cartesian topology, or the integer handle of one.
        mesh_dim_names
            One name per dim.
        handle
            What an integer is: ``"fortran"`` (``MPI_Comm_c2f``, an ``integer`` in Fortran) or ``"c"`` (the
            ``MPI_Comm`` itself, as an integer).
        device
            Override of the device rule.

        Returns
        -------
        CartMesh

        Raises
        ------
        MeshError
            The communicator has no Cartesian topology.

        Examples
        --------
        >>> mesh = ms.CartMesh.from_comm(cart.py2f(), ("y", "x"))
        """
        if isinstance(comm, int):
            if handle not in ("fortran", "c"):
                raise MeshError(
                    described("from_comm: unknown handle kind", expected="'fortran' or 'c'", got=handle, fix="name one")
                )
            comm = MPI.Comm.f2py(comm) if handle == "fortran" else MPI.Comm.fromhandle(comm)
        if comm == MPI.COMM_NULL or comm.Get_topology() != MPI.CART:
            raise MeshError(
                described(
                    "from_comm: not a Cartesian communicator",
                    expected="a communicator made by MPI_Cart_create (or a handle of one)",
                    got=repr(comm),
                    fix="use mpishard.init_mesh(shape, names, comm=comm), which makes the topology",
                )
            )
        return cls(MPI.Cartcomm(comm.Dup()), mesh_dim_names, _as_device(device))

    @property
    def ndim(self) -> int:
        """Number of mesh dims."""
        return len(self.shape)

    def group(self, mesh_dims: tuple[int, ...]) -> Group:
        """Return the group of ranks along ``mesh_dims`` (ascending). Not collective."""
        if self.freed:
            raise MeshError(
                described(
                    "mesh used after free()",
                    expected="a live mesh",
                    got=repr(self),
                    fix="free a mesh only when no tensor or exchanger on it is used any more",
                )
            )
        return self._groups[mesh_dims]

    def mesh_dim(self, dim: int | str) -> int:
        """Return the index of a mesh dim given by index or name. Not collective."""
        if isinstance(dim, str):
            if dim in self.mesh_dim_names:
                return self.mesh_dim_names.index(dim)
        elif -self.ndim <= dim < self.ndim:
            return dim % self.ndim
        raise MeshError(
            described(
                "no such mesh dim",
                expected=f"one of {self.mesh_dim_names} or an index below {self.ndim}",
                got=repr(dim),
                fix="name a dim of this mesh",
            )
        )

    def __getitem__(self, names: str | tuple[str, ...]) -> CartMesh:
        """Return the sub-mesh of the named dims that this rank lies in. Collective on the first call."""
        names = (names,) if isinstance(names, str) else tuple(names)
        if names not in self._children:
            dims = [self.mesh_dim(n) for n in names]
            if sorted(set(dims)) != dims:
                raise MeshError(
                    described(
                        "sub-mesh dims out of order", expected="dims in mesh order", got=names, fix="list them in order"
                    )
                )
            sub = self.group(tuple(range(self.ndim))).comm.Sub([m in dims for m in range(self.ndim)])
            self._children[names] = CartMesh(sub, names, self.device)
        return self._children[names]

    def neighbour(self, dim: int | str, displacement: int) -> int | None:
        """Return the mesh rank ``displacement`` steps along ``dim``, or None past a non-periodic edge.

        Not collective.
        """
        m = self.mesh_dim(dim)
        at = self.coords[m] + displacement
        if self.periodic[m]:
            at %= self.shape[m]
        elif not 0 <= at < self.shape[m]:
            return None
        return self.rank_at((*self.coords[:m], at, *self.coords[m + 1 :]))

    def rank_at(self, coords: Sequence[int]) -> int:
        """Return the mesh rank at ``coords`` (row-major, as MPI orders Cartesian ranks). Not collective."""
        rank = 0
        for c, s in zip(coords, self.shape):
            rank = rank * s + c
        return rank

    def plan(self, key: Any, build: Callable[[], T], mesh_dims: tuple[int, ...] | None = None) -> T:
        """Return the cached plan of ``key``, building it where it is new.

        Collective over ``mesh_dims`` (all, if not given) where it is new: user errors found by ``build`` rise
        on every rank, and ranks that ask for different plans are told so. Else not collective, one dictionary
        look-up.
        """
        plan = self.plans.get(key)
        if plan is None:
            error = None
            try:
                plan = build()
            except MpishardError as e:
                error = e
            every = tuple(range(self.ndim)) if mesh_dims is None else mesh_dims
            guard.agree(self.group(every).comm, error, repr(key))
            self.plans[key] = plan
        return plan  # type: ignore[return-value]

    def own(self, release: Callable[[], None]) -> None:
        """Have ``release`` called when the mesh is freed. Not collective."""
        self._resources.append(release)

    def free(self) -> None:
        """Free the plans, persistent requests and communicators of this mesh. Collective.

        Called at the end of the program for every mesh still alive; calling it twice is harmless.
        """
        if self.freed:
            return
        self.freed = True
        for child in self._children.values():
            child.free()
        for release in reversed(self._resources):
            release()
        self._resources.clear()
        self.plans.clear()
        for group in self._groups.values():
            group.comm.Free()
        self._groups.clear()

    def __repr__(self) -> str:
        dims = ", ".join(
            f"{n}={s}{' periodic' if p else ''}" for n, s, p in zip(self.mesh_dim_names, self.shape, self.periodic)
        )
        return f"CartMesh({dims}; rank {self.rank} at {self.coords}{', freed' if self.freed else ''})"

    def __reduce__(self) -> Any:
        raise MeshError(
            described(
                "a CartMesh cannot be pickled",
                expected="a live MPI communicator",
                got=repr(self),
                fix="make the mesh again with init_mesh in the other process",
            )
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CartMesh:
        return self


def init_mesh(
    shape: Sequence[int] | int,
    mesh_dim_names: Sequence[str] | None = None,
    *,
    periodic: bool | Sequence[bool] = False,
    comm: MPI.Intracomm | None = None,
    device: torch.device | str | None = None,
) -> CartMesh:
    """Make a Cartesian mesh over all ranks of a communicator.

    Collective over ``comm``.

    Parameters
    ----------
    shape
        Extent of every mesh dim; -1 entries are inferred from the number of ranks, several of them by the
        rule of ``MPI_Dims_create`` (as square as it goes, larger extents first).
    mesh_dim_names
        One name per dim; ``("dim0", ...)`` if not given.
    periodic
        Whether the last coordinate is a neighbour of the first, per dim or for all.
    comm
        Communicator to use; ``MPI.COMM_WORLD`` if not given. It is duplicated.
    device
        Override of the rule "the GPU at this rank's position on its node, or the CPU".

    Returns
    -------
    CartMesh
        Ranks keep their order: mesh rank = communicator rank, row-major in the coordinates.

    Raises
    ------
    MeshError
        The shape does not fit the number of ranks.

    Examples
    --------
    >>> mesh = ms.init_mesh((2, -1), ("y", "x"), periodic=(False, True))
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    shape = (shape,) if isinstance(shape, int) else tuple(int(s) for s in shape)
    names = _checked_names(mesh_dim_names, len(shape))
    periods = (bool(periodic),) * len(shape) if isinstance(periodic, (bool, int)) else tuple(map(bool, periodic))
    if len(periods) != len(shape):
        raise MeshError(
            described(
                "init_mesh: periodic does not fit the shape",
                expected=f"{len(shape)} flags or one for all",
                got=periods,
                fix="give one flag per mesh dim",
            )
        )
    full = _infer(shape, comm.Get_size())
    cart = comm.Create_cart(full, periods=periods, reorder=False)
    return CartMesh(cart, names, _as_device(device))


def _infer(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    known = math.prod(s for s in shape if s != -1)
    valid = shape and all(s > 0 or s == -1 for s in shape)
    if valid and known and size % known == 0 and (-1 in shape or known == size):
        return tuple(MPI.Compute_dims(size, [0 if s == -1 else s for s in shape]))
    raise MeshError(
        described(
            "init_mesh: the mesh shape does not fit the number of ranks",
            expected=f"extents > 0 (or -1) whose product is, or divides where there is a -1, {size} ranks",
            got=f"{shape} (product of the given extents: {known})",
            fix="change the shape, put -1 for an extent to infer, or start another number of ranks",
        )
    )


def _checked_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"dim{i}" for i in range(ndim))
    names = (names,) if isinstance(names, str) else tuple(names)
    if len(names) != ndim or len(set(names)) != ndim or not all(isinstance(n, str) for n in names):
        raise MeshError(
            described(
                "mesh dim names do not fit the mesh",
                expected=f"{ndim} different names",
                got=names,
                fix="give one name per mesh dim",
            )
        )
    return names


def _as_device(device: torch.device | str | None) -> torch.device | None:
    return None if device is None else torch.device(device)


def _local_device(comm: MPI.Comm) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    device = torch.device("cuda", node.Get_rank() % torch.cuda.device_count())
    node.Free()
    return device
