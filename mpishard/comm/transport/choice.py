"""The one place where host or device is chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from mpishard.comm.device.driver import driver_at, driver_of
from mpishard.comm.mesh import Group
from mpishard.comm.transport import device, host

Transport = host.Host | device.Device
Posted = host.Posted | device.Posted


def transport_of(group: Group, x: Tensor | torch.device) -> Transport:
    """Return what carries tensors among the ranks of a group; kept by the group. Not collective.

    ``x`` is the device that they lie on, or a tensor that lies there.
    """
    driver = driver_of(x) if isinstance(x, torch.device) else driver_at(x)
    found: Transport | None = group.links.get(driver)
    if found is None:
        found = group.links[driver] = host.Host(group) if driver is None else device.Device(group, driver)
    return found
