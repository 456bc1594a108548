"""Bytes of tensors that count as contiguous."""

import pytest
import torch

from mpishard.comm.memory.buffer import byte_view


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "x", [torch.arange(6).view(3, 2)[1:2, 1], torch.arange(6)[1:4], torch.empty(0, 3), torch.ones(())]
)
def test_bytes_of_any_contiguous_tensor(x):
    assert x.is_contiguous()
    assert bytes(byte_view(x).tolist()) == x.numpy().tobytes()
    if x.numel():
        assert byte_view(x).data_ptr() == x.data_ptr()
