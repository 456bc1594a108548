"""Machines: what one rank of a published system has, read from machines.toml, with the source of every number."""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mpishard.errors import JobError, described

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_NEEDED = ("float32", "memory_bandwidth", "network_bandwidth")


class Machine(NamedTuple):
    """What one rank has. Rates are per second, costs in seconds.

    Attributes
    ----------
    name : str
    gpu : bool
        Whether operations are queued on a GPU while the host goes on.
    flops : dict of str to float
        Operations a second that products reach, by dtype.
    memory : float
        Bytes.
    memory_bandwidth : float
        Bytes a second that operations reach.
    network_bandwidth : float
        Bytes a second and direction.
    latency : float
        Of a small message.
    operation, exchange, collective : float
        Of the host: for an operation of torch, an exchange with neighbours, a collective.
    sources : dict of str to str
        Where the numbers are from.
    """

    name: str
    gpu: bool
    flops: dict[str, float]
    memory: float
    memory_bandwidth: float
    network_bandwidth: float
    latency: float
    operation: float
    exchange: float
    collective: float
    sources: dict[str, str]

    def rate(self, dtype: torch.dtype) -> float:
        """Return the operations a second of a dtype; of one that is not known, those of float32. Not collective."""
        return self.flops.get(str(dtype).rpartition(".")[2], self.flops["float32"])


def _tables(text: str) -> dict[str, dict[str, Any]]:
    tables = tomllib.loads(text)
    assumed = tables.pop("assumed", {})
    if not all(isinstance(table, dict) for table in (assumed, *tables.values())):
        raise ValueError("a value outside the tables: a line [name] begins each")
    return {name: {**assumed, **table} for name, table in tables.items()}


@lru_cache(1)
def _published() -> dict[str, dict[str, Any]]:
    return _tables(files("mpishard.planning").joinpath("machines.toml").read_text(encoding="utf-8"))


def _is_entry(key: str, entry: Any) -> bool:
    """Tell whether an entry is a number, or for ``gpu`` a flag, with its source."""
    if not isinstance(entry, dict) or not isinstance(entry.get("source", ""), str):
        return False
    value: Any = entry.get("value")
    if key == "gpu":
        return isinstance(value, bool)
    return type(value) in (int, float) and 1e-15 <= value <= 1e25


def machine_names() -> list[str]:
    """Return the names of the published systems. Not collective."""
    return list(_published())


def machine_named(name: str) -> Machine:
    """Return a published system, or the one that a file describes.

    Not collective.

    Parameters
    ----------
    name
        One of `machine_names`, or ``FILE.toml`` of one table, or ``FILE.toml:NAME``.

    Raises
    ------
    JobError
        There is none of this name, or its table lacks a number.
    """
    path, _, table = str(name).partition(":")
    if path.endswith(".toml"):
        try:
            assumed = _published()[machine_names()[0]]
            common = {key: assumed[key] for key in ("arithmetic", "bandwidth", "latency", *_HOST)}
            found = {n: {**common, **t} for n, t in _tables(Path(path).read_text(encoding="utf-8")).items()}
            table = table or next(iter(found), "")
            if not found:
                raise ValueError("no table")
        except (OSError, RecursionError, ValueError) as error:
            # what is no TOML, and no text in UTF-8, are ValueErrors; tables in tables in tables are no end of them
            text = described("a machine's file", expected="a TOML file of tables", got=error, fix="see machines.toml")
            raise JobError(text) from None
    else:
        found, table = _published(), name.lower().replace(" ", "-").replace("_", "-")
    if table not in found:
        raise JobError(
            "unknown machine",
            expected=f"one of {', '.join(found)}, or local",
            got=repr(name),
            fix="describe yours in a file as mpishard/planning/machines.toml does, and give FILE.toml",
        )
    return _machine(table, found[table])


_HOST = ("operation", "exchange", "collective")


def _machine(name: str, table: dict[str, Any]) -> Machine:
    table = {key: entry for key, entry in table.items() if key != "title"}
    bad = [f"without {key}" for key in _NEEDED if key not in table]
    bad += [f"{key} = {entry!r}" for key, entry in table.items() if not _is_entry(key, entry)]
    if bad:
        raise JobError(
            f"machine {name}",
            expected="numbers from 1e-15 to 1e25 for " + ", ".join(_NEEDED),
            got=bad[0],
            fix='write them as key = {value = 1e9, source = "where it is from"}, and gpu = {value = true}',
        )
    values = {key: entry["value"] for key, entry in table.items()}
    return Machine(
        name=name,
        gpu=values.get("gpu", False),
        flops={d: values[d] * values["arithmetic"] for d in _DTYPES if d in values},
        memory=values.get("memory", math.inf),
        memory_bandwidth=values["memory_bandwidth"] * values["bandwidth"],
        network_bandwidth=values["network_bandwidth"],
        latency=values["latency"],
        **{key: values[key] for key in _HOST},
        sources={key: entry.get("source", "") for key, entry in table.items()},
    )
