"""No planner, step or error of a rank grows with the number of ranks: counted in work, on planning meshes.

Work is the bytecodes that Python runs in the package's own files: the same in every run, whatever else the machine
does. A processor runs some 50 of them in a microsecond, so that 250,000 are about 5 ms. Memory is what a plan keeps.
"""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from collections.abc import Callable
from functools import _lru_cache_wrapper
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

import mpishard as ms
from mpishard.autograd import redistribute
from mpishard.comm import disagreement, guard
from mpishard.comm.collective.banded import Banded
from mpishard.comm.null import Event, NullComm
from mpishard.io.backend.job import given
from mpishard.io.checkpoint.background import below
from mpishard.io.file.parts import Parts, Plan, place, writes
from mpishard.layout import balanced, layout_of
from mpishard.ops.attention import scaled_dot_product
from mpishard.planning.mesh import mesh_on
from mpishard.planning.step import Program, step_on
from mpishard.tensor import scatter

PACKAGE = os.path.dirname(ms.__file__) + os.sep
MESHES = {"3-D": (64, 32, 32), "2-D": (256, 256), "1-D": (65536,)}
# of one plan: bytecodes, and bytes that it keeps
LIMITS = {"3-D": (250_000, 100_000), "2-D": (250_000, 100_000), "1-D": (250_000, 100_000)}

# where one dim has all ranks, and a plan has a number for each: what it may take (50 ms are 2,500,000 bytecodes)
GROWING: dict[tuple[str, str], tuple[int, int]] = {
    # blocks of 4 cells have one or two results, in no runs: a number for each, in numpy
    ("conv3d, in steps of 3", "1-D"): (250_000, 800_000),
    ("max_pool3d, in steps of 3", "1-D"): (250_000, 4_000_000),
    ("adaptive_avg_pool3d, of unequal windows", "1-D"): (250_000, 800_000),
    # sizes and borders of all blocks, in numpy
    ("rebalance", "1-D"): (250_000, 4_000_000),
    # cuts of 65,536 blocks, and what each has cost, four times
    ("balance", "1-D"): (2_500_000, 8_000_000),
}
# of the first step at 65,536 ranks, beyond 1.3 times that at 64: blocks along the mesh dims are looked at, in 26 plans
GROWING_STEP = 500_000
# at the peak of an error that all ranks have
ERROR_NBYTES = 20_000

# planned on fewer dims as on three, along one of them
ALIKE = (
    *("halo, reflect", "halo, circular", "conv_transpose3d", "max_pool3d", "roll", "mean", "softmax"),
    *("avg_pool3d, overlapping", "pad, reflect", "slice, strided", "cumsum"),
)


class TooMuch(BaseException):
    """More bytecodes than a planner may run; no error that the package might catch."""


def work(call: Callable[[], object], limit: int) -> int:
    """Return how many bytecodes the package's own files run in a call, up to a limit."""
    count = 0

    def step(frame, event, _arg):
        nonlocal count
        if event == "opcode":
            count += 1
            if count > limit:
                raise TooMuch
        return step

    def enter(frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step(frame, event, arg)

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except TooMuch:
        return limit + 1
    finally:
        sys.settrace(before)
    return count


def kept(call: Callable[[], object]) -> int:
    """Return how many bytes are there after a call that were not there before."""
    gc.collect()
    # or the collection below goes through all that torch has imported, which takes longer than a plan
    gc.freeze()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    result = call()
    gc.collect()
    now = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del result
    return now - before


def forget() -> None:
    """Empty the caches of the package's functions: what is planned next is planned for the first time."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mpishard"):
            for value in list(vars(module).values()):
                if isinstance(value, _lru_cache_wrapper) and value.__module__.startswith("mpishard"):
                    value.cache_clear()


def field(mesh, *, channels=8, dims=None, shape=None):
    """Return a field of 2048^3 cells, or as many in a row where one dim has all ranks."""
    space = (2048,) * 3 if mesh.ndim > 1 else (4 * 65536, 182, 182)
    shape = (1, channels, *space) if shape is None else shape
    return ms.empty(*shape, mesh=mesh, placements=[ms.Shard(d) for d in dims or range(2, 2 + mesh.ndim)])


def weight(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def on_rows(call):
    """Return a case of some rows, which are cut by all ranks."""

    def case(mesh):
        x = ms.empty(8, 8 * mesh.size, mesh=mesh, placements=[ms.Shard(1)] * mesh.ndim)
        return lambda: call(x)

    return case


def on_plane(call):
    """Return a case of a plane, which is cut by all ranks."""

    def case(mesh):
        x = ms.empty(1, 2, 16 * mesh.size, 64, mesh=mesh, placements=[ms.Shard(2)] * mesh.ndim)
        return lambda: call(x)

    return case


def sequence(mesh, cells):
    """Return queries, sharded over all ranks."""
    shape = (1, 2, cells * mesh.size, 16)
    return ms.empty(*shape, mesh=mesh, placements=[ms.Shard(2)] * mesh.ndim)


def turned(mesh):
    x = field(mesh)
    return lambda: x.redistribute(placements=[ms.Shard({2: 3, 3: 2}.get(d, d)) for d in range(2, 2 + mesh.ndim)])


def attention(causal, cells=64):
    """Return a case of the plan of a ring; its hops are as many as there are ranks."""

    def case(mesh):
        q = sequence(mesh, cells)

        def call():
            with mock.patch.object(scaled_dot_product, "ring_attention", lambda plan, dropout, q, *_: q):
                return F.scaled_dot_product_attention(q, q, q, is_causal=causal)

        return call

    return case


def blocks_told(how):
    """Return a case of blocks whose extents the ranks tell each other, as for `ms.HaloExchanger` too, or know."""

    def case(mesh):
        mesh = mesh_on("cpu", mesh.shape)
        block, placements = torch.zeros(1, 2, *(4,) * mesh.ndim), [ms.Shard(2 + d) for d in range(mesh.ndim)]
        return lambda: ms.ShardTensor.from_local(block, mesh, placements, how)

    return case


def on_block(function: Callable[[torch.Tensor, ms.CartMesh], object], rows: int = 1):
    """Return a case of a collective on a plain tensor, of some rows for each rank along the first mesh dim."""

    def case(mesh):
        x = torch.empty(rows * mesh.shape[0], 8, device="meta")
        return lambda: function(x, mesh)

    return case


def scattered(mesh):
    """Return a case of a tensor that another rank has: what this one must know, and its block."""
    mesh, shape = mesh_on("cpu", mesh.shape), (4 * 65536, *(64,) * (mesh.ndim - 1))
    placements = [ms.Shard(d) for d in range(mesh.ndim)]

    def told(_comm, _meta, root):
        return shape, torch.float32

    def came(_mesh, _src, _x, box_of, dtype):
        return torch.empty([hi - lo for lo, hi in box_of(mesh.rank)], dtype=dtype)

    def call():
        with mock.patch.object(NullComm, "bcast", told), mock.patch.object(scatter, "scatter_blocks", came):
            return ms.scatter_tensor(None, 0, mesh, placements)

    return call


def sampled(mesh):
    """Return a case of a grid whose points lie a cell and a half from its own cells, beyond the block's ends too."""
    mesh, space = mesh_on("cpu", mesh.shape), [2 * n for n in mesh.shape]
    space = [*space, *(4,) * (2 - len(space))]
    x = field(mesh, channels=1, shape=(1, 1, *space))
    grid = ms.zeros(1, *space, len(space), mesh=mesh, placements=[ms.Shard(1 + d) for d in range(mesh.ndim)])
    for d, n in enumerate(space):
        cells = torch.arange(*grid.sharding.interval(1 + d, mesh.coords))
        at = ((cells + 2) / n * 2 - 1).view([-1 if k == d else 1 for k in range(len(space))])
        grid.block[..., len(space) - 1 - d] = at
    return lambda: F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def transformed(mesh):
    """Return a case of a Fourier transform along three sharded dims: the route, and what travels on it."""
    x = field(mesh, channels=1)

    def came(_mesh, _plan, block, shape, *_, **__):
        return block.new_empty(shape)

    def band_came(transfer, block, _lo):
        return block.new_empty(transfer._shape)

    def call():
        with (
            mock.patch.object(redistribute, "run_transfer", came),
            mock.patch.object(Banded, "__call__", band_came),
        ):
            return torch.fft.fftn(x, dim=(2, 3, 4))

    return call


def balanced_anew(mesh):
    """Return a case of a balancer's second decision, about as many measured slabs as the mesh has coordinates."""
    mesh = mesh_on("cpu", mesh.shape)
    balancer, x = ms.balance(mesh, every=1), field(mesh, channels=0)
    costs = [np.linspace(1 << 30, 1 << 34, n).astype(int).tolist() for n in mesh.shape]
    balancer(x)
    balancer.record(1.0)  # the first one does not count

    def call():
        with mock.patch.object(type(balancer), "_costs", return_value=(sum(costs[0]), costs)):
            balancer.record(1.0)
            balancer.record(1.0)
            balancer.record(2.0)
        assert balancer.changes
        return balancer

    return call


def written(mesh):
    """Return a case of what a rank must know to write its blocks to files that ranks share, and where."""
    layout = field(mesh).sharding

    def call():
        plan = Plan.of(mesh.size)
        assert writes(layout, mesh.coords)
        slabs = given(layout, mesh.rank, 1 << 24, 4)
        return slabs, plan.name(mesh.rank), plan.folders(), Parts(layout, "parts", plan).told()

    return call


def read(mesh):
    """Return a case of what a rank must know to read its block of a field that as many ranks cut elsewhere wrote."""
    layout = field(mesh).sharding
    source = layout_of(mesh.shape, layout.placements, layout.shape, {2: balanced(layout.shape[2], mesh.shape[0], 3)})
    box = layout.box(mesh.coords)

    def call():
        parts = Parts(source, "parts", Plan.of(mesh.size))
        return [(parts.path(rank), place(rank, "x"), box) for rank, box in parts.touched(box)]

    return call


def on_field(function: Callable[[ms.ShardTensor], object]) -> Callable[[ms.CartMesh], Callable[[], object]]:
    def case(mesh):
        x = field(mesh)
        return lambda: function(x)

    return case


CASES = {
    "layout": lambda mesh: lambda: field(mesh),
    "halo, zeros": on_field(lambda x: ms.halo_exchange(x, dict.fromkeys(range(2, 2 + x.mesh.ndim), (1, 1)))),
    "halo, reflect": on_field(
        lambda x: ms.halo_exchange(x, dict.fromkeys(range(2, 2 + x.mesh.ndim), (1, 1)), mode="reflect")
    ),
    "halo, circular": on_field(
        lambda x: ms.halo_exchange(x, dict.fromkeys(range(2, 2 + x.mesh.ndim), (1, 1)), mode="circular")
    ),
    "rebalance": on_field(lambda x: x.rebalance({2: np.random.default_rng(0).uniform(1, 2, x.mesh.shape[0])})),
    "conv3d": on_field(lambda x: F.conv3d(x, weight(8, 8, 3, 3, 3), padding=1)),
    "conv3d, strided": on_field(lambda x: F.conv3d(x, weight(8, 8, 3, 3, 3), stride=2, padding=1)),
    "conv3d, in steps of 3": on_field(lambda x: F.conv3d(x, weight(8, 8, 3, 3, 3), stride=3, padding=1)),
    "max_pool3d, in steps of 3": on_field(lambda x: F.max_pool3d(x, 3)),
    "conv_transpose3d": on_field(lambda x: F.conv_transpose3d(x, weight(8, 8, 3, 3, 3), stride=2, padding=1)),
    "max_pool3d": on_field(lambda x: F.max_pool3d(x, 2)),
    "adaptive_avg_pool3d, to one cell": on_field(lambda x: F.adaptive_avg_pool3d(x, 1)),
    # windows of two lengths, of which the shorter are filled
    "adaptive_avg_pool3d, of unequal windows": on_field(
        lambda x: F.adaptive_avg_pool3d(x, [n // 8 * 3 for n in x.shape[2 : 2 + x.mesh.ndim]] + [1] * (3 - x.mesh.ndim))
    ),
    "avg_pool3d, overlapping": on_field(lambda x: F.avg_pool3d(x, 3, 2, 1)),
    "interpolate, trilinear": on_field(lambda x: F.interpolate(x, scale_factor=2, mode="trilinear")),
    "interpolate, by 1.5": on_field(lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear")),
    "interpolate, corners": on_field(lambda x: F.interpolate(x, scale_factor=2, mode="trilinear", align_corners=True)),
    "interpolate, bicubic": on_plane(lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic")),
    "interpolate, antialiased": on_plane(
        lambda x: F.interpolate(x, scale_factor=0.75, mode="bilinear", antialias=True)
    ),
    "pad, reflect": on_field(lambda x: F.pad(x, (1, 1) * 3, mode="reflect")),
    "flip": on_field(lambda x: x.flip(2)),
    "cat": on_field(lambda x: torch.cat([x, x], 2)),
    "slice": on_field(lambda x: x[:, :, 3:-5]),
    "slice, strided": on_field(lambda x: x[:, :, ::2]),
    "difference": on_field(lambda x: torch.diff(x, dim=2)),
    "dropout": on_field(F.dropout),
    "repeat_interleave": on_field(lambda x: x.repeat_interleave(2, 2)),
    "argmax": on_field(torch.argmax),
    "embedding": on_field(lambda x: F.embedding(x.long(), weight(5, 3))),
    "cumsum": on_field(lambda x: x.cumsum(2)),
    "roll": on_field(lambda x: torch.roll(x, 3, 2)),
    # what is kept is a number for each row of the block: of few channels, few
    "flatten": on_field(lambda x: x[:, :4].flatten(1)),
    "var": on_field(torch.var),
    "var of uneven blocks": on_field(lambda x: x[:, :, 1:].var()),
    "prod": on_field(torch.prod),
    "logsumexp": on_field(lambda x: x.logsumexp((2, 3, 4))),
    "norm": on_field(lambda x: torch.linalg.vector_norm(x, 3)),
    "norms of a list": on_field(lambda x: torch._foreach_norm([x, x])),
    "flatten, of two dims": on_field(lambda x: x.flatten(2, 3)),
    "unflatten": on_field(lambda x: x.unflatten(2, (-1, x.shape[2] // 32))),
    "select": on_field(lambda x: x.select(2, 7)),
    "select, of another dim": on_field(lambda x: x[:, :, 1:].select(2, -1)),
    "topk": on_rows(lambda x: x.topk(3, 1)),
    "sort": on_rows(lambda x: x.sort(1)),
    "median": on_rows(lambda x: x.median(1)),
    "qr": on_rows(lambda x: torch.linalg.qr(x.mT)),
    "diagonal": on_field(lambda x: x.diagonal(0, 2, 3)),
    "linear, over cells that are cut": on_rows(lambda x: F.linear(x, weight(4, x.shape[1]))),
    "uneven blocks, whole": on_rows(lambda x: x[:, 3:].redistribute(placements=[ms.Replicate()] * x.mesh.ndim)),
    "to few ranks": on_rows(lambda x: x.redistribute(placements=[ms.Shard(0)] * x.mesh.ndim)),
    "index": on_field(lambda x: x[:, :, torch.arange(0, x.shape[2], 2)]),
    "index, of points": on_field(lambda x: x[0, :, torch.arange(2048), torch.arange(2048) % 182]),
    "group_norm": on_field(lambda x: F.group_norm(x, 4)),
    "conv3d, not overlapped": on_field(lambda x: F.conv3d(x, weight(8, 8, 4, 4, 4), padding="same")),
    "grid_sample": sampled,
    "fft": transformed,
    "HaloExchanger": lambda mesh: lambda: ms.HaloExchanger(mesh_on("cpu", mesh.shape), (6,) * mesh.ndim, 1, "float32"),
    "scatter_tensor": scattered,
    "balance": balanced_anew,
    "files, written": written,
    "files, read": read,
    "checkpoint, whom to wait for": lambda mesh: lambda: [*below(0, mesh.size)],
    "mean": on_field(lambda x: x.mean()),
    "softmax": on_field(lambda x: x.softmax(2)),
    "redistribute": turned,
    "from_local, infer": blocks_told("infer"),
    "from_local, chunk": blocks_told("chunk"),
    "all_gather": on_block(ms.all_gather),
    "all_to_all": on_block(
        lambda x, mesh: ms.all_to_all(x, mesh, mesh.mesh_dim_names[0], split_dim=0, concat_dim=1), 4
    ),
    "all_reduce, deterministic": on_block(lambda x, mesh: ms.all_reduce(x[:4], mesh, deterministic=True)),
    "attention": attention(False),
    "attention, causal": attention(True),
    "attention, causal and balanced": attention(True, scaled_dot_product.BALANCED),
}


def test_what_grows_exists():
    assert {name for name, _ in GROWING} <= set(CASES)


@pytest.mark.parametrize(
    ("name", "place"),
    [(n, p) for p in MESHES for n in CASES if p == "3-D" or n not in ALIKE],
)
def test_a_plan(name, place):
    most, room = GROWING.get((name, place), LIMITS[place])
    case = CASES[name]
    case(ms.planning.mesh((2,) * len(MESHES[place])))()  # what is imported or made at a first use
    forget()
    mesh = ms.planning.mesh(MESHES[place])
    call = case(mesh)
    count = work(call, most)
    assert count <= most, f"more than {most:,} bytecodes at 65,536 ranks"
    forget()
    other = ms.planning.mesh(MESHES[place])
    nbytes = kept(case(other))
    assert nbytes <= room, f"{nbytes:,} bytes at 65,536 ranks"


def net() -> torch.nn.Module:
    sys.path.insert(0, os.path.join(os.path.dirname(PACKAGE[:-1]), "examples"))
    try:
        from unet import UNet
    finally:
        del sys.path[0]
    return UNet(1, 2, base=4, levels=3)


def test_a_step():
    """A training step of a U-Net: the first with its plans, a later one; and what it waits for with all ranks."""
    told = {}
    for shape in ((4, 4, 4), (64, 32, 32)):
        program = Program(net, (1, 1, *(8 * n for n in shape)), (2, 3, 4))
        if not told:
            step_on(mesh_on("meta", shape), program)()
        forget()
        mesh = mesh_on("meta", shape)
        step = step_on(mesh, program)
        first = work(step, 1 << 40)
        events: list[Event] = []
        mesh.comm.listeners.append(events.append)
        later = work(step, 1 << 40)
        told[shape] = first, later, sum(e.kind == "start" for e in events), sum(e.nbytes for e in events)
        blocking = [e for e in events if e.kind == "collective"]
    (first, later, exchanges, nbytes), large = told.values()
    assert large[0] <= 1.3 * first + GROWING_STEP
    assert large[1] <= 1.05 * later
    assert large[2:3] == (exchanges,)
    assert large[3] <= 1.05 * nbytes
    # one for each of ten norms forward, and the last gradients; norms' sums backward and the loss travel meanwhile
    assert len(blocking) <= 11


def refused(mesh):
    """Return calls whose blocks do not fit those of other ranks."""
    mesh, block = mesh_on("cpu", mesh.shape), torch.zeros(4, 4, 4)
    shards = [ms.Shard(d) for d in range(3)]
    return [
        lambda: ms.ShardTensor.from_local(block, mesh, shards, sharding_shapes="infer"),
        lambda: ms.HaloExchanger(mesh, (6, 6, 6), 1, "float32"),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_blocks_that_do_not_fit(which):
    """No rank hears of all others' blocks: a small text, and few bytes on the way."""
    refused(ms.planning.mesh((2, 2, 2)))[which]()
    call = refused(ms.planning.mesh(MESHES["3-D"]))[which]

    def odd(_comm, send, recv, op=None):
        send, recv = (x[0] if isinstance(x, (tuple, list)) else x for x in (send, recv))
        recv[:] = send[:]
        if op is MPI.MIN:
            recv[:] = 4242  # the first rank of those that differ

    never = mock.patch("mpishard.comm.collective.gather_sizes.are_alike", return_value=False)
    tracemalloc.start()
    with never, mock.patch.object(NullComm, "Allreduce", odd), pytest.raises(ms.LayoutError, match="4242") as caught:
        call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(caught.value)) <= 10_000
    assert peak <= 65536  # not a byte for each rank


def test_an_error():
    """Every rank finds the same wrong: its text, and what it takes to agree on it."""
    mesh = ms.planning.mesh(MESHES["3-D"])
    x = field(mesh)
    tracemalloc.start()
    with pytest.raises(ms.LayoutError) as caught:
        x.redistribute(placements=[ms.Shard(9)] * 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(caught.value)) <= 10_000
    assert peak <= ERROR_NBYTES


def test_an_error_of_every_third_rank():
    """This rank hears of it: the first one's text, and which ranks have it, in as many bytes as of three ranks."""
    comm, text = ms.planning.mesh(MESHES["3-D"]).comm, "LayoutError|" + "cells " * 100_000
    told = disagreement._clipped(text, disagreement.TEXT_NBYTES)
    answers = [np.array([disagreement.digest_of(text), len(told)]), np.frombuffer(told, np.uint8)]
    sent: list[int] = []

    def reduced(_comm, send, recv, op=None):
        send, recv = (x[0] if isinstance(x, list) else x for x in (send, recv))
        sent.append(send.nbytes)
        recv[:] = send
        if op is MPI.MAX:
            recv[0] = comm.size  # rank 0 has failed
            return
        for rank in range(0, comm.size, 3):
            row = np.full_like(send, -1)
            row[:, 0] = 0
            row[int(rank == 3), :3] = 1, rank, rank  # rank 3 for another reason
            disagreement._add_ranges(recv.ravel(), row.ravel())
            recv[:] = row

    def came(_comm, x, root=0):
        sent.append(x[0].nbytes)
        x[0][:] = answers.pop(0)

    with (
        mock.patch.object(NullComm, "Allreduce", reduced),
        mock.patch.object(NullComm, "Bcast", came),
        pytest.raises(ms.LayoutError, match=r"raised on: .* of 65536 .*other reasons on rank 3") as caught,
    ):
        guard.agree(comm, None, "a call")
    assert len(str(caught.value)) <= 10_000
    assert sum(sent) <= 10_000
