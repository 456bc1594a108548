"""What torch.distributed gets for an operation that it started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor


class Work(dist.Work):
    """What runs on; ``wait`` ends it. Groups' operations end in the order in which they are waited for."""

    def __init__(self, tensors: Sequence[Tensor], finish: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self.finish = finish
        self.source = -1
        self.requests: list[MPI.Request] = []

    def wait(self, timeout: Any = None) -> bool:
        """End the operation."""
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        """Whether it is over; lets MPI make progress."""
        if self.finish is not None and self.requests and MPI.Request.Testall(self.requests):
            self.wait()
        return self.finish is None

    def is_success(self) -> bool:
        """Whether it is over, and well: what fails raises from ``wait``."""
        return self.finish is None

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors that it fills."""
        self.wait()
        return self._tensors

    def get_future(self) -> Any:
        """Return a future that is done: who asks for one cannot end the operation later."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def _source_rank(self) -> int:
        return self.source

    def source_rank(self) -> int:
        """Return the rank that a message came from."""
        return self.source
