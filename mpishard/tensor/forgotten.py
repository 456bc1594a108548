"""Arguments that a function of torch in Python takes and does not hand on to `__torch_function__`."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

# between the function and its rule lie torch's dispatch and ours
_MOST_FRAMES = 16


def forgotten(function: Any, name: str) -> Any:
    """Return an argument of a call whose rule is running, from the stack; None where the rule was called at once.

    Not collective.
    """
    code = getattr(function, "__code__", None)
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None or code is None:
            return None
        if frame.f_code is code:
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None
