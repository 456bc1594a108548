"""Memory that large arrays free, kept by the process: a step then writes to the same pages as the step before."""

from __future__ import annotations

import ctypes
import os

# of mallopt(3)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# larger arrays have a mapping of their own: the most that every glibc takes
MAPPED_NBYTES = 1 << 25
# so much free memory, at the end of the heap, stays the process's
KEPT_NBYTES = 1 << 30
_OF_THE_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed() -> bool:
    """Have glibc keep what arrays free, unless the environment sets its thresholds; return whether it does.

    Not collective. By default it gives large blocks back to the kernel, which clears every page that is used again:
    7 to 30 % of the training steps measured whose arrays have some megabytes. For programs that own their process.
    """
    libc = ctypes.CDLL(None)
    if any(name in os.environ for name in _OF_THE_USER) or not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_MMAP_THRESHOLD, MAPPED_NBYTES) and libc.mallopt(_TRIM_THRESHOLD, KEPT_NBYTES))
