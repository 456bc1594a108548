"""Plans for any number of ranks in one process: memory, messages, bytes and time of a step."""

from mpishard.planning.machine import Machine, machine_named, machine_names
from mpishard.planning.mesh import mesh
from mpishard.planning.predict import Plan, plan, powers, sweep
from mpishard.planning.timeline import Parts

__all__ = ["Machine", "Parts", "Plan", "machine_named", "machine_names", "mesh", "plan", "powers", "sweep"]
