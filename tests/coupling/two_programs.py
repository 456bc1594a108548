"""Two programs, ``solver`` and ``model``, which couple in every way that two can: run as both, with the name."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
from mpi4py import MPI

import mpishard as ms

NAME = sys.argv[1]
OTHER = {"solver": "model", "model": "solver"}[NAME]
SOLVER = NAME == "solver"


def fields_of(me, n=6):
    mesh = ms.init_mesh((-1,), ("x",), comm=me.comm)
    return ms.zeros(n, mesh=mesh, placements=(ms.Shard(0),))


def refused(kind, call, *texts):
    with pytest.raises(kind) as caught:
        call()
    assert all(text in str(caught.value) for text in texts), caught.value


def side(x, **rest):
    return {"out" if SOLVER else "into": x, **rest}


def bad_input(me):
    u = fields_of(me)
    refused(ms.MpishardError, lambda: me.connect("nobody", out={"u": u}), "no such program", OTHER)
    peer = "nobody" if me.comm.rank == me.comm.size - 1 else OTHER
    refused(ms.MpishardError, lambda: me.connect(peer, out={"u": u}), "no such program", OTHER)
    cases = (
        ("other fields", {"u": u} if SOLVER else {"w": u}, ms.LayoutError, "'u'", "'w'"),
        ("other global shapes", {"u": fields_of(me, 6 if SOLVER else 7)}, ms.LayoutError, "(6,)", "(7,)"),
        ("other dtypes", {"u": u if SOLVER else u.double()}, ms.UnsupportedDtypeError, "float32", "float64"),
        ("name no field", {}, ms.LayoutError, "none"),
    )
    for text, fields, kind, *texts in cases:
        refused(kind, lambda: me.connect(OTHER, **side(fields), timeout=100), text, *texts)
    # wrong on one side alone: there it is named, and the other side hears of it
    wrong = ({"policy": "newest"}, {"depth": 0}, {"depth": 1 << 40}, {"timeout": -1}, {"x": torch.ones(3)})
    for bad in wrong:
        for culprit in ("solver", "model"):
            given = {k: v for k, v in bad.items() if k != "x"}
            fields = {"u": bad.get("x", u)}
            if culprit == NAME:
                refused(ms.MpishardError, lambda: me.connect(OTHER, **side(fields, **given)), "connect:")
            else:
                refused(ms.MpishardError, lambda: me.connect(OTHER, **side({"u": u})), f"{culprit!r} gave up")
    # several cells in one place can be read, and not written to
    wide = {"u": u[:, None].expand(-1, 3)}
    if SOLVER:
        refused(ms.MpishardError, lambda: me.connect(OTHER, out=wide), "'model' gave up")
    else:
        refused(ms.LayoutError, lambda: me.connect(OTHER, into=wide), "into 'u': cells that share memory")
    # wrong on one rank alone
    fields = {"u": u} if me.comm.rank or not SOLVER else {7: u}
    refused(ms.MpishardError, lambda: me.connect(OTHER, **side(fields)), "no name of a field" if SOLVER else "gave up")


def wrong_order(me):
    u = fields_of(me)
    link = me.connect(OTHER, **side({"u": u}))
    refused(ms.UnsupportedOperationError, link.get if SOLVER else link.put, "nothing to")
    if SOLVER:
        assert link.put()
        link.close()
        refused(ms.UnsupportedOperationError, link.put, "put: the link is closed")
    else:
        assert list(link) == [0]
        assert link.get() is None
        assert link.ended
        link.close()
        refused(ms.UnsupportedOperationError, link.get, "get: the link is closed")
    link = me.connect(OTHER, **side({"u": u}))
    # a block that no longer fits, on one rank
    if SOLVER:
        if me.comm.rank == 0:
            u.block = u.block[:0]
            refused(ms.LayoutError, link.put, "has changed")
        else:
            assert link.put()  # nobody waits for the others: the next call tells
        refused(ms.LayoutError, link.put, "has changed")
        refused(ms.LayoutError, link.put, "has changed")
    else:
        refused(ms.MpishardError, link.get, "left", "program 'solver'")
    link.close()


def wrong_everywhere(me):
    """What all ranks were given is refused by the call itself; and by whatever call comes next."""
    for last in ("put", "get", "close"):
        u, v = fields_of(me), fields_of(me)
        link = me.connect(OTHER, out={NAME: u}, into={OTHER: v}, timeout=100)
        if SOLVER:
            assert link.put()
            u.block = u.block.double()
            refused(ms.LayoutError, link.put, "has changed", "float64")
            if last != "close":
                refused(ms.LayoutError, getattr(link, last), "has changed", "float64")
        else:
            assert link.get() == 0
            refused(ms.MpishardError, link.get, "left", "program 'solver'")
        link.close()


def wrong_on_one_rank(me):
    """Reported by the call after it, be it put, get or close; nothing is lost where that is the last."""
    for last in ("put", "get", "close"):
        u, v = fields_of(me), fields_of(me)
        link = me.connect(OTHER, out={NAME: u}, into={OTHER: v}, timeout=100)
        if SOLVER and me.comm.rank == me.comm.size - 1:
            u.block = u.block.double()
            refused(ms.LayoutError, link.put, "has changed")
        elif SOLVER:
            assert link.put()
            refused(ms.LayoutError, getattr(link, last), "has changed")
        else:
            refused(ms.MpishardError, link.get, "left", "program 'solver'")
        link.close()


def released_field(me):
    """A field of a simulation that lets go of it, in the midst of a link."""
    n = me.comm.size
    array = torch.zeros(3 + 2)
    sim = ms.insitu.adopt(me.comm, (3 * n,), 1, ("x",), grid=(n,), sizes=(3,))
    u = sim.field("u", array)
    link = me.connect(OTHER, **side({"u": u}), timeout=100)
    if SOLVER:
        array[1:-1] = torch.arange(3.0) + 3 * me.comm.rank
        assert link.put()
    else:
        assert link.get() == 0
        assert array.tolist() == [0, *range(3 * me.comm.rank, 3 * me.comm.rank + 3), 0]
    sim.release()
    for _ in range(2):
        refused(ms.MpishardError, link.put if SOLVER else link.get, "'u' was released" if SOLVER else "")
    link.close()


def policies(me):
    """The reader waits until the writer is as far as it gets alone."""
    for policy, depth, expected in (
        ("block", 2, list(range(6))),
        ("drop_newest", 2, [0, 1]),
        ("latest", 2, [4, 5]),
        ("latest", 1, [5]),
        ("drop_newest", 3, [0, 1, 2]),
    ):
        u = fields_of(me)
        told = {"policy": policy, "depth": depth} if SOLVER or depth == 3 else {}
        if depth == 3 and SOLVER:
            told = {}  # the reader's count where the writer gives none
        link = me.connect(OTHER, **side({"u": u}, **told), timeout=100)
        if SOLVER:
            kept, start = [], 0.0
            for step in range(6):
                u.to_local().fill_(step)
                kept.append(link.put())
                if policy == "block" and step == 2:
                    assert time.monotonic() - start > 0.2  # it waited for a slot
                if step == (depth - 1 if policy == "block" else 5):
                    start = time.monotonic()
                    MPI.COMM_WORLD.Barrier()
            assert kept == [policy != "drop_newest" or step < depth for step in range(6)]
        else:
            MPI.COMM_WORLD.Barrier()
            time.sleep(0.5)
            got = []
            for step in link:
                assert torch.equal(u.to_local(), torch.full_like(u.to_local(), step))
                got.append(step)
            assert got == expected, (policy, got)
        link.close()


def latest_under_way(me):
    u = fields_of(me)
    link = me.connect(OTHER, **side({"u": u}), policy="latest" if SOLVER else None)
    if SOLVER:
        for step in range(400):
            u.to_local().fill_(step)
            assert link.put()
            time.sleep(0.0005 * (step % 3))
    else:
        got = []
        for step in link:
            assert torch.equal(u.to_local(), torch.full_like(u.to_local(), step))
            got.append(step)
            time.sleep(0.002)
        assert got == sorted(set(got))
        assert got[-1] == 399
    link.close()


def both_ways_latest(me):
    u, tau = fields_of(me), fields_of(me)
    link = me.connect(OTHER, out={NAME: u}, into={OTHER: tau}, policy="latest", depth=1)
    for step in range(20):
        u.to_local().fill_(step)
        if SOLVER:
            link.put()
            assert link.get() == step
            assert torch.equal(tau.to_local(), torch.full_like(tau.to_local(), step))
        else:
            assert link.get() == step
            link.put()
    link.close()


def reader_stops_first(me):
    for policy in ("block", "drop_newest", "latest"):
        u = fields_of(me)
        link = me.connect(OTHER, **side({"u": u}), policy=policy if SOLVER else None)
        if SOLVER:
            puts = 0
            while not link.ended:
                puts += link.put()
                time.sleep(0.01)
            assert puts > 0
            assert not link.put()
        else:
            assert link.get() is not None
        link.close()


def several_links(me):
    n = 5
    one, two = fields_of(me, n), fields_of(me, n)
    a = me.connect(OTHER, **side({"u": one}), depth=1)
    b = me.connect(OTHER, **({"into": {"u": two}} if SOLVER else {"out": {"u": two}}))
    for step in range(4):
        if SOLVER:
            one.to_local().fill_(step)
            a.put()
            assert b.get() == step
        else:
            two.to_local().fill_(-step)
            b.put()
            assert a.get() == step
        got, value = (two, -step) if SOLVER else (one, step)
        assert torch.equal(got.to_local(), torch.full_like(got.to_local(), value))
    a.close()
    b.close()


class Field:
    """What an adopted field looks like to a link."""

    def __init__(self, tensor):
        self.tensor = tensor


def fields_and_layouts(me):
    u = fields_of(me).double()
    link = me.connect(OTHER, **side({"u": Field(u) if SOLVER else u.sharding}))
    if SOLVER:
        strided = torch.zeros(6, 2, dtype=torch.float64)[: u.to_local().shape[0], 0]
        # another array of the same shape, as time levels are
        link.out["u"].tensor = ms.ShardTensor.from_local(strided, u.mesh, u.placements)
        strided.fill_(3)
        link.put()
    else:
        assert link.get() == 0
        x = link.into["u"]
        assert x.dtype == torch.float64
        assert torch.equal(x.to_local(), torch.full_like(x.to_local(), 3))
    link.close()


def reordered_mesh(me):
    comm = me.comm.Split(0, -me.comm.rank)
    mesh = ms.init_mesh((-1,), ("x",), comm=comm if SOLVER else me.comm)
    u = ms.zeros(7, mesh=mesh, placements=(ms.Shard(0),))
    link = me.connect(OTHER, **side({"u": u}))
    lo, hi = u.sharding.interval(0, mesh.coords)
    expected = torch.arange(float(lo), float(hi))
    if SOLVER:
        u.to_local().copy_(expected)
        link.put()
    else:
        assert link.get() == 0
        assert torch.equal(u.to_local(), expected)
    link.close()


def other_cells_of_the_same_shape(me):
    meshes = [ms.init_mesh((-1,), ("x",), comm=me.comm.Split(0, turn * me.comm.rank)) for turn in (1, -1)]
    u, v = (ms.zeros(6, mesh=mesh, placements=(ms.Shard(0),)) for mesh in meshes)
    link = me.connect(OTHER, **side({"u": u}), timeout=100)
    if SOLVER:
        assert link.put()
        link.out["u"] = v
        refused(ms.LayoutError, link.put, "has changed")
    else:
        assert link.get() == 0
        refused(ms.PeerError, link.get, "left")
    link.close()


def inference_mode(me):
    """A field made in it is written outside of it, too, as autograd never knows of one."""
    with torch.inference_mode():
        u, v = fields_of(me), fields_of(me)
    v = v if SOLVER else fields_of(me)
    link = me.connect(OTHER, **side({"u": u, "v": v}))
    for step in range(3):
        if SOLVER:
            with torch.inference_mode():
                u.fill_(step + 1)
                v.fill_(step + 1)
            link.put()
        else:
            with torch.inference_mode(step == 1):
                assert link.get() == step
            assert (u.to_local() == step + 1).all()
            assert (v.to_local() == step + 1).all()
    link.close()


def gradients_know(me):
    u = fields_of(me)
    leaf = fields_of(me).requires_grad_()
    link = me.connect(OTHER, out={"a": leaf} if SOLVER else {}, into={} if SOLVER else {"a": u})
    if SOLVER:
        link.put()
    else:
        y = (u * u.clone().requires_grad_()).sum()
        link.get()
        refused(RuntimeError, y.backward, "modified by an inplace operation")
    link.close()


def many_links(me):
    """The writer leaves first: what a reader told each link of it then would fill up what MPI has for messages."""
    u = fields_of(me)
    links = [me.connect(OTHER, **side({"u": u}), timeout=20) for _ in range(200)]
    for step, link in enumerate(links):
        if SOLVER:
            u.fill_(step)
            link.put()
        else:
            link.get()
            assert torch.equal(u.to_local(), torch.full_like(u.to_local(), step))
    for link in reversed(links):
        link.close()


def main(*parts) -> None:
    torch.set_num_threads(1)
    me = ms.insitu.join(NAME, timeout=100)
    assert me.name == NAME
    assert me.comm.size == me.programs[NAME]
    for part in parts:
        part(me)
        if me.comm.rank == 0:
            os.write(1, f"{NAME} {part.__name__}\n".encode())  # at once: the programs share the output


if __name__ == "__main__":
    main(
        bad_input,
        wrong_order,
        wrong_everywhere,
        wrong_on_one_rank,
        released_field,
        policies,
        latest_under_way,
        both_ways_latest,
        reader_stops_first,
        several_links,
        fields_and_layouts,
        reordered_mesh,
        other_cells_of_the_same_shape,
        inference_mode,
        gradients_know,
        many_links,
    )
