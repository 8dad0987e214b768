"""Which device a plan says holds which engine."""

from __future__ import annotations

import pytest

from rl.config.schema import ColocatedConfig, FullyAsyncConfig
from rl.placement.colocated import Colocated
from rl.placement.fully_async import FullyAsync
from rl.placement.gpu_map import GpuMap


def colocated(trainer_ranks: int, **engines: int) -> GpuMap:
    return Colocated.gpu_map(ColocatedConfig(trainer_ranks=trainer_ranks), **engines)


def fully_async(trainer_ranks: int, **engines: int) -> GpuMap:
    return FullyAsync.gpu_map(FullyAsyncConfig(trainer_ranks=trainer_ranks), **engines)


def test_one_engine_has_workers_without_a_number_of_its_own():
    assert colocated(1, gpus_per_engine=2, num_groups=1, per_device=1) == [
        ["trainer rank 0", "engine worker 0"],
        ["engine worker 1"],
    ]


def test_engines_follow_the_trainer_when_they_run_apart():
    assert fully_async(1, gpus_per_engine=2, num_groups=2, per_device=1) == [
        ["trainer rank 0"],
        ["engine 0 worker 0"],
        ["engine 0 worker 1"],
        ["engine 1 worker 0"],
        ["engine 1 worker 1"],
    ]


def test_a_fully_async_engine_that_shares_is_where_the_trainer_is():
    config = FullyAsyncConfig(share_devices=True)
    assert FullyAsync.gpu_map(config, gpus_per_engine=1, num_groups=1, per_device=1) == [
        ["trainer rank 0", "engine worker 0"]
    ]


@pytest.mark.parametrize("per_device", [2, 3])
def test_engines_that_share_a_device_are_not_neighbours_in_order(per_device: int):
    devices = colocated(2, gpus_per_engine=1, num_groups=2, per_device=per_device)
    for device, held in enumerate(devices):
        assert held[0] == f"trainer rank {device}"
        assert held[1:] == [f"engine {2 * slot + device} worker 0" for slot in range(per_device)]
