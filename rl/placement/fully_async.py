"""Trainer and engine run at the same time, each on devices of its own unless told to share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from rl.config.schema import FullyAsyncConfig, InFlight
from rl.placement.gpu_map import GpuMap, Role, engine_roles, map_roles
from rl.protocols import PauseMode, Phases, RolloutEngine, Trainer, WeightSource
from rl.types import PublishStats
from rl.weights.publish import publish_weights
from rl.weights.transport import Overlapped, Transport

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
        self._sending: asyncio.Task[PublishStats] | None = None
        """Of an overlapped publish, the last one."""
        self._error: BaseException | None = None
        self._has_failed = asyncio.Event()

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
    async def training(self, phase: Phases) -> AsyncIterator[FullyAsync]:
        del phase
        yield self

    async def publish(self, version: int) -> PublishStats:
        """After an error the engine stays paused: the run ends.

        Overlapped it returns when the weights are copied, and what the engine is asked for from then on waits for them;
        `pause_s` is that of the publish before. The first is waited for: without weights an engine refuses requests.
        """
        await self.arrived()
        if not isinstance(self._transport, Overlapped):
            return await self._send(self._trainer, version)
        started = time.monotonic()
        kept = await self._transport.keep(self._trainer, version)
        seconds = time.monotonic() - started
        before, self._sending = self._sending, asyncio.create_task(self._send(kept, version))
        self._sending.add_done_callback(self._note)
        await asyncio.sleep(0)  # its pause goes before whatever the engine is asked for next
        if before is None:
            await self.arrived()
        pause_s = 0.0 if before is None else before.result().pause_s
        return PublishStats(version=version, num_bytes=kept.num_bytes, seconds=seconds, pause_s=pause_s)

    async def _send(self, source: WeightSource, version: int) -> PublishStats:
        started = time.monotonic()
        await self._engine.pause(self._pause_mode)
        pause_s = time.monotonic() - started
        stats = await publish_weights(source, self._engine, version=version, transport=self._transport)
        await self._engine.resume()
        return replace(stats, pause_s=pause_s)

    async def failure(self) -> BaseException:
        await self._has_failed.wait()
        assert self._error is not None
        return self._error

    def _note(self, sending: asyncio.Task[PublishStats]) -> None:
        if not sending.cancelled() and (error := sending.exception()) is not None:
            self._error = error
            self._has_failed.set()

    async def arrived(self) -> None:
        if self._sending is not None:
            await asyncio.shield(self._sending)

    async def close(self) -> None:
        try:
            if self._sending is not None:
                self._sending.cancel()
                await asyncio.gather(self._sending, return_exceptions=True)
            await self._engine.close()
        finally:
            await self._trainer.close()
