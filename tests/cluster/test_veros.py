"""An ocean model with a closure: veros as it is, examples/veros_closure.py as a user would write it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import h5py
import numpy as np

from tests.coupling.conftest import programs  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[2]
CLOSURE, OCEAN = ROOT / "examples" / "veros_closure.py", Path(__file__).with_name("ocean.py")
LIMIT_S = 600


def variables(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: values[...] for name, values in file["core"].items()}


def test_on_the_same_ranks_and_beside(programs, tmp_path):  # noqa: F811
    """Nothing leaves no trace; a network does on four ranks, beside them, and on one process, what it does in torch."""
    python, veros = sys.executable, Path(sys.executable).with_name("veros")
    settings = [
        "--force-overwrite",
        "-s",
        "nx",
        12,
        "-s",
        "ny",
        12,
        "-s",
        "runlen",
        4 * 43200,
        "-s",
        "restart_output_filename",
    ]
    jobs = [
        [(4, [python, OCEAN, tmp_path, 2, 2, "plain", "nothing", "network"])],
        [(1, [python, OCEAN, tmp_path, 1, 1, "by_hand"])],
        [
            (4, ["env", "CLOSURE=beside", veros, "run", CLOSURE, "-n", 2, 2, *settings, tmp_path / "beside.h5"]),
            (2, [python, CLOSURE, 12, 12, 15]),
        ],
    ]
    for parts in jobs:
        parts = [(ranks, [os.fspath(w) if isinstance(w, Path) else str(w) for w in words]) for ranks, words in parts]
        done = programs(*parts, timeout_s=LIMIT_S)
        assert done.returncode == 0, done.stdout
    runs = {n: variables(tmp_path / f"{n}.h5") for n in ("plain", "nothing", "network", "by_hand", "beside")}
    plain, network = runs["plain"], runs["network"]
    for name, values in plain.items():
        assert values.tobytes() == runs["nothing"][name].tobytes(), name
    # what the solver of the stream function sums depends on the ranks in its last digits
    for name in ("temp", "salt", "u", "v", "psi", "eke", "tke"):
        for other in ("by_hand", "beside"):
            scale = abs(network[name]).max()
            assert scale > 0
            np.testing.assert_allclose(runs[other][name], network[name], rtol=0, atol=1e-9 * scale, err_msg=name)
    # it does something, and not on land
    changed = abs(network["temp"] - plain["temp"])
    assert changed.max() > 1e-3
    assert not network["temp"][plain["temp"] == 0].any()
