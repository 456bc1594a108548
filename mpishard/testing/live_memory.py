"""LiveMemory: how many bytes of tensors are alive, and the most there were."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Count the bytes of the storages that operations make on this rank, as long as they live.

    Not collective. What was made before it is entered does not count; a view counts with its base, once.

    Attributes
    ----------
    nbytes, peak : int
        Bytes alive now, and the most there were.

    Examples
    --------
    >>> with ms.testing.LiveMemory() as memory:
    ...     model(x).sum().backward()
    >>> memory.peak
    """

    # devices whose tensors take no memory
    _ignored: tuple[str, ...] = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if type(x) is not torch.Tensor or x.device.type in self._ignored:
                continue
            if x.layout is torch.strided:
                storage = x.untyped_storage()
                if storage not in self._seen:
                    self._seen.add(storage)
                    self._came(storage, storage.nbytes())
            elif x.layout is torch._mkldnn:  # type: ignore[attr-defined]
                # a copy in memory of its own, which has no storage
                self._came(x, x.numel() * x.itemsize)
        return out

    def _came(self, owner: object, nbytes: int) -> None:
        self.nbytes += nbytes
        weakref.finalize(owner, self._gone, nbytes)
        self.peak = max(self.peak, self.nbytes)

    def _gone(self, nbytes: int) -> None:
        self.nbytes -= nbytes
