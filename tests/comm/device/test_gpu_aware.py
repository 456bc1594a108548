"""The ladder of sources that say whether MPI may be given device memory."""

import pytest
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard.comm.device import gpu_aware
from mpishard.comm.device.gpu_aware import Finding, decide

WORLD = MPI.COMM_WORLD
GPU = torch.device("cuda", 0)


def test_the_first_source_that_knows_decides():
    yes, no, maybe, nothing = (Finding(f"source {s}", s, f"it says {s}") for s in ("yes", "no", "maybe", "nothing"))
    assert decide([nothing, yes, no]) == (True, "source yes: it says yes")
    assert decide([nothing, maybe, no, yes])[0] is False
    assert decide([])[0] is False
    aware_, why = decide([nothing, maybe])
    assert not aware_
    assert "source maybe" in why
    assert "MPISHARD_GPU_AWARE=1" in why


def test_sources_of_this_library(monkeypatch):
    monkeypatch.delenv("MPISHARD_GPU_AWARE", raising=False)
    found = {f.source: f.says for f in gpu_aware.findings()}
    assert found["MPISHARD_GPU_AWARE"] == "nothing"
    # neither library was built for GPUs, and a library that was says "maybe" at most
    assert found["MPIX_Query_cuda_support"] in ("nothing", "no")
    assert not decide(gpu_aware.findings())[0]


@pytest.mark.parametrize(
    ("library", "name", "value", "says"),
    [
        ("MPI VERSION : CRAY MPICH version 8.1", "MPICH_GPU_SUPPORT_ENABLED", "1", "yes"),
        ("MPI VERSION : CRAY MPICH version 8.1", "MPICH_GPU_SUPPORT_ENABLED", "0", "no"),
        ("MVAPICH Version: 4.0", "MVP_USE_CUDA", "1", "yes"),
        ("Open MPI v5.0", "OMPI_MCA_opal_cuda_support", "true", "maybe"),
        ("Open MPI v5.0", "OMPI_MCA_opal_cuda_support", "false", "no"),
        ("MPICH Version: 5.0", "MPIR_CVAR_ENABLE_GPU", "0", "no"),
    ],
)
def test_variables_of_vendors(library, name, value, says):
    found = gpu_aware._variables(library, {name: value, "MPICH_GPU_SUPPORT_ENABLED_": "1"})
    assert [(f.source, f.says) for f in found] == [(name, says)]
    assert gpu_aware._variables("another library", {name: value}) == []


def test_all_ranks_agree(monkeypatch):
    monkeypatch.setenv("MPISHARD_GPU_AWARE", "1")
    assert gpu_aware.agreed(WORLD, GPU)
    assert not gpu_aware.agreed(WORLD, torch.device("cpu"))
    if WORLD.rank == 0:
        monkeypatch.setenv("MPISHARD_GPU_AWARE", "0")
    assert not gpu_aware.agreed(WORLD, GPU)


def test_a_bad_override_is_an_error_on_all(monkeypatch):
    if WORLD.rank == WORLD.size - 1:
        monkeypatch.setenv("MPISHARD_GPU_AWARE", "maybe")
    with pytest.raises(ms.MeshError, match="MPISHARD_GPU_AWARE"):
        gpu_aware.agreed(WORLD, GPU)


@pytest.mark.ranks(2, 3, 4)
def test_a_gpu_on_some_ranks_only_is_an_error_on_all():
    with pytest.raises(ms.MeshError, match="with and without a GPU"):
        gpu_aware.agreed(WORLD, GPU if WORLD.rank else torch.device("cpu"))


def test_meshes_of_the_host_are_not_aware():
    mesh = ms.init_mesh(WORLD.size)
    assert mesh.gpu_aware is False
    mesh.free()
