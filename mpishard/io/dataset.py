"""Streams of samples: a dataset whose first dim is time (or sample), read step by step, ahead of the training."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import data

from mpishard.comm import guard
from mpishard.comm.device.driver import host_tensor
from mpishard.comm.mesh import CartMesh
from mpishard.errors import FileError, LayoutError, MpishardError, UnsupportedOperationError, described
from mpishard.io.file.hyperslab import Block
from mpishard.io.file.open import Path, check_sources, damaged, found, opened
from mpishard.io.read import Part, Window, part_of
from mpishard.layout import Shard, as_placements, layout_of
from mpishard.tensor import ShardTensor, wrap


class Dataset(data.Dataset[Any]):
    """A dataset of a file, read when it is indexed: ``ds[t]`` is the sharded sample ``t``.

    Collective over the mesh: to make, index, iterate. The file stays open, on every rank, for reading.

    Parameters
    ----------
    path, name, mesh, dtype, device, multiple, decode
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
    ) -> None:
        self.path, self.name, self.mesh = path, name, mesh
        self.device = torch.device(mesh.device if device is None else device)
        self._comm = mesh.group(tuple(range(mesh.ndim))).comm
        self._pid = os.getpid()
        self._file: Any = None
        error: MpishardError | None = None
        signature = f"io.Dataset {name}"
        try:
            self._file = opened(path)
            self._dataset = found(self._file, path, name)
            self.shape = tuple(self._dataset.shape)
            if not self.shape:
                raise LayoutError(
                    described(
                        f"Dataset: {name!r} has no samples",
                        expected="a first dim to index",
                        got="a scalar",
                        fix="use mpishard.io.read",
                    )
                )
            own = as_placements(placements, mesh.ndim, len(self.shape) - 1)
            # the dataset's own dims: the sample's come after the first
            shifted = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in own]
            cut = None if sizes is None else {d + 1 if d >= 0 else d: s for d, s in sizes.items()}
            self._part: Part = part_of(
                self._dataset, name, mesh, shifted, dtype=dtype, sizes=cut, multiple=multiple, decode=decode
            )
            self._window: Window = self._part.window(mesh)
            check_sources(self._dataset, path, self._part.layout.box(mesh.coords))
            self._local = self._window.shape[1:]
            signature += f" {self._part!r}"
        except MpishardError as e:
            error = e
        guard.agree(self._comm, error, signature)
        self.sample_shape = self.shape[1:]
        self.dtype = self._part.dtype
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.shape[0]  # type: ignore[no-any-return]

    def __getitem__(self, index: int | slice) -> ShardTensor:
        """Return a sample, or several of them along a new first dim that is not sharded. Collective."""
        if isinstance(index, slice):
            return self.batch(range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} of {self.name!r}")
        return _tensor(self, self._fetched([index % len(self)]), True)

    def batch(self, indices: Sequence[int]) -> ShardTensor:
        """Return some samples along a new first dim that is not sharded. Collective."""
        return _tensor(self, self._fetched(list(indices)), False)

    def __iter__(self) -> Iterator[ShardTensor]:
        """Give every sample in order, reading two ahead in a thread. Collective, step by step."""
        return iter(Loader(self))

    def close(self) -> None:
        """Close the file. Not collective."""
        with self._lock:
            if self._file:
                self._file.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise UnsupportedOperationError(
            described(
                "a Dataset cannot be sent to another process",
                expected="use on the ranks of its mesh",
                got="pickling, as by DataLoader(num_workers=...)",
                fix="use mpishard.io.Loader, which reads ahead in a thread",
            )
        )

    def _fetched(self, indices: list[int]) -> _Fetched:
        """Read the local blocks of some samples: file reading only, no MPI, from any thread."""
        try:
            if os.getpid() != self._pid:
                raise UnsupportedOperationError(
                    described(
                        "a Dataset is used in a forked process",
                        expected="use on the ranks of its mesh",
                        got="a worker of a DataLoader",
                        fix="use mpishard.io.Loader, which reads ahead in a thread",
                    )
                )
            out = host_tensor((len(indices), *self._local), self.dtype, self.device)
            first, *rest = self._part.axes
            runs = self._window.runs[1:]
            for i, t in enumerate(indices):
                axes = (first._replace(start=t, count=1, kept=False), *rest)
                with self._lock:
                    for _ in Block(axes, runs, out[i], self._part.stored, self._part.decoding).read(self._dataset):
                        pass
            return _Fetched(indices, out, None)
        except MpishardError as e:
            return _Fetched(indices, None, e)
        except (OSError, RuntimeError, ValueError) as e:
            return _Fetched(indices, None, damaged(self.path, self.name, e))


class _Fetched(NamedTuple):
    indices: list[int]
    local: Tensor | None
    error: MpishardError | None


def _tensor(ds: Dataset, got: _Fetched, single: bool) -> ShardTensor:
    """Make the blocks that every rank has read a ShardTensor. Collective."""
    guard.agree(ds._comm, got.error, f"sample {got.indices} of {ds.name}")
    assert got.local is not None
    local = got.local.to(ds.device, non_blocking=True)
    own = ds._part.layout
    if single:
        placements = [Shard(p.dim - 1) if isinstance(p, Shard) else p for p in own.placements]
        layout = layout_of(own.mesh_shape, placements, own.shape[1:], own.sizes[1:])
        return wrap(local[0], layout, ds.mesh)
    layout = layout_of(own.mesh_shape, own.placements, (len(got.indices), *own.shape[1:]), own.sizes)
    return wrap(local, layout, ds.mesh)


class Loader:
    """Samples of one or several datasets in order or shuffled, singly or in batches, read ahead in a thread.

    Every iteration is collective over the mesh; the thread only reads files.

    Parameters
    ----------
    datasets
        A `Dataset`, or a tuple or a dict of them with the same number of samples, on one mesh: each item is
        then a tuple or a dict.
    batch_size
        Samples per item, along a new first dim; None: single samples without it.
    shuffle
        Whether to draw another order at every iteration; the same on every rank.
    seed
        Of the orders.
    drop_last
        Whether to leave out a last batch that is not full.
    prefetch
        Items read ahead, at least 1.
    transform
        Applied to every item on the main thread.

    Examples
    --------
    >>> loader = ms.io.Loader((inputs, targets), batch_size=4, shuffle=True, seed=1)
    >>> for x, y in loader:
    ...     ...
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
    ) -> None:
        self.datasets = datasets
        own = _all(datasets)
        if len({(len(ds), id(ds.mesh)) for ds in own}) != 1 or prefetch < 1 or (batch_size or 1) < 1:
            raise LayoutError(
                described(
                    "Loader: datasets or sizes that do not fit",
                    expected="datasets with as many samples on one mesh, batch_size and prefetch of at least 1",
                    got=f"{[len(ds) for ds in own]} samples, batch_size={batch_size}, prefetch={prefetch}",
                    fix="read datasets that belong together",
                )
            )
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.drop_last, self.prefetch, self.transform = drop_last, prefetch, transform
        self.epoch = 0

    def __len__(self) -> int:
        n, b = len(_all(self.datasets)[0]), self.batch_size or 1
        return n // b if self.drop_last else -(-n // b)

    def __iter__(self) -> Iterator[Any]:
        """Start an iteration: a thread begins to read. Not collective; every step is."""
        own = _all(self.datasets)
        order = list(range(len(own[0])))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        self.epoch += 1
        b = self.batch_size or 1
        items = [order[i * b : (i + 1) * b] for i in range(len(self))]
        return self._steps(own, items)

    def _steps(self, own: list[Dataset], items: list[list[int]]) -> Iterator[Any]:
        ready: queue.Queue[list[_Fetched]] = queue.Queue(self.prefetch)
        stop = threading.Event()

        def work() -> None:
            for item in items:
                got = [ds._fetched(item) for ds in own]
                while not stop.is_set():
                    try:
                        ready.put(got, timeout=0.1)
                        break
                    except queue.Full:
                        pass
                if stop.is_set():
                    return

        thread = threading.Thread(target=work, name="mpishard-read-ahead", daemon=True)
        thread.start()
        try:
            for _ in items:
                single = self.batch_size is None
                tensors = [_tensor(ds, got, single) for ds, got in zip(own, ready.get())]
                item = _like(self.datasets, tensors)
                yield item if self.transform is None else self.transform(item)
        finally:
            stop.set()
            thread.join()


def _all(datasets: Any) -> list[Dataset]:
    if isinstance(datasets, Dataset):
        return [datasets]
    own = list(datasets.values() if isinstance(datasets, Mapping) else datasets)
    if own and all(isinstance(ds, Dataset) for ds in own):
        return own
    raise FileError(
        described(
            "Loader: no datasets",
            expected="an mpishard.io.Dataset, or a tuple or dict of them",
            got=type(datasets).__name__,
            fix="open them first",
        )
    )


def _like(datasets: Any, tensors: list[ShardTensor]) -> Any:
    if isinstance(datasets, Dataset):
        return tensors[0]
    return dict(zip(datasets, tensors)) if isinstance(datasets, Mapping) else tuple(tensors)
