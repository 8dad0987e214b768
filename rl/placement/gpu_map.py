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


def engine_roles(*, first: int, gpus_per_engine: int, num_groups: int, per_device: int) -> list[Role]:
    """Engines from device `first` on; engine i is on group `i % num_groups` of `gpus_per_engine` devices."""
    count = num_groups * per_device
    if count == 1:
        return [Role("engine worker", gpus_per_engine, first)]
    starts = [first + index % num_groups * gpus_per_engine for index in range(count)]
    return [Role(f"engine {index} worker", gpus_per_engine, start) for index, start in enumerate(starts)]


def map_roles(roles: Sequence[Role]) -> GpuMap:
    num_devices = max(role.first + role.count for role in roles)
    devices: GpuMap = [[] for _ in range(num_devices)]
    for role in roles:
        for member in range(role.count):
            devices[role.first + member].append(f"{role.name} {member}")
    return devices
