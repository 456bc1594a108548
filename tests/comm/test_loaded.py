"""Which of the libraries in a process are MPI libraries."""

from __future__ import annotations

from mpishard.comm import loaded

MAPS = """\
7f1 r-xp 0 08:01 1 /lib/x86_64-linux-gnu/openmpi/lib/libmpi.so.40.30.4
7f2 r--p 0 08:01 1 /lib/x86_64-linux-gnu/openmpi/lib/libmpi.so.40.30.4
7f3 r-xp 0 08:01 1 /lib/x86_64-linux-gnu/libmpi_cxx.so.40.30.1
7f4 r-xp 0 08:01 1 /lib/x86_64-linux-gnu/libmpi_mpifh.so.40
7f5 r-xp 0 08:01 1 /lib/libmpilike.so
"""
ONE = "/lib/x86_64-linux-gnu/openmpi/lib/libmpi.so.40.30.4"
OTHER = "/env/lib/libmpi.so.12.5.2"


def test_mpi_libraries(monkeypatch):
    assert len(loaded.mpi_libraries()) == 1
    for maps, expected in (
        (MAPS, [ONE]),
        (f"{MAPS}7f6 r-xp 0 08:01 1 {OTHER}\n", [OTHER, ONE]),
        (
            "7f 0 1 /soft/libmpich.so.12\n7f 0 1 /soft/libmpi_abi.so.0 (deleted)\n7f 0 2 /soft/m\n",
            ["/soft/libmpi_abi.so.0", "/soft/libmpich.so.12"],
        ),
        ("7f 0 1 /soft with a space/libmpi.so\n", ["/soft with a space/libmpi.so"]),
        ("", []),
    ):
        monkeypatch.setattr(loaded, "_maps", lambda maps=maps: maps)
        assert loaded.mpi_libraries() == expected
