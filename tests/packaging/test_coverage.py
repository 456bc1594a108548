"""The table of operations: complete, current, and printed by the command line."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpishard.cli import main
from mpishard.ops import op_table
from mpishard.tensor import implements
from mpishard.tensor.registry import TREATMENTS

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
ROW = re.compile(r"\| `(\w+)` \| (.+) \| (\w+) \|")


def listed() -> set[tuple[str, str]]:
    rows = ROW.findall(PAGE.read_text())
    return {(place, name) for name, places, _ in rows for place in places.split(", ")}


def has(place: str, name: str) -> bool:
    owner = torch
    for part in place.split(".")[1:]:
        owner = getattr(owner, part, None)
    # those of this module only say by what they were replaced
    return hasattr(owner, name) and getattr(getattr(owner, name), "__module__", "") != "torch._linalg_utils"


def test_no_function_lost_its_rule():
    now = {(place, c.name) for c in op_table.covered() for place in c.places}
    assert len(now) > 1000
    lost = {path for path in listed() - now if has(*path)}
    assert not lost


def test_the_page_is_current():
    made_with = re.search(r"with torch ([\d.]+)\.\n", PAGE.read_text()).group(1)
    if made_with == ".".join(torch.__version__.split(".")[:2]):
        assert PAGE.read_text().splitlines() == list(op_table.markdown()), "run mpishard ops --markdown"
    else:  # another torch has other functions
        assert len(listed()) > 1000


def test_treatments():
    treatments = {c.name: c.treatment for c in op_table.covered()}
    assert treatments["add"] == "local"
    assert treatments["conv2d"] == "halo"
    assert treatments["sum"] == "reduction"
    assert treatments["inverse"] == "gathers"


def test_every_rule_declares_its_treatment():
    silent = []
    for path in sorted((PAGE.parents[1] / "mpishard").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            declares = isinstance(node, ast.Call) and getattr(node.func, "id", None) == "implements"
            if declares and not any(k.arg == "sharded" for k in node.keywords):
                silent.append(f"{path.name}:{node.lineno}")
    assert silent == []
    assert op_table.SHARDED.keys() >= op_table.RULES.keys()


def test_treatments_are_checked():
    with pytest.raises(ValueError, match="local, halo"):
        implements(torch.add, sharded="somehow")


@pytest.mark.parametrize("named", ["window/conv", "window", "conv"])
def test_command_names_families_by_folder_and_file(capsys, named):
    assert main(["ops", named]) == 0
    out = capsys.readouterr().out
    assert "conv2d" in out
    assert "cumsum" not in out


def test_command(capsys):
    assert main(["ops", "pool"]) == 0
    out = capsys.readouterr().out
    assert "max_pool2d" in out
    assert "functions have rules" in out
    assert main(["ops", "--missing"]) == 0
    assert "torch.quantize_per_tensor" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["ops", "no such family"])
    assert "families:" in capsys.readouterr().err


def test_command_shows_one_operation(capsys):
    for name in ("conv2d", "F.conv2d", "torch.nn.functional.conv2d"):
        assert main(["ops", name, "--json"]) == 0
        (found,) = [c for c in json.loads(capsys.readouterr().out) if c["name"] == "conv2d"]
        assert found["treatment"] == "halo"
    # as NoShardingRule names them, without torch's own name too
    for name in (
        "torch.Tensor.cumsum",
        "Tensor.cumsum",
        "Tensor.add_",
        "fft.rfft",
        "linalg.norm",
        "nn.functional.relu",
    ):
        assert main(["ops", name, "--json"]) == 0
        assert name.rpartition(".")[2] in {c["name"] for c in json.loads(capsys.readouterr().out)}
    for name in ("torch.conv", "linalg.cumsum", "F.fft"):
        with pytest.raises(SystemExit):
            main(["ops", name])
    capsys.readouterr()
    assert main(["ops", "conv2d"]) == 0
    assert TREATMENTS["halo"].split()[0] in capsys.readouterr().out
    assert main(["ops", "quantize_per_tensor"]) == 1
    assert "NoShardingRule" in capsys.readouterr().out
    with pytest.raises(SystemExit) as raised:
        main(["ops", "conv2dd"])
    assert raised.value.code == 2
    assert "conv2d" in capsys.readouterr().err


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "mpishard", "--help"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "ops" in done.stdout
