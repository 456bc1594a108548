"""adopt: a simulation's communicator, decomposition and arrays, as they are, become a mesh and its fields."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from mpishard.comm.adoption import Periodic, adopted_mesh
from mpishard.comm.agreement import Agreement
from mpishard.comm.halo.exchanger import Width, width_pair
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError, MeshError, MpishardError, UnsupportedOperationError
from mpishard.insitu.box import misplaced
from mpishard.insitu.field import Field, staggered_dims
from mpishard.insitu.hook import Hook, told
from mpishard.insitu.kind import Kinds, outline
from mpishard.insitu.memory import as_tensor
from mpishard.insitu.worker import Worker
from mpishard.layout import Replicate, Shard, layout_of
from mpishard.tensor.resident import resident

Halo = Width | Sequence[Width] | Mapping[str, Width]
Dims = Sequence[str | int | None] | Mapping[int, str | int]
_MOST = 1 << 62  # the ranks' numbers are compared in 64 bits


def adopt(
    comm: Any,
    shape: Sequence[int] | int,
    halo: Halo = 0,
    names: Sequence[str] | None = None,
    periodic: Periodic = None,
    *,
    grid: Sequence[int] | None = None,
    coords: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
    handle: str = "fortran",
    device: torch.device | str | None = None,
) -> Simulation:
    """Take a running simulation's decomposition as it is; the host keeps communicator, arrays and time loop.

    Collective over ``comm``, which is duplicated.

    Parameters
    ----------
    comm
        The host's communicator: mpi4py's, Cartesian or plain; its handle as an integer; or None, for one process.
    shape
        Owned cells of the whole domain per mesh dim, in the index order of the arrays.
    halo
        Width of the ghost layers of most fields: an int, or per mesh dim an int or (lo, hi). Ranks may differ along
        a mesh dim.
    names
        Of the mesh dims; ``("dim0", ...)`` if not given.
    periodic
        Per mesh dim or for all; that of a Cartesian communicator, else False, if not given.
    grid, coords
        Of a plain communicator: ranks per mesh dim, and this rank's place (row-major if not given).
    sizes
        Owned cells of this rank per mesh dim; those of the first field if not given.
    offset
        The first of them in the domain, per mesh dim, to be checked; in the order of the ranks if not given.
    handle
        What an integer is: ``"fortran"`` (``MPI_Comm_c2f``, ``comm%MPI_VAL``) or ``"c"`` (``MPI_Comm``).
    device
        Override of the rule "the GPU at this rank's position on its node, or the CPU". Fields may always lie in host
        memory.

    Returns
    -------
    Simulation

    Raises
    ------
    MeshError, LayoutError
        On every rank: the arguments do not fit the communicator, or owned boxes overlap or leave a gap.

    Examples
    --------
    >>> sim = ms.insitu.adopt(cart, shape=(256, 192), halo=2, names=("x", "y"))
    >>> u = sim.field("u", array)
    >>> hook = sim.hook(model, inputs=["u"], outputs=["u"])
    """
    extents: tuple[int, ...] = ()
    error = None
    try:
        extents = tuple(shape) if isinstance(shape, Iterable) else (operator.index(shape),)
        named = [f"dim{m}" for m in range(len(extents))] if names is None else names
        names = (named,) if isinstance(named, str) else tuple(named)
    except Exception as e:  # noqa: BLE001 (Python's, of other kinds of arguments)
        error = e  # perhaps of this rank alone: the others must hear of it
    mesh = adopted_mesh(
        comm, names or (), periodic=periodic, grid=grid, coords=coords, handle=handle, device=device, error=error
    )
    simulation = Simulation(mesh)
    try:
        simulation._begin(extents, halo, sizes, offset)
    except MpishardError:
        mesh.free()
        raise
    return simulation


class Simulation:
    """A host program's domain: the mesh of its ranks, and the fields on it. Made by `adopt`.

    Attributes
    ----------
    mesh : CartMesh
        On which the fields' tensors live; row-major in the host's coordinates.
    shape : tuple of int
        Owned cells of the whole domain, per mesh dim.
    halo : tuple of (int, int)
        Width of the ghost layers of fields that say nothing else, per mesh dim, on this rank.
    fields : dict of str to Field
    """

    def __init__(self, mesh: CartMesh) -> None:
        self.mesh = mesh
        self.agreement = Agreement(mesh)
        self.fields: dict[str, Field] = {}
        self._kinds = Kinds(mesh, self.agreement)
        self.shape: tuple[int, ...] = ()
        self.halo: tuple[tuple[int, int], ...] = ()
        self._offset: tuple[int, ...] | None = None
        # owned cells of all positions along each mesh dim, once known
        self._sizes: list[tuple[int, ...] | None] = [None] * mesh.ndim
        self._flying: Hook | None = None  # the same on all ranks
        self._worker = Worker()  # where models run that were started
        self._released = False

    def _begin(
        self, shape: tuple[int, ...], halo: Halo, sizes: Sequence[int] | None, offset: Sequence[int] | None
    ) -> None:
        own: dict[int, int] = {}

        def check() -> None:
            self.shape = self._per_dim("shape", shape)
            self.halo = self._widths(halo)
            self._offset = None if offset is None else self._per_dim("offset", offset)
            own.update(enumerate(() if sizes is None else self._per_dim("sizes", sizes)))

        self._agreed("adopt", check, lambda: f"adopt({self.shape}, {len(own)} sizes, {self._offset is None})")
        self._place(own)

    def _per_dim(self, what: str, given: Sequence[int]) -> tuple[int, ...]:
        numbers = tuple(map(operator.index, given))
        if len(numbers) != self.mesh.ndim or not all(0 <= n < _MOST for n in numbers):
            raise LayoutError(
                f"adopt: {what} does not fit the decomposition",
                expected=f"a number >= 0, below 2^62, for each of the dims {self.mesh.mesh_dim_names}",
                got=numbers,
                fix="count owned cells along the dims that the ranks cut, in the arrays' index order",
            )
        return numbers

    def _widths(self, halo: Halo | None, array_dims: Sequence[int | None] = ()) -> tuple[tuple[int, int], ...]:
        """Return (lo, hi) per mesh dim; ``halo`` may be given per array dim where that cannot be misread."""
        names = self.mesh.mesh_dim_names
        if halo is None:
            return self.halo
        try:
            if isinstance(halo, Mapping):
                told = {self.mesh.mesh_dim(m): width_pair(w) for m, w in halo.items()}
                pairs = [told.get(m, (0, 0)) for m in range(len(names))]
            elif not isinstance(halo, Iterable):
                pairs = [width_pair(halo)] * len(names)
            elif len(halo) == len(names):
                pairs = [width_pair(w) for w in halo]  # type: ignore[arg-type]
            elif len(names) == 1 and len(halo) == 2:
                pairs = [width_pair(halo)]  # type: ignore[arg-type]
            else:
                by_dim = dict(zip(array_dims, map(width_pair, halo), strict=True))  # type: ignore[arg-type]
                pairs = [by_dim.get(m, (0, 0)) for m in range(len(names))]
                if any(m is None and any(w) for m, w in by_dim.items()):
                    pairs = []
        except (TypeError, ValueError):
            pairs = []
        if len(pairs) != len(names) or not all(0 <= w < _MOST for pair in pairs for w in pair):
            raise LayoutError(
                "halo: not the widths of ghost layers",
                expected=f"an int >= 0, below 2^62, or an int or (lo, hi) for each of {names}",
                got=repr(halo),
                fix="give widths along the dims that the ranks cut",
            )
        return tuple(pairs)

    def _agreed(self, op: str, check: Callable[[], None], signature: Callable[[], str] = str) -> None:
        """Run a check of this rank's arguments, and raise on every rank where it raises on one. Collective."""
        error: Exception | None = None
        try:
            check()
        except Exception as e:  # noqa: BLE001 (the others wait for this rank)
            error = e
        self.agreement.on(error, op, "" if error else signature())

    def _place(self, own: Mapping[int, int]) -> None:
        """Take the owned extents along some mesh dims, and check that the boxes tile the domain. Collective."""
        error: MpishardError | None = None
        for m, n in own.items():
            told = (n, self._offset[m]) if self._offset else (n,)
            along, common = self.agreement.along(m, told)
            sizes = self._sizes[m] = tuple(row[0] for row in along)
            offsets = [row[1] for row in along] if self._offset else None
            error = error or misplaced(self.mesh, m, self.shape[m], sizes, offsets, common)
        self.agreement.on(error, "adopt", str([self._sizes[m] for m in own]))

    # -- fields

    def field(
        self,
        name: str,
        array: Any,
        halo: Halo | None = None,
        dims: Dims | None = None,
        location: str | Sequence[str] = "cell",
        writable: bool = True,
    ) -> Field:
        """Take an array of the host as a field: its memory, no copy.

        Collective.

        Parameters
        ----------
        name
            By which hooks, links and errors know it.
        array
            This rank's array with its ghost cells: of numpy, torch, cupy; an object with ``__dlpack__``, an array
            interface, a buffer; or ``(address, dtype, shape, strides)``, strides in bytes (None: C order). The host
            keeps it alive; of a raw address until `release`.
        halo
            Its ghost layers, where they are not those of the simulation: an int, per mesh dim an int or (lo, hi), or
            ``{name: width}``.
        dims
            Per array dim the mesh dim that it lies on, or None (levels, components, time slots). May be left out
            where the array has the dims of the mesh, in that order. A mesh dim that is not named holds copies.
        location
            ``"cell"``, or where the array has a point more than cells (staggered grids): the name of a mesh dim
            (faces normal to it), several, or ``"node"`` for all. A face between two ranks is owned by the rank
            above it, whose first point it is; the last rank of a dim that is not periodic owns the last face, too.
        writable
            Whether the model, and refreshes of the ghost cells, may write.

        Returns
        -------
        Field

        Raises
        ------
        MpishardError
            On every rank: a name used twice, an array of another size than said, or one that cannot be shared; or a
            hook's `Hook.start` was not waited for, and the array is unlike those of the fields before.
        """
        self._require_alive()
        seen = outline(array)
        # what is told of the others need not be hashable
        plain = halo is None and dims is None and location == "cell"
        key = None if seen is None else (seen, plain or repr((halo, dims, location)), writable)
        known = self._kinds.again(name, array, key, new=isinstance(name, str) and name not in self.fields)
        if known is not None:
            return self._added(Field(self, name, *known, writable=writable, known=seen))
        if self._flying is not None:
            # what the ranks ask each other here would meet what the model asks
            raise UnsupportedOperationError(
                f"field {name!r}: a hook's start() was not waited for",
                expected="fields unlike those before only while no model runs",
                got=f"{self._flying} in flight",
                fix="make the field before start(), or after wait()",
            )
        mesh, names = self.mesh, self.mesh.mesh_dim_names
        what = f"field {name!r}"
        found: dict[str, Any] = {}

        def check() -> None:
            fix = "u.rebind(array) swaps arrays"
            if not isinstance(name, str):
                raise LayoutError("field: no name", expected="a text", got=repr(name), fix="give one")
            if name in self.fields:
                raise LayoutError(f"{what}: a name used twice", expected="a new name", got=name, fix=fix)
            with torch.inference_mode(False):
                tensor = found["array"] = as_tensor(what, array, mesh.device, writable=writable)
            on = found["dims"] = self._dims(what, tensor, dims)
            found["halo"] = self._widths(halo, on)
            found["staggered"] = staggered_dims(location, names)

        def signature() -> str:
            array: Tensor = found["array"]
            whole = [n for n, m in zip(array.shape, found["dims"]) if m is None]
            return (
                f"{what}: dims {found['dims']}, whole extents {whole}, between the cells of {found['staggered']}, "
                f"{array.dtype} on {array.device.type}, writable={writable}"
            )

        self._agreed("field", check, signature)
        array, on, staggered = found["array"], found["dims"], found["staggered"]
        own = {m: n - sum(found["halo"][m]) - (m in staggered) for n, m in zip(array.shape, on) if m is not None}
        new = {m: n for m, n in sorted(own.items()) if self._sizes[m] is None}
        try:
            if new:
                self._agreed("field", lambda: _require_room(what, array, min(new.values())))
                self._place(new)
            sizes, widths = self._fitted(what, array, on, found["halo"], staggered)
        except MpishardError:
            # on all ranks: what did not become a field says nothing of the next one
            for m in new:
                self._sizes[m] = None
            raise
        strides = [s for s, n in zip(array.stride(), array.shape) if n > 1]
        reverse = self.agreement.same(len(strides) > 1 and strides == sorted(strides))
        placements: list[Any] = [Replicate()] * mesh.ndim
        shape = list(array.shape)
        for d, m in enumerate(on):
            if m is not None:
                placements[m], shape[d] = Shard(d), sum(sizes[d])
        layout = layout_of(mesh.shape, placements, shape, sizes)
        with torch.inference_mode(False):
            tensor = resident(
                mesh, layout, widths, array, order="F" if reverse else "C", writable=writable, name=name, foreign=True
            )
        self._kinds.note(key, array, tensor)
        return self._added(Field(self, name, array, tensor, writable=writable, known=seen))

    def _fitted(
        self,
        what: str,
        array: Tensor,
        on: Sequence[int | None],
        halo: Sequence[tuple[int, int]],
        staggered: Collection[int],
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, Sequence[Any]]]:
        """Return an array's owned extents and ghost widths, by dim; raise where it has others. Collective."""
        mesh = self.mesh
        sizes: dict[int, tuple[int, ...]] = {}
        widths: dict[int, Sequence[Any]] = {}
        error: MpishardError | None = None
        for d, m in enumerate(on):
            if m is None:
                continue
            cells, (lo, hi) = self._sizes[m], halo[m]
            assert cells is not None
            at, last, name = mesh.coords[m], len(cells) - 1, mesh.mesh_dim_names[m]
            faces = m in staggered
            # the last face of all is nobody's first
            sizes[d] = cells if not faces or mesh.periodic[m] else (*cells[:-1], cells[-1] + 1)
            room = array.shape[d] - lo - hi - sizes[d][at]
            if room != 0 and not (faces and room == 1 and (at < last or mesh.periodic[m])):
                error = error or LayoutError(
                    f"{what}: array dim {d} has another extent than said",
                    expected=f"{lo} + {sizes[d][at]} + {hi} cells along {name!r}"
                    + (" (or one more)" if faces and (at < last or mesh.periodic[m]) else ""),
                    got=array.shape[d],
                    fix="pass the array with its ghost cells; give halo= or dims= where the field's differ",
                )
            widths[d], common = self.agreement.along(m, (lo, hi + max(0, room)))
            if not common:
                error = error or LayoutError(
                    f"{what}: ghost layers along {name!r} differ between ranks at one coordinate of it",
                    expected="widths that depend on the coordinate along their own dim only",
                    got=f"{(lo, hi)} on the rank at {mesh.coords}",
                    fix="say the narrower widths on all of them, and give the rest to dims= or a view of the array",
                )
        self.agreement.on(error, "field")
        return sizes, widths

    def _added(self, field: Field) -> Field:
        if self._flying is not None:
            field._prepare_as(self.fields.values())
        self.fields[field.name] = field
        return field

    def _dims(self, what: str, array: Tensor, dims: Dims | None) -> tuple[int | None, ...]:
        ndim, names = array.ndim, self.mesh.mesh_dim_names
        if dims is None and ndim == len(names):
            return tuple(range(ndim))
        try:
            if dims is None:
                raise ValueError
            if isinstance(dims, Mapping):
                inside = {d: m for d, m in dims.items() if isinstance(d, Integral) and -ndim <= d < ndim}
                told = {int(d) % ndim: self.mesh.mesh_dim(m) for d, m in inside.items()}
                found: tuple[int | None, ...] = tuple(told.get(d) for d in range(ndim))
                count = len(dims)
            else:
                found = tuple(None if m is None else self.mesh.mesh_dim(m) for m in dims)
                count = len(found) - found.count(None)
            used = [m for m in found if m is not None]
            if len(found) != ndim or len(set(used)) != len(used) or len(used) != count:
                raise ValueError
        except (MeshError, TypeError, ValueError):
            raise LayoutError(
                f"{what}: which array dims the ranks cut is not clear",
                expected=f"dims= with one of {names}, or None, for each of {ndim} array dims",
                got=dims,
                fix="e.g. dims=(None, 'x', 'y') for an array [level, x, y]",
            ) from None
        return found

    # -- models

    def hook(
        self,
        model: Callable[..., Any],
        inputs: Sequence[str | Field],
        outputs: Sequence[str | Field] = (),
        pack: Callable[..., Any] | None = None,
        unpack: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Hook:
        """Return a `Hook`, which runs ``model`` on fields and writes its results into fields. Collective.

        Parameters as of a `Hook`, fields by name. A module's plain parameters are the same on all ranks, or it raises.
        """
        self._require_alive()
        made: list[Hook] = []

        def check() -> None:
            told = [(g,) if isinstance(g, (str, Field)) else g for g in (inputs, outputs)]
            chosen = [[self._known(f) for f in given] for given in told]
            for field in chosen[1]:
                field._require_writable("a hook's output")
            made.append(Hook(self, model, chosen[0], chosen[1], pack, unpack, **options))

        self._agreed("hook", check, lambda: told(made[0]))
        return made[0]

    def _known(self, field: str | Field) -> Field:
        found = self.fields.get(field) if isinstance(field, str) else field
        if not isinstance(found, Field) or found._simulation is not self:
            raise LayoutError(
                f"hook: no field {field!r}",
                expected=f"one of {sorted(self.fields)}",
                got=field,
                fix="make it with sim.field(name, array) first",
            )
        return found

    def _require_alive(self) -> None:
        if self._released:
            raise UnsupportedOperationError(
                "the simulation was released",
                expected="use before sim.release()",
                got="use after it",
                fix="adopt again",
            )
        if self.agreement.lost is not None:
            raise self.agreement.lost

    def release(self) -> None:
        """Let go of the host's arrays and free the plans: later use of a field raises.

        Collective. What `Hook.start` has started is waited for, and its results are written.

        Raises
        ------
        MpishardError
            On every rank, after the release: a model that was waited for raised.
        """
        if self._released:
            return
        try:
            if self._flying is not None:
                self._flying.wait()
        finally:
            if self._flying is None:  # not where the wait was interrupted: the model still runs
                self._free()

    def _free(self) -> None:
        self._released = True
        self._worker.end()
        for field in self.fields.values():
            field._release()
        self.mesh.free()

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *error: object) -> None:
        # on an error the other ranks may be elsewhere
        if error[0] is None:
            self.release()

    def __repr__(self) -> str:
        return f"Simulation({self.shape}, fields {sorted(self.fields)}, {self.mesh!r})"


def _require_room(what: str, array: Tensor, least: int) -> None:
    if least < 0:
        raise LayoutError(
            f"{what}: the array is smaller than its ghost layers",
            expected="owned cells between the ghost layers",
            got=tuple(array.shape),
            fix="give the halo that the array has",
        )
