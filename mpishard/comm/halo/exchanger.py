"""HaloExchanger: refresh the halos of ghosted arrays in place.

Dimension by dimension, so that corners are carried; the slowest dim comes last, where its slabs lie dense in
memory and travel from and to the arrays themselves. What is needed for fields at given addresses is built
once (`mpishard.comm.halo.host`) and kept.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from numbers import Integral
from typing import Any

import torch

from mpishard.comm import exit, guard, in_flight, lifetime, thread
from mpishard.comm.collective.gather_sizes import first_misfit, gather_blocks
from mpishard.comm.halo.channel import Channel, channel_of
from mpishard.comm.halo.device import DeviceRefresh
from mpishard.comm.halo.host import Refresh, Sweep, plan_at_once, plan_sweep
from mpishard.comm.interruption import whole
from mpishard.comm.memory.foreign_array import dtype_names, field_key, locate, mark_written
from mpishard.comm.mesh import CartMesh
from mpishard.comm.mesh_argument import no_mesh
from mpishard.comm.transport.choice import transport_of
from mpishard.errors import LayoutError, UnsupportedOperationError
from mpishard.layout import bounds, repeated, runs_of
from mpishard.layout.partition import coords_of

_HOST = torch.device("cpu")
_TAGS, _SLOT_STEP, _FIELDS_STEP = 32767, 499, 61
_KEPT = 64  # refreshes kept per exchanger: a few sets of fields, double-buffered

Width = int | Sequence[int]
Dims = Mapping[int, int | str] | Sequence[int | str | None]


class HaloExchanger:
    """Refreshes the halos of ghosted arrays in place.

    Neighborwise collective in every method but the constructor, which is collective: all ranks refresh the
    same number of fields, in the same order.

    Parameters
    ----------
    mesh
        The mesh whose neighbours exchange.
    local_shape_with_halo
        Shape of every field on this rank. Interior extents may differ along a mesh dim.
    halo_width
        Per array dim an int or ``(lo, hi)``; an int alone is the width of every exchanged dim. A halo may be
        wider than a neighbour's interior. The same on all ranks.
    dtype
        Of all fields (numpy's or torch's), or a sequence with one dtype per field.
    dims
        ``{array dim: mesh dim}``, or per array dim a mesh dim or None; without it, array dim d lies on mesh dim d.
        Dims that lie on no mesh dim are not exchanged. An array of more dims than the mesh needs it, or a width per
        dim.
    order
        Memory order of most fields, ``"C"`` or ``"F"``: which dim's slabs are dense. Fields of the other order,
        or of any strides, are refreshed as well, only slower. The same on all ranks.

    Raises
    ------
    LayoutError, UnsupportedDtypeError
        On every rank: the arguments do not fit each other, the mesh, or the other ranks' shapes.
    DesyncError
        The ranks' halo widths, dtypes, dims or orders differ.

    Notes
    -----
    Periodic dims wrap. At a non-periodic edge the cells beyond the domain are never written, corners included.
    Fields are numpy arrays, torch tensors, or objects with ``__cuda_array_interface__``; on all ranks in host
    memory, or on all on a GPU. Fields of torch on a GPU are refreshed in the order of torch's current stream; for
    those of others the host waits until all streams are done, before and after. A field is known by its address:
    reallocate it, and it is a new field.

    Between `start` and `finish` a field's interior may be read, but not written, and its halo neither.

    Examples
    --------
    >>> h = ms.HaloExchanger(mesh, u.shape, (1, 1), u.dtype)
    >>> h(u, v)
    >>> h.start(u, v)
    >>> deep_inside(u, v)
    >>> h.finish()
    """

    def __init__(
        self,
        mesh: CartMesh,
        local_shape_with_halo: Sequence[int],
        halo_width: int | Sequence[Width],
        dtype: Any,
        *,
        dims: Dims | None = None,
        order: str = "C",
    ) -> None:
        if not isinstance(mesh, CartMesh):
            raise no_mesh("HaloExchanger", mesh)
        everyone = mesh.all_ranks.comm
        error: Exception | None = None
        try:
            self.shape = _extents(local_shape_with_halo)
            self.mesh_dims = _mesh_dims(mesh, len(self.shape), dims, isinstance(halo_width, Iterable))
            self.halo_width = _widths(self.shape, halo_width, self.mesh_dims)
            self.dtypes = dtype_names(dtype)
            if order not in ("C", "F"):
                raise LayoutError(
                    "HaloExchanger: unknown memory order", expected="'C' or 'F'", got=order, fix="name one"
                )
        except Exception as e:  # noqa: BLE001 (Python's and numpy's too, of other kinds of arguments)
            error = e
        signature = "" if error else f"HaloExchanger{(self.halo_width, self.dtypes, self.mesh_dims, order)}"
        self._number, _ = mesh.agree(everyone, error, signature)
        sizes = _interior_sizes(mesh, self.shape, self.halo_width, self.mesh_dims)
        # the same at all positions
        alike = {
            d: (repeated(((lo, len(n)),)), repeated(((hi, len(n)),)))
            for d, n in sizes.items()
            for lo, hi in [self.halo_width[d]]
        }
        self._prepare(mesh, sizes, alike, order)

    @classmethod
    def planned(
        cls,
        mesh: CartMesh,
        sizes: Mapping[int, Sequence[int]],
        widths: Mapping[int, Sequence[tuple[int, int]]],
        local_shape_with_halo: Sequence[int],
        mesh_dims: Mapping[int, int],
        dtype: Any,
        order: str,
    ) -> HaloExchanger:
        """Return an exchanger of fields that all ranks know alike.

        Collective.

        Parameters
        ----------
        mesh, local_shape_with_halo, dtype, order
            As of a `HaloExchanger`.
        sizes, widths
            Interior extents and halos (lo, hi) of all positions, per exchanged array dim.
        mesh_dims
            Mesh dim of every exchanged array dim.
        """
        self = object.__new__(cls)
        self.shape = tuple(local_shape_with_halo)
        self.mesh_dims = dict(sorted(mesh_dims.items()))
        own = {d: widths[d][mesh.coords[m]] for d, m in self.mesh_dims.items()}
        self.halo_width = tuple(own.get(d, (0, 0)) for d in range(len(self.shape)))
        self.dtypes = dtype_names(dtype)
        everyone = mesh.all_ranks.comm
        self._number, _ = mesh.agree(
            everyone, None, f"HaloExchanger of a field, {self.dtypes}, {self.mesh_dims}, {order}"
        )
        each = {d: ([lo for lo, _ in w], [hi for _, hi in w]) for d, w in widths.items()}
        self._prepare(mesh, sizes, each, order)
        return self

    def _prepare(
        self,
        mesh: CartMesh,
        sizes: Mapping[int, Sequence[int]],
        widths: Mapping[int, tuple[Sequence[int], Sequence[int]]],
        order: str,
    ) -> None:
        self.mesh = mesh
        self._sizes = sizes
        self._widths = widths
        self._reversed = order == "F"
        self._sweeps = self._plan()
        self._channel = channel_of(mesh)
        self._channel.exchangers.add(self)
        self._kept: OrderedDict[Any, Refresh] = OrderedDict()
        self._flying: list[tuple[int, Refresh, tuple[Any, ...]]] = []

    @property
    def interior(self) -> tuple[slice, ...]:
        """The owned cells of a field, as an index. Not collective."""
        return tuple(slice(lo, n - hi) for n, (lo, hi) in zip(self.shape, self.halo_width))

    @whole
    def __call__(self, *fields: Any) -> None:
        """Refresh the halos of ``fields``. Neighborwise collective.

        Parameters
        ----------
        *fields
            Arrays of the shape and device that the exchanger was made for, each of its dtype, with their halos.

        Raises
        ------
        MpishardError
            On a rank whose field does not fit: its shape, dtype, device, memory, or it is in flight.
        """
        self.renew(*fields)
        for field in fields:
            mark_written(field)

    def renew(self, *fields: Any, beside: bool = False) -> None:
        """Refresh the halos of ``fields``, of which autograd has saved the interior alone.

        Neighborwise collective. ``beside``: while another thread communicates on the mesh, on all ranks.
        """
        if guard.DEBUG:
            self._check(fields, beside=beside)
        slot = self._channel.free_slot()
        self._refresh(fields, slot).run()

    @whole
    def start(self, *fields: Any) -> None:
        """Start to refresh the halos of ``fields``; several may be in flight. Neighborwise collective.

        Parameters
        ----------
        *fields
            As in a call. Their halos are fresh, and may be read, after `finish`.

        Raises
        ------
        MpishardError
            As in a call.
        """
        if guard.DEBUG:
            self._check(fields)
        slot = self._channel.free_slot()
        refresh = self._refresh(fields, slot)
        # the fields too: their memory must outlive the messages
        self._flying.append((slot, refresh, fields))
        self._channel.flying[slot] = (self, refresh.addresses)
        refresh.start()

    def poke(self) -> bool:
        """Let messages in flight progress, without waiting; return whether all have arrived. Not collective."""
        thread.require(self._channel.comm)
        arrived = [refresh.poke() for _, refresh, _ in self._flying]
        return all(arrived)

    @whole
    def finish(self) -> None:
        """Wait for everything in flight, oldest first: the halos are fresh. Neighborwise collective.

        Raises
        ------
        UnsupportedOperationError
            Nothing was started.
        """
        if not self._flying:
            raise UnsupportedOperationError(
                "HaloExchanger.finish: nothing is in flight",
                expected="start(...) before finish()",
                got="finish() alone",
                fix="call start(fields) first, or the exchanger itself to do both",
            )
        while self._flying:
            slot, refresh, fields = self._flying[0]
            refresh.finish()
            del self._flying[0], self._channel.flying[slot]
            for field in fields:
                mark_written(field)

    def free(self) -> None:
        """Free the persistent requests; the mesh does so, too. Not collective."""
        if exit.alive():
            _free(self._kept)
        for slot, _, _ in self._flying:
            self._channel.flying.pop(slot, None)
        self._flying.clear()

    def move(self, channel: Channel) -> None:
        """Go on on another channel of the same ranks; what is in flight is left behind. Not collective."""
        in_flight.left.append((self._kept, self._flying))
        self._kept, self._flying, self._channel = OrderedDict(), [], channel
        channel.exchangers.add(self)

    def __del__(self) -> None:
        if getattr(self, "_kept", None):
            # fields in flight too: MPI may still write to them
            lifetime.discard(partial(_free, self._kept, self._flying))

    def __repr__(self) -> str:
        return f"HaloExchanger(shape {self.shape}, halo {self.halo_width}, {', '.join(self.dtypes)}, {self.mesh!r})"

    @cached_property
    def _at_once(self) -> Sweep:
        """The exchange along all dims at once: on a GPU, a launch and a message cost more than their bytes."""
        return plan_at_once(self.mesh, self.mesh_dims, self._sizes, self._widths, self._interior())

    def _interior(self) -> list[tuple[int, int]]:
        return [(lo, n - hi) for n, (lo, hi) in zip(self.shape, self.halo_width)]

    def _plan(self) -> list[Sweep]:
        """Plan one sweep per exchanged dim, in the order in which they run: each carries the edges of the last."""
        mesh, sizes = self.mesh, self._sizes
        # cells of the domain in reach: those that a finished sweep has filled
        filled, ranges = [], self._interior()
        for d, (n, (lo, hi)) in enumerate(zip(self.shape, self.halo_width)):
            m = self.mesh_dims.get(d)
            if m is None or mesh.periodic[m]:
                filled.append((0, n))
            else:
                border = bounds(sizes[d])
                before, after = border[mesh.coords[m]], border[-1] - border[mesh.coords[m] + 1]
                filled.append((lo - min(lo, before), n - hi + min(hi, after)))
        sweeps = []
        slowest_last = sorted(self.mesh_dims, reverse=not self._reversed)
        for d in slowest_last:
            if any(map(any, self._widths[d])):
                sweeps.append(plan_sweep(mesh, d, self.mesh_dims[d], sizes[d], self._widths[d], ranges))
            ranges[d] = filled[d]
        return [s for s in sweeps if s.local or s.sends or s.recvs]

    def _refresh(self, fields: tuple[Any, ...], slot: int) -> Refresh:
        thread.require(self._channel.comm)
        key = (slot, *map(field_key, fields))
        refresh = self._kept.get(key)
        if refresh is None:
            refresh = self._build(fields, slot)
            self._kept[key] = refresh
            if len(self._kept) > _KEPT:
                self._drop_oldest()
        elif len(self._kept) > 1:
            self._kept.move_to_end(key)
        if self._channel.flying:
            self._channel.refuse_busy(refresh.addresses)
        return refresh

    def _drop_oldest(self) -> None:
        flying = {id(refresh) for _, refresh, _ in self._flying}
        for key in list(self._kept)[:-1]:
            if id(self._kept[key]) not in flying:
                self._kept.pop(key).free()
                return

    def _build(self, fields: tuple[Any, ...], slot: int) -> Refresh:
        group = self.mesh.all_ranks  # raises where the mesh is freed
        lifetime.free_discarded()
        if not fields or (len(self.dtypes) > 1 and len(fields) != len(self.dtypes)):
            raise LayoutError(
                "HaloExchanger: wrong number of fields",
                expected=len(self.dtypes) if len(self.dtypes) > 1 else "one field or more",
                got=len(fields),
                fix="pass one field per dtype given to the exchanger",
            )
        names = self.dtypes if len(self.dtypes) > 1 else self.dtypes * len(fields)
        blocks = [
            locate(f"HaloExchanger: field {i}", field, self.shape, name, self.mesh.device)
            for i, (field, name) in enumerate(zip(fields, names))
        ]
        addresses = [b.address for b in blocks if b.nbytes]  # empty arrays share addresses
        if len(set(addresses)) < len(addresses) or len({b.device for b in blocks}) > 1:
            raise UnsupportedOperationError(
                "HaloExchanger: fields that cannot travel together",
                expected="different arrays, all on the same device",
                # not addresses, which differ from rank to rank: fields of one number share memory
                got=[f"{b.device or 'cpu'} array {[a.address for a in blocks].index(b.address)}" for b in blocks],
                fix="pass every field once, and GPU and CPU fields in calls of their own",
            )
        foreign = any(b.device and not isinstance(f, torch.Tensor) for b, f in zip(blocks, fields))
        comm = self._channel.comm
        ways = 2 * len(self.shape)
        # small numbers never meet; those of many exchangers and fields may
        tag = (self._number + _SLOT_STEP * slot + _FIELDS_STEP * (len(fields) - 1)) % (_TAGS // ways) * ways
        op = f"HaloExchanger {self._number} of shape {self.shape}, halo {self.halo_width}, {len(fields)} fields"
        driver = transport_of(group, blocks[0].device or _HOST).driver
        rest = (blocks, tag, self._reversed, op)
        if driver is None:
            return Refresh(comm, self._sweeps, *rest)
        return DeviceRefresh(comm, [self._at_once], *rest, foreign=foreign, driver=driver, aware=group.aware)

    def _check(self, fields: tuple[Any, ...], *, beside: bool = False) -> None:
        _ = self.mesh.all_ranks  # raises where the mesh is freed
        # not the widths, of which ranks at an edge of the domain may have others
        what = f"HaloExchanger {self._number} of {len(fields)} fields along {self.mesh_dims}"
        guard.check(self._channel.comm if beside else self.mesh.comm, what, None, self.dtypes)


def _free(kept: OrderedDict[Any, Refresh], *_fields: object) -> None:
    while kept:
        kept.popitem()[1].free()


def _extents(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, shape))
    except TypeError:
        raise LayoutError(
            "HaloExchanger: no shape of an array", expected="a sequence of integers", got=shape, fix="give u.shape"
        ) from None


def _mesh_dims(mesh: CartMesh, ndim: int, dims: Dims | None, per_dim: bool) -> dict[int, int]:
    if dims is None:
        if ndim > mesh.ndim and not per_dim:
            raise LayoutError(
                "HaloExchanger: which array dims does the mesh cut?",
                expected=f"an array of {mesh.ndim} dims, as {mesh.outline} has, or dims=",
                got=f"an array of {ndim} dims, and one width for all",
                fix=f"say which, e.g. dims={dict(zip(range(ndim - mesh.ndim, ndim), mesh.mesh_dim_names))}; where "
                f"they are the first, halo_width={(1,) * mesh.ndim + (0,) * (ndim - mesh.ndim)} says it too",
            )
        return {d: d for d in range(min(ndim, mesh.ndim))}
    if isinstance(dims, (list, tuple)) and len(dims) == ndim:
        dims = {d: m for d, m in enumerate(dims) if m is not None}
    known = dims if isinstance(dims, Mapping) else {}
    inside = {d: m for d, m in known.items() if isinstance(d, Integral) and -ndim <= d < ndim}
    found = {int(d) % ndim: mesh.mesh_dim(m) for d, m in inside.items()}
    if known is not dims or len(found) != len(dims) or len(set(found.values())) != len(dims):
        raise LayoutError(
            "HaloExchanger: dims do not fit the array or the mesh",
            expected=f"different array dims below {ndim} on different mesh dims",
            got=dims,
            fix="give {array dim: mesh dim} for the dims that the mesh cuts, or a mesh dim or None per array dim",
        )
    return dict(sorted(found.items()))


def width_pair(width: Width) -> tuple[int, int]:
    """Return a halo's width as (lo, hi); a TypeError or ValueError says that it is none. Not collective."""
    # int first: to ask an abstract class takes as long as all the rest
    lo, hi = (width, width) if isinstance(width, int) or not isinstance(width, (tuple, Iterable)) else width
    if lo is True or lo is False or hi is True or hi is False:
        raise TypeError
    return operator.index(lo), operator.index(hi)


def _widths(
    shape: tuple[int, ...], halo_width: int | Sequence[Width], mesh_dims: Mapping[int, int]
) -> tuple[tuple[int, int], ...]:
    if not isinstance(halo_width, Iterable):
        halo_width = [halo_width if d in mesh_dims else 0 for d in range(len(shape))]
    try:
        pairs = [width_pair(width) for width in halo_width]
    except (TypeError, ValueError):
        pairs = []
    if len(pairs) != len(shape) or any(lo < 0 or hi < 0 for lo, hi in pairs):
        raise LayoutError(
            "HaloExchanger: halo_width does not fit the shape",
            expected=f"an int >= 0 or (lo, hi) for each of {len(shape)} array dims",
            got=halo_width,
            fix="give 0 for dims without a halo",
        )
    for d, (n, (lo, hi)) in enumerate(zip(shape, pairs)):
        if lo + hi > n:
            raise LayoutError(
                f"HaloExchanger: array dim {d} is smaller than its halo",
                expected=f"at least {lo} + {hi} cells (the shape counts the halo)",
                got=shape,
                fix="pass the shape of the local array with its halo",
            )
        if lo + hi and d not in mesh_dims:
            raise LayoutError(
                f"HaloExchanger: array dim {d} has a halo, but lies on no mesh dim",
                expected=f"width 0 outside array dims {tuple(mesh_dims)}",
                got=(lo, hi),
                fix="give width 0 there, or say with dims= on which mesh dim it lies",
            )
    return tuple(pairs)


def _interior_sizes(
    mesh: CartMesh, shape: tuple[int, ...], widths: Sequence[tuple[int, int]], mesh_dims: Mapping[int, int]
) -> dict[int, tuple[int, ...]]:
    """Return the interior extents along every dim on the mesh, or raise the same error on all ranks. Collective."""
    found = gather_blocks("HaloExchanger", mesh, shape, {d: (m,) for d, m in mesh_dims.items()})
    if found is None:
        raise _misfit(mesh, shape, mesh_dims)
    sizes: dict[int, tuple[int, ...]] = {}
    for d, extents in sorted(found.items()):
        lo, hi = widths[d]
        sizes[d] = repeated((n - lo - hi, k) for n, k in runs_of(extents))
        extent = bounds(sizes[d])[-1]
        if max(lo, hi) > extent and not (mesh.periodic[mesh_dims[d]] and extent):
            raise LayoutError(
                f"HaloExchanger: the halo of array dim {d} is wider than the global extent",
                expected=f"at most {extent} cells",
                got=(lo, hi),
                fix="use a narrower halo, or a mesh that is periodic along this dim",
            )
    return sizes


def _misfit(mesh: CartMesh, own: tuple[int, ...], mesh_dims: Mapping[int, int]) -> LayoutError:
    """Return the error of arrays that do not fit each other. Collective."""
    d, rank, expected, shape = first_misfit("HaloExchanger", mesh, own, {d: (m,) for d, m in mesh_dims.items()})
    m = mesh_dims.get(d)
    coord = 0 if m is None else coords_of(rank, mesh.shape)[m]
    where = "the ranks" if m is None else f"ranks at coordinate {coord} of {mesh.mesh_dim_names[m]!r}"
    return LayoutError(
        f"HaloExchanger: array dim {d} has different extents on {where}",
        expected=f"{expected}, as on the first of them",
        got=f"{shape[d]} on rank {rank}",
        fix="let an extent depend on the coordinate along its own mesh dim only",
    )
