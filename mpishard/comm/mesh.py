"""CartMesh: a Cartesian MPI communicator of our own, with named dims, sub-meshes and a device per rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import combinations
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

import torch
from mpi4py import MPI

from mpishard.comm import guard, mesh_argument, thread
from mpishard.comm.device import gpu_aware as aware
from mpishard.comm.device_mesh import DeviceMeshNames, Ranks
from mpishard.comm.exit import require_mpi
from mpishard.comm.lifetime import Holding, duplicated, made
from mpishard.comm.mesh_device import as_device, local_device, local_rank, told_device
from mpishard.comm.plans import Plans, nbytes_of, plans_on, text_of
from mpishard.comm.setting import first_agreement
from mpishard.comm.tag import Label
from mpishard.errors import MeshError, MpishardError, typed_text
from mpishard.layout.partition import rank_of

T = TypeVar("T")


class Group(NamedTuple):
    """The ranks that share this rank's coordinates outside some mesh dims.

    ``rank`` is this rank's row-major position in those mesh dims, so a peer index of a plan is a rank of
    ``comm``. ``links`` are other ways to the same ranks, kept by those who made them. ``aware`` says whether
    messages go from GPU memory to GPU memory.
    """

    comm: MPI.Intracomm
    rank: int
    size: int
    links: dict[Any, Any]
    aware: bool = False


class CartMesh(DeviceMeshNames):
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
    local_rank : int
        This rank's position among the mesh's ranks on its node.
    device : torch.device
        The GPU at that position, or the CPU; several ranks share a GPU where there are more ranks than GPUs.
    comm : mpi4py.MPI.Cartcomm
        The private communicator.
    """

    def __init__(self, cart: MPI.Cartcomm, names: Sequence[str], device: torch.device | None = None) -> None:
        """Take ownership of ``cart``. Collective."""
        dims, periods, coords = cart.Get_topo()
        # a host program's communicator may end the job at an error; ours raises
        cart.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm: MPI.Intracomm = cart
        self.shape = tuple(dims)
        self.periodic = tuple(bool(p) for p in periods)
        self.coords = tuple(coords)
        self.rank = cart.Get_rank()
        self.size: int = Ranks(cart.Get_size())
        self.mesh_dim_names = tuple(names)
        self.forget()
        self._label: Label | None = None
        self._freed = False
        self._holding = Holding(cart)
        self.local_rank = local_rank(cart)
        self.device = local_device(self.local_rank) if device is None else device
        self._groups = self.made_groups(cart, aware.agreed(cart, self.device))

    def forget(self) -> None:
        """Have nothing planned, nor known of what its ranks hold. Not collective."""
        # not emptied: with MPISHARD_DEBUG they compare their keys on the communicator they were made with
        self.plans = plans_on(self.comm)
        # of the ranks along some dims only: what goes to make room is alike on all ranks that share a cache
        self._partial: dict[tuple[int, ...], Plans] = {}
        # what a rank makes on its own
        self.kept = Plans()
        # of the messages of all plans
        self.storages: list[Any] = []
        self._children: dict[tuple[int, ...], CartMesh] = {}
        # by id: parameters that were found to be the same on all ranks
        self.compared: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def made_groups(self, cart: MPI.Cartcomm, gpu_aware: bool) -> dict[tuple[int, ...], Group]:
        """Return the groups of all choices of mesh dims. Collective."""
        # all sub-communicators now: making them is collective over the whole mesh, and an operation on a
        # sub-mesh must not depend on ranks outside it
        every, groups = tuple(range(self.ndim)), {}
        for k in range(1, self.ndim):
            for mesh_dims in combinations(every, k):
                sub = cart.Sub([m in mesh_dims for m in every])
                sub.Set_errhandler(MPI.ERRORS_RETURN)
                self._holding.comms.append(sub)
                groups[mesh_dims] = Group(sub, sub.Get_rank(), sub.Get_size(), {}, gpu_aware)
        groups[every] = Group(cart, self.rank, int(self.size), {}, gpu_aware)
        for comm in self._holding.comms:
            thread.own(comm, self._holding.owner)
        return groups

    @classmethod
    def from_comm(
        cls,
        comm: MPI.Comm | int,
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
        require_mpi("from_comm")
        adopted = mesh_argument.checked_cart(comm, handle)
        with duplicated("from_comm", adopted) as own:  # type: ignore[arg-type]
            names, on = mesh_argument.agreed(own, mesh_dim_names, device)
            return made("from_comm", own, lambda: cls(MPI.Cartcomm(own.Dup()), names, on))

    @property
    def freed(self) -> bool:
        """Whether `free` was called, or the program is at its end."""
        return self._freed or self._holding.freed

    @property
    def root_comm(self) -> MPI.Intracomm:  # type: ignore[override]
        """The communicator of the whole mesh, of which this one may be a sub-mesh."""
        _ = self.all_ranks  # raises where the mesh is freed
        return self._holding.comms[0]  # type: ignore[return-value]

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of mesh dims."""
        return len(self.shape)

    @property
    def gpu_aware(self) -> bool:
        """Whether messages go from GPU memory to GPU memory; else they go through pinned host memory."""
        return self.all_ranks.aware

    @property
    def all_ranks(self) -> Group:
        """The group of all ranks of this mesh."""
        return self.group(tuple(range(self.ndim)))

    def group(self, mesh_dims: tuple[int, ...]) -> Group:
        """Return the group of the ranks along some mesh dims that this rank lies in. Not collective.

        Parameters
        ----------
        mesh_dims
            Indices of mesh dims, ascending.

        Returns
        -------
        Group
            A communicator, this rank in it and its number of ranks.
        """
        if self._freed or self._holding.freed:
            raise MeshError(
                "mesh used after free()",
                expected="a live mesh",
                got=self.outline,
                fix="free a mesh only when no tensor or exchanger on it is used any more",
            )
        return self._groups[mesh_dims]

    def mesh_dim(self, dim: int | str) -> int:
        """Return the index of a mesh dim. Not collective.

        Parameters
        ----------
        dim
            Its name, or its index, which may count from the end.

        Returns
        -------
        int
            Not negative.

        Raises
        ------
        MeshError
            There is no such mesh dim.
        """
        if isinstance(dim, str):
            if dim in self.mesh_dim_names:
                return self.mesh_dim_names.index(dim)
        elif isinstance(dim, (int, Integral)) and -self.ndim <= dim < self.ndim:
            return int(dim) % self.ndim
        raise MeshError(
            "no such mesh dim",
            expected=f"one of {self.mesh_dim_names} or an index below {self.ndim}",
            got=repr(dim),
            fix="name a dim of this mesh",
        )

    def __getitem__(self, names: str | int | Sequence[str | int]) -> CartMesh:
        """Return the sub-mesh of some dims that this rank lies in, the same object until that is freed. Not collective.

        It shares the communicators of this mesh, and is freed with it.
        """
        _ = self.all_ranks  # raises where the mesh is freed
        dims = tuple(self.mesh_dim(n) for n in mesh_argument.listed(names))
        if not dims or sorted(set(dims)) != list(dims):
            raise MeshError(
                "sub-mesh: no dims, or dims out of order",
                expected=f"one dim or more, in the order {self.mesh_dim_names}",
                got=names,
                fix="list them in the order of the mesh",
            )
        if len(dims) == self.ndim:
            return self
        if (child := self._children.get(dims)) is None or child.freed:
            child = self._children[dims] = self._child(dims)
        return child

    def _child(self, dims: tuple[int, ...]) -> CartMesh:
        child = object.__new__(CartMesh)
        child.comm, child.rank, child.size, *_ = self._groups[dims]
        child.shape = tuple(self.shape[m] for m in dims)
        child.periodic = tuple(self.periodic[m] for m in dims)
        child.coords = tuple(self.coords[m] for m in dims)
        child.mesh_dim_names = tuple(self.mesh_dim_names[m] for m in dims)
        child.local_rank, child.device = self.local_rank, self.device
        child.forget()
        child._freed, child._holding, child._label = False, self._holding, None
        places = {m: i for i, m in enumerate(dims)}
        child._groups = {
            tuple(places[m] for m in own): group for own, group in self._groups.items() if set(own) <= set(dims)
        }
        return child

    def neighbour(self, dim: int | str, displacement: int) -> int | None:
        """Return the mesh rank some steps along a mesh dim. Not collective.

        Parameters
        ----------
        dim
            Name or index of the mesh dim.
        displacement
            Steps along it; negative ones go to lower coordinates.

        Returns
        -------
        int or None
            None past an edge that is not periodic.
        """
        m = self.mesh_dim(dim)
        at = self.coords[m] + mesh_argument.checked_displacement(displacement)
        if self.periodic[m]:
            at %= self.shape[m]
        elif not 0 <= at < self.shape[m]:
            return None
        return self.rank_at((*self.coords[:m], at, *self.coords[m + 1 :]))

    def rank_at(self, coords: Sequence[int]) -> int:
        """Return the mesh rank at some coordinates. Not collective.

        Parameters
        ----------
        coords
            One per mesh dim.

        Returns
        -------
        int
            Row-major in the coordinates, as MPI orders the ranks of a Cartesian communicator.
        """
        return rank_of(mesh_argument.checked_coords(coords, self.shape), self.shape)

    def plan(self, key: Any, build: Callable[[], T], mesh_dims: tuple[int, ...] | None = None) -> T:
        """Return the cached plan of ``key``, building it where it is new.

        Collective over ``mesh_dims`` (all, if not given) where it is new: what ``build`` raises on one rank rises
        on every rank, and ranks that ask for different plans are told so. Else not collective, one dictionary
        look-up. A plan that was not used for long is forgotten, on all these ranks at the same call.
        """
        whole = mesh_dims is None or len(mesh_dims) == len(self.shape)
        plans = self.plans if whole else self.plans_along(mesh_dims)  # type: ignore[arg-type]
        plan = plans.get(key)
        if plan is None and (plan := plans.recall(key)) is None:
            comm = (self.all_ranks if mesh_dims is None else self.group(mesh_dims)).comm
            label = Label(text_of(key), self._holding.comms)
            before, self._label = self._label, label
            error: Exception | None = None
            try:
                # a plan lives on: its buffers must not be inference tensors, which later gradients may not write
                with torch.inference_mode(False):
                    plan = build()
            except Exception as e:  # noqa: BLE001 (of wrong arguments Python and torch raise anything)
                error = e
            finally:
                self._label = before
            own = 0 if error else nbytes_of((key, plan), CartMesh, Group, Label)
            label.number, nbytes = self.agree(comm, error, label.text, own)
            plans.put(key, plan, nbytes)
        return plan  # type: ignore[return-value]

    def plans_along(self, mesh_dims: tuple[int, ...]) -> Plans:
        """Return the plans of the ranks along some mesh dims (ascending). Not collective."""
        if len(mesh_dims) == self.ndim:
            return self.plans
        plans = self._partial.get(mesh_dims)
        if plans is None:
            plans = self._partial[mesh_dims] = plans_on(self.group(mesh_dims).comm)
        return plans

    def agree(self, comm: MPI.Intracomm, error: Exception | None, signature: str, nbytes: int = 0) -> tuple[int, int]:
        """Do what `guard.agree` does; return a number that no other plan of these ranks has, and the most bytes.

        Collective over ``comm``, which is one of the mesh's. An error of torch's or Python's stays that where every
        rank has it.
        """
        try:
            number, most = guard.agree(comm, error, signature, (self._holding.number, nbytes))
        except MpishardError as agreed:
            if error is not None and str(agreed) == typed_text(error):
                raise guard.common(error, comm) from None
            raise
        self._holding.number = number + 1
        return number, most

    @property
    def label(self) -> Label:
        """Of the plan that is being made. Not collective."""
        assert self._label is not None, "messages outside a plan"
        return self._label

    def keep(self, key: Any, build: Callable[[], T]) -> T:
        """Return the cached value of ``key``, which this rank may make on its own. Not collective."""
        value = self.kept.get(key)
        if value is None:
            value = self.kept.recall(key)
        if value is None:
            value = build()
            self.kept.put(key, value, nbytes_of((key, value), CartMesh, Group, Label))
        return value  # type: ignore[no-any-return]

    def lend(self, to: str = "") -> None:
        """Let only a `thread.guest` communicate, or take the mesh back. Not collective."""
        self._holding.owner.lend(to)

    def own(self, release: Callable[[], None]) -> None:
        """Have ``release`` called when the mesh is freed, dropped, or the program ends. Not collective.

        ``release`` must not communicate, nor hold the mesh.
        """
        self._holding.releases.append(release)

    def own_weakly(self, resource: Any) -> None:
        """Have ``resource.free`` called likewise, if it still exists then. Not collective."""
        self._holding.resources.add(resource)

    def duplicate(self) -> MPI.Intracomm:
        """Return one more communicator of this mesh's ranks, freed with the mesh. Collective."""
        comm = made("CartMesh.duplicate", self.comm, self.all_ranks.comm.Dup)
        self._holding.comms.append(comm)
        thread.own(comm, self._holding.owner)
        return comm

    def free(self) -> None:
        """Free the plans, persistent requests and communicators of this mesh and its sub-meshes. Collective.

        Never necessary, and harmless twice: a mesh that is no longer used gives its plans back at once (below
        ``MPI_THREAD_MULTIPLE``, when this rank next makes plans, if another thread finds it unused), and its
        communicators when its ranks make another mesh. Of a sub-mesh, only that object becomes unusable.
        """
        if self.freed:
            return
        self._freed = True
        for mesh in (self, *self._children.values()):
            for plans in (mesh.plans, mesh.kept, *mesh._partial.values()):
                plans.clear()
            mesh.storages.clear()
        if self._groups[tuple(range(self.ndim))].comm in self._holding.comms[:1] or not self._holding.comms:
            self._holding.free()
        self._groups.clear()

    @property
    def outline(self) -> str:
        """What all ranks say alike of the mesh, for the texts of errors."""
        dims = ", ".join(
            f"{n}={s}{' periodic' if p else ''}" for n, s, p in zip(self.mesh_dim_names, self.shape, self.periodic)
        )
        return f"CartMesh({dims}{', freed' if self.freed else ''})"

    def __repr__(self) -> str:
        return f"{self.outline[:-1]}; rank {self.rank} at {self.coords})"

    def __reduce__(self) -> Any:
        raise MeshError(
            "a CartMesh cannot be pickled",
            expected="a live MPI communicator",
            got=self.outline,
            fix="make the mesh again with init_mesh in the other process",
        )

    def __copy__(self) -> CartMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CartMesh:
        return self


def init_mesh(
    mesh_shape: Sequence[int] | int,
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
    mesh_shape
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
        The shape does not fit the number of ranks, or these differ in ``MPISHARD_DEBUG`` or ``MPISHARD_DETERMINISTIC``.

    Examples
    --------
    >>> mesh = ms.init_mesh((2, -1), ("y", "x"), periodic=(False, True))
    """
    require_mpi("init_mesh")
    comm = mesh_argument.checked_comm(comm)
    error = None
    try:
        extents = mesh_argument.checked_extents(mesh_shape)
        names = mesh_argument.checked_names(mesh_dim_names, len(extents), "init_mesh")
        periods = mesh_argument.checked_periods(periodic, len(extents), "init_mesh")
        full = mesh_argument.inferred(extents, comm.Get_size())
        wanted = as_device(device)
    except Exception as e:  # noqa: BLE001 (Python's too, of other kinds of arguments)
        error = e
    told = "" if error else f"init_mesh({full}, {names}, periodic={periods}{told_device(wanted)})"
    first_agreement(comm, error, told)
    return made(
        "init_mesh", comm, lambda: CartMesh(comm.Create_cart(full, periods=periods, reorder=False), names, wanted)
    )
