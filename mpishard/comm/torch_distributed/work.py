"""What torch.distributed gets for an operation that it started."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import Reducer, _create_work_from_future  # type: ignore[attr-defined]

from mpishard.comm import exit


class Work(dist.Work):
    """What runs on; ``wait`` ends it. Groups' operations end in the order in which they are waited for."""

    def __init__(self, tensors: Sequence[Tensor], finish: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self.finish = finish
        self.source = -1
        self.requests: list[MPI.Request] = []
        # of requests that tell what came; MPI tells it once, to the call that ends them
        self.statuses: list[MPI.Status] | None = None
        self.arrived = False
        # whether there is nothing to wait for, where the requests do not tell, or not all
        self.is_due: Callable[[Work], bool] = Work.through
        # of a sum: nothing of it may be under way where its communicators end
        self.group: Any = None
        self.mark: Any = None
        # MPI does not let two threads look at one request
        self.thread = get_ident()
        self._error: BaseException | None = None

    def wait(self, timeout: Any = None) -> bool:
        """End the operation."""
        if self._error is not None:
            raise self._error
        finish, self.finish = self.finish, None
        if finish is None:
            return True
        with _looking:
            kept = _under_way.pop(id(self), None) is not None
        try:
            finish()
        except BaseException as error:
            self._error = error
            if kept:
                with _looking:
                    _under_way[id(self)] = self
            raise
        return True

    def is_lost(self) -> bool:
        """Whether it may never come through, as calls have failed. Not collective."""
        told = self.mark is not None and self.mark.error is not None
        return told or self._error is not None or self.group.is_lost

    def through(self) -> bool:
        """Whether MPI is done with the memory; lets it make progress. Not collective."""
        if not self.arrived:
            self.arrived = MPI.Request.Testall(self.requests, self.statuses)
        return self.arrived

    def is_completed(self) -> bool:
        """Whether it is over; lets MPI make progress."""
        if self.finish is not None and self.is_due(self):
            self.wait()
        return self.finish is None

    def is_success(self) -> bool:
        """Whether it is over, and well: what fails raises from ``wait``."""
        return self.finish is None and self._error is None

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

    def kept(self) -> Any:
        """Return a handle of torch's own, done, for what outlives this object. Ends the operation."""
        return _create_work_from_future(self.get_future())

    def _source_rank(self) -> int:
        return self.source

    def source_rank(self) -> int:
        """Return the rank that a message came from."""
        return self.source


_under_way: OrderedDict[int, Work] = OrderedDict()
# who waits takes its own out
_looking = threading.Lock()
_SETTLED_S = 5.0


def keep(work: Work) -> Work:
    """Keep what MPI reads and writes until it is through: nobody need wait for a work. Not collective."""
    with _looking:
        for _ in range(min(2, len(_under_way))):
            key, earlier = _under_way.popitem(last=False)
            if earlier.thread != get_ident() or not earlier.through():
                _under_way[key] = earlier
        _under_way[id(work)] = work
    if work.group is not None:
        _settle_at_end()
    return work


def settle(group: object = None) -> bool:
    """Let the sums of a group, or of all, come through that nobody has waited for: Open MPI crashes otherwise.

    Return whether they did. Not collective: all ranks have started them, but of what failed on some; so not for ever.
    """
    limit = time.monotonic() + _SETTLED_S
    while True:
        with _looking:
            sums = [w for w in _under_way.values() if w.group is not None and group in (None, w.group)]
            going = [w for w in sums if not w.through()]
        if all(w.is_lost() for w in going) or time.monotonic() > limit:
            return not going
        time.sleep(1e-4)


@cache
def _settle_at_end() -> None:
    exit.on_finalize(settle)


_set_handle = Reducer._set_forward_pass_work_handle


def _keep_handle(self: Reducer, work: Any, *args: Any, **kwargs: Any) -> None:
    """Give DDP's ``join()`` a handle that lives: torch's C++ asks it in backward, when Python has dropped ours."""
    _set_handle(self, work.kept() if isinstance(work, Work) else work, *args, **kwargs)


Reducer._set_forward_pass_work_handle = _keep_handle
