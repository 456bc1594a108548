"""The machine that figures are of."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from mpishard.comm.info import described_job, version


def described() -> dict[str, Any] | None:
    """Return on rank 0 what figures depend on. Collective over all ranks of the program."""
    job = described_job()
    if job is None:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    hosts = [rank["host"] for rank in job["ranks"]]
    most = max(hosts.count(host) for host in set(hosts))
    return {
        **job,
        "versions": {**job["versions"], **{name: found for name in _OTHERS if (found := version(name))}},
        "cpu": _cpu(),
        "cores": cores,
        "hosts": len(set(hosts)),
        "ranks_per_host": most,
        # then ranks wait for a core, not for each other alone
        "oversubscribed": most * torch.get_num_threads() > cores,
        "threads_per_rank": torch.get_num_threads(),
        "load": [round(n, 2) for n in os.getloadavg()],
        "system": platform.platform(),
    }


_OTHERS = ("heat",)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def lines(machine: dict[str, Any]) -> list[str]:
    """Return the description for a person. Not collective."""
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    note = ": more threads than cores, so ranks wait for cores too" if machine["oversubscribed"] else ""
    threads = f"{machine['threads_per_rank']} thread(s) a rank, {machine['cores']} cores"
    return [
        f"{machine['size']} ranks on {machine['hosts']} host(s), {threads}{note}",
        f"{machine['cpu']}; {machine['system']}; load {machine['load'][0]} before the run",
        f"{machine['mpi']}; Python {machine['python']}, {versions}",
    ]
