from __future__ import annotations

from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "examples" / "stencil.py"


def test_every_mesh_gives_the_same_heat(launch, tmp_path):
    picture = tmp_path / "heat.png"
    told = {}
    for size in (1, 4):
        done = launch(size, PROGRAM, "--cells", "33", "--steps", "50", "--figure", picture)
        assert done.returncode == 0, done.stdout
        mesh, _, told[size] = done.stdout.strip().partition(": ")
        assert mesh == {1: "mesh (1, 1)", 4: "mesh (2, 2)"}[size]
        assert picture.read_bytes().startswith(b"\x89PNG")
        picture.unlink()
    assert told[1] == told[4]
    # what flows stays in the plate
    hot = sum(((i + 0.5) / 33 - 0.5) ** 2 + ((j + 0.5) / 33 - 0.1) ** 2 < 0.04 for i in range(33) for j in range(33))
    assert f"mean {hot / 33**2:.12f}" in told[1]
