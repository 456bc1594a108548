"""`mpishard info`: what the job runs on, said once."""

import pytest
import torch
from mpi4py import MPI

from mpishard.cli import main
from mpishard.comm import info as survey_module
from mpishard.comm.info import survey
from mpishard.comm.mesh import init_mesh

WORLD = MPI.COMM_WORLD


def test_every_rank_is_described_on_the_first():
    lines = []
    survey(lines.append)
    if WORLD.rank:
        assert lines == []
        return
    text = "\n".join(lines)
    for rank in range(WORLD.size):
        assert f"  rank {rank}: " in text
    assert f"{WORLD.size} ranks on 1 host(s)" in text
    for source in ("MPISHARD_GPU_AWARE", "mpi_memory_alloc_kinds", "MPIX_Query_cuda_support"):
        assert f"  {source}: " in text
    assert "mpi4py" in text
    assert MPI.Get_library_version().split()[0] in text


def test_a_launcher_of_another_library_is_noticed(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "64")
    lines = []
    survey(lines.append)
    assert any("WARNING" in line for line in lines) == (WORLD.size == 1)
    # as Slurm writes others of its variables
    monkeypatch.setenv("SLURM_NTASKS", "4(x2)")
    survey(lambda line: None)


def test_command(capsys):
    assert main(["info"]) == 0
    assert ("May MPI be given GPU memory?" in capsys.readouterr().out) == (WORLD.rank == 0)


@pytest.mark.ranks(2, 3, 4)
def test_nothing_is_tried_where_some_ranks_have_no_gpu():
    mesh = init_mesh(WORLD.size)
    mesh.device = torch.device("cpu" if WORLD.rank else "cuda")
    lines = []
    survey_module._tell_route(mesh, lines.append)
    assert lines[-1].startswith(f"  1 of {WORLD.size} ranks have a GPU")
