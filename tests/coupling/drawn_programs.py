"""Two programs whose links are drawn at random, against what was put: run as both, with the name and a count."""

from __future__ import annotations

import math
import os
import random
import sys
import time

import numpy as np
import torch
from two_programs import NAME, OTHER, SOLVER, main, refused, side

import mpishard as ms
from mpishard.layout import layout_of

COUNT, SEED = int(sys.argv[2]), int(os.environ.get("MPISHARD_SEED", "0"))


def drawn(rng: random.Random, ranks: int, shape: tuple[int, ...]):
    """Any decomposition of a shape on so many ranks: meshes of 1 to 3 dims, uneven, empty, replicated."""
    meshes = ((ranks,), (1, ranks), (ranks, 1), (1, ranks, 1), (2, ranks // 2), (1, 2, ranks // 2))
    mesh = rng.choice([m for m in meshes if math.prod(m) == ranks])
    placements = tuple(rng.choice([ms.Replicate(), *map(ms.Shard, range(len(shape)))]) for _ in mesh)
    sizes = {}
    for d, n in enumerate(shape):
        count = math.prod(s for s, p in zip(mesh, placements) if p == ms.Shard(d))
        if count > 1 and rng.random() < 0.6:
            borders = sorted(rng.choice([0, n, rng.randint(0, n)]) for _ in range(count - 1))
            sizes[d] = [b - a for a, b in zip([0, *borders], [*borders, n])]
    return layout_of(mesh, placements, shape, sizes)


def tensor(me, layout, dtype, values=None):
    mesh = ms.init_mesh(layout.mesh_shape, comm=me.comm)
    box = tuple(slice(lo, hi) for lo, hi in layout.box(mesh.coords))
    block = torch.full(layout.local_shape(mesh.coords), 0, dtype=dtype) if values is None else values[box].clone()
    return ms.ShardTensor.from_local(
        block,
        mesh,
        layout.placements,
        {min(layout.shard_dims[d]): s for d, s in enumerate(layout.sizes) if s is not None},
    ), box


def cells(shape, dtype, offset=0):
    return (torch.arange(math.prod(shape)).reshape(shape) + offset).to(dtype)


def any_decompositions(me):
    rng = random.Random(7 + SEED)
    for case in range(COUNT):
        shapes = [
            tuple(rng.randint(0 if rng.random() < 0.1 else 1, 7) for _ in range(rng.randint(1, 3))) for _ in range(2)
        ]
        dtypes = [
            rng.choice([torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.complex64]) for _ in shapes
        ]
        layouts = {n: [drawn(rng, me.programs[n], s) for s in shapes] for n in ("solver", "model")}
        fields = [tensor(me, layout, t)[0] for layout, t in zip(layouts[NAME], dtypes)]
        boxes = [tensor(me, layout, t)[1] for layout, t in zip(layouts[NAME], dtypes)]
        back = case % 2  # the second field goes back, or along
        names = dict(zip("uv", fields))
        first, second = {"u": fields[0]}, {"v": fields[1]}
        if back:
            out, into = (first, second) if SOLVER else (second, first)
        else:
            out, into = (names, {}) if SOLVER else ({}, names)
        link = me.connect(OTHER, out=out, into=into, timeout=100)
        for step in range(3):
            if SOLVER:
                for f, s, t, b in zip(fields, shapes, dtypes, boxes):
                    f.to_local().copy_(cells(s, t, step)[b])
                assert link.put()
                # at once: the step is in a slot
                fields[0].to_local().zero_()
            else:
                assert link.get() == step
                for name, f, s, t, b in zip("uv", fields, shapes, dtypes, boxes):
                    if name in into:
                        assert torch.equal(f.to_local(), cells(s, t, step)[b]), (case, name, layouts)
            if back and SOLVER:
                assert link.get() == step
                assert torch.equal(fields[1].to_local(), cells(shapes[1], dtypes[1], 5 * step)[boxes[1]]), (
                    case,
                    layouts,
                )
            elif back:
                fields[1].to_local().copy_(cells(shapes[1], dtypes[1], 5 * step)[boxes[1]])
                assert link.put()
        link.close()
        link.close()


def any_policy(me):
    """Drawn: decompositions, policy, depth, paces, and which side closes first; what is read is what was put."""
    rng = random.Random(11 + SEED)
    mine = random.Random(me.comm.rank + 100 * SOLVER)  # paces, each rank its own
    for case in range(COUNT):
        shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
        dtype = rng.choice([torch.float64, torch.int32])
        layouts = {n: drawn(rng, me.programs[n], shape) for n in ("solver", "model")}
        policy, depth = rng.choice(("block", "drop_newest", "latest")), rng.randint(1, 3)
        puts, gets = rng.randint(1, 8), rng.choice([99, rng.randint(0, 3)])
        late = rng.choice([0, 0, 0.004]), rng.choice([0, 0, 0.004])
        field, box = tensor(me, layouts[NAME], dtype)
        told = (case, policy, depth, puts, gets, layouts)
        link = me.connect(OTHER, **side({"u": field}, policy=policy, depth=depth), timeout=100)
        if SOLVER:
            kept = []
            for step in range(puts):
                field.to_local().copy_(cells(shape, dtype, step)[box])
                kept.append(link.put())
                time.sleep(late[0] * mine.random())
            assert gets < 99 or policy == "drop_newest" or all(kept), told
            assert not gets or kept[0], told
            # all ranks are told the same
            assert len(set(me.comm.allgather((tuple(kept), link.ended)))) == 1, told
        else:
            got = []
            for step in link if gets else ():
                assert torch.equal(field.to_local(), cells(shape, dtype, step)[box]), (*told, step)
                got.append(step)
                time.sleep(late[1] * mine.random())
                if len(got) == gets:
                    break
            if policy == "block":
                assert got == list(range(min(puts, gets))), (*told, got)
            assert got == sorted(set(got)), (*told, got)
            if gets == 99:
                assert got, told
                assert got[-1] == puts - 1 or policy == "drop_newest", (*told, got)
                assert got[0] == 0 or policy == "latest", (*told, got)
            assert len(set(me.comm.allgather(tuple(got)))) == 1, told
        link.close()


def ghosted(me, rng, layout, dtype):
    """The same as a field of a simulation: field, its array with ghost cells, simulation."""
    dims = [p.dim for p in layout.placements if isinstance(p, ms.Shard)]
    grid = layout.mesh_shape
    widths = [(rng.randint(0, 2), rng.randint(0, 2)) for _ in grid]
    coords = tuple(int(c) for c in np.unravel_index(me.comm.rank, grid))
    own = layout.local_shape(coords)
    lo = dict(zip(dims, widths))
    array = torch.full([n + sum(lo.get(d, (0, 0))) for d, n in enumerate(own)], -1).to(dtype)
    sim = ms.insitu.adopt(me.comm, [layout.shape[d] for d in dims], widths, grid=grid, sizes=[own[d] for d in dims])
    on = [dims.index(d) if d in dims else None for d in range(len(own))]
    field = sim.field("f", array, dims=on)
    return field, array, sim


def any_links(me):
    """Drawn: several links at a time, of adopted and other fields, in any order; links that do not match."""
    rng = random.Random(13 + SEED)
    for case in range(COUNT):
        links, sims, told = [], [], []
        for _ in range(rng.randint(1, 3)):
            shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3)))
            dtype = rng.choice([torch.float64, torch.float32, torch.int16, torch.complex64, torch.bool])
            layouts = {n: drawn(rng, me.programs[n], shape) for n in ("solver", "model")}
            writer, depth = rng.choice(("solver", "model")), rng.randint(1, 3)
            adopts = {n: rng.random() < 0.6 for n in layouts}
            told.append((shape, dtype, layouts, writer, depth, adopts))
            layout = layouts[NAME]
            dims = [p.dim for p in layout.placements if isinstance(p, ms.Shard)]
            cut = len(set(dims)) == len(layout.placements)
            ghosts = random.Random(case)
            array = None
            if cut and adopts[NAME]:
                field, array, sim = ghosted(me, ghosts, layout, dtype)
                sims.append(sim)
                block = field.tensor.to_local()
                box = tensor(me, layout, dtype)[1]
            else:
                field, box = tensor(me, layout, dtype)
                block = field.to_local()
            fields = {"u": field}
            mistake = rng.choice((None, None, "name", "shape", "dtype", "more", "policy", "depth", "rank"))
            culprit = rng.choice(("solver", "model"))
            if mistake is not None:
                mine, given = culprit == NAME, {"timeout": 100}
                wrong = dict(fields)
                if mine and mistake == "name":
                    wrong = {"w": field}
                elif mine and mistake == "shape":
                    other = layout_of((me.comm.size,), (ms.Shard(0),), (*shape[:-1], shape[-1] + 1))
                    wrong = {"u": tensor(me, other, dtype)[0]}
                elif mine and mistake == "dtype":
                    wrong = {"u": tensor(me, layout, torch.uint8)[0]}
                elif mine and mistake == "more":
                    wrong["v"] = tensor(me, layout, dtype)[0]
                elif mine and mistake == "rank":
                    wrong = {"u": field if me.comm.rank != me.comm.size - 1 else "no field"}
                elif mine:
                    given.update({"policy": "best"} if mistake == "policy" else {"depth": 0})
                direction = "out" if writer == NAME else "into"
                refused(ms.MpishardError, lambda: me.connect(OTHER, **{direction: wrong}, **given))
            direction = "out" if writer == NAME else "into"
            links.append(
                (
                    me.connect(OTHER, **{direction: fields}, depth=depth, timeout=100),
                    block,
                    box,
                    array,
                    writer,
                    shape,
                    dtype,
                )
            )
        steps = [0] * len(links)
        for _ in range(rng.randint(1, 9)):
            i = rng.randrange(len(links))
            link, block, box, array, writer, shape, dtype = links[i]
            values = cells(shape, dtype, 3 * steps[i] + i)[box]
            if writer == NAME:
                block.copy_(values)
                assert link.put(), (case, told)
            else:
                before = None if array is None else array.clone()
                assert link.get() == steps[i], (case, told)
                assert torch.equal(block, values), (case, i, told)
                if before is not None:
                    # nothing beside the owned cells
                    now = array.clone()
                    block_of = torch.as_strided(now, block.shape, block.stride(), block.storage_offset())
                    block_of.copy_(torch.as_strided(before, block.shape, block.stride(), block.storage_offset()))
                    assert torch.equal(now, before), (case, i, told)
            steps[i] += 1
        rng.shuffle(links)
        for link, *_, writer, _, _ in links:
            if writer != NAME:
                assert link.get() is None, (case, told)
            link.close()
            call = link.put if writer == NAME else link.get
            refused(ms.UnsupportedOperationError, call, "the link is closed")
        for sim in sims:
            sim.release()


if __name__ == "__main__":
    main(any_decompositions, any_policy, any_links)
