"""One weight publish: what the trainer gathers goes, bucket by bucket, into the engine's own update session."""

from __future__ import annotations

import logging
import time

from rl.protocols import EngineError, RolloutEngine, WeightSource
from rl.types import PublishStats
from rl.weights.transport import Handed, Transport

logger = logging.getLogger(__name__)

HANDED = Handed()


async def publish_weights(
    trainer: WeightSource, engine: RolloutEngine, *, version: int, transport: Transport = HANDED
) -> PublishStats:
    """Sends the trainer's weights and makes them `version`.

    An update is in place: if it fails, the engine stays unfit and the version does not advance. Where the transport
    allows, a failed one is followed by another, whole one.
    """
    started = time.monotonic()
    num_left = transport.num_attempts
    while True:
        try:
            num_bytes = await _update(trainer, engine, version, transport)
            break
        except EngineError as error:
            num_left -= 1
            if num_left == 0:
                raise
            logger.warning("the publish of version %d failed and is tried again: %s", version, error)
    reported = await engine.policy_version()
    if reported != version:
        raise EngineError(f"weights were published as version {version}, but the engine reports version {reported}.")
    return PublishStats(version=version, num_bytes=num_bytes, seconds=time.monotonic() - started)


async def _update(trainer: WeightSource, engine: RolloutEngine, version: int, transport: Transport) -> int:
    session = await engine.open_update(await trainer.manifest(version))
    try:
        num_bytes = await transport.move(trainer, session)
        await session.commit(version)
    except BaseException:
        await session.abort()
        raise
    return num_bytes
