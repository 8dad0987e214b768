"""One weight publish: what the trainer gathers goes, bucket by bucket, into the engine's own update session."""

from __future__ import annotations

import time

from rl.protocols import EngineError, RolloutEngine, Trainer
from rl.types import PublishStats


async def publish_weights(trainer: Trainer, engine: RolloutEngine, *, version: int) -> PublishStats:
    """Sends the trainer's weights and makes them `version`.

    An update is in place: if it fails, the engine stays unfit and the version does not advance.
    """
    started = time.monotonic()
    num_bytes = 0
    session = await engine.open_update(await trainer.manifest(version))
    try:
        async for bucket in trainer.buckets():
            await session.send(bucket)
            num_bytes += sum(tensor.nbytes for _, tensor in bucket)
        await session.commit(version)
    except BaseException:
        await session.abort()
        raise
    reported = await engine.policy_version()
    if reported != version:
        raise EngineError(f"weights were published as version {version}, but the engine reports version {reported}.")
    return PublishStats(version=version, num_bytes=num_bytes, seconds=time.monotonic() - started)
