"""Files: what the library adds to the fastest program that a person would write by hand, in the same run.

    mpiexec -n 2 python benchmarks/hdf5.py --nbytes 1073741824 --folder /scratch

Each line is a ratio of bandwidths, ours to theirs (1 is as fast):

- mpio write and read, to a low-level collective h5py program (where h5py was built with MPI);
- virtual write, to ``numpy.tofile`` of one file per rank;
- read of every rank's slab, to ``read_direct`` into a buffer that is kept.

Files are in the page cache: what is timed is the software, which a slow disk would hide (/dev/shm shows it best). Give
a folder on the file system that you mean to use. Every write makes a new file, and old ones are removed before: to
replace one, the library renames (so that a kill costs nothing), and some file systems, such as ext4, then bring all
data to the disk first.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import timing
import torch

import mpishard as ms
from mpishard.io.backend.choice import mpio_obstacle

WORLD = timing.WORLD


def own_options() -> argparse.Namespace:
    """Return our own command line, and leave the common one to `timing`."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--nbytes", type=int, default=64 << 20, help="of the whole tensor (default 64 MiB)")
    parser.add_argument("--folder", help="where files go (default: the system's temporary folder)")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    return own


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


def report(
    what: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    nbytes: int,
    rounds: int,
    tidy: Callable[[], object] = lambda: None,
) -> None:
    """Time two calls in turns, and print the ratio of their bandwidths."""
    times = timing.interleaved({"ours": ours, "theirs": theirs}, 1, rounds, tidy)
    speeds = {name: nbytes / statistics.median(each) / 2**20 for name, each in times.items()}
    timing.say(
        f"{what:42s} {timing.ratio(times, 'theirs', 'ours'):5.2f}x"
        f"   ours {speeds['ours']:7.0f} MiB/s, theirs {speeds['theirs']:7.0f} MiB/s"
    )


def main() -> None:
    """Run all comparisons."""
    own = own_options()
    options = timing.options(__doc__)
    nbytes = 1 << 20 if options.quick else own.nbytes
    folder = Path(WORLD.bcast(tempfile.mkdtemp(prefix="mpishard-bench-", dir=own.folder) if WORLD.rank == 0 else None))
    mesh = ms.init_mesh((-1,), ("y",))
    rows = max(WORLD.size, nbytes // 4 // 4096)
    try:
        for dim in (0, 1):
            x = ms.rand(rows, 4096, mesh=mesh, placements=(ms.Shard(dim),))
            compare(folder, x, f"shard {dim}", options.rounds)
    finally:
        WORLD.Barrier()
        if WORLD.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def compare(folder: Path, x: ms.ShardTensor, what: str, rounds: int) -> None:
    """Compare every back-end on one tensor."""
    mesh, block = x.mesh, x.to_local().numpy()
    start, nbytes = x.layout.offset(mesh.coords), 4 * x.layout.shape[0] * x.layout.shape[1]
    here = folder / f"part{WORLD.rank}.bin"
    kept = torch.empty(block.shape)
    timing.say(f"{what}: {nbytes / 2**20:.0f} MiB on {WORLD.size} ranks")

    hand = folder / "hand.h5"

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
        by_hand_write(hand, tuple(x.layout.shape), start, block)

    report("virtual write / tofile per rank", write("virtual"), tofile, nbytes, rounds, clear)
    report("root write / tofile per rank", write("root"), tofile, nbytes, rounds, clear)
    if mpio_obstacle() is None:
        report("mpio write / collective h5py by hand", write("mpio"), by_hand, nbytes, rounds, clear)
    clear()
    write("root")()
    with h5py.File(folder / "root.h5", "r", locking=False) as file:
        box = tuple(slice(lo, hi) for lo, hi in x.layout.box(mesh.coords))

        def direct() -> None:
            file["x"].read_direct(kept.numpy(), box)

        def read(backend: str) -> Callable[[], object]:
            return lambda: ms.io.read(folder / "root.h5", "x", mesh, x.placements, out=kept, backend=backend)

        report("own read / read_direct into a kept buffer", read("root"), direct, nbytes, rounds)
    if mpio_obstacle() is None:

        def by_hand_again() -> None:
            by_hand_read(folder / "root.h5", start, kept.numpy())

        report("mpio read / collective h5py by hand", read("mpio"), by_hand_again, nbytes, rounds)


if __name__ == "__main__":
    main()
