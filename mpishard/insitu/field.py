"""Field: one ghosted array of a simulation, seen as a ShardTensor on the same memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mpishard.comm.thread import guest
from mpishard.errors import LayoutError, MpishardError, UnsupportedOperationError
from mpishard.insitu.kind import outline
from mpishard.insitu.memory import as_tensor, described_array, differs
from mpishard.tensor.shard_tensor import ShardTensor, wrap

if TYPE_CHECKING:
    from mpishard.comm.halo.exchanger import HaloExchanger
    from mpishard.insitu.simulation import Simulation


class Field:
    """An array of the host program: its owned cells are a ShardTensor, its ghost cells that tensor's halo.

    Made by `Simulation.field`. The memory stays the host's: what the model writes, the solver reads, and the other
    way round.

    Attributes
    ----------
    name : str
    writable : bool
        Whether the model, and refreshes of the halo, may write.
    tensor : ShardTensor
        The owned cells, in the array's own index order. Of the array that `rebind` gave last.
    array : torch.Tensor
        The whole ghosted array of this rank.
    halo_valid : bool
        Whether the ghost cells are known to be fresh. True after `exchange`, and where the host says so by
        assignment, because an exchange of its own has just filled them; until the next write that is seen: by torch,
        by `touch`, by `rebind`, at either end of a hook. What a solver writes is seen in a sample of cells only: say
        `touch` after writing a few cells between `exchange` and a model that is called without a hook.
    """

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        array: Tensor,
        tensor: ShardTensor,
        *,
        writable: bool,
        known: tuple[Any, ...] | None = None,
    ) -> None:
        assert tensor._halo is not None
        self.name, self.writable = name, writable
        self._simulation: Simulation | None = simulation
        self._array, self._tensor, self._halo = array, tensor, tensor._halo
        self._known = known  # the outline of an array that has been found right
        self._swap: _Swap | None = None
        # while a model runs in a thread of its own: plans are the model's then
        self._ready: HaloExchanger | None = None

    @property
    def tensor(self) -> ShardTensor:
        """The owned cells. Not collective."""
        if self._simulation is None:
            raise self._gone()
        self._halo.watch(self._tensor.block, all_cells=False)
        return self._tensor

    @property
    def array(self) -> Tensor:
        """The whole array of this rank. Not collective."""
        if self._simulation is None:
            raise self._gone()
        return self._array

    @property
    def halo_valid(self) -> bool:
        """Whether the ghost cells are known to be fresh, as this rank sees it. Not collective."""
        return self._halo.claimed(self.tensor.block)

    @halo_valid.setter
    def halo_valid(self, value: bool) -> None:
        if value:
            self._halo.claim(self.tensor.block, sampled=False)
        else:
            self._halo.disclaim()

    def exchange(self) -> None:
        """Refresh the ghost cells in place; those beyond a non-periodic edge stay the host's. Neighborwise collective.

        Raises
        ------
        UnsupportedOperationError
            The field was released, or is not writable.
        """
        tensor = self.tensor
        self._require_writable("exchange")
        if self._ready is None:
            self._halo.refresh(tensor.block, tensor.sharding)
        else:
            with guest():
                self._ready.renew(self._halo.whole(tensor.block, tensor.sharding), beside=True)
        torch.autograd.graph.increment_version(self._array)
        self._halo.counted()
        self._halo.claim(tensor.block, sampled=True)

    def touch(self) -> None:
        """Say that the host has written cells: the halo is stale, and what autograd saved is old. Not collective.

        All ranks say so, or none.
        """
        self._halo.disclaim()
        torch.autograd.graph.increment_version(self.array)

    def rebind(self, array: Any) -> None:
        """Let the field be another array of the same shape, strides and dtype: the next time level, a swapped buffer.

        Collective; plans are kept. `tensor` is a new one afterwards.

        Raises
        ------
        LayoutError
            On every rank: on some rank the array is another one than the field's.
        """
        simulation, error = self._simulation, None
        if simulation is None:
            raise self._gone()
        agreement, swap = simulation.agreement, self._swap
        if swap is None:
            swap = self._swap = _Swap.of(self.name, self._array, self._tensor)
        # in a time loop it is mostly numpy's again
        seen = outline(array)
        if seen is not None and seen == self._known:
            agreement.begin(swap.digest)
            found = torch.from_numpy(array)
            cells = array[swap.sampled]
        else:
            cells = None
            try:
                found = self._checked(array)
                self._known = seen
            except MpishardError as e:
                error = e
            agreement.begin(swap.digest, error is not None)
        if error is None:
            local = found.as_strided(swap.shape, swap.strides, found.storage_offset() + swap.interior)
            tensor = wrap(local, self._tensor.sharding, self._tensor.mesh)
            tensor._halo = halo = self._halo.again()
            if cells is not None:
                halo.sample_of(local, cells)
        if not agreement.together("rebind"):
            agreement.on(error, "rebind", f"rebind of field {self.name!r}")
        # the host goes on to write the one before
        torch.autograd.graph.increment_version(self._array)
        self._array, self._tensor, self._halo = found, tensor, halo

    def _enter(self) -> ShardTensor:
        """Return the tensor for a model that is called now: the host has written since. Not collective."""
        halo, declared = self._halo, self._halo.declared
        # first: what autograd saved before is old whatever the host did, and is not looked at
        torch.autograd.graph.increment_version(self.array)
        tensor = self.tensor
        halo.counted()
        if declared:
            halo.claim(tensor.block, sampled=False)
        else:
            halo.disclaim()
        halo.quiet = True
        return tensor

    def _prepare(self) -> None:
        """Plan the refresh of the halo, so that `exchange` is no more than messages. Collective where it is new."""
        if self.writable:
            self._ready = self._halo.exchanger(self._tensor.block, self._tensor.sharding)

    def _prepare_as(self, fields: Iterable[Field]) -> None:
        """Do as `_prepare`, after one of these fields that is of this one's kind has. Not collective."""

        def kind(field: Field) -> tuple[object, ...]:
            return field._tensor.sharding, field._halo.key, field._halo.order, field._array.dtype, field.writable

        self._ready = next((f._ready for f in fields if f._ready is not None and kind(f) == kind(self)), None)

    def _leave(self) -> None:
        """Give the field back to the host, which may write: what autograd saved is old. Not collective."""
        halo = self._halo
        halo.quiet = False
        halo.disclaim()
        torch.autograd.graph.increment_version(self._array)
        halo.unwatch()

    def _write(self, result: ShardTensor) -> None:
        """Copy a result into the owned cells. Collective where it is laid out differently."""
        tensor = self._tensor
        if result.sharding is tensor.sharding:
            tensor.block.copy_(result.block)
        else:
            tensor.copy_(result)

    def _checked(self, array: Any) -> Tensor:
        what = f"field {self.name!r}: rebind"
        with torch.inference_mode(False):
            found = as_tensor(what, array, self._array.device, writable=self.writable)
        if differs(self._array, found):
            raise LayoutError(
                f"{what}: another kind of array",
                expected=described_array(self._array),
                got=described_array(found),
                fix="pass an array of the same shape, strides, dtype and device, or make another field",
            )
        return found

    def _require_writable(self, what: str) -> None:
        if not self.writable:
            raise UnsupportedOperationError(
                f"field {self.name!r}: {what} would write into it",
                expected="a writable field",
                got="writable=False",
                fix="make the field with writable=True, if the host lets its array be written",
            )

    def _release(self) -> None:
        """Let go of the host's memory. Not collective."""
        if self._simulation is not None:
            self._simulation = None
            torch.autograd.graph.increment_version(self._array)
            self._halo.unwatch()
            self._tensor.__class__ = _Released  # type: ignore[assignment]
            del self._array

    def _gone(self) -> UnsupportedOperationError:
        return released(self.name)

    def __repr__(self) -> str:
        if self._simulation is None:
            return f"Field({self.name!r}, released)"
        return f"Field({self.name!r}, {self._tensor!r}, array {tuple(self._array.shape)})"


class _Swap(NamedTuple):
    """What each `rebind` of a field has in common: what it is called, and where its cells lie in an array."""

    digest: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    interior: int
    sampled: tuple[slice, ...]

    @classmethod
    def of(cls, name: str, array: Tensor, tensor: ShardTensor) -> _Swap:
        block = tensor.block
        assert tensor._halo is not None
        return cls(
            zlib.crc32(f"rebind {name}".encode(errors="replace")),
            tuple(block.shape),
            block.stride(),
            int(block.storage_offset() - array.storage_offset()),
            tensor._halo.sampled(tensor.sharding),
        )


class _Released(ShardTensor):
    """What a field's tensor becomes when the field is released: its memory may be gone."""

    __slots__ = ()

    @property
    def block(self) -> Tensor:  # type: ignore[override]
        assert self._halo is not None
        raise released(self._halo.name)


# what errors and programs read
_Released.__name__ = _Released.__qualname__ = ShardTensor.__name__


def released(name: str) -> UnsupportedOperationError:
    """Return the error of a field that is used after its release. Not collective."""
    return UnsupportedOperationError(
        f"field {name!r} was released",
        expected="use before sim.release()",
        got="use after it",
        fix="copy what is needed later, or release at the end",
    )


def staggered_dims(location: str | Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """Return the mesh dims along which values lie between the cells. Not collective.

    Parameters
    ----------
    location
        ``"cell"``; the name of a mesh dim (or ``"face_x"``), for faces normal to it; several names; or ``"node"``,
        for all.
    names
        Of the mesh dims.
    """
    if location == "cell":
        return ()
    if location in ("node", "vertex", "corner"):
        return tuple(range(len(names)))
    if location == "face" and len(names) == 1:
        return (0,)
    several = isinstance(location, Iterable) and not isinstance(location, str)
    given: tuple[Any, ...] = tuple(location) if several else (location,)
    found = {n.removeprefix("face_").removesuffix("_face") for n in given if isinstance(n, str)}
    if len(found) != len(given) or not found <= set(names) or not found:
        raise LayoutError(
            "field: unknown location",
            expected=f"'cell', 'node', or one or more of {tuple(names)}: the faces normal to these dims",
            got=location,
            fix="name the dims in which the array has a point more than cells",
        )
    return tuple(m for m, n in enumerate(names) if n in found)
