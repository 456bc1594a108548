"""Who is near whom, of points that are sharded."""

from mpishard.points.knn import Nearest, knn
from mpishard.points.radius import Within, radius

__all__ = ["Nearest", "Within", "knn", "radius"]
