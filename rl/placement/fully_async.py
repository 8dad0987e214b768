"""Trainer and engine have devices of their own and run at the same time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rl.config.schema import FullyAsyncConfig
from rl.placement.gpu_map import GpuMap, Role, engine_roles, map_roles
from rl.protocols import RolloutEngine, Trainer
from rl.types import PublishStats
from rl.weights.publish import publish_weights


class FullyAsync:
    """Neither waits for the other, except that a publish waits for the running requests (`in_flight=finish`)."""

    def __init__(self, config: FullyAsyncConfig, *, trainer: Trainer, engine: RolloutEngine) -> None:
        del config  # in_flight has one value so far
        self._trainer, self._engine = trainer, engine

    @classmethod
    def gpu_map(cls, config: FullyAsyncConfig, *, gpus_per_engine: int, num_groups: int, per_device: int) -> GpuMap:
        engines = engine_roles(
            first=config.trainer_ranks, gpus_per_engine=gpus_per_engine, num_groups=num_groups, per_device=per_device
        )
        return map_roles([Role("trainer rank", config.trainer_ranks, first=0), *engines])

    async def start(self) -> None:
        await self._trainer.start()
        await self._engine.start()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[FullyAsync]:
        yield self

    async def publish(self, version: int) -> PublishStats:
        return await publish_weights(self._trainer, self._engine, version=version)

    async def close(self) -> None:
        try:
            await self._engine.close()
        finally:
            await self._trainer.close()
