"""Room for a file that is about to grow."""

import os

import pytest

from mpishard.io.file.open import reserve

pytestmark = pytest.mark.ranks(1)


def test_reserved_blocks_change_nothing_that_a_writer_sees(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    reserve(path, 1 << 20)
    assert path.read_bytes() == b"abc"
    assert os.stat(path).st_blocks * 512 >= 1 << 20
    with open(path, "ab") as file:
        file.write(b"d")
    assert path.read_bytes() == b"abcd"
