"""Trainer and engine share the devices and take turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rl.config.schema import ColocatedConfig
from rl.placement.gpu_map import GpuMap, Role, engine_roles, map_roles
from rl.protocols import PauseMode, Phases, RolloutEngine, Trainer
from rl.types import PublishStats
from rl.weights.publish import publish_weights
from rl.weights.transport import Transport


class Colocated:
    samples_while_training = False

    def __init__(
        self, config: ColocatedConfig, *, trainer: Trainer, engine: RolloutEngine, transport: Transport
    ) -> None:
        del config
        self._trainer, self._engine, self._transport = trainer, engine, transport

    @classmethod
    def gpu_map(cls, config: ColocatedConfig, *, gpus_per_engine: int, num_groups: int, per_device: int) -> GpuMap:
        engines = engine_roles(first=0, gpus_per_engine=gpus_per_engine, num_groups=num_groups, per_device=per_device)
        return map_roles([Role("trainer rank", config.trainer_ranks, first=0), *engines])

    async def start(self) -> None:
        """The trainer first and then out of the way, so that the engine can size its cache by what is free."""
        await self._trainer.start()
        await self._trainer.offload()
        await self._engine.start()

    @asynccontextmanager
    async def training(self, phase: Phases) -> AsyncIterator[_Residency]:
        """Engine sleeps, trainer moves in; the publish moves weights once; trainer moves out, engine wakes.

        Requests whose caller has left, as that of a recalled group, end before the engine sleeps. After an error
        nothing is moved back: the run ends.
        """
        with phase("sleep"):
            await self._engine.pause(PauseMode.WAIT)
            await self._engine.resume()
            await self._engine.sleep()
        with phase("onload"):
            await self._trainer.onload()
        residency = _Residency(self._trainer, self._engine, self._transport)
        yield residency
        assert residency.has_published, "a colocated engine drops its weights asleep and needs them again"
        with phase("offload"):
            await self._trainer.offload()
        with phase("wake"):
            await self._engine.wake()

    async def arrived(self) -> None:
        """A publish is waited for."""

    async def failure(self) -> BaseException:
        """Nothing goes on behind a caller."""
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        try:
            await self._engine.close()
        finally:
            await self._trainer.close()


class _Residency:
    def __init__(self, trainer: Trainer, engine: RolloutEngine, transport: Transport) -> None:
        self._trainer, self._engine, self._transport = trainer, engine, transport
        self.has_published = False

    async def publish(self, version: int) -> PublishStats:
        await self._trainer.release_cache()  # what the step's activations took, or the weights find no room
        await self._engine.wake_weights()
        stats = await publish_weights(self._trainer, self._engine, version=version, transport=self._transport)
        self.has_published = True
        return stats
