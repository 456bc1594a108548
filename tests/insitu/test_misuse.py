"""What a host may get wrong: an error on every rank, and everything as before."""

from __future__ import annotations

import gc
import signal
import sys

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard.comm.agreement import threads_may_communicate
from mpishard.comm.dissemination import Dissemination
from tests.insitu.hosts import WORLD, Host, cut

SIZE = WORLD.size
LAST = WORLD.rank == SIZE - 1


@pytest.fixture
def host():
    made = Host((SIZE, 1), [cut(14, SIZE), (8,)], [(1, 1), (1, 1)])
    yield made
    made.free()


@pytest.fixture
def sim(host):
    with ms.insitu.adopt(host.cart, host.shape, 1, ("x", "y"), sizes=host.own) as made:
        yield made


def strided(array):
    roomy = np.zeros((array.shape[0], 2 * array.shape[1]))
    roomy[:, ::2] = array
    return roomy[:, ::2]


class Rude:
    """What raises an error that is none of ours, nor a usual one."""

    def __dlpack__(self, **options):
        raise BufferError("not to be had")

    def __dlpack_device__(self):
        return 1, 0


BUFFERS = {
    "size": lambda a: np.zeros((a.shape[0] + 1, a.shape[1])),
    "dims": lambda a: np.zeros((*a.shape, 2)),
    "dtype": lambda a: a.astype("float32"),
    "stride": strided,
    "order": np.asfortranarray,
    "reversed": lambda a: a[::-1],
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "windows": lambda a: np.lib.stride_tricks.as_strided(np.zeros(a.size), a.shape, (8, 8)),
    "list": lambda a: a.tolist(),
    "masked": np.ma.masked_array,
    "objects": lambda a: a.astype(object),
    "byte order": lambda a: a.astype(">f8"),
    "read-only": lambda a: np.frombuffer(a.tobytes()).reshape(a.shape),
    "requires grad": lambda a: torch.from_numpy(a).requires_grad_(),
    "null": lambda a: (0, "f8", a.shape, None),
    "unaligned": lambda a: (a.ctypes.data + 1, "f8", a.shape, None),
    "negative stride": lambda a: (a.ctypes.data, "f8", a.shape, (-8, 8)),
    "description": lambda a: (a.ctypes.data, "f8"),
    "meta": lambda a: torch.empty(a.shape, dtype=torch.float64, device="meta"),
    "quantized": lambda a: torch.quantize_per_tensor(torch.from_numpy(a).float(), 0.1, 0, torch.qint8),
    "nested": lambda a: torch.nested.nested_tensor(list(torch.from_numpy(a))),
    "sparse": lambda a: torch.from_numpy(a).to_sparse(),
    "extents": lambda a: (a.ctypes.data, "f8", ("rows", 8), None),
    "rude": lambda a: Rude(),
    "device": lambda a: type(
        "Cupy", (), {"__cuda_array_interface__": {"data": (1, False), "shape": a.shape, "typestr": "<f8", "version": 3}}
    )(),
}


@pytest.mark.filterwarnings("ignore:.*(quantize|nested tensors)")
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers(host, sim, kind):
    """One rank's buffer is not what was said, at first or later: an error on all."""
    array = host.array()
    wrong = BUFFERS[kind](array)
    if kind not in ("dtype", "stride", "order") or (kind == "dtype" and SIZE > 1):
        with pytest.raises(ms.MpishardError, match=r"'u'|different calls"):
            sim.field("u", wrong if LAST else array)
    u = sim.field("u", array)
    before = u.tensor
    with pytest.raises(ms.MpishardError, match="'u'"):
        u.rebind(wrong if LAST else array)
    # the field is what it was
    assert u.tensor is before
    u.exchange()
    np.testing.assert_array_equal(u.tensor.full_tensor().numpy(), host.whole)


def test_a_byte_order_is_named(host, sim):
    with pytest.raises(ms.UnsupportedDtypeError, match=r"machine's byte order\s+got: +dtype\('>f8'\)"):
        sim.field("u", host.array().astype(">f8"))


def test_a_first_field_that_failed_says_nothing_of_the_next(host):
    """Owned cells are those of the first field, where `adopt` was not told: not of one that is none."""
    array = host.array()
    for where in (True, LAST):
        with ms.insitu.adopt(host.cart, host.shape, 1, ("x", "y")) as sim:
            for wrong in ({"array": array[:-1]}, {"array": array, "halo": 0}):
                with pytest.raises(ms.LayoutError, match=r"along '[xy]'"):
                    sim.field("u", **(wrong if where else {"array": array}))
            u = sim.field("u", array)
            assert torch.equal(u.tensor.full_tensor(), torch.from_numpy(host.whole))


def test_windows_that_are_only_read(host, sim):
    array = host.array()
    roomy = np.zeros((array.shape[0], 2 * array.shape[1] - 1))
    roomy[:, ::2] = array
    assert torch.equal(sim.field("odd", roomy[:, ::2]).tensor.full_tensor(), torch.from_numpy(host.whole))
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(sum(array.shape) - 1.0), array.shape[1])
    assert torch.equal(sim.field("w", windows, writable=False).array, torch.from_numpy(windows.copy()))


def test_names(host, sim):
    sim.field("u", host.array())
    with pytest.raises(ms.LayoutError, match="used twice"):
        sim.field("u", host.array())
    if SIZE > 1:
        with pytest.raises(ms.DesyncError):
            sim.field("v" if LAST else "w", host.array())
    for name in (5, ["v"]):
        with pytest.raises(ms.LayoutError, match="no name"):
            sim.field(name if LAST else "v", host.array())
    with pytest.raises(ms.LayoutError, match="no field 'w'"):
        sim.hook(len, ["w"] if LAST else ["u"])
    with pytest.raises(ms.MpishardError, match="an output is named twice"):
        sim.hook(len, ["u"], ["u", "u"] if LAST else ["u"])
    for wrong in ({"every": 0}, {"every": "2"}, {"evry": 2}, *[{"every": 2}] * (SIZE > 1)):
        with pytest.raises(ms.MpishardError, match=r"every|evry|different calls"):
            sim.hook(len, ["u"], **(wrong if LAST else {}))


@pytest.mark.ranks(2, 3, 4)
def test_calls_that_differ(host, sim):
    """Ranks in different calls of the simulation are told so, all of them, and go on."""
    u, v = (sim.field(name, host.array()) for name in "uv")
    tensors = u.tensor, v.tensor
    for mine in (lambda: v.rebind(host.array()), lambda: sim.field("w", host.array())):
        with pytest.raises(ms.DesyncError, match="different calls"):
            mine() if LAST else u.rebind(host.array())
        assert u.tensor is tensors[0]
        assert v.tensor is tensors[1]
        assert sorted(sim.fields) == ["u", "v"]
    u.rebind(host.array())
    np.testing.assert_array_equal(u.tensor.full_tensor().numpy(), host.whole)


def test_released(host, sim):
    u = sim.field("u", host.array())
    v = sim.field("v", host.array())
    kept = u.tensor
    hook = sim.hook(lambda x: x, ["u"], ["v"])
    sim.release()
    for use in (
        lambda: u.tensor,
        lambda: u.array,
        u.exchange,
        u.touch,
        lambda: u.rebind(host.array()),
        lambda: u.halo_valid,
        lambda: kept + 1,
        lambda: kept.add_(1),
        kept.full_tensor,
        kept.to_local,
    ):
        with pytest.raises(ms.UnsupportedOperationError, match="'u' was released"):
            use()
    assert "released" in repr(v)
    for use in (hook, hook.start, lambda: sim.field("w", host.array()), lambda: sim.hook(len, [])):
        with pytest.raises(ms.UnsupportedOperationError, match="released"):
            use()
    sim.release()


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (lambda own: (own[0] + LAST, own[1]), "overlap, or reach past the domain, along 'x' at the box"),
        (lambda own: (own[0] - LAST, own[1]), "gap along 'x' at the box"),
        (lambda own: (own[0], own[1] + 1), "along 'y' at the box \\[0:9\\)"),
        (lambda own: (own[0], -1), "sizes does not fit"),
        (lambda own: own[:1], "sizes does not fit"),
    ],
)
def test_boxes(host, sizes, text):
    with pytest.raises(ms.LayoutError, match=text):
        ms.insitu.adopt(host.cart, host.shape, 1, ("x", "y"), sizes=sizes(host.own))


@pytest.mark.parametrize(("shift", "text"), [(1, "leave a gap"), (-1, "overlap")])
def test_offsets(host, shift, text):
    offset = (host.starts[0] + (shift if LAST else 0), 0)
    if SIZE > 1 or shift > 0:
        with pytest.raises(ms.LayoutError, match=f"{text} along 'x' before the box"):
            ms.insitu.adopt(host.cart, host.shape, 1, ("x", "y"), sizes=host.own, offset=offset)
    ms.insitu.adopt(host.cart, host.shape, 1, ("x", "y"), sizes=host.own, offset=host.starts).release()


@pytest.mark.ranks(4)
def test_boxes_that_differ_beside_each_other():
    host = Host((2, 2), [(6, 6), (4, 4)], [(1, 1)] * 2)
    own = (host.own[0], host.own[1] + (1 if WORLD.rank == 2 else -1 if WORLD.rank == 3 else 0))
    with pytest.raises(ms.LayoutError, match="along 'y' at the box"):
        ms.insitu.adopt(host.cart, host.shape, 1, ("x", "y"), sizes=own)
    with ms.insitu.adopt(host.cart, host.shape, 1, ("x", "y"), sizes=host.own) as sim:
        array = np.zeros((8, 6 + (WORLD.rank == 1)))
        with pytest.raises(ms.LayoutError, match="differ between ranks"):
            sim.field("u", array, halo=(1, (1, 1 + (WORLD.rank == 1))))
    host.free()


@pytest.mark.parametrize(
    "wrong",
    [
        {"comm": "world"},
        {"comm": MPI.COMM_NULL},
        {"comm": 3.5},
        {"comm": -7},
        {"comm": 1 << 40},
        {"handle": "rust", "comm": 0},
        {"grid": (SIZE + 1, 1)},
        {"grid": (SIZE,)},
        {"names": ("x",)},
        {"names": ("x", "x")},
        {"periodic": (True, False, True)},
        {"coords": (SIZE, 0)},
        {"coords": (0,)},
        {"shape": (12,)},
        {"shape": (12, -8)},
        {"shape": (12, 8.5)},
        {"shape": None},
        {"names": 5},
        {"coords": "ab"},
        {"device": "toaster"},
        {"halo": -1},
        {"halo": (1, 1, 1)},
        {"halo": "wide"},
        {"halo": {"z": 1}},
        {"halo": 2**70},
        {"halo": ((1, 2**63), 1)},
        {"sizes": (2**70, 8)},
        {"sizes": (12, 8), "offset": (2**70, 0)},
    ],
    ids=",".join,
)
def test_arguments_of_adopt(wrong):
    right = {"comm": WORLD, "shape": (12, 8), "halo": 1, "names": ("x", "y"), "grid": (SIZE, 1)}
    with pytest.raises(ms.MpishardError):
        ms.insitu.adopt(**right | wrong)
    # of one rank alone the others hear where there is a communicator
    if not {"comm", "handle"} & wrong.keys():
        with pytest.raises(ms.MpishardError):
            ms.insitu.adopt(**(right | wrong if LAST else right))


def test_dims_that_the_ranks_have_not():
    """Where no names are given, the text is not about names."""
    with pytest.raises(ms.MeshError, match=r"shape= and names=(.|\n)*expected: 2 extents(.|\n)*got: +1"):
        ms.insitu.adopt(WORLD, (12,), 1, grid=(SIZE, 1))
    cart = WORLD.Create_cart((SIZE, 1))
    with pytest.raises(ms.MeshError, match=r"shape= and names=(.|\n)*expected: 2 extents(.|\n)*got: +3"):
        ms.insitu.adopt(cart, (12, 8, 4), 1)
    cart.Free()


def test_a_topology_that_is_contradicted(host):
    for wrong in ({"periodic": True}, {"grid": (1, SIZE + 1)}, {"coords": (SIZE, 0)}):
        with pytest.raises(ms.MeshError, match="contradicts"):
            ms.insitu.adopt(host.cart, host.shape, 1, ("x", "y"), **wrong)


@pytest.mark.ranks(2, 3, 4)
def test_coordinates_of_several_ranks():
    with pytest.raises(ms.MeshError, match="overlapping boxes"):
        ms.insitu.adopt(WORLD, (12,), 1, ("x",), grid=(SIZE,), coords=(0,))
    with pytest.raises(ms.MeshError, match="needs the grid"):
        ms.insitu.adopt(WORLD, (12,), 1, ("x",))


@pytest.mark.parametrize(
    "wrong",
    [
        {"dims": ("x", "z")},
        {"dims": ("x", "x")},
        {"dims": ("x",)},
        {"dims": {5: "x"}},
        {"halo": 2},
        {"halo": (1, 2)},
        {"halo": 2**70},
        {"halo": {"x": (1, 2**62)}},
        {"location": "edge"},
        {"location": 3},
        {"location": "x"},
        {"location": ("x", "x")},
    ],
    ids=str,
)
def test_arguments_of_a_field(host, sim, wrong):
    for where in (True, LAST):
        with pytest.raises(ms.MpishardError):
            sim.field("u", host.array(), **(wrong if where else {}))
    sim.field("u", host.array())


def test_the_host_is_as_before(host, sim):
    """Error handlers, signal handlers, hooks and the floating-point environment stay the host's."""
    handlers = {s: signal.getsignal(s) for s in signal.valid_signals()}
    excepthook = sys.excepthook
    host.cart.Set_errhandler(MPI.ERRORS_ARE_FATAL)
    world = WORLD.Get_errhandler()
    u = sim.field("u", host.array())
    weight = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    hook = sim.hook(lambda x: torch.nn.functional.conv2d(x[None, None], weight, padding=1)[0, 0], ["u"], ["u"])
    with ms.insitu.adopt(host.cart, host.shape, 1) as other:
        other.field("u", host.array()).exchange()
    hook()
    hook.start()
    hook.wait()
    u.exchange()
    assert {s: signal.getsignal(s) for s in signal.valid_signals()} == handlers
    assert sys.excepthook is excepthook
    assert host.cart.Get_errhandler() == MPI.ERRORS_ARE_FATAL
    assert WORLD.Get_errhandler() == world
    assert host.cart.Get_topology() == MPI.CART
    assert np.float64(5e-324) / 1 != 0  # denormal numbers are not flushed
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        np.float64(1) / np.float64(0)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("beside", [False, True], ids=["in step", "beside"])
@pytest.mark.parametrize("on_all", [False, True], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["SystemExit", "KeyboardInterrupt"])
def test_a_model_that_ends_its_program(error, on_all, beside):
    """Where it rose it goes on as it is; the others, which wait for this rank in the model, are told."""
    if beside and SIZE > 1 and not threads_may_communicate():
        pytest.skip("MPI was initialised without MPI_THREAD_MULTIPLE")
    array = np.ones((6, 5))
    with ms.insitu.adopt(WORLD, (4 * SIZE, 5), [(1, 1), 0], ("x", "y"), grid=(SIZE, 1)) as sim:
        sim.field("u", array)
        ends = on_all or WORLD.rank == SIZE - 1

        def model(u):
            if ends:
                raise error
            return torch.roll(u, 1, 0) + 1

        hook = sim.hook(model, ["u"], ["u"])

        def call():
            if beside:
                hook.start()
                hook.wait()
            else:
                hook()

        for _ in range(2):
            with pytest.raises(type(error) if ends else ms.MpishardError) as caught:
                call()
            if ends:
                assert caught.value is error
            else:
                assert type(error).__name__ in str(caught.value)
            assert (array == 1).all()
        ends = False
        call()
        assert (array[1:-1] == 2).all()


def test_an_exchanger_of_the_user_after_a_model_has_raised():
    """Where other ranks wait in it for the rank that raised."""
    array = np.zeros((6, 2))
    with ms.insitu.adopt(WORLD, (4 * SIZE, 2), [(1, 1), 0], ("x", "y"), True, grid=(SIZE, 1)) as sim:
        sim.field("u", np.zeros((6, 2)))
        exchange = ms.HaloExchanger(sim.mesh, array.shape, (1, 0), array.dtype)
        raises = False

        def model(u):
            if raises and WORLD.rank == SIZE - 1:
                raise ValueError("unstable")
            exchange(array)
            return u

        hook = sim.hook(model, ["u"], ["u"])
        for step in range(5):
            raises = step in (1, 3)
            array[:] = 100 * step + WORLD.rank
            if raises:
                with pytest.raises(ms.MpishardError, match="unstable"):
                    hook()
                continue
            hook()
            assert (array[0] == 100 * step + (WORLD.rank - 1) % SIZE).all()
            assert (array[-1] == 100 * step + (WORLD.rank + 1) % SIZE).all()


@pytest.mark.ranks(2, 3, 4)
def test_a_simulation_that_nobody_released_keeps_no_requests(host, monkeypatch):
    """MPI keeps a communicator for as long as there are requests on it: in the end none would be left."""
    gc.collect()
    freed = []
    free = Dissemination.free
    monkeypatch.setattr(Dissemination, "free", lambda self: freed.append(free(self)))
    sim = ms.insitu.adopt(host.cart, host.shape, 1, sizes=host.own)
    sim.field("u", host.array())
    del sim
    gc.collect()
    assert len(freed) == 2
