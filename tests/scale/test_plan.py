"""Planning meshes and `mpishard plan`, in one process."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from mpishard.cli import main
from mpishard.comm.null import Event
from mpishard.errors import JobError, MissingPackageError
from mpishard.planning.arguments import candidates
from mpishard.planning.machine import Machine
from mpishard.planning.timeline import Parts, collective_seconds, run
from mpishard.planning.trace import Operation

UNET = str(Path(__file__).parents[2] / "examples" / "unet.py") + ":UNet"
SMALL = ["--option", "base=2", "--option", "levels=2", "--shape", "1x1x32x32x32"]


def conv() -> torch.nn.Module:
    return torch.nn.Conv3d(1, 4, 3, padding=1)


# -- meshes


def test_a_field_without_memory():
    mesh = ms.planning.mesh((64, 32, 32), ("z", "y", "x"))
    assert (mesh.size, mesh.coords, mesh["y"].size, mesh["y"].rank) == (65536, (32, 16, 16), 32, 16)
    x = ms.zeros(1, 8, 4096, 4096, 4096, mesh=mesh, placements=[ms.Shard(2), ms.Shard(3), ms.Shard(4)])
    with ms.comm_counter() as count:
        y = F.conv3d(x, torch.empty(8, 8, 3, 3, 3, device="meta"), padding=1)
    assert y.shape == x.shape
    assert y.to_local().shape == (1, 8, 64, 128, 128)
    face = 128 * 128, 66 * 128, 66 * 130  # of the rounds along x, y and z: corners are carried
    assert count.messages == 6
    assert count.nbytes == pytest.approx(2 * 4 * 8 * sum(face), rel=0.05)


def test_what_asks_torch_for_values():
    """Which cells an interpolation reads is asked of torch's own function."""
    mesh = ms.planning.mesh((4, 4))
    x = ms.empty(1, 2, 34, 35, mesh=mesh, placements=[ms.Shard(2), ms.Shard(3)])
    with ms.comm_counter() as count:
        y = F.interpolate(x, scale_factor=1.5, mode="bilinear")
    assert y.shape == (1, 2, 51, 52)
    assert count.messages == 8  # to all that are beside this block, at once


@pytest.mark.parametrize(
    "ask", [lambda y: y.item(), lambda y: y.tolist(), bool, lambda y: y.full_tensor().item(), lambda y: y.cpu()]
)
def test_no_value_comes_out(ask):
    mesh = ms.planning.mesh((2, 2))
    y = ms.ones(8, 8, mesh=mesh, placements=[ms.Shard(0), ms.Shard(1)]).sum()
    # of a plain tensor without values, it is torch that refuses
    with pytest.raises((ms.MeshError, RuntimeError, NotImplementedError)):
        ask(y)


def test_values_do_not_travel():
    """A tensor with values is refused where others' would be needed."""
    mesh = ms.planning.mesh((4,))
    with pytest.raises(ms.MeshError, match="planning"):
        ms.all_reduce(torch.ones(3), mesh)
    with pytest.raises(ms.MeshError, match="planning"):
        ms.HaloExchanger(mesh, (6,), 1, torch.float32)(torch.ones(6))


@pytest.mark.parametrize(("shape", "coords"), [((0, 2), None), ((2, 2), (2, 0)), ((2, 2), (0,))])
def test_wrong_meshes(shape, coords):
    with pytest.raises(ms.MeshError, match="expected"):
        ms.planning.mesh(shape, coords=coords)


# -- time


MACHINE = Machine("m", True, {"float32": 1e9}, 1e9, 1e9, 1e6, 1e-3, 1e-4, 0.0, 0.0, {})


def test_what_travels_hides_behind_what_is_computed():
    work, key = Operation("conv", 10_000_000, 0, torch.float32), object()
    start = Event("start", "conv", key, 2, 4000, 8)  # 1 ms latency, 4 ms bytes
    finish = Event("finish", "conv", key, 0, 0, 8)
    hidden = run(MACHINE, [start, work._replace(nbytes=8), finish])
    assert hidden == pytest.approx(Parts(0.01, 0.0, 0.0, 0.0001))
    exposed = run(MACHINE._replace(gpu=False), [work, start, finish])
    assert exposed == pytest.approx(Parts(0.01, 0.005, 0.0, 0.25e-4))


def test_collectives():
    small = collective_seconds(MACHINE, "all_reduce", 1, 65536)
    assert small == pytest.approx(16 * 1e-3, rel=0.01)
    large = collective_seconds(MACHINE, "all_reduce", 10**9, 65536)
    assert large == pytest.approx(2000, rel=0.01)
    assert collective_seconds(MACHINE, "all_reduce", 10**9, 1) == 0


# -- plans


def test_the_best_mesh():
    best = ms.plan(conv, (1, 1, 1024, 64, 64), ranks=64)
    assert best.ranks == 64
    assert best.mesh[0] > max(best.mesh[1:])
    assert best.fits
    assert best.seconds == pytest.approx(sum(best.parts))
    assert best.limit in Parts._fields
    assert best.flops == pytest.approx(2 * 2 * 27 * 4 * 1024 * 64, rel=0.1)  # forward, and the weight's gradient


def test_more_ranks_need_less():
    plans = list(ms.planning.sweep(conv, (1, 1, 256, 256, 256), (1, 64, 4096), machine="frontier", optimizer="adam"))
    assert [p.ranks for p in plans] == [1, 64, 4096]
    for a, b in zip(plans, plans[1:]):
        assert b.memory < a.memory
        assert b.efficiency < a.efficiency


def test_uneven_cells():
    even, uneven = (ms.plan(conv, (1, 1, n, 16, 16), mesh=(8,)) for n in (64, 65))
    assert even.imbalance == 1
    assert uneven.imbalance == pytest.approx(9 * 8 / 65)
    alone = ms.plan(conv, (1, 1, 64, 16, 16), mesh=(1,))
    assert alone.ideal == pytest.approx(alone.parts.compute)
    assert even.ideal == pytest.approx(alone.ideal / 8)


@pytest.mark.parametrize(
    "given",
    [{}, {"ranks": 2, "mesh": (2,)}, {"ranks": 10**7}, {"mesh": (2, 2, 2, 2)}, {"mesh": (99,)},
     {"ranks": 2, "dims": (7,)}, {"ranks": 2, "machine": "none"}, {"ranks": 2, "optimizer": "lion"},
     {"ranks": 2, "optimizer": ["sgd"]},
     {"ranks": 10**15}, {"ranks": 10**9 + 7},
     {"ranks": 4.0}, {"ranks": "4"}, {"ranks": (2, 2)}, {"ranks": 0}, {"mesh": (2.5,)}, {"mesh": "4"},
     {"ranks": 2, "dims": 2.0}, {"ranks": 2, "machine": 3}, {"ranks": 2, "dtype": "float32"},
     {"ranks": 2, "dtype": torch.int32}, {"ranks": 2, "loss": 1}, {"ranks": 2, "loss": lambda y: y},
     {"ranks": 2, "loss": lambda y: None}],
)  # fmt: skip
def test_wrong_plans(given):
    with pytest.raises(JobError, match="expected"):
        ms.plan(conv, (1, 1, 16, 16, 16), **given)


@pytest.mark.parametrize("shape", [16, "16", (1, 1, 16.0), (1, 3, 16, 16, 16), (1, 1, 10**30, 16, 16), (16, 16)])
def test_wrong_shapes(shape):
    with pytest.raises(ms.MpishardError, match="expected"):
        ms.plan(conv, shape, mesh=(1,), dims=(0,) if shape == (16, 16) else None)


def refuses() -> torch.nn.Module:
    raise KeyError("a reason of its own")


def test_a_shape_that_the_model_does_not_take():
    with pytest.raises(JobError, match=r"plan: the step fails(.|\n)*LayoutError: conv3d") as error:
        ms.plan(lambda: torch.nn.Sequential(conv()), (32, 32), mesh=(4,))
    assert "raised on" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "said"),
    [(conv(), "lambda"), (None, "function or class"), (lambda: None, "NoneType"), (torch.nn.ReLU, "optimizer=None"),
     (torch.nn.Linear, "cannot be made"), (refuses, r"a reason of its own.*test_plan.py, line")],
)  # fmt: skip
def test_wrong_models(model, said):
    with pytest.raises(JobError, match=said):
        ms.plan(model, (1, 1, 16, 16, 16), ranks=2)


def test_arguments_as_others_take_them():
    """A number for a mesh of one dim, dims counted from the end, a model without parameters that only goes forward."""
    assert ms.plan(conv, (1, 1, 16, 16, 16), mesh=4).mesh == (4,)
    assert ms.plan(conv, (1, 1, 16, 16, 16), mesh=(2, 2), dims=(-1, -3)).dims == (4, 2)
    assert ms.plan(torch.nn.ReLU, (1, 1, 16), mesh=2, optimizer=None).messages == 0


class Windowed(torch.nn.Module):
    """What reads values while it is made, by NumPy, and gives whole numbers and complex ones beside its output."""

    def __init__(self):
        super().__init__()
        self.factor = float(torch.linspace(0, 1, 5).numpy()[1])
        self.conv = conv()

    def forward(self, x):
        y = self.conv(x) * self.factor
        return {"y": y, "largest": y.argmax(1), "spectrum": torch.fft.fft(y, dim=1)}


def test_a_model_of_other_numbers():
    assert ms.plan(Windowed, (1, 1, 16, 16, 16), mesh=2).messages > 0


@pytest.mark.parametrize("machine", ["perlmutter", "local"])
def test_random_numbers_of_the_program_are_its_own(machine):
    """A rank may plan alone: what all draw afterwards stays the same."""
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    ms.plan(lambda: torch.nn.Sequential(conv(), torch.nn.Dropout(0.5)), (1, 1, 8, 8, 8), mesh=2, machine=machine)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_complex_parameters_stay_complex(dtype):
    class Phase(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x):
            spectrum = torch.fft.rfft(x.float() if x.dtype == torch.bfloat16 else x, dim=2)
            assert self.weight.dtype == spectrum.dtype
            return torch.fft.irfft(spectrum * self.weight[:, None], dim=2)

    assert ms.plan(Phase, (1, 3, 64), mesh=(4,), dtype=dtype).messages > 0


@pytest.mark.parametrize("shape", [(1, 1, 64, 64, 64), (1, 1, 640, 64, 65), (1, 1, 128, 100, 1)])
def test_fewer_cuts_are_planned_too(shape):
    """Small blocks may feel the cost of messages more than that of their surface, and windows differ by the dim."""
    found = candidates(shape, (2, 3, 4), 64)
    cut = [sum(n > 1 for n in extents) for extents in found]
    assert {*cut} == ({1, 2, 3} if shape[-1] > 1 else {1, 2})
    assert len(found) <= 4 + 7
    best = ms.plan(conv, shape, ranks=64)
    assert best.seconds == min(ms.plan(conv, shape, mesh=mesh).seconds for mesh in found)


def test_numbers_of_ranks_are_factored_in_no_time():
    most = 2**31 - 1  # a prime
    vast = (1, 1, 10**9, 10**9)
    assert candidates(vast, (2, 3), most) == []
    assert candidates((1, 1, 2**40, 2), (2, 3), most) == [(most, 1)]
    assert {extents for n in (36, 97, 64) for extents in candidates((1, 1, 9, 100), (2, 3), n)} <= {
        (p, q) for p in range(1, 10) for q in range(1, 101)
    }
    for ranks in (most + 1, 10**300, 0):
        with pytest.raises(JobError, match="plan: ranks"):
            ms.plan(conv, (1, 1, 64, 64, 2**40), ranks=ranks)
    with pytest.raises(JobError, match="plan: mesh"):
        ms.plan(conv, (1, 1, 2**20, 2**20, 2), mesh=(2**16, 2**16))


def test_a_model_that_asks_for_values():
    class Reads(torch.nn.Module):
        def forward(self, x):
            return x * 2 if x.sum().item() > 0 else x

    with pytest.raises(ms.UnsupportedOperationError, match="values"):
        ms.plan(Reads, (1, 1, 8, 8), ranks=2, optimizer=None)


def test_machines_say_where_numbers_are_from(tmp_path):
    for name in ms.planning.machine_names():
        machine = ms.planning.machine_named(name)
        assert all(machine.sources[key] for key in ("float32", "memory", "memory_bandwidth", "network_bandwidth"))
    own = tmp_path / "own.toml"
    rates = "float32 = {value = 1e12}\nmemory_bandwidth = {value = 1e11}\n"
    own.write_text(f"[own]\n{rates}network_bandwidth = {{value = 1e10}}\n")
    assert ms.planning.machine_named(str(own)).network_bandwidth == 1e10
    own.write_text(f"[own]\n{rates}")
    with pytest.raises(JobError, match="network_bandwidth"):
        ms.planning.machine_named(str(own))


NUMBERS = "float32 = {value = 1e12}\nmemory_bandwidth = {value = 1e11}\nnetwork_bandwidth = {value = 1e10}\n"


@pytest.mark.parametrize(
    "text",
    ["", "x = 3", "x = " + "[" * 10000, "assumed = 3\n[m]\n" + NUMBERS, "[m", "[m]\nfloat32 = 1e9", b"\xff\xfe",
     *("[m]\n" + NUMBERS + more for more in (
         "latency = 5", "latency = {value = 'fast'}", "latency = {value = [1]}", "latency = {value = 1e-300}",
         "latency = {source = 'x'}", "latency = {value = 2020-01-01}", "memory = {value = '1e9'}",
         "gpu = {value = 'false'}", "gpu = {value = 1}", "latency = {value = true}",
         "latency = {value = 1e-6, source = 3}", f"latency = {{value = {10**400}}}"))],
)  # fmt: skip
def test_files_that_describe_no_machine(text, tmp_path):
    own = tmp_path / "own.toml"
    own.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(JobError, match="expected"):
        ms.planning.machine_named(str(own))


@pytest.mark.parametrize("given", [{"shape": ()}, {"coords": 5}, {"coords": ("a", 1)}, {"coords": (0.5, 0)}])
def test_meshes_that_are_none(given):
    with pytest.raises(ms.MeshError, match="expected"):
        ms.planning.mesh(given.get("shape", (4, 4)), coords=given.get("coords"))


def test_a_model_that_has_changed():
    """What one rank alone computes is that of the model as it is."""
    width = [4]

    def layer() -> torch.nn.Module:
        return torch.nn.Conv3d(1, width[0], 3, padding=1)

    first = ms.plan(layer, (1, 1, 32, 32, 32), mesh=(2,))
    width[0] = 32
    second = ms.plan(layer, (1, 1, 32, 32, 32), mesh=(2,))
    assert second.ideal > 4 * first.ideal


# -- the command


def test_command(capsys, tmp_path):
    figure = tmp_path / "plan.svg"
    assert main(["plan", UNET, *SMALL, "--ranks", "2", "--json", "--plot", str(figure)]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["ranks"] == 2
    assert told["by_op"]["conv3d"]["messages"] == told["messages"] - sum(
        row["messages"] for op, row in told["by_op"].items() if op != "conv3d"
    )
    assert "reductions" in figure.read_text()
    assert main(["plan", UNET, *SMALL, "--mesh", "2x2"]) == 0
    assert "efficiency" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mesh", "said", "parts"),
    [
        ("256x1x256", r"of the (\d+) ms of a step the GPU computes (\d+)", ("seconds", "compute")),
        ("64x32x32", r"waits for its host longer, (\d+) of (\d+) ms", ("host", "seconds")),
    ],
)
def test_what_the_page_says_of_the_largest_mesh(mesh, said, parts, capsys):
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    assert main(["plan", UNET, "--shape", "1x1x4096x4096x4096", "--mesh", mesh, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)[0]
    told = re.search(said, page).groups()
    times = planned["parts"] | {"seconds": planned["seconds"]}
    assert [int(t) for t in told] == pytest.approx([1000 * times[part] for part in parts], rel=0.05, abs=0.5)


def test_a_figure_of_ranks_that_have_a_mesh(capsys, tmp_path):
    """Powers of two that this field has no mesh of are left out; the table comes whatever becomes of the figure."""
    figure = tmp_path / "plan.svg"
    small = ["--shape", "1x1x9x9x6", "--ranks", "54"]
    assert ms.planning.powers(54, (1, 1, 9, 9, 6)) == [1, 2, 4, 8, 16, 32, 54]
    assert ms.planning.powers(162, (1, 1, 9, 9, 2)) == [1, 2, 4, 8, 16, 32, 64, 128, 162]
    assert ms.planning.powers(9, (1, 1, 3, 3)) == [1, 2, 4, 9]
    model = f"{__file__}:conv"
    assert main(["plan", model, *small, "--plot", str(figure)]) == 0
    assert figure.exists()
    assert main(["plan", model, *small, "--plot", str(tmp_path / "none" / "plan.svg")]) == 2
    assert "efficiency" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--option", "nothing=3"], ["--loss", "torch:none"], ["--shape", "1x5x4x4x4"]])
def test_command_refused_without_a_traceback(options, capsys):
    assert main(["plan", UNET, *SMALL, "--ranks", "2", *options]) == 2
    assert "fix:" in capsys.readouterr().err


def test_command_of_a_loss_that_is_not_there(capsys):
    assert main(["plan", UNET, *SMALL, "--ranks", "2", "--loss", "torch:none"]) == 2
    assert "plan: the loss\n" in capsys.readouterr().err


def test_command_of_a_machine_with_a_name_that_is_markup(capsys, tmp_path):
    own = tmp_path / "own.toml"
    rates = "\n".join(f"{key} = {{value = 1e12}}" for key in ("float32", "memory_bandwidth", "network_bandwidth"))
    own.write_text(f'["[/bold]mine"]\n{rates}\n')
    assert main(["plan", UNET, *SMALL, "--ranks", "2", "--machine", str(own)]) == 0
    assert "[/bold]mine" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["raise SystemExit(0)", "import sys\n\ndef f(**_):\n    sys.exit(0)\n"])
def test_command_of_a_script_that_ends_itself(text, capsys, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(text)
    assert main(["plan", f"{script}:f", *SMALL, "--ranks", "2"]) == 2
    assert "SystemExit: 0 (script.py, line " in capsys.readouterr().err


def test_command_of_a_file_that_does_not_compile(capsys, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    assert main(["plan", f"{broken}:f", *SMALL, "--ranks", "2"]) == 2
    assert "SyntaxError" in capsys.readouterr().err


def test_command_without_matplotlib(monkeypatch, tmp_path):
    imported = builtins.__import__

    def none(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", none)
    from mpishard.planning.figure import draw

    with pytest.raises(MissingPackageError, match=r"mpishard\[plot\]"):
        draw([], str(tmp_path / "plan.png"))


@pytest.mark.parametrize("wrong", [["no.module:none"], [UNET + "x"], ["noname"], ["torch:pi"]])
def test_command_without_a_model(wrong, capsys):
    assert main(["plan", *wrong, *SMALL, "--ranks", "2"]) == 2
    assert "module:factory" in capsys.readouterr().err
