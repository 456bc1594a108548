from __future__ import annotations

import fractions
import math
import os
import pickle
import threading

import h5py
import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.errors import FileError
from tests.emulated import emulated, span
from tests.io.files import WORLD, same_on_all, sharded, store, values


@pytest.fixture
def stream(mesh, folder):
    full = values((5, 6, 7))
    store(folder / "a.h5", a=(full.numpy(), {"chunks": (1, 6, 7)}), b=(-full.numpy(), {}))
    with ms.io.Dataset(folder / "a.h5", "a", mesh, (ms.Shard(0), ms.Shard(1))) as ds:
        yield ds, full


def test_samples(stream):
    ds, full = stream
    assert ds.shape == full.shape
    assert ds.sample_shape == (6, 7)
    assert len(ds) == 5
    assert ds.dtype == torch.float32
    for t in (0, 3, -1):
        assert ds[t].placements == (ms.Shard(0), ms.Shard(1))
        assert torch.equal(ds[t].full_tensor(), full[t])
    assert ds[1:4].placements == (ms.Shard(1), ms.Shard(2))
    assert torch.equal(ds[1:4].full_tensor(), full[1:4])
    assert torch.equal(ds[4:1:-2].full_tensor(), full[[4, 2]])
    assert torch.equal(ds.batch([2, 0]).full_tensor(), full[[2, 0]])
    assert torch.equal(ds.batch([-1, np.int64(1), torch.tensor(0)]).full_tensor(), full[[4, 1, 0]])
    assert torch.equal(ds.batch(range(-2, 1)).full_tensor(), full[[3, 4, 0]])
    assert ds[5:].shape == ds.batch([]).shape == (0, 6, 7)
    for call in (lambda: ds[5], lambda: ds[-6], lambda: ds.batch([0, 5]), lambda: ds.batch(range(1 << 40))):
        with pytest.raises(IndexError, match=r"sample (5|-6) of 5"):
            call()
    odd = (1.5, "a", (0, 1), slice(0.5, 2), slice(None, None, 0))
    for call in (*[lambda i=i: ds[i] for i in odd], lambda: ds.batch([0, 1.0]), lambda: ds.batch(3)):
        with pytest.raises(ms.LayoutError, match="is of another kind") as e:
            call()
        same_on_all(e)
    mesh = ds.mesh
    cut = ms.distribute_tensor(torch.arange(4), mesh, [ms.Shard(0)] + [ms.Replicate()] * (mesh.ndim - 1))
    sums = [
        ms.ShardTensor.from_local(torch.ones(n, dtype=torch.int64), mesh, [ms.Partial()] * mesh.ndim)
        for n in ((2,), ())
    ]
    for indices in (cut, sums[0], [0, sums[1]], b"\0\1"):
        for on_all in (True, False):  # and on one rank alone
            with pytest.raises(ms.MpishardError, match="is of another kind"):
                ds.batch(indices if on_all or WORLD.rank == WORLD.size - 1 else [0])
    assert torch.equal(ds.batch(cut.redistribute(placements=[ms.Replicate()] * mesh.ndim)).full_tensor(), full[:4])
    with pytest.raises(IndexError if WORLD.rank == WORLD.size - 1 else ms.MpishardError, match="sample 5 of 5"):
        ds[5 if WORLD.rank == WORLD.size - 1 else 0]
    assert torch.equal(ds[0].full_tensor(), full[0])


def test_iteration_reads_ahead_in_a_thread(stream):
    ds, full = stream
    for x, expected in zip(ds, full, strict=True):
        assert torch.equal(x.full_tensor(), expected)
    for i, x in enumerate(ds):
        assert torch.equal(x.full_tensor(), full[i])
        if i == 1:
            break
    del x
    assert not [t for t in threading.enumerate() if t.name == "mpishard-read-ahead"]


def test_batches(stream):
    ds, full = stream
    loader = ms.io.Loader(ds, batch_size=2)
    assert len(loader) == 3
    assert [tuple(x.shape) for x in loader] == [(2, 6, 7), (2, 6, 7), (1, 6, 7)]
    assert torch.equal(torch.cat([x.full_tensor() for x in loader]), full)
    loader = ms.io.Loader(ds, batch_size=2, drop_last=True, transform=lambda x: x * 2)
    assert len(list(loader)) == len(loader) == 2
    assert torch.equal(next(iter(loader)).full_tensor(), 2 * full[:2])


def test_samples_for_a_gpu_are_read_into_pinned_memory(stream):
    ds, full = stream
    with emulated(kernel=True) as driver:
        x = next(iter(ms.io.Loader(ds, batch_size=2)))
        local = x.to_local()
        assert any(span(local).meets(span(pinned)) for pinned in driver.pins) or not local.numel()
        assert torch.equal(x.full_tensor(), full[:2])


def test_a_thread_that_dies_while_it_reads_ahead(stream, monkeypatch):
    ds, _ = stream
    monkeypatch.setattr(type(ds), "_fetched", lambda *_: {}["key"] if WORLD.rank == WORLD.size - 1 else 1 / 0)
    # one rank alone raises what was raised
    kind, text = (ms.MpishardError, "ZeroDivisionError|KeyError") if WORLD.size > 1 else (KeyError, "key")
    with pytest.raises(kind, match=text):
        next(iter(ms.io.Loader(ds)))


def test_shuffled_alike_on_every_rank(stream):
    ds, full = stream
    torch.manual_seed(WORLD.rank)
    loader = ms.io.Loader(ds, shuffle=True, seed=3)
    orders = [[int(x.full_tensor()[0, 0] - 0) for x in loader] for _ in range(2)]
    firsts = sorted(full[:, 0, 0].int().tolist())
    assert [sorted(o) for o in orders] == [firsts, firsts]
    assert orders[0] != orders[1]
    assert len(set(WORLD.allgather(str(orders)))) == 1


def test_inputs_with_targets(stream, mesh, folder):
    ds, full = stream
    with ms.io.Dataset(folder / "a.h5", "b", mesh, (ms.Replicate(), ms.Shard(0))) as other:
        for x, y in ms.io.Loader((ds, other)):
            assert torch.equal(x.full_tensor(), -y.full_tensor())
        for item in ms.io.Loader({"x": ds, "y": other}, batch_size=3):
            assert torch.equal(item["x"].full_tensor(), -item["y"].full_tensor())
    for wrong in ((), (ds, 3), ds.shape):
        with pytest.raises(ms.MpishardError, match="Loader"):
            ms.io.Loader(wrong)
    for sizes in ({"prefetch": 0}, {"prefetch": None}, {"batch_size": 0}, {"batch_size": -1}, {"batch_size": 1.5}):
        with pytest.raises(ms.LayoutError, match="prefetch"):
            ms.io.Loader(ds, **sizes)
    for state in (None, {}, {"epoch": "a"}, {"epoch": float("inf")}, 3):
        with pytest.raises(ms.LayoutError, match="another order"):
            ms.io.Loader(ds).load_state_dict(state)
    assert full.ndim == 3


def test_it_is_a_torch_dataset(stream):
    ds, full = stream
    assert isinstance(ds, torch.utils.data.Dataset)
    loader = torch.utils.data.DataLoader(ds, batch_size=None, shuffle=False)
    for x, expected in zip(loader, full, strict=True):
        assert isinstance(x, ms.ShardTensor)
        assert torch.equal(x.full_tensor(), expected)
    with pytest.raises(ms.UnsupportedOperationError, match="Loader"):
        pickle.dumps(ds)


@pytest.mark.ranks(2, 3, 4)
def test_what_one_rank_cannot(stream, monkeypatch):
    ds, _ = stream
    last = WORLD.rank == WORLD.size - 1
    with pytest.raises(ms.LayoutError if last else ms.MpishardError, match="of another kind"):
        ds[slice(0.5, 2) if last else slice(0, 2)]
    with pytest.raises(ms.MpishardError, match="ZeroDivisionError") as e:
        ds.batch((1 // 0 for _ in "a") if last else [0])
    same_on_all(e)

    def transform(x):
        if last and torch.equal(x.to_local(), ds_3):
            raise ValueError("only here")
        return x

    ds_3, given = ds[3].to_local(), []
    with pytest.raises(ms.MpishardError, match="only here") as e:
        given.extend(ms.io.Loader(ds, shuffle=True, seed=np.int64(3), transform=transform))
    same_on_all(e)
    assert len(given) < len(ds)
    monkeypatch.setattr("mpishard.io.file.trust.available_nbytes", lambda: 100 if last else 1 << 40)
    monkeypatch.setattr("mpishard.io.file.trust._SMALL_NBYTES", 10)
    with pytest.raises(FileError, match="does not fit into memory") as e:
        next(iter(ms.io.Loader(ds, shuffle=True)))
    same_on_all(e)


def test_epochs_that_are_set(stream):
    ds, _ = stream

    def order(loader):
        return [float(x.full_tensor().sum()) for x in loader]

    def new():
        return ms.io.Loader(ds, shuffle=True, seed=1 << 62)

    epochs = [order(loader) for loader in [new()] for _ in range(6)]
    loader = new()
    next(iter(loader))  # broken off
    loader.epoch = 2
    assert (order(loader), loader.epoch) == (epochs[2], 3)
    state = new()
    next(iter(state))
    loader.load_state_dict(state.state_dict())
    loader.epoch = 4
    assert order(loader) == epochs[4]
    with pytest.raises(ms.LayoutError, match="seed"):
        ms.io.Loader(ds, seed=1.5)
    with pytest.raises(ms.LayoutError, match="Loader: epoch= is of another kind"):
        loader.epoch = "2"
    assert loader.epoch == 5


@pytest.mark.parametrize(
    "odd", [1.5, "1", b"1", math.nan, None, -1, [1], fractions.Fraction(3, 2), torch.tensor([1, 2])]
)
@pytest.mark.parametrize("key", ["epoch", "position"])
def test_states_that_are_no_numbers(stream, key, odd):
    """None is cut to a whole number, which would be another place."""
    ds, _ = stream
    loader = ms.io.Loader(ds, batch_size=2, shuffle=True)
    state = {**loader.state_dict(), "epoch": 1, "position": 1}
    with pytest.raises(ms.LayoutError, match="another order"):
        loader.load_state_dict({**state, key: odd})
    assert loader.state_dict() == {**state, "epoch": 0, "position": 0}
    for like in (1.0, np.int64(1), torch.tensor(1)):
        loader.load_state_dict({**state, key: like})
        assert loader.state_dict() == state
        assert all(type(n) is int for n in loader.state_dict().values())


@pytest.mark.ranks(2, 3, 4)
def test_other_samples_on_other_ranks(stream):
    ds, _ = stream
    with pytest.raises(ms.DesyncError) as e:
        ds[min(WORLD.rank, 1)]
    same_on_all(e)


@pytest.mark.parametrize("odd", ["batch_size", "drop_last", "position"])
def test_an_iteration_that_ends_on_one_rank_before_the_others(stream, odd):
    """One that is at its end asks for no sample that would differ: the others waited for it."""
    ds, _ = stream
    first = WORLD.rank == 0
    loader = ms.io.Loader(ds, batch_size=4 if odd == "batch_size" and first else 2)
    loader.drop_last = odd == "drop_last" and first
    if odd == "position" and first:
        loader.load_state_dict({**loader.state_dict(), "position": len(loader)})
    if WORLD.size > 1:
        with pytest.raises(ms.DesyncError, match="Loader from item") as e:
            list(loader)
        same_on_all(e)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    "odd",
    [{"batch_size": 0}, {"prefetch": None}, {"seed": 1.5}, {"transform": 3}, {"batch_dim": "z"}, {"datasets": None}],
    ids=lambda odd: next(iter(odd)),
)
def test_options_that_are_wrong_on_one_rank(stream, odd):
    """The others went on, to wait for this rank's samples."""
    ds, full = stream
    given = {"datasets": (ds,), "batch_size": 2}
    if WORLD.rank == WORLD.size - 1:
        given |= {"datasets": (ds, None)} if "datasets" in odd else odd
    with pytest.raises(ms.MpishardError) as e:
        ms.io.Loader(**given)
    same_on_all(e)
    assert torch.equal(next(iter(ms.io.Loader(ds, batch_size=2))).full_tensor(), full[:2])


def test_options_of_another_kind(stream):
    ds, _ = stream
    assert ms.io.Loader(ds, batch_size=2, drop_last=None, shuffle=None).state_dict()["drop_last"] == 0
    with pytest.raises(ms.LayoutError, match="Loader: transform= is of another kind"):
        ms.io.Loader(ds, transform=3)


def test_packed_samples(mesh, folder):
    packed = np.arange(24, dtype=np.int16).reshape(4, 6)
    if WORLD.rank == 0:
        with h5py.File(folder / "p.nc", "w") as f:
            f.create_dataset("p", data=packed).attrs["scale_factor"] = 0.5
    WORLD.Barrier()
    ds = ms.io.Dataset(
        folder / "p.nc",
        "p",
        mesh,
        (ms.Replicate(), ms.Shard(0)),
        decode=True,
        sizes={0: [6]} if WORLD.size == 1 else None,
    )
    assert torch.equal(ds[2].full_tensor(), torch.from_numpy(packed[2] * 0.5).float())
    ds.close()


@pytest.mark.parametrize(
    ("stored", "attributes", "dtype", "expected"),
    [
        (np.uint16([0, 65530]), {"scale_factor": 0.01}, torch.float16, [0, 655.3]),
        (np.int32([1700000000, 1700000005]), {"add_offset": -1.7e9}, torch.float32, [0, 5]),
        (np.int32([1700000000, 1700000005]), {"add_offset": -1.7e9}, torch.float16, [0, 5]),
        (np.int16([-32768, 1]), {"_FillValue": np.int16(-32768), "scale_factor": 0.01}, torch.bfloat16, [np.nan, 0.01]),
        (np.int16([1, 2]), {"scale_factor": 0.1}, torch.float64, [0.1, 0.2]),
        (np.complex64([1 + 2j, 3j]), {"scale_factor": 2.0}, None, [2 + 4j, 6j]),
        (np.float16([np.inf, 2]), {"_FillValue": 1e20, "missing_value": 2.0}, torch.float32, [np.inf, np.nan]),
        (np.float32([np.inf, -np.inf]), {"missing_value": [1e300, -np.inf]}, torch.float64, [np.inf, np.nan]),
        (np.float32([np.inf, 3.4028235e38]), {"_FillValue": 3.4028235e38}, torch.float64, [np.inf, np.nan]),
        (np.complex64([np.inf, 3j]), {"missing_value": 1e300}, None, [np.inf, 3j]),
    ],
)
def test_packed_values_of_another_dtype(mesh, folder, stored, attributes, dtype, expected):
    """Unpacked first."""
    if WORLD.rank == 0:
        with h5py.File(folder / "p.nc", "w") as f:
            f.create_dataset("p", data=stored).attrs.update(attributes)
    WORLD.Barrier()
    place = {"path": folder / "p.nc", "name": "p", "mesh": mesh, "placements": (ms.Shard(0), ms.Replicate())}
    x = ms.io.read(**place, decode=True, dtype=dtype).full_tensor()
    wanted = torch.tensor(expected, dtype=dtype or torch.complex64)
    close = {"rtol": 1e-12, "atol": 0} if dtype is torch.float64 else {}
    torch.testing.assert_close(x, wanted, equal_nan=True, **close)
    if dtype is not None:
        with pytest.raises(ms.LayoutError, match="decoded"):
            ms.io.read(**place, decode=True, out=torch.empty(x.shape, dtype=torch.int32))


@pytest.mark.ranks(2, 3, 4)
def test_buffers_of_other_dtypes(mesh, stream, folder):
    out = torch.empty(5, 6, 7, dtype=torch.float64 if WORLD.rank else torch.float32)
    with pytest.raises(ms.DesyncError):
        ms.io.read(folder / "a.h5", "a", mesh, (ms.Replicate(), ms.Replicate()), out=out)


def test_sizes_are_of_a_samples_dims(mesh, folder, stream):
    _, full = stream
    cuts = {-2: (6, *(0,) * (mesh.shape[0] - 1)), 1: (*(0,) * (mesh.shape[1] - 1), 7)}
    with ms.io.Dataset(folder / "a.h5", "a", mesh, (ms.Shard(0), ms.Shard(1)), sizes=cuts) as ds:
        assert ds[1].sharding.sizes == tuple(cuts.values())
        assert torch.equal(ds[1].full_tensor(), full[1])
    for sizes in ({2: (7,)}, {-3: (1, 4)}, {0: (6,), -2: (6,)}):
        with pytest.raises(ms.LayoutError) as e:
            ms.io.Dataset(folder / "a.h5", "a", mesh, (ms.Shard(0), ms.Shard(1)), sizes=sizes)
        same_on_all(e)


def test_bad_datasets(mesh, folder, stream):
    store(folder / "s.h5", s=(np.float32(1), {}))
    for name, file in (("s", "s.h5"), ("none", "a.h5"), ("a", "none.h5")):
        with pytest.raises(ms.MpishardError) as e:
            ms.io.Dataset(folder / file, name, mesh, (ms.Shard(0), ms.Shard(1)))
        same_on_all(e)
    with pytest.raises(ms.LayoutError):
        ms.io.Dataset(folder / "a.h5", "a", mesh, (ms.Shard(0), ms.Shard(2)))


def test_a_file_that_is_cut_while_it_is_read(mesh, folder):
    store(folder / "a.h5", a=(np.arange(20000.0).reshape(20, 1000), {"chunks": (1, 1000), "fletcher32": True}))
    ds = ms.io.Dataset(folder / "a.h5", "a", mesh, (ms.Replicate(), ms.Shard(0)))
    if WORLD.rank == 0:
        with open(folder / "a.h5", "r+b") as f:
            f.seek(os.path.getsize(folder / "a.h5") - 4000)
            f.write(b"\xff" * 4000)
    WORLD.Barrier()
    with pytest.raises(ms.MpishardError, match="has changed since it was opened") as e:
        list(ds)
    same_on_all(e)


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True, "seed": 3}, {"batch_size": 2}, {"batch_size": 2, "shuffle": True}]
)
def test_an_iteration_that_goes_on_later(stream, options):
    ds, _ = stream

    def run(loader, epochs, stop=None):
        """Samples given until item ``stop``, and the state there."""
        given = []
        for _ in range(epochs):
            for x in loader:
                given.append(x.full_tensor())
                if len(given) == stop:
                    return given, loader.state_dict()
        return given, loader.state_dict()

    whole, last = run(ms.io.Loader(ds, **options), 3)
    assert last["epoch"] == 3
    per_epoch = len(ms.io.Loader(ds, **options))
    for stop in (1, per_epoch - 1, per_epoch, per_epoch + 2, 2 * per_epoch):
        before, state = run(ms.io.Loader(ds, **options), 3, stop)
        assert all(type(v) is int for v in state.values())
        loader = ms.io.Loader(ds, **options)
        loader.load_state_dict(state)
        after, _ = run(loader, 3 - state["epoch"])
        for expected, got in zip(whole, before + after, strict=True):
            assert torch.equal(expected, got)
    with pytest.raises(ms.LayoutError, match="another order"):
        ms.io.Loader(ds, **{**options, "seed": 99}).load_state_dict(last)
    loader = ms.io.Loader(ds, **options)
    next(iter(loader))
    next(iter(loader))  # broken off: the next order
    assert loader.epoch == 1


@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_a_batch_that_ranks_share(folder, batch_size):
    mesh = ms.init_mesh((-1, 2 if WORLD.size == 4 else 1), ("data", "y"))
    full = values((5, 6, 7))
    store(folder / "a.h5", a=(full.numpy(), {}))
    with ms.io.Dataset(folder / "a.h5", "a", mesh, (ms.Replicate(), ms.Shard(0))) as ds:
        for i, x in enumerate(ms.io.Loader(ds, batch_size=batch_size, batch_dim="data")):
            assert x.placements == (ms.Shard(0), ms.Shard(1))
            assert torch.equal(x.full_tensor(), full[i * batch_size : (i + 1) * batch_size])
        with pytest.raises(ms.LayoutError, match="batch_dim"):
            ms.io.Loader(ds, batch_dim="data")
        with pytest.raises(ms.LayoutError, match="batch_dim"):
            ms.io.Loader(ds, batch_size=2, batch_dim="y")
        with pytest.raises(ms.MeshError):
            ms.io.Loader(ds, batch_size=2, batch_dim="z")


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("odd", ["batch_dim", "key", "order", "kind", "count"])
def test_items_of_another_form_on_one_rank(folder, odd):
    mesh = ms.init_mesh((-1,), ("data",))
    full = values((5, 6, 7))
    store(folder / "a.h5", a=(full.numpy(), {}), b=(full.numpy(), {}))
    is_odd = mesh.rank == mesh.size - 1
    with (
        ms.io.Dataset(folder / "a.h5", "a", mesh, (ms.Replicate(),)) as a,
        ms.io.Dataset(folder / "a.h5", "b", mesh, (ms.Replicate(),)) as b,
    ):
        given = {"key": {"c": a}, "order": {"b": b, "a": a}, "kind": (a, b), "count": {"a": a}}.get(
            odd, {"a": a, "b": b}
        )
        usual = {"a": a} if odd == "key" else {"a": a, "b": b}
        batch_dim = None if odd == "batch_dim" and is_odd else "data"
        loader = ms.io.Loader(given if is_odd else usual, batch_size=4, batch_dim=batch_dim)
        with pytest.raises(ms.DesyncError, match="Loader from item") as e:
            next(iter(loader))
        same_on_all(e)


@pytest.mark.parametrize("backend", ["root", "virtual"])
def test_nothing_is_open_of_one_that_is_closed(mesh, folder, backend):
    path = folder / "closed.h5"
    ms.io.write(path, {"u": sharded(values((7, 6)), mesh)}, backend=backend)
    with ms.io.Dataset(path, "u", mesh, (ms.Shard(0), ms.Replicate())) as ds:
        assert ds[3].shape == (6,)
    with pytest.raises(FileError, match=r"'u' of .* is closed") as e:
        ds[3]
    same_on_all(e)
    with pytest.raises(FileError, match="is closed"):
        list(ds)
    with h5py.File(path) as file:
        assert (file["u"][3] == values((7, 6))[3].numpy()).all()
