"""What is no torch tensor: arrays as blocks and as operands, and where ShardTensors leave torch."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import mpishard as ms
from tests.compare import WORLD, gathered, mesh_of, shard

N = 3 * WORLD.size


def mesh_1d():
    return mesh_of((WORLD.size,))


def read_only():
    array = np.ones(3)
    array.flags.writeable = False
    return array


class Foreign:
    """An array of another library, which runs backwards."""

    strides = (-8,)

    def __dlpack__(self, **_):
        raise AssertionError("torch would end the process")

    def __dlpack_device__(self):
        return 1, 0


REFUSED = {
    "backwards": lambda: np.ones(3)[::-1],
    "backwards in one dim": lambda: np.ones((3, 2))[:, ::-1],
    "of another library": Foreign,
    "read-only": read_only,
    "broadcast": lambda: np.broadcast_to(np.ones(1), (3,)),
    "swapped": lambda: np.ones(3, np.dtype(float).newbyteorder()),
    "record": lambda: np.zeros(3, [("a", "f4")]),
    "field of a record": lambda: np.zeros(3, [("a", "f4"), ("b", "f8")])["b"],
    "text": lambda: np.array(["a"]),
    "objects": lambda: np.array([None]),
    "list": lambda: [1.0, 2.0],
    "number": lambda: 3.0,
    "None": lambda: None,
    "masked": lambda: np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0]),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("shapes", ["infer", "chunk"])
def test_blocks_that_are_refused(make, odd, shapes):
    """Where one rank's block is bad, all ranks raise."""
    if odd and shapes == "chunk":
        return  # not collective
    block = make() if not odd or WORLD.rank == WORLD.size - 1 else np.ones(3)
    with pytest.raises(ms.MpishardError, match=r"from_local(.|\n)*fix"):
        ms.ShardTensor.from_local(block, mesh_1d(), ms.Shard(0), shapes)


def test_whole_arrays():
    whole = np.arange(12.0).reshape(6, 2)
    assert torch.equal(gathered(ms.distribute_tensor(whole, mesh_1d(), ms.Shard(0))), torch.from_numpy(whole))
    for make in REFUSED.values():
        with pytest.raises(ms.MpishardError, match=r"distribute_tensor(.|\n)*fix"):
            ms.distribute_tensor(make(), mesh_1d(), ms.Shard(0))


@pytest.mark.parametrize("view", [lambda a: a, lambda a: a[::2], lambda a: a.T, np.asfortranarray])
def test_blocks_that_share_memory(view):
    array = view(np.arange(8.0).reshape(4, 2) + WORLD.rank)
    x = ms.ShardTensor.from_local(array, mesh_1d(), ms.Shard(0))
    x.mul_(2)
    np.testing.assert_array_equal(x.to_local().numpy(), array)
    assert gathered(x)[: array.shape[0]].tolist() == (view(np.arange(8.0).reshape(4, 2)) * 2).tolist()


OPERATORS = "__add__ __radd__ __sub__ __rsub__ __mul__ __truediv__ __rtruediv__ __pow__ __rpow__ __eq__ __lt__".split()


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_take_arrays(name):
    full = torch.rand(N, 2, dtype=torch.float32, generator=torch.Generator().manual_seed(0)) + 0.5
    x = shard(full, mesh_1d(), [ms.Shard(0)])
    for array in (np.arange(2.0), np.ones((N, 1))[::-1] * 2, np.ones((N, 2), np.float32), np.arange(2)):
        expected = getattr(full, name)(torch.from_numpy(array.copy()))
        got = getattr(x, name)(array)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(gathered(got), expected)


def test_operators_around_arrays():
    x = shard(torch.ones(N), mesh_1d(), [ms.Shard(0)])
    before = x
    np.testing.assert_array_equal(gathered(np.arange(N) - x), np.arange(N) - 1.0)
    np.testing.assert_array_equal(gathered(np.float64(2) * x), 2.0)
    x -= np.ones(N)  # as in torch another tensor, of the wider type
    assert x is not before
    assert x.dtype == torch.float64
    np.testing.assert_array_equal(gathered(x), 0.0)
    for bad in ([1.0] * N, "a", {}):
        with pytest.raises(TypeError):
            x + bad
        assert (x == bad) is False
    with pytest.raises(RuntimeError):
        x + np.ones(N + 1)
    with pytest.raises(ms.UnsupportedOperationError, match="full_tensor"):
        np.add(np.ones(N), x)


VIEWS = {
    "whole": lambda x: x,
    "t": lambda x: x.t(),
    "steps": lambda x: x[:, ::2],
    "rows": lambda x: x[1:],
    "columns": lambda x: x[:, 1:3],
    "columns, detached": lambda x: x[:, 1:3].detach(),
    "columns, with a dim": lambda x: x[:, 1:3].unsqueeze(0),
    "columns of rows": lambda x: x[1:][:, :2],
    "t of columns": lambda x: x[:, 1:].t(),
    "rows of t": lambda x: x.t()[1:3],
    "columns of t": lambda x: x.t()[:, 1:3],
    "columns of t, turned back": lambda x: x.t()[:, 1:3].t(),
    "columns of a permuted one": lambda x: x.unsqueeze(0).permute(2, 0, 1)[:, :, 1:].permute(1, 2, 0),
    "a column": lambda x: x[:, 2:3],
    "every second row": lambda x: x[::2],
}
FLAT = {
    "reshape": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("flat", FLAT.values(), ids=FLAT)
def test_writing_into_the_reshape_of_a_view(view, flat):
    """On all ranks alike: it reaches the tensor, or (where torch makes a copy) nothing of it, or it raises."""
    for placement in (ms.Shard(0), ms.Shard(1), ms.Replicate()):
        last = {d: [*[0] * (WORLD.size - 1), (N, 4)[d]] for d in range(2) if placement == ms.Shard(d)}
        for sizes in (None, last):
            whole = torch.arange(N * 4.0).reshape(N, 4)
            x, through = ms.distribute_tensor(whole, mesh_1d(), [placement], sizes=sizes), whole.clone()
            flat(view(whole)).mul_(2)
            view(through).mul_(2)
            try:
                flat(view(x)).mul_(2)
                raised = False
            except ms.UnsupportedOperationError:
                raised = True
            assert len(set(WORLD.allgather(raised))) == 1
            if not raised:
                found = gathered(x)
                torch.testing.assert_close(found, through if torch.equal(found, through) else whole)


def test_copies_and_pickles():
    x = shard(torch.arange(float(N)), mesh_1d(), [ms.Shard(0)], requires_grad=True)
    twin = copy.deepcopy({"a": [x, x]})
    assert twin["a"][0] is twin["a"][1]
    assert twin["a"][0].requires_grad
    with torch.no_grad():
        twin["a"][0].zero_()
    assert gathered(x).sum() == N * (N - 1) / 2
    for call in (lambda: torch.save({"a": x}, io.BytesIO()), lambda: multiprocessing.reduction.ForkingPickler.dumps(x)):
        with pytest.raises(ms.UnsupportedOperationError, match=r"mpishard\.io"):
            call()


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("through", [lambda x: pickle.loads(pickle.dumps(x)), saved])
def test_what_every_rank_holds_whole_is_pickled_as_a_plain_tensor(through):
    """As losses are that checkpoints keep, and parameters of DTensor's kind."""
    x = shard(torch.arange(float(N)), mesh_1d(), [ms.Shard(0)], requires_grad=True)
    parameter = nn.Parameter(ms.distribute_tensor(torch.ones(2), mesh_1d(), [ms.Replicate()]))
    loss, detached, parameter = through([x.square().mean(), x.detach().sum(), parameter])
    assert [type(t) for t in (loss, detached, parameter)] == [torch.Tensor, torch.Tensor, nn.Parameter]
    assert [t.requires_grad for t in (loss, detached, parameter)] == [True, False, True]
    torch.testing.assert_close(loss.detach(), torch.arange(float(N)).square().mean())
    torch.testing.assert_close([detached, parameter.data], [torch.arange(float(N)).sum(), torch.ones(2)])


class Samples(torch.utils.data.Dataset):
    def __init__(self, x) -> None:
        self.x = x

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i):
        return self.x


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore")
def test_a_worker_that_returns_one():
    """The loader raises; it does not wait for ever."""
    x = shard(torch.arange(float(N)), mesh_1d(), [ms.Shard(0)])
    with pytest.raises(ms.UnsupportedOperationError, match=r"mpishard\.io\.Loader"):
        next(iter(torch.utils.data.DataLoader(Samples(x), batch_size=None, num_workers=1)))
