"""Tests that need a GPU: ``make test-gpu`` runs them all; elsewhere each is skipped, and says why.

With ``MPISHARD_TEST_REHEARSAL=1`` those that need no more than its memory run over the emulated device: so the
tests themselves are tried before a GPU is at hand.
"""

import contextlib
import os
from pathlib import Path

import pytest
import torch

import mpishard as ms
from mpishard.comm.device import driver, gpu_aware
from tests.emulated import emulated

HERE = Path(__file__).parent
REHEARSAL = os.environ.get("MPISHARD_TEST_REHEARSAL", "0") == "1"
ROUTES = ["aware-kernel", "staged-kernel", "aware-torch", "staged-torch"]


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent != HERE:
            continue  # the hook is shown the items of all folders
        if REHEARSAL:
            if "device" not in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason="a rehearsal has no CUDA"))
        elif not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))


def pytest_terminal_summary(terminalreporter):
    """Print how often each test passed, failed and was skipped, and how long it took."""
    rows = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            path, _, name = report.nodeid.rpartition("::")
            if Path(path).parent.name == HERE.name and (report.when == "call" or outcome != "passed"):
                row = rows.setdefault(name.partition("[")[0], dict.fromkeys(("passed", "failed", "skipped"), 0))
                row["failed" if outcome == "error" else outcome] += 1
                row["seconds"] = row.get("seconds", 0) + report.duration
    if any(row["passed"] or row["failed"] for row in rows.values()):
        terminalreporter.section("on the GPU" if not REHEARSAL else "in rehearsal, on no GPU")
        terminalreporter.write_line(f"{'test':44}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
        for name, row in rows.items():
            counts = f"{row['passed']:8}{row['failed']:8}{row['skipped']:9}"
            terminalreporter.write_line(f"{name:44}{counts}{row['seconds']:9.1f}")


@pytest.fixture
def device():
    """Where the tensors of a test lie."""
    return torch.device("cpu" if REHEARSAL else "cuda")


@pytest.fixture(params=ROUTES)
def make_mesh(request, monkeypatch):
    """Makes meshes whose messages take one of the routes."""
    route, pack = request.param.split("-")
    if not REHEARSAL and route == "aware" and not gpu_aware.decide(gpu_aware.findings())[0]:
        pytest.skip("this MPI may not be given GPU memory (`mpishard info` says more)")
    monkeypatch.setattr(gpu_aware, "agreed", lambda comm, device: route == "aware")
    made = []

    def make(shape, periodic=False):
        mesh = ms.init_mesh(shape, periodic=periodic)
        made.append(mesh)
        own = driver.driver_of(mesh.device)
        if pack == "kernel" and not own.has_kernel:
            pytest.skip("cupy is not installed")
        monkeypatch.setattr(own, "has_kernel", pack == "kernel")
        if not REHEARSAL:
            torch.cuda.set_device(mesh.device)
        return mesh

    with emulated(kernel=True) if REHEARSAL else contextlib.nullcontext():
        yield make
        for mesh in made:
            mesh.free()
