"""Trainer and engine run at the same time, each on devices of its own unless told to share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from rl.config.schema import FullyAsyncConfig, InFlight
from rl.placement.gpu_map import GpuMap, Role, engine_roles, map_roles
from rl.protocols import PauseMode, RolloutEngine, Trainer
from rl.types import PublishStats
from rl.weights.publish import publish_weights
from rl.weights.transport import Transport

PAUSE_MODES = {
    InFlight.finish: PauseMode.WAIT,
    InFlight.abort: PauseMode.RESTART,
    InFlight.continue_on_new_weights: PauseMode.KEEP,
}


class FullyAsync:
    """Neither waits for the other, except at a publish, whose pause of the engine `in_flight` chooses."""

    samples_while_training = True

    def __init__(
        self, config: FullyAsyncConfig, *, trainer: Trainer, engine: RolloutEngine, transport: Transport
    ) -> None:
        self._pause_mode = PAUSE_MODES[config.in_flight]
        self._trainer, self._engine, self._transport = trainer, engine, transport

    @classmethod
    def gpu_map(cls, config: FullyAsyncConfig, *, gpus_per_engine: int, num_groups: int, per_device: int) -> GpuMap:
        first = 0 if config.share_devices else config.trainer_ranks
        engines = engine_roles(
            first=first, gpus_per_engine=gpus_per_engine, num_groups=num_groups, per_device=per_device
        )
        return map_roles([Role("trainer rank", config.trainer_ranks, first=0), *engines])

    async def start(self) -> None:
        await self._trainer.start()
        await self._engine.start()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[FullyAsync]:
        yield self

    async def publish(self, version: int) -> PublishStats:
        """After an error the engine stays paused: the run ends."""
        started = time.monotonic()
        await self._engine.pause(self._pause_mode)
        pause_s = time.monotonic() - started
        stats = await publish_weights(self._trainer, self._engine, version=version, transport=self._transport)
        await self._engine.resume()
        return replace(stats, pause_s=pause_s)

    async def close(self) -> None:
        try:
            await self._engine.close()
        finally:
            await self._trainer.close()
