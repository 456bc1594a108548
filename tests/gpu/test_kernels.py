"""The copy kernels on random tables; under compute-sanitizer, run tests/gpu/kernels.py itself."""

import pytest

from tests.gpu import kernels


@pytest.mark.ranks(1, 2)
def test_pack_and_unpack():
    pytest.importorskip("cupy", reason="cupy is not installed")
    kernels.run()
