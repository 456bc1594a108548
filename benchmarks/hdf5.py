"""Files: what the library adds to the fastest program that a person would write by hand, in the same run.

The floor of each:

- mpio write and read, to a low-level collective h5py program (where h5py was built with MPI);
- virtual write, to ``numpy.tofile`` of one file per rank;
- read of every rank's slab, to ``read_direct`` into a buffer that is kept.

Files are in the page cache: what is timed is the software, which a slow disk would hide (/dev/shm shows it best). Give
the command a --folder on the file system that you mean to use. Every write makes a new file, and old ones are removed
before: to replace one, the library renames (so that a kill costs nothing), and some file systems, such as ext4, then
bring all data to the disk first.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import torch

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench
from mpishard.io.backend.choice import mpio_obstacle

OPTIONS = {"nbytes": "of the whole tensor (default 64 MiB)"}


def by_hand_write(path: Path, full_shape: tuple[int, ...], start: tuple[int, ...], block: np.ndarray) -> None:
    """Write a dataset collectively, as low as h5py goes, and as safely: it is on disk when this returns."""
    with h5py.File(path, "w", driver="mpio", comm=WORLD) as file:
        dataset = file.create_dataset("x", full_shape, block.dtype)
        dxpl = h5py.h5p.create(h5py.h5p.DATASET_XFER)
        dxpl.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)
        space = dataset.id.get_space()
        space.select_hyperslab(start, block.shape)
        dataset.id.write(h5py.h5s.create_simple(block.shape), space, block, dxpl=dxpl)
        file.flush()


def by_hand_read(path: Path, start: tuple[int, ...], block: np.ndarray) -> None:
    """Read a block collectively into a kept buffer."""
    with h5py.File(path, "r", driver="mpio", comm=WORLD) as file:
        dataset = file["x"]
        dxpl = h5py.h5p.create(h5py.h5p.DATASET_XFER)
        dxpl.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)
        space = dataset.id.get_space()
        space.select_hyperslab(start, block.shape)
        dataset.id.read(h5py.h5s.create_simple(block.shape), space, block, dxpl=dxpl)


def run(bench: Bench) -> None:
    """Run all comparisons."""
    nbytes = 1 << 20 if bench.quick else bench.setting("nbytes", 64 << 20)
    mesh = ms.init_mesh((-1,), ("y",))
    rows = max(WORLD.size, nbytes // 4 // 4096)
    for dim in (0, 1):
        x = ms.rand(rows, 4096, mesh=mesh, placements=(ms.Shard(dim),))
        compare(bench, x, f"{rows * 4096 * 4 / 2**20:.0f} MiB, shard {dim}")


def compare(bench: Bench, x: ms.ShardTensor, size: str) -> None:
    """Compare every back-end on one tensor."""
    folder = bench.folder
    mesh, block = x.mesh, x.to_local().numpy()
    start = x.sharding.offset(mesh.coords)
    here = folder / f"part{WORLD.rank}.bin"
    kept = torch.empty(block.shape)
    hand = folder / "hand.h5"

    def report(
        what: str, ours: Callable[[], object], floor: str, theirs: Callable[[], object], tidy=lambda: None
    ) -> None:
        bench.compare(f"{what}, {size}", {"ours": ours, floor: theirs}, floor=floor, count=1, tidy=tidy)

    def clear() -> None:
        WORLD.Barrier()
        if WORLD.rank == 0:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        WORLD.Barrier()

    def write(name: str) -> Callable[[], object]:
        return lambda: ms.io.write(folder / f"{name}.h5", {"x": x}, backend=name)

    def tofile() -> None:
        block.tofile(here)

    def by_hand() -> None:
        by_hand_write(hand, tuple(x.sharding.shape), start, block)

    report("virtual write", write("virtual"), "tofile per rank", tofile, clear)
    report("root write", write("root"), "tofile per rank", tofile, clear)
    if mpio_obstacle() is None:
        report("mpio write", write("mpio"), "h5py by hand", by_hand, clear)
    clear()
    write("root")()
    with h5py.File(folder / "root.h5", "r", locking=False) as file:
        box = tuple(slice(lo, hi) for lo, hi in x.sharding.box(mesh.coords))

        def direct() -> None:
            file["x"].read_direct(kept.numpy(), box)

        def read(backend: str) -> Callable[[], object]:
            return lambda: ms.io.read(folder / "root.h5", "x", mesh, x.placements, out=kept, backend=backend)

        report("own read", read("root"), "read_direct", direct)
    if mpio_obstacle() is None:

        def by_hand_again() -> None:
            by_hand_read(folder / "root.h5", start, kept.numpy())

        report("mpio read", read("mpio"), "h5py by hand", by_hand_again)
