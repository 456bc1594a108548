"""Streams of samples: a dataset whose first dim is time (or sample), read step by step, ahead of the training."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import data

from mpishard.autograd.argument import require, require_functions, require_mesh
from mpishard.comm import guard
from mpishard.comm.device.driver import host_tensor
from mpishard.comm.mesh import CartMesh
from mpishard.errors import FileError, LayoutError, MpishardError, UnsupportedOperationError
from mpishard.io.file.ahead import ahead, shuffled
from mpishard.io.file.hyperslab import BlockReader
from mpishard.io.file.open import check_chunks, check_sources, closed, damaged, found, opened
from mpishard.io.file.parts import narrowed
from mpishard.io.file.seen import Seen, changed
from mpishard.io.file.trust import Path, check_memory, shown, told
from mpishard.io.read import Part, Window, at_rest, no_device, opened_alike, part_of
from mpishard.io.sample_index import counted
from mpishard.layout import Layout, Replicate, Shard, as_placements, largest, layout_of
from mpishard.tensor import ShardTensor, wrap


class Dataset(data.Dataset[Any]):
    """A dataset of a file, read when it is indexed: ``ds[t]`` is the sharded sample ``t``.

    Collective over the mesh: to make, index, iterate. The file stays open, on every rank, for reading.

    Parameters
    ----------
    path, name, mesh, dtype, device, multiple, decode, external
        As of `read`.
    placements
        Of one sample, that is of ``ds[t]``: the dataset's dims without the first.
    sizes
        Dim of a sample -> block sizes.

    Attributes
    ----------
    shape : tuple of int
        Of the whole dataset; ``len(ds)`` is its first entry.
    sample_shape : tuple of int
    dtype : torch.dtype

    Notes
    -----
    It is a torch Dataset, but give `Loader` the work of a DataLoader: worker processes are no MPI ranks, and a
    shuffling sampler draws another order on every rank. A DataLoader without either is fine.

    Examples
    --------
    >>> ds = ms.io.Dataset("run.nc", "t2m", mesh, (ms.Shard(0), ms.Shard(1)), decode=True)
    >>> ds[-1], ds[0:4]  # one sample; four of them, along a new first dim that is not sharded
    >>> for x in ds:
    ...     ...  # reads ahead in a thread
    """

    def __init__(
        self,
        path: Path,
        name: str,
        mesh: CartMesh,
        placements: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        sizes: Mapping[int, Sequence[int]] | None = None,
        multiple: int = 1,
        decode: bool = False,
        external: bool = False,
    ) -> None:
        require_mesh("io.Dataset", mesh)
        self.path, self.name, self.mesh = path, name, mesh
        self._comm, self._pid = mesh.all_ranks.comm, os.getpid()
        self._files: list[Any] = []  # and the one in memory that shows this rank's part of a virtual dataset
        options = {"dtype": dtype, "multiple": multiple, "decode": decode}
        at_rest(path, lambda: self._opened(Seen(path), placements, device, sizes, external, **options))
        self.sample_shape, self.dtype = self.shape[1:], self._part.dtype
        self._lock = threading.Lock()

    def _opened(self, seen: Seen, placements: Any, device: Any, sizes: Any, external: bool, **options: Any) -> Any:
        """Open the file, and return None on every rank where it has changed meanwhile. Collective."""
        path, name, mesh, part, self._files = self.path, self.name, self.mesh, "", []
        error: Exception | None = None
        try:
            self.device = torch.device(mesh.device if device is None else device)
        except Exception as e:  # noqa: BLE001 (Python's too, of other kinds of arguments)
            error = no_device(device, e)
        try:
            self._files.append(opened(path))
            self._dataset = found(self._files[0], path, name, external=external)
            self.shape = tuple(self._dataset.shape)
            if not self.shape:
                raise LayoutError(
                    f"Dataset: {name!r} has no samples",
                    expected="a first dim to index",
                    got="a scalar",
                    fix="use mpishard.io.read",
                )
            own = as_placements(placements, mesh.ndim, len(self.shape) - 1)
            # the dataset's own dims: the sample's come after the first
            shifted = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in own]
            cut = {d + 1 if d >= 0 else d: s for d, s in sizes.items()} if isinstance(sizes, Mapping) else sizes
            self._part: Part = part_of(self._dataset, name, mesh, shifted, sizes=cut, **options)
            self._window: Window = self._part.window(mesh)
            box, whole = self._part.layout.box(mesh.coords), self._dataset
            self._dataset = narrowed(whole, path, box)
            self._files.append(self._dataset.file)
            self._seen = Seen(path, self._files[0])
            self._seen.add(check_sources(self._dataset, path, box, external=external, whole=self._dataset is not whole))
            check_chunks(self._dataset, name)
            part = f" {self._part!r}, external={bool(external)}"
        except MpishardError as e:
            error = error or e
        except Exception as e:  # noqa: BLE001 (of a damaged file h5py raises anything)
            error = error or damaged(path, name, e)
        same = None
        try:
            same = opened_alike(self._comm, error, f"io.Dataset {shown(name)} of {told(path)}", part, seen) or None
        finally:
            if not same:  # open, a file that is damaged would be found as it is now by who opens it when it is mended
                self._shut()
        return same

    def __len__(self) -> int:
        return self.shape[0]  # type: ignore[no-any-return]

    def __getitem__(self, index: int | slice) -> ShardTensor:
        """Return a sample, or several of them along a new first dim that is not sharded. Collective."""
        if isinstance(index, slice):
            return self._given(index, False)
        return self._given([index], True)

    def batch(self, indices: Sequence[int]) -> ShardTensor:
        """Return some samples along a new first dim that is not sharded; negative ones from the end. Collective."""
        return self._given(indices, False)

    def _given(self, indices: Sequence[int] | slice, single: bool) -> ShardTensor:
        try:
            got = self._fetched(counted(indices, len(self), self.name))
        except Exception as e:  # noqa: BLE001 (what a user's sequence raises, too: the others wait for this rank)
            got = _Fetched((), None, e)
        try:
            return _tensor(self, got, single)
        except MpishardError:
            if isinstance(got.error, IndexError):  # as of any sequence, when all have heard of it
                raise got.error from None
            raise

    def __iter__(self) -> Iterator[ShardTensor]:
        """Give every sample in order, reading two ahead in a thread. Collective, step by step."""
        return iter(Loader(self))

    def close(self) -> None:
        """Close the file. Not collective."""
        with self._lock:
            self._shut()

    def _shut(self) -> None:
        for file in reversed(self._files):
            if file:
                file.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise UnsupportedOperationError(
            "a Dataset cannot be sent to another process",
            expected="use on the ranks of its mesh",
            got="pickling, as by DataLoader(num_workers=...)",
            fix="use mpishard.io.Loader, which reads ahead in a thread",
        )

    def _fetched(self, indices: Sequence[int], mesh_dim: int | None = None) -> _Fetched:
        """Read the local blocks of some samples: file reading only, no MPI, from any thread.

        Along ``mesh_dim`` the ranks share the samples.
        """
        item, batch = indices, self._batched(len(indices), mesh_dim)
        if mesh_dim is not None:
            lo, hi = batch.box(self.mesh.coords)[0]
            indices = item[lo:hi]
        try:
            if os.getpid() != self._pid:
                raise UnsupportedOperationError(
                    "a Dataset is used in a forked process",
                    expected="use on the ranks of its mesh",
                    got="a worker of a DataLoader",
                    fix="use mpishard.io.Loader, which reads ahead in a thread",
                )
            if not self._files[0]:
                raise closed(self.path, self.name)
            # of the largest block: a rank without cells must not go through samples that the others refuse
            cells = math.prod(n if cut is None else largest(cut) for n, cut in zip(batch.shape, batch.sizes))
            check_memory(cells * self.dtype.itemsize, f"samples of {self.name!r}")
            out = host_tensor((len(indices), *self._window.shape[1:]), self.dtype, self.device)
            first, *rest = self._part.axes
            runs = self._window.runs[1:]
            for i, t in enumerate(indices):
                axes = (first._replace(start=t, count=1, kept=False), *rest)
                with self._lock:
                    for _ in BlockReader(axes, runs, out[i], self._part.stored, self._part.decoding).read(
                        self._dataset
                    ):
                        pass
            with self._lock:
                self._seen.check()
            return _Fetched(item, out, None)
        except MpishardError as e:
            return _Fetched(item, None, e)
        except Exception as e:  # noqa: BLE001
            got = self._seen.changed()
            return _Fetched(item, None, changed(self.path, got) if got else damaged(self.path, self.name, e))
        except BaseException as e:  # noqa: BLE001 (of a thread too: whoever waits for it must know)
            return _Fetched(item, None, e)

    def _batched(self, count: int, mesh_dim: int | None) -> Layout:
        """Return the layout of so many samples."""
        own = self._part.layout
        placements = [Shard(0) if m == mesh_dim else p for m, p in enumerate(own.placements)]
        return layout_of(own.mesh_shape, placements, (count, *own.shape[1:]), (None, *own.sizes[1:]))


class _Fetched(NamedTuple):
    """What a rank has read of an item: of the samples ``indices``, those that it holds."""

    indices: Sequence[int]
    local: Tensor | None
    error: BaseException | None


def _tensor(ds: Dataset, got: _Fetched, single: bool, mesh_dim: int | None = None) -> ShardTensor:
    """Make the blocks that every rank has read a ShardTensor. Collective."""
    guard.agree(ds._comm, got.error, f"sample {got.indices} of {ds.name}")
    assert got.local is not None
    local = got.local.to(ds.device, non_blocking=True)
    own = ds._part.layout
    if single:
        placements = [Shard(p.dim - 1) if isinstance(p, Shard) else p for p in own.placements]
        layout = layout_of(own.mesh_shape, placements, own.shape[1:], own.sizes[1:])
        return wrap(local[0], layout, ds.mesh)
    return wrap(local, ds._batched(len(got.indices), mesh_dim), ds.mesh)


class Loader:
    """Samples of one or several datasets in order or shuffled, singly or in batches, read ahead in a thread.

    Collective over the mesh: to make, and every step of an iteration; the thread only reads files.

    Parameters
    ----------
    datasets
        A `Dataset`, or a tuple or a dict of them with the same number of samples, on one mesh: each item is
        then a tuple or a dict.
    batch_size
        Samples per item, at least 1, along a new first dim; None: single samples without it.
    shuffle
        Whether to draw another order at every iteration; the same on every rank.
    seed
        Of the orders.
    drop_last
        Whether to leave out a last batch that is not full.
    prefetch
        Items read ahead, at least 1.
    transform
        Applied to every item on the main thread, on every rank; collective, as ranks agree on what it raises.
    batch_dim
        Mesh dim that shards the samples of a batch, by name or index, such as ``"data"``: each rank reads its own.
        The samples themselves must not be sharded over it.

    Attributes
    ----------
    epoch : int
        Number of the next iteration, or of the one that goes on.

    Raises
    ------
    LayoutError
        Datasets, sizes or ``batch_dim`` do not fit each other.

    Examples
    --------
    >>> loader = ms.io.Loader((inputs, targets), batch_size=4, shuffle=True, seed=1, batch_dim="data")
    >>> for x, y in loader:
    ...     ...
    >>> state = loader.state_dict()  # numbers: keep them with a checkpoint; the next iteration goes on from there
    >>> loader.load_state_dict(state)
    """

    def __init__(
        self,
        datasets: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        prefetch: int = 2,
        transform: Callable[[Any], Any] | None = None,
        batch_dim: str | int | None = None,
    ) -> None:
        self.datasets = datasets
        known = [ds for ds in _listed(datasets) if isinstance(ds, Dataset)]
        error: Exception | None = None
        try:
            self._set(_all(datasets), batch_size, shuffle, seed, drop_last, prefetch, transform, batch_dim)
        except Exception as e:
            if not known:  # who the other ranks are
                raise
            error = e
        known[0].mesh.agree(known[0]._comm, error, "io.Loader")

    def _set(
        self,
        own: list[Dataset],
        batch_size: int | None,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        prefetch: int,
        transform: Callable[[Any], Any] | None,
        batch_dim: str | int | None,
    ) -> None:
        """Keep what the items are made of, or raise where that does not fit. Not collective."""
        sizes = [prefetch] if batch_size is None else [prefetch, batch_size]
        counts = all(isinstance(n, Integral) and n >= 1 for n in sizes)
        if len({(len(ds), id(ds.mesh)) for ds in own}) != 1 or not counts:
            raise LayoutError(
                "Loader: datasets or sizes that do not fit",
                expected="datasets with as many samples on one mesh, integers batch_size and prefetch of at least 1",
                got=f"{[len(ds) for ds in own]} samples, batch_size={batch_size}, prefetch={prefetch}",
                fix="read datasets that belong together",
            )
        require("Loader", "seed", seed, Integral, "give an integer")
        require_functions("Loader", transform=transform)
        self.batch_size, self.shuffle, self.seed = batch_size, bool(shuffle), int(seed)
        self.drop_last, self.prefetch, self.transform = bool(drop_last), prefetch, transform
        self._current: object | None = None  # the iteration whose state it is
        self.epoch = 0
        self._batch_dim = None if batch_dim is None else own[0].mesh.mesh_dim(batch_dim)
        m = self._batch_dim
        if m is not None and (
            batch_size is None or any(type(ds._part.layout.placements[m]) is not Replicate for ds in own)
        ):
            raise LayoutError(
                f"Loader: batch_dim={batch_dim!r}",
                expected="a batch_size, and datasets with Replicate() there",
                got=f"batch_size={batch_size}, placements {[ds._part.layout.placements[m] for ds in own]}",
                fix="place samples on the other mesh dims alone",
            )

    def __len__(self) -> int:
        n, b = len(_all(self.datasets)[0]), self.batch_size or 1
        return n // b if self.drop_last else -(-n // b)

    @property
    def epoch(self) -> int:
        """Number of the next iteration, or of the one that goes on; set, the next one is that, from its start."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        require("Loader", "epoch", epoch, Integral, "give an integer")
        self._epoch, self._position, self._current = int(epoch), 0, None

    def state_dict(self) -> dict[str, int]:
        """Return where the iteration is, the same on all ranks, as numbers. Not collective.

        Of items that were given; those that the thread has read ahead are read again.
        """
        ended = 0 < self._position == len(self)
        return {"epoch": self.epoch + ended, "position": 0 if ended else self._position, **self._order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration go on where `state_dict` was taken: it gives the rest of that epoch.

        Not collective.

        Raises
        ------
        LayoutError
            The state is that of another order: other samples, batches, seed, or shuffled otherwise.
        """
        own, given = self._order(), {}
        with contextlib.suppress(ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError):
            whole = {key: int(value) for key, value in state.items()}
            given = whole if whole == dict(state) else {}  # 1.5 and "1" are no places
        epoch, position = given.pop("epoch", -1), given.pop("position", -1)
        if given != own or epoch < 0 or not 0 <= position <= len(self):
            raise LayoutError(
                "Loader.load_state_dict: the state of another order of samples",
                expected=f"an epoch, a position up to {len(self)}, and {own}",
                got=state,
                fix="make the Loader as it was; or set loader.epoch alone, to begin an epoch",
            )
        self.epoch, self._position = epoch, position  # in this order

    def _order(self) -> dict[str, int]:
        """Return what decides the items of an epoch."""
        return {
            "samples": len(_all(self.datasets)[0]),
            "batch_size": self.batch_size or 0,
            "shuffle": int(self.shuffle),
            "seed": self.seed,
            "drop_last": int(self.drop_last),
        }

    def __iter__(self) -> Iterator[Any]:
        """Start an iteration, or go on with one that was loaded. Not collective; every step is."""
        own = _all(self.datasets)
        if self._current is not None:  # broken off
            self.epoch += 1
        self._current = token = object()
        # a range, of what a file calls its length, takes no memory
        order: Sequence[int] | Exception = range(len(own[0]))
        if self.shuffle:
            try:
                order = shuffled(len(own[0]), self.seed * 1_000_003 + self.epoch)
            except Exception as e:  # noqa: BLE001 (memory, which may be short on one rank)
                order = e
        return self._steps(own, order, self._position, token)

    def _steps(self, own: list[Dataset], order: Sequence[int] | Exception, first: int, token: object) -> Iterator[Any]:
        def read(i: int) -> list[_Fetched]:
            b = self.batch_size or 1
            item = [] if isinstance(order, Exception) else list(order[i * b : (i + 1) * b])
            try:
                if isinstance(order, Exception):
                    raise order
                return [ds._fetched(item, self._batch_dim) for ds in own]
            except BaseException as e:  # noqa: BLE001 (a subclass of the user's may raise anything)
                return [_Fetched(item, None, e)] * len(own)

        # of items that end on one rank before the others, these would wait for one more
        form = f"{_like(self.datasets, [ds.name for ds in own])}, batch_dim={self._batch_dim}"
        guard.agree(own[0]._comm, None, f"Loader from item {first} of epoch {self.epoch}, {self._order()}, {form}")
        with contextlib.closing(ahead(read, range(first, len(self)), self.prefetch)) as items:
            for got in items:
                tensors = [_tensor(ds, each, self.batch_size is None, self._batch_dim) for ds, each in zip(own, got)]
                item = _like(self.datasets, tensors)
                item = item if self.transform is None else self._transformed(item, own[0]._comm)
                if self._current is token:
                    self._position += 1
                yield item
        if self._current is token:
            self.epoch += 1

    def _transformed(self, item: Any, comm: Any) -> Any:
        """Call the user's function; what it raises on some ranks is raised on all. Collective."""
        assert self.transform is not None
        error: Exception | None = None
        try:
            item = self.transform(item)
        except Exception as e:  # noqa: BLE001 (a user's)
            error = e
        guard.agree(comm, error, "Loader: a transform")
        return item


def _listed(datasets: Any) -> list[Any]:
    if isinstance(datasets, Dataset):
        return [datasets]
    given = datasets.values() if isinstance(datasets, Mapping) else datasets
    return list(given) if isinstance(given, Iterable) else []


def _all(datasets: Any) -> list[Dataset]:
    own = _listed(datasets)
    if own and all(isinstance(ds, Dataset) for ds in own):
        return own
    raise FileError(
        "Loader: no datasets",
        expected="an mpishard.io.Dataset, or a tuple or dict of them",
        got=type(datasets).__name__,
        fix="open them first; a torch.utils.data.Subset of one goes into torch's DataLoader",
    )


def _like(datasets: Any, tensors: list[Any]) -> Any:
    if isinstance(datasets, Dataset):
        return tensors[0]
    return dict(zip(datasets, tensors)) if isinstance(datasets, Mapping) else tuple(tensors)
