"""Files that may not be as long or as many as they would be (``ulimit -f``, ``-n``): errors, and a clean end."""

from __future__ import annotations

import os

BODY = """
import random, resource
from mpishard.io.backend.choice import mpio_obstacle

folder = os.environ["FOLDER"]
mesh = ms.init_mesh((-1,), ("x",))
draw = random.Random(os.environ.get("MPISHARD_SEED", "0"))

def allow(nbytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

def fails(call):
    try:
        call()
    except OSError as e:
        texts = world.allgather(str(e))
        assert len(set(texts)) == 1 and "File too large" in texts[0], texts
        return True
    return False

def fields(n, count):
    # no filter makes it shorter
    full = torch.rand(n, 48, generator=torch.Generator().manual_seed(n))
    return {f"v{i}": ms.distribute_tensor(full + i, mesh, (ms.Shard(0),)) for i in range(count)}

def append(case):
    path = f"{folder}/{case}.h5"
    # some steps of the first ones are sure to fit
    n, count, most = (100, 1, 150_000) if case < 3 else (draw.randint(4, 300), draw.choice([1, 3, 20]), None)
    compression = [None, "gzip", "lzf"][case % 3]
    state = fields(n, count)
    chunks = draw.choice([None, (5, 7), (2, 48)])
    options = dict(append="time", chunks=chunks, compression=compression)
    options["attrs"] = {f"a{i}": "x" * 500 for i in range(draw.choice([0, 20]))}
    allow(most or draw.randint(1000, 400_000))
    steps = 0
    while steps < 12 and not fails(lambda: ms.io.write(path, state, **options)):
        steps += 1
    for _ in range(2 if steps < 12 else 0):
        assert fails(lambda: ms.io.write(path, state, **options))
    allow(resource.RLIM_INFINITY)
    ms.io.write(path, state, **options)
    for name in ("v0", f"v{count - 1}"):
        found = ms.io.read(path, name, mesh, (ms.Shard(1),)).full_tensor()
        assert len(found) == steps + 1
        assert (found == state[name].full_tensor()).all()
    return steps

def new(case, backend):
    path = f"{folder}/{backend}{case}.h5"
    # of the first two, one is sure to fail and one is not
    n, count, most = [(4, 1, 1000), (4, 1, 400_000)][case] if case < 2 else (
        draw.randint(4, 300), draw.choice([1, 3, 60]), draw.randint(1000, 400_000)
    )
    state = fields(n, count)
    ms.io.write(path, {"old": state["v0"]})
    allow(most)
    failed = fails(lambda: ms.io.write(path, state, backend=backend, compression=[None, "gzip"][case // 2 % 2]))
    allow(resource.RLIM_INFINITY)
    name = "old" if failed else "v0"
    assert torch.equal(ms.io.read(path, name, mesh, (ms.Shard(1),)).full_tensor(), state["v0"].full_tensor())
    return failed

def checkpoint(case, asynchronous):
    state = fields(draw.randint(4, 300), draw.choice([1, 3, 60]))
    save = lambda step: ms.io.save_checkpoint(folder + "/c", step, tensors=state, asynchronous=asynchronous).wait()
    save(2 * case)
    # in the background room for more is held
    allow(draw.randint(1000, 2_400_000 if asynchronous else 400_000))
    failed = fails(lambda: save(2 * case + 1))
    allow(resource.RLIM_INFINITY)
    assert ms.io.load_checkpoint(folder + "/c", mesh=mesh).step == 2 * case + (not failed)
    return failed

variants = min(60, int(os.environ.get("MPISHARD_VARIANTS", "9")))
told = {"append": [append(i) for i in range(variants)]}
for i, backend in enumerate(["root", "virtual", *([] if mpio_obstacle() else ["mpio"])]):
    told[backend] = [new(case, backend) for case in range(variants)]
    told["ck" + backend] = [checkpoint(case + i * variants, i == 0) for case in range(variants // 2)]
assert any(0 < steps < 12 for steps in told["append"]), told
assert len({failed for name, each in told.items() if name != "append" for failed in each}) == 2, told
if rank == 0:
    print(told)
note("END")
"""


def test_no_length_that_a_file_may_have_ends_a_process(job, tmp_path):
    outcome = job(2, BODY, FOLDER=os.fspath(tmp_path))
    assert outcome.status == 0, outcome.output
    assert len(outcome.noted("END")) == 2, outcome.output


FEW = """
import resource

mesh = ms.init_mesh((-1,), ("x",))
full = torch.arange(20.0).view(10, 2)
x = ms.distribute_tensor(full, mesh, (ms.Shard(0),))
path = os.environ["FOLDER"] + "/a.h5"
ms.io.write(path, {"x": x})

def outcome(call):
    try:
        call()
    except OSError as e:
        return str(e)

calls = [
    lambda: ms.io.write(path, {"x": x}),
    lambda: ms.io.write(path + "5", {"x": x}, append="time"),
    lambda: ms.io.read(path, "x", mesh, (ms.Shard(0),)),
]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
said = []
for left in range(6):
    for odd in range(world.size):
        if rank == odd:
            # numbers below the limit that are in use, and those that are left
            held = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
            try:
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                pass
            for _ in range(left):
                os.close(held.pop())
        for call in calls:
            texts = world.allgather(outcome(call))
            assert len(set(texts)) == 1, texts
            said.append(texts[0])
        if rank == odd:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in held:
                os.close(descriptor)
        for call in calls:
            call()
assert torch.equal(ms.io.read(path, "x", mesh, (ms.Shard(1),)).full_tensor(), full)
assert any(text and "Too many open files" in text for text in said), said
note("END")
"""


def test_one_rank_that_may_open_no_more_files_is_an_error_of_all(job, tmp_path):
    outcome = job(2, FEW, FOLDER=os.fspath(tmp_path), MPISHARD_TIMEOUT="30")
    assert outcome.status == 0, outcome.output
    assert len(outcome.noted("END")) == 2, outcome.output
