"""Tools that check distributed functions, for users' own functions too."""

from mpishard.testing.derivative import check_gradient, check_jvp, check_second_gradient
from mpishard.testing.dot import DotTest, dot_test
from mpishard.testing.live_memory import LiveMemory

__all__ = ["DotTest", "LiveMemory", "check_gradient", "check_jvp", "check_second_gradient", "dot_test"]
