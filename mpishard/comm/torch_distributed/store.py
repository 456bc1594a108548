"""The store of torch's default process group: torch wants one, and this backend looks into none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from mpishard.errors import UnsupportedOperationError

# torch holds but their C++ half, and calls the methods below through it for as long as anyone asks
_alive: list[OwnStore] = []


class OwnStore(dist.Store):
    """Entries of this process alone. Nobody can wait for another rank's: that raises at once, and would hang else."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[str, bytes] = {}
        _alive.append(self)

    def set(self, key: str, value: Any) -> None:
        """Keep an entry. Not collective."""
        self._entries[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return an entry of this process. Not collective."""
        self.wait([key])
        return self._entries[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it. Not collective."""
        total = int(self._entries.get(key, b"0")) + amount
        self._entries[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Keep an entry if it was the expected one, or neither is there; return what is there. Not collective."""
        before = self._entries.get(key, b"")
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        if before == wanted:
            self.set(key, desired)
        return self._entries.get(key, wanted)

    def wait(self, keys: Sequence[str], *_timeout: Any) -> None:
        """Return where all entries are there. Not collective."""
        for key in keys:
            if key not in self._entries:
                raise UnsupportedOperationError(
                    "torch.distributed's store on a process group over MPI",
                    expected="an entry that this process has set",
                    got=key,
                    fix="send it with dist.broadcast_object_list or dist.all_gather_object",
                )

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all entries are there. Not collective."""
        return all(key in self._entries for key in keys)

    # as torch calls them from C++
    def deleteKey(self, key: str) -> bool:  # noqa: N802
        """Forget an entry; tell whether there was one. Not collective."""
        return self._entries.pop(key, None) is not None

    def getNumKeys(self) -> int:  # noqa: N802
        """Return the number of entries. Not collective."""
        return len(self._entries)
