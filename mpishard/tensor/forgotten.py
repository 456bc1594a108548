"""Arguments that a function of torch in Python takes and does not hand on to `__torch_function__`."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

# between the function and its rule lie torch's dispatch and ours, and a mode, in which torch calls the function again
_MOST_FRAMES = 32


def forgotten(function: Any, name: str) -> Any:
    """Return an argument of the call whose rule is running, from the stack; None where there is none.

    Not collective.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if frame.f_code is function.__code__ and frame.f_locals.get(name) is not None:
            return frame.f_locals[name]
        frame = frame.f_back
    return None
