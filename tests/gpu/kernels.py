"""Run every kernel on random tables against torch; exits 1 at the first wrong byte.

compute-sanitizer --error-exitcode 1 python tests/gpu/kernels.py
"""

import random

import torch

from mpishard.comm.device.driver import driver_of
from mpishard.comm.memory.copy_table import UNITS, Box, plan_table

ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def run(count: int = 200) -> None:
    driver = driver_of(torch.device("cuda", torch.cuda.current_device()))
    assert driver is not None
    assert driver.has_kernel, "cupy is not installed"
    rng = random.Random(1)
    used = set()
    for _ in range(count):
        itemsize = rng.choice(list(ITEMS))
        shape = [rng.randint(1, 40) for _ in range(rng.randint(1, 4))]
        whole = torch.randint(0, 100, shape, device="cuda").to(ITEMS[itemsize])
        whole = whole.permute(rng.sample(range(whole.ndim), whole.ndim))
        boxes, parts, at = [], [], 0
        for _ in range(rng.randint(1, 4)):
            view = whole
            for d, n in enumerate(whole.shape):
                start = rng.randrange(n)
                view = view.narrow(d, start, rng.randint(1, n - start))
            strides = tuple(s * itemsize for s in view.stride())
            boxes.append(Box(view.data_ptr() - whole.data_ptr(), tuple(view.shape), strides, itemsize, at))
            parts.append((at, view))
            at = -(-(at + view.numel() * itemsize) // 64) * 64
        table = plan_table(boxes)
        used.add(table.unit)
        memory = driver.allocate(at)
        device_table = driver.table(table)
        driver.pack(device_table, whole.data_ptr(), memory)
        for start, view in parts:
            packed = memory.tensor[start : start + view.numel() * itemsize].view(whole.dtype).view(view.shape)
            assert torch.equal(packed, view), "pack"
        kept = whole.clone()
        for _, view in parts:
            view.zero_()
        driver.unpack(device_table, whole.data_ptr(), memory)
        assert torch.equal(whole, kept), "unpack"
        memory.free()
    assert used == set(UNITS), used


if __name__ == "__main__":
    run()
    print("all kernels: right")
