"""Which device holds which role. Pure, so that a plan needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Role:
    name: str
    count: int
    first: int
    """Device of member 0; member i is on device first + i."""


GpuMap = list[list[str]]
"""[device] -> what runs on it, for example `["trainer rank 0", "engine worker 0"]`."""


def map_roles(roles: Sequence[Role]) -> GpuMap:
    num_devices = max(role.first + role.count for role in roles)
    devices: GpuMap = [[] for _ in range(num_devices)]
    for role in roles:
        for member in range(role.count):
            devices[role.first + member].append(f"{role.name} {member}")
    return devices
