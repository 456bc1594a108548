"""The tutorial of docs/extending.md: its code, executed as it stands there, and what it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, layouts, mesh_of, shard, skew
from tests.ops.windows import field

TEXT = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
TUTORIAL: dict = {}
for _block in BLOCKS:
    exec(compile(_block, "docs/extending.md", "exec"), TUTORIAL)


def test_the_three_rules_take_less_than_20_lines():
    (rules,) = [b for b in BLOCKS if b.count("@ms.implements") == 3]
    assert len([line for line in rules.splitlines() if line.strip()]) < 20


@pytest.mark.parametrize("name", ["limited", "slope", "rms", "cube", "ranks"])
def test_they_agree_with_one_process(name):
    full = 2 * field(2, 3, 7, 9)
    for mesh, placements, sizes in list(layouts(full.shape, (2, 3))):
        compare(TUTORIAL[name], [(full, mesh, placements, sizes)], what=f"{name} {placements} {sizes}")


def test_a_rule_that_gathers():
    points, others = field(7, 3), field(9, 3)
    for mesh, placements, sizes in list(layouts(points.shape, (0, 1))):
        for mine, theirs in (
            ((mesh, placements, sizes), (mesh, [ms.Replicate()] * mesh.ndim, None)),
            ((mesh, placements, sizes), (mesh, [ms.Shard(0)] * mesh.ndim, None)),
            ((mesh, placements, sizes), (None, None, None)),
            ((None, None, None), (mesh, placements, None)),
        ):
            compare(TUTORIAL["nearest"], [(points, *mine), (others, *theirs)], what=f"{mine} {theirs}")


def test_what_travels():
    x = shard(field(1, 2, 4 * WORLD.size, 5), mesh_of((WORLD.size,)), (ms.Shard(2),))
    for name, exchanges in [("limited", 0), ("slope", 1), ("rms", 1)]:
        with ms.comm_counter() as count:
            TUTORIAL[name](x)
        assert count.calls == (exchanges if WORLD.size > 1 else 0) or (WORLD.size == 1 and name == "rms")


def test_the_tutorials_own_test():
    mesh, full = mesh_of((WORLD.size,)), field(1, 2, 3 * WORLD.size, 5)
    TUTORIAL["agrees"](TUTORIAL["slope"], full, mesh, (ms.Shard(2),), sizes={2: skew(3 * WORLD.size, WORLD.size)})


def test_without_a_rule_they_raise():
    @torch.overrides.wrap_torch_function(lambda x: (x,))
    def unknown(x):
        return x.clone()

    x = shard(field(4, 3), mesh_of((WORLD.size,)), (ms.Shard(0),))
    with pytest.raises(ms.NoShardingRule, match="unknown"):
        unknown(x)
    assert torch.equal(TUTORIAL["StraightThrough"].apply(x).full_tensor(), x.full_tensor().clamp(-1, 1))


@torch.library.custom_op("tutorial::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_an_operator_without_a_rule_is_named_as_a_rule_is_given():
    x = shard(field(3, 4), mesh_of((WORLD.size,)), (ms.Shard(0),))
    for call in (unknown, torch.ops.tutorial.unknown, torch.ops.tutorial.unknown.default):
        with pytest.raises(ms.NoShardingRule, match=r'with @mpishard\.implements\("tutorial::unknown"\); \(2\)') as e:
            call(x)
        assert "torch.func" not in str(e.value)
