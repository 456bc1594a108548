"""The one place where host or device is chosen, or nothing that is to travel."""

from __future__ import annotations

import torch
from torch import Tensor

from mpishard.comm.device.driver import driver_at, driver_of
from mpishard.comm.mesh import Group
from mpishard.comm.null import NullComm
from mpishard.comm.transport import device, host, null

Transport = host.Host | device.Device | null.Null
Posted = host.Posted | device.Posted | null.NullPosted


def transport_of(group: Group, x: Tensor | torch.device) -> Transport:
    """Return what carries tensors among the ranks of a group; kept by the group. Not collective.

    ``x`` is the device that they lie on, or a tensor that lies there.
    """
    planning = isinstance(group.comm, NullComm)
    driver = None if planning else driver_of(x) if isinstance(x, torch.device) else driver_at(x)
    found: Transport | None = group.links.get(driver)
    if found is None:
        found = null.Null(group) if planning else host.Host(group) if driver is None else device.Device(group, driver)
        group.links[driver] = found
    return found
