"""How the trainer's buckets get to an engine: handed over by this process, or on a way of their own.

in this process    trainer -> bucket -> engine                            Handed, HostBytes
on a way of theirs  the ranks' outlets ~~~~~~~~~~~~> inlets of the workers   Collective, Shared, Disk
                       driver: post, then tell the engine what comes
while they train    rank 0's copy on the host ~~~~~> inlets of the workers   Overlapped

Imports no torch: a plan asks the placements, which publish through this.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol

from rl.protocols import EngineError, Trainer, UpdateSession, WeightSource
from rl.weights.kept import KeptWeights

COLLECTIVE_TIMEOUT_S = 60.0
"""Forming a group and broadcasting a bucket take seconds; the first collective of NCCL may take some tens."""


class Transport(Protocol):
    num_attempts: int
    """At one publish, each with an update of its own."""

    async def move(self, trainer: WeightSource, session: UpdateSession) -> int:
        """Sends all of the trainer's buckets into an open update; how many bytes they are."""
        ...


class Handed:
    """By this process, as tensors. Trainer or engine may hand on a handle of a GPU's memory, or bytes."""

    num_attempts = 1

    async def move(self, trainer: WeightSource, session: UpdateSession) -> int:
        total = 0
        async for bucket in trainer.buckets():
            await session.send(bucket)
            total += sum(tensor.nbytes for _, tensor in bucket)
        return total


class HostBytes:
    """By this process, from the host's memory."""

    num_attempts = 1

    async def move(self, trainer: WeightSource, session: UpdateSession) -> int:
        total = 0
        async for bucket in trainer.buckets():
            await session.send([(name, tensor.cpu()) for name, tensor in bucket])
            total += sum(tensor.nbytes for _, tensor in bucket)
        return total


class Collective:
    """Broadcast from rank 0's device to all workers at once, in a process group of their own.

    The group lives as long as its members. When one died, and at the first publish after it is back, the next group is
    formed by those that live; a publish in which one dies is therefore tried once more.
    """

    num_attempts = 2

    def __init__(self, *, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s

    async def move(self, trainer: WeightSource, session: UpdateSession) -> int:
        try:
            await self._meet(trainer, session)
            return await _post_all(trainer, session, "broadcast")
        except BaseException:
            await trainer.outlet("drop")
            raise

    async def _meet(self, trainer: WeightSource, session: UpdateSession) -> None:
        """Forms a group unless the trainer and exactly these workers are one already."""
        ids = await session.groups()
        held = await trainer.outlet("group")
        if held is not None and ids == [held.group_id] * (held.num_ranks - 1):
            return
        meeting = await trainer.outlet("meet", len(ids), self._timeout_s)
        await _both(trainer.outlet("join"), session.join(meeting))


class Shared:
    """Out of memory of the devices that both use: each worker copies what the rank beside it laid out."""

    num_attempts = 1

    async def move(self, trainer: WeightSource, session: UpdateSession) -> int:
        try:
            return await _post_all(trainer, session, "share")
        except BaseException:
            await trainer.outlet("drop")
            raise


class Overlapped(Shared):
    """Out of the host's memory, where rank 0 has kept a copy: so the trainer need not wait until an engine has it."""

    async def keep(self, trainer: Trainer, version: int) -> KeptWeights:
        """What `move` takes in the trainer's place."""
        return await KeptWeights.of(trainer, version)


class Disk:
    """Through files of one folder that all machines of the run see. Each is removed when all workers have read it."""

    num_attempts = 1

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def move(self, trainer: WeightSource, session: UpdateSession) -> int:
        from rl.weights.disk import remove_stale

        remove_stale(self._folder)
        try:
            return await _post_all(trainer, session, "store", str(self._folder))
        except BaseException:
            await trainer.outlet("drop")
            raise
        finally:
            with contextlib.suppress(OSError):  # it may be written elsewhere and be seen late
                self._folder.rmdir()


async def _post_all(trainer: WeightSource, session: UpdateSession, method: str, *arguments: Any) -> int:
    total = 0
    async for bucket in trainer.post_buckets(method, *arguments):
        if session.keeps_copies:
            copy, _ = await asyncio.gather(trainer.copy_posted(), session.send(bucket))
            session.keep(copy)
        else:
            await session.send(bucket)
        total += bucket.num_bytes
    await trainer.outlet("finish")
    return total


async def _both(of_trainer: Coroutine[Any, Any, Any], of_engine: Coroutine[Any, Any, Any]) -> None:
    """Waits for both halves, each of which ends in bounded time, and tells what both have to say."""
    errors = [
        error
        for error in await asyncio.gather(of_trainer, of_engine, return_exceptions=True)
        if isinstance(error, BaseException)
    ]
    if len(errors) == 2 and all(isinstance(error, EngineError) for error in errors):
        raise EngineError(f"{errors[0]} The engine: {errors[1]}") from errors[0]
    if errors:
        raise errors[0]
