"""What interrupts a call that communicates ends its mesh on that rank, and what it leaves meets no other's messages."""

from __future__ import annotations

import functools
import signal
import sys

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

import mpishard as ms
from mpishard.comm import guard, interruption
from mpishard.ops.window import conv, conv_overlap

pytestmark = pytest.mark.ranks(2, 3, 4)
SAID = "mesh used after a call on it was interrupted"


def field(mesh):
    whole = torch.arange(1.0 * mesh.size * 96, dtype=torch.float64).view(1, 2, -1, 12)
    return whole, ms.distribute_tensor(whole, mesh, (ms.Shard(2),))


def interrupted(*_, **__):
    raise KeyboardInterrupt


def interrupt(mesh):
    with pytest.raises(KeyboardInterrupt), guard.waiting("a wait", (), mesh.comm):
        interrupted()


CALLS = {
    "sum": lambda x: x.sum().full_tensor(),
    "gather": lambda x: x.full_tensor(),
    "redistribute": lambda x: x.redistribute((ms.Shard(3),)).full_tensor(),
    "roll": lambda x: torch.roll(x, 1, 2).full_tensor(),
    "conv": lambda x: F.conv2d(x, torch.ones(1, 2, 3, 3, dtype=x.dtype), padding=1).full_tensor(),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x).full_tensor(),
}


@pytest.mark.parametrize("warm", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_travels_on_its_mesh_any_more(call, warm):
    mesh = ms.init_mesh((-1,))
    _, x = field(mesh)
    if warm:
        call(x)
    interrupt(mesh)
    with pytest.raises(ms.MeshError, match=SAID):
        call(x)
    mesh.free()


def test_nor_on_its_sub_meshes_and_exchangers():
    mesh = ms.init_mesh((-1, 1), ("y", "x"))
    exchanger = ms.HaloExchanger(mesh, (6, 6), ((1, 1), (0, 0)), torch.float32)
    block, (_, x) = torch.zeros(6, 6), field(mesh["y"])
    exchanger(block)
    interrupt(mesh["y"])
    for call in (lambda: exchanger(block), x.sum):
        with pytest.raises(ms.MeshError, match="KeyboardInterrupt inside a wait"):
            call()
    mesh.free()


def test_what_is_left_meets_no_other_mesh():
    """MPI gave the context of a communicator that was freed to the next one, which found the messages."""
    for free in (True, False):
        mesh = ms.init_mesh((-1,))
        right = (mesh.rank + 1) % mesh.size
        request = mesh.comm.Isend(bytearray(4), right, 0)
        interrupt(mesh)
        if free:
            mesh.free()
        del mesh
        for _ in range(3):
            other = ms.init_mesh((-1,))
            other.comm.Barrier()
            assert not other.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
            whole, x = field(other)
            torch.testing.assert_close(CALLS["roll"](x), torch.roll(whole, 1, 2))
            other.free()
        del request


def test_where_a_rank_computes_while_messages_travel(monkeypatch):
    """The convolution of a block, beside whose strips: one rank's may wait already for those of another's next call."""
    monkeypatch.setattr(conv, "LARGE_CELLS", 0)
    mesh = ms.init_mesh((-1,))
    _, x = field(mesh)

    with monkeypatch.context() as patch:
        patch.setattr(conv_overlap, "convolution", interrupted)
        with pytest.raises(KeyboardInterrupt):
            CALLS["conv"](x)
    with pytest.raises(ms.MeshError, match="KeyboardInterrupt inside conv2d"):
        x.sum()
    mesh.free()


def test_messages_come_to_their_end_before_an_error_does():
    mesh = ms.init_mesh((-1,))
    _, x = field(mesh)
    came = []
    for error in (ValueError("mine"), KeyboardInterrupt()):
        with (
            pytest.raises(type(error)),
            interruption.under_way("a call", mesh.comm, lambda: came.append(1), lambda: came.append(2)),
        ):
            raise error
        assert came == [1, 2]
        came.clear()
        if isinstance(error, ValueError):
            x.sum()
    with pytest.raises(ms.MeshError, match="KeyboardInterrupt inside a call"):
        x.sum()
    mesh.free()


def test_an_error_that_all_ranks_agree_on_later_ends_no_mesh():
    """HDF5's, of a file that cannot be opened or flushed."""
    mesh = ms.init_mesh((-1,))
    whole, x = field(mesh)
    with pytest.raises(OSError, match="full"), guard.waiting("io.write", (), mesh.comm):
        raise OSError("full")
    torch.testing.assert_close(CALLS["roll"](x), torch.roll(whole, 1, 2))
    mesh.free()


MORE = CALLS | {
    "scalar": lambda x: x.mean() + 1,
    "list": lambda x: torch.cat([x, x], 2).redistribute((ms.Replicate(),)),
    "halos": lambda x: ms.halo_exchange(x, {2: 1}),
    "one direction": lambda x: ms.halo_exchange(x, {2: (1, 0)}, mode="zeros"),
    "all_reduce": lambda x: ms.all_reduce(x.to_local().sum(), x.mesh),
    "all_gather": lambda x: ms.all_gather(torch.ones(2), x.mesh),
    "shift": lambda x: ms.shift(torch.ones(2), x.mesh, 0, 1),
    "rebalance": lambda x: x.rebalance({2: [(1.0 + r) ** 2 for r in range(x.mesh.size)]}),
    "backward": lambda x: (x.detach().requires_grad_().softmax(2) ** 2).sum().backward(),
}


@pytest.mark.parametrize("warm", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("call", MORE.values(), ids=MORE)
def test_before_a_call_waits_for_anything(call, warm, monkeypatch):
    """Nothing is waited for yet, but a rank that goes on has left this call out, and its peers have not."""
    mesh = ms.init_mesh((-1,))
    _, x = field(mesh)
    if warm:
        call(x)

    with monkeypatch.context() as patch:
        patch.setattr(guard.waiting, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(x)
    with pytest.raises(ms.MeshError, match="KeyboardInterrupt inside"):
        x.sum()
    mesh.free()


def test_with_a_mesh_that_is_freed():
    mesh = ms.init_mesh((-1,))
    _, x = field(mesh)
    mesh.free()

    with pytest.raises(KeyboardInterrupt):
        interruption.whole(interrupted)([x], {"mesh": mesh}, other=mesh)


def test_before_halos_are_waited_for(monkeypatch):
    for use in (lambda e, u: e(u), lambda e, u: e.start(u)):
        mesh = ms.init_mesh((-1,))
        exchanger, block = ms.HaloExchanger(mesh, (6, 6), ((1, 1), (0, 0)), torch.float32), torch.zeros(6, 6)

        with monkeypatch.context() as patch:
            patch.setattr(ms.HaloExchanger, "_refresh", interrupted)
            with pytest.raises(KeyboardInterrupt):
                use(exchanger, block)
        with pytest.raises(ms.MeshError, match=SAID):
            exchanger(block)
        mesh.free()


class Late(RuntimeError):
    """What a time limit of the user's raises: an Exception, as a rule's own are."""


def late(number, frame):
    raise Late(number)


def late_of_any(*_):
    def told():
        raise Late

    told()


class Limit:
    def late(self, number, frame):
        raise Late(number)

    def __call__(self, number, frame):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # as pytest-timeout does first
        raise Late(number)


HANDLERS = [late, late_of_any, Limit().late, Limit(), functools.partial(late)]


@pytest.fixture
def handled():
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("handler", HANDLERS, ids=["function", "any", "method", "object", "partial"])
def test_what_a_handler_of_signals_raises_interrupts_as_well(handler, handled, monkeypatch):
    for begin in (False, True):  # inside a wait, and before it
        mesh = ms.init_mesh((-1,))
        _, x = field(mesh)
        signal.signal(signal.SIGUSR1, handler)

        def stopped(*_):
            signal.raise_signal(signal.SIGUSR1)

        with monkeypatch.context() as patch:
            patch.setattr(guard.waiting, "__init__" if begin else "__enter__", stopped)
            with pytest.raises(Late):
                torch.roll(x, 1, 2)
        # of what the watchdog would end the job for
        assert not guard._live
        with pytest.raises(ms.MeshError, match="Late inside"):
            x.sum()
        mesh.free()


@pytest.mark.parametrize(
    ("module", "interrupts"),
    [("torch.utils.data._utils.signal_handling", True), ("torch._dynamo.convert_frame", False)],
)
def test_frames_that_torch_hands_on(module, interrupts):
    """Its loader of data raises in a handler where a worker has died; its compiler only reads code."""
    given = {"__name__": module}
    exec("def handler(number, frame):\n    raise RuntimeError", given)
    with pytest.raises(RuntimeError) as raised:
        given["handler"](0, sys._getframe())
    assert interruption.cuts(raised.value) == interrupts


def test_what_a_call_raises_itself_does_not(handled):
    """Wrong arguments, and what the user's own functions raise: on all ranks alike."""
    signal.signal(signal.SIGUSR1, late)
    mesh = ms.init_mesh((-1,))
    whole, x = field(mesh)

    def mine(g):
        raise Late

    for call, error in (
        (lambda: x.sum(9), IndexError),
        (lambda: x + "a", TypeError),
        (lambda: torch.cat([x, 3]), TypeError),
        (lambda: ms.shift(torch.ones(2), mesh, 5, 1), ms.MpishardError),
        (lambda: x.redistribute((ms.Shard(7),)), ms.MpishardError),
    ):
        with pytest.raises(error):
            call()
    y = x.detach().requires_grad_()
    y.register_hook(mine)
    with pytest.raises(Late):
        y.sum().backward()
    torch.testing.assert_close(CALLS["roll"](x), torch.roll(whole, 1, 2))
    mesh.free()


@pytest.mark.ranks(1)
def test_one_rank_meets_nobody():
    mesh = ms.init_mesh((-1,))
    whole, x = field(mesh)
    interrupt(mesh)
    torch.testing.assert_close(CALLS["roll"](x), torch.roll(whole, 1, 2))
