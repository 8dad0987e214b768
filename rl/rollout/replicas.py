"""Several engines behind the one seam: who samples what, who lives, and how one that died comes back.

Calls go to the engine with the fewest unfinished samples, whole groups, so that a group's prompt is shared. Whatever
changes the state of one engine changes that of all, and an update is all or nothing. An engine that dies takes nothing
with it: its groups are sampled again by others, and it is started anew with the weights of the last complete update.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from rl.config.schema import ConfigError
from rl.protocols import (
    Bucket,
    EngineCapabilities,
    EngineError,
    Meeting,
    PauseMode,
    RemoteBucket,
    RolloutEngine,
    UpdateManifest,
    UpdateSession,
)
from rl.rollout.lifecycle import Lifecycle, Phase
from rl.types import Prompt, Rollout, Sampling

log = logging.getLogger(__name__)

MAX_FAILED_RESTARTS = 3
"""In a row; then the engine is given up."""
MAX_DEATHS = 3
"""Of the engines of one call. A request that itself ends engines must not end them for ever."""


class SharedUpdate(UpdateSession, Protocol):
    async def send_shared(self, shared: Any) -> None: ...


class Replica(RolloutEngine, Protocol):
    """What the set needs of an engine besides the seam; `rl.rollout.remote.RemoteEngine` has it."""

    @property
    def death(self) -> str | None: ...

    def kill(self, reason: str) -> None: ...

    async def share(self, bucket: Bucket) -> Any:
        """The bucket where every engine can take it from, for as long as the result is held. Needs no living engine."""
        ...

    async def open_update(self, manifest: UpdateManifest) -> SharedUpdate: ...


class _State(Enum):
    DOWN = "down"
    """It waits until the set is awake: asleep, the devices are the trainer's."""
    STARTING = "starting"
    """Until it has the current weights."""
    BLANK = "without weights"
    READY = "ready"
    """It holds the set's version, or what a failed update left of it."""
    LOST = "given up"


@dataclass(eq=False, slots=True)
class _Member:
    """One place of the set, over the lives of its engines."""

    index: int
    engine: Replica
    state: _State = _State.BLANK
    num_unfinished: int = 0
    """Samples."""
    has_settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Unset while it starts."""

    def become(self, state: _State) -> None:
        self.state = state
        (self.has_settled.clear if state is _State.STARTING else self.has_settled.set)()

    @property
    def is_alive(self) -> bool:
        return self.state in {_State.BLANK, _State.READY} and self.engine.death is None

    @property
    def is_ready(self) -> bool:
        return self.state is _State.READY and self.engine.death is None


@dataclass(frozen=True, slots=True)
class _Weights:
    """The last complete update, kept for engines that start later.

    One copy in all, where `Replica.share` puts it: for RemoteEngine in Ray's object store, that is in the host's
    memory and, beyond the store's size, on disk.
    """

    manifest: UpdateManifest
    buckets: list[Any]


class ReplicaSet:
    """Implements `protocols.RolloutEngine` over `count` engines, `new_replica(0)` to `new_replica(count - 1)`.

    Those with equal `index % num_groups` share devices and start one after the other: an engine that sizes its cache
    by the memory that is free would take another's growth for its own. None: none share.
    """

    capabilities: EngineCapabilities
    """The first engine's. Which engine samples what follows from the order of calls and results alone, so equal seeds
    give equal tokens as far as each engine promises it for an equal batch."""

    def __init__(self, new_replica: Callable[[int], Replica], count: int, *, num_groups: int | None = None) -> None:
        self._new_replica, self._count = new_replica, count
        self._devices = [asyncio.Lock() for _ in range(num_groups or count)]
        self._members: list[_Member] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._lifecycle = Lifecycle("replicated")
        self._is_awake = asyncio.Event()
        self._is_paused = False
        self._waiting: deque[tuple[int, asyncio.Future[_Member]]] = deque()
        """Calls that no engine has yet, with the samples that they want."""
        self._version = -1
        self._weights: _Weights | None = None
        self._writing = asyncio.Lock()
        """Held by whoever writes weights: an update, or a restart until its engine joins."""
        self._obituary = ""
        self._are_all_lost = asyncio.Event()
        self._closing: asyncio.Future[None] | None = None
        self._num_redispatched = 0
        self._num_restarts = 0

    async def start(self) -> None:
        self._lifecycle.check("start")
        self._members = [_Member(index, self._new_replica(index)) for index in range(self._count)]
        starts = [asyncio.create_task(self._start(member.index, member.engine)) for member in self._members]
        try:
            await asyncio.gather(*starts)
            if self._lifecycle.phase is Phase.CLOSED:
                raise EngineError("the replicated engine was closed while it started.")
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await asyncio.gather(*(member.engine.close() for member in self._members), return_exceptions=True)
            raise
        self.capabilities = self._members[0].engine.capabilities
        self._lifecycle.phase = Phase.AWAKE
        self._is_awake.set()
        for member in self._members:
            task = asyncio.create_task(self._keep_alive(member))
            task.add_done_callback(lambda task, member=member: self._give_up(member, task))
            self._tasks.append(task)

    async def _start(self, index: int, engine: Replica) -> None:
        async with self._devices[index % len(self._devices)]:
            await engine.start()

    # Requests.

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        """As one engine, except that a group whose engine dies may come from several."""
        self._check("generate")
        missing = set(range(n))
        num_deaths = 0
        while missing:
            member = await self._next_member(n)
            engine, num_left = member.engine, n
            try:
                samples = engine.generate(prompt, group_id=group_id, n=n, sampling=sampling)
                async with contextlib.aclosing(samples):  # type: ignore[type-var]  # a generator, as every engine's is
                    async for rollout in samples:
                        num_left -= 1
                        member.num_unfinished -= 1
                        if rollout.index in missing:
                            missing.discard(rollout.index)
                            yield rollout
                        if not missing:
                            break
            except EngineError as error:
                if not await self._has_died(engine):
                    raise
                # The seam takes groups, not single samples, so the whole group is sampled again. With equal seeds and
                # the same weights it comes out as before; what the caller has already is dropped. It costs a group's
                # work once per death, and keeps the group's prompt shared.
                num_deaths += 1
                if num_deaths == MAX_DEATHS:
                    raise EngineError(
                        f"group {group_id} was running on {num_deaths} engines that died, the last one so: {error}"
                    ) from error
                self._num_redispatched += 1
            finally:
                member.num_unfinished -= num_left

    async def _next_member(self, n: int) -> _Member:
        """Reserves the place of n samples. Does not suspend if an engine is free to take them."""
        turn: asyncio.Future[_Member] = asyncio.get_running_loop().create_future()
        self._waiting.append((n, turn))
        self._serve_waiting()
        try:
            return turn.result() if turn.done() else await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                turn.result().num_unfinished -= n
            raise

    def _serve_waiting(self) -> None:
        """Gives waiting calls an engine, in their order, or the reason why there will be none."""
        waiting = self._waiting
        if (reason := self._end_reason()) is not None:
            self._refuse_waiting(lambda: EngineError(reason))
        if self._is_paused or self._lifecycle.is_updating or self._lifecycle.phase is not Phase.AWAKE:
            return
        if self._lifecycle.unfit_reason is not None:
            self._refuse_waiting(self._lifecycle.unfit)
        while waiting and (ready := [member for member in self._members if member.is_ready]):
            n, turn = waiting.popleft()
            if not turn.done():  # its caller has not left
                member = min(ready, key=lambda member: member.num_unfinished)  # the first of equals
                member.num_unfinished += n
                turn.set_result(member)

    def _refuse_waiting(self, new_error: Callable[[], EngineError]) -> None:
        while self._waiting:
            _, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(new_error())

    def counters(self) -> dict[str, int]:
        return {"redispatched_groups": self._num_redispatched, "replica_restarts": self._num_restarts}

    # Life and death.

    async def _has_died(self, engine: Replica) -> bool:
        """Whether an error of an engine is its end. It is asked: an engine may die in a process that lives."""
        if engine.death is None:
            try:
                await engine.policy_version()
            except EngineError as error:
                engine.kill(str(error))
        return engine.death is not None

    async def _keep_alive(self, member: _Member) -> None:
        """Starts the engine of one place again whenever it dies. Returns when that has failed too often in a row."""
        num_failed = 0
        while num_failed < MAX_FAILED_RESTARTS:
            if num_failed == 0:
                self._obituary = await member.engine.wait_for_death()
                log.warning("engine %d of %d died: %s", member.index, self._count, self._obituary)
                member.become(_State.DOWN)
                await member.engine.close()
            while self._lifecycle.phase is not Phase.AWAKE:
                await self._is_awake.wait()
            member.become(_State.STARTING)
            try:
                await self._restart(member)
            except (EngineError, ConfigError) as error:
                num_failed += 1
                self._obituary = f"{self._obituary}\nIts restart {num_failed} failed: {error}"
                log.warning("restart %d of engine %d failed: %s", num_failed, member.index, error)
                member.become(_State.DOWN)
            else:
                num_failed = 0
                self._num_restarts += 1
                log.warning("engine %d of %d is back, with version %d", member.index, self._count, self._version)
                self._serve_waiting()

    def _give_up(self, member: _Member, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._obituary = f"{self._obituary}\nNothing looks after it any more: {type(error).__name__}: {error}"
        member.become(_State.LOST)
        log.error("engine %d of %d is given up: %s", member.index, self._count, self._obituary)
        if all(other.state is _State.LOST for other in self._members):
            self._are_all_lost.set()
        self._serve_waiting()

    async def wait_for_death(self) -> str:
        """Of the last engine that could not be started again."""
        await self._are_all_lost.wait()
        reason = self._end_reason()
        assert reason is not None
        return reason

    async def _restart(self, member: _Member) -> None:
        """A new engine with the current weights. While an update is open it waits, and takes the newer ones."""
        engine = self._new_replica(member.index)
        try:
            await self._start(member.index, engine)
            async with self._writing:
                if self._weights is not None:
                    await _replay(self._weights, engine)
                member.engine = engine
                member.become(_State.BLANK if self._weights is None else _State.READY)
        except BaseException:
            await engine.close()
            raise

    async def close(self) -> None:
        """Ends every engine, also those that are being started. May be called twice, and again when cancelled."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._lifecycle.phase = Phase.CLOSED
        self._serve_waiting()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self._members:
            member.become(_State.LOST)  # a `sleep` may wait for one that was being started
        self._weights = None
        ends = await asyncio.gather(*(member.engine.close() for member in self._members), return_exceptions=True)
        for error in ends:
            if error is not None:
                raise error

    def _end_reason(self) -> str | None:
        """Why nothing will ever be sampled again."""
        if self._lifecycle.phase in {Phase.NEW, Phase.CLOSED}:
            return f"the replicated engine is {self._lifecycle.phase.value}."
        if all(member.state is _State.LOST for member in self._members):
            return f"all {self._count} engines have died and could not be started again. The last one: {self._obituary}"
        return None

    def _check(self, action: str) -> None:
        if (reason := self._end_reason()) is not None:
            raise EngineError(reason)
        self._lifecycle.check(action)

    # What all do together.

    async def _command(self, method: str, *arguments: Any) -> dict[_Member, Any]:
        """The answers of all that live; none where all are being started again."""
        alive = [member for member in self._members if member.is_alive]
        return await self._on_each({member: getattr(member.engine, method)(*arguments) for member in alive})

    async def _on_each(self, work: Mapping[_Member, Coroutine[Any, Any, Any]]) -> dict[_Member, Any]:
        """Waits for all, then raises the first error that is not an engine's death. Who died is left out."""
        engines = {member: member.engine for member in work}
        tasks = {member: asyncio.create_task(coroutine) for member, coroutine in work.items()}
        try:
            if tasks:
                await asyncio.wait(tasks.values())
        except asyncio.CancelledError:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            raise
        results, errors = {}, []
        for member, task in tasks.items():
            error = task.exception()
            if error is None:
                results[member] = task.result()
            elif not (isinstance(error, EngineError) and await self._has_died(engines[member])):
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    async def pause(self, mode: PauseMode) -> None:
        """Groups of an engine that dies meanwhile wait for `resume`, too."""
        self._check("pause")
        self._is_paused = True
        try:
            await self._command("pause", mode)
        except BaseException:
            self._is_paused = False
            await self._command("resume")
            self._serve_waiting()
            raise

    async def resume(self) -> None:
        self._check("resume")
        await self._command("resume")
        self._is_paused = False
        self._serve_waiting()

    async def sleep(self) -> None:
        """Waits for engines that are being started: they would go on taking memory."""
        self._check_idle()
        while starting := [member for member in self._members if member.state is _State.STARTING]:
            await asyncio.gather(*(member.has_settled.wait() for member in starting))
        self._check_idle()
        self._lifecycle.phase = Phase.ASLEEP
        self._is_awake.clear()
        if self.capabilities.loses_weights_asleep:
            self._lifecycle.unfit_reason = "its weights were dropped when it slept"
            self._weights = None
        await self._command("sleep")

    def _check_idle(self) -> None:
        self._check("sleep")
        num_running = sum(member.num_unfinished for member in self._members)
        if not self._is_paused:
            num_running += sum(n for n, turn in self._waiting if not turn.done())
        if num_running > 0:
            raise EngineError(f"sleep while {num_running} requests are running.")

    async def wake_weights(self) -> None:
        self._check("wake_weights")
        await self._command("wake_weights")
        self._lifecycle.phase = Phase.WEIGHTS_AWAKE

    async def wake(self) -> None:
        """Engines that died asleep are started from now on."""
        self._check("wake")
        await self._command("wake")
        self._lifecycle.phase = Phase.AWAKE
        self._is_awake.set()
        self._serve_waiting()

    # Weights.

    async def policy_version(self) -> int:
        """Raises `EngineError` if engines report different versions. While all are being started again, that which they
        must report before they are used."""
        versions = await self._ask_holders("policy_version")
        if len(set(versions.values())) > 1:
            raise EngineError(f"the engines hold different policy versions: {versions}.")
        return next(iter(versions.values()), self._version)

    async def weight_digests(self) -> dict[str, str]:
        """Raises `EngineError` if the engines' weights differ."""
        self._check("weight_digests")
        (first, digests), *others = (await self._ask_holders("weight_digests")).items() or [(0, {})]
        for index, other in others:
            differing = sorted(name for name in digests | other if digests.get(name) != other.get(name))
            if differing:
                raise EngineError(f"parameter {differing[0]} is not the same in engines {first} and {index}.")
        return digests

    async def _ask_holders(self, method: str) -> dict[int, Any]:
        """Answers of the engines that hold weights, by index; where none does, of all."""
        if (reason := self._end_reason()) is not None:
            raise EngineError(reason)
        answers = await self._command(method)
        holders = {member: answer for member, answer in answers.items() if member.state is _State.READY}
        return {member.index: answer for member, answer in (holders or answers).items()}

    async def open_update(self, manifest: UpdateManifest) -> _SetUpdate:
        """As one engine. Groups of an engine that dies while the update waits for it are sampled after the update."""
        self._check("open_update")
        self._lifecycle.is_updating = True
        update = _SetUpdate(self, manifest)
        try:
            await self._writing.acquire()
        except BaseException:
            self._end_update(self._lifecycle.unfit_reason)
            raise
        try:
            await self._on_each({member: update.open_on(member) for member in self._members if member.is_alive})
        except BaseException:
            await update.abort()  # also where it was cancelled: some engine may have begun
            raise
        self._weights = None  # what older weights the engines hold is gone with the first tensor
        return update

    def _end_update(self, unfit_reason: str | None) -> None:
        self._lifecycle.is_updating = False
        self._lifecycle.unfit_reason = unfit_reason
        self._serve_waiting()


async def _replay(weights: _Weights, engine: Replica) -> None:
    update = await engine.open_update(weights.manifest)
    for shared in weights.buckets:
        await update.send_shared(shared)
    await update.commit(weights.manifest.version)
    version = await engine.policy_version()
    if version != weights.manifest.version:
        raise EngineError(f"it was given version {weights.manifest.version} again and reports version {version}.")


class _SetUpdate:
    """One update of all engines; each bucket is laid out once. Whatever goes wrong leaves the whole set unfit."""

    keeps_copies = True

    def __init__(self, owner: ReplicaSet, manifest: UpdateManifest) -> None:
        self._owner = owner
        self._manifest = manifest
        self._updates: dict[_Member, SharedUpdate] = {}
        """Of the engines that live."""
        self._num_workers: dict[_Member, int] = {}
        self._buckets: list[Any] = []
        self._is_open = True

    async def open_on(self, member: _Member) -> None:
        self._updates[member] = await member.engine.open_update(self._manifest)

    async def send(self, bucket: Bucket | RemoteBucket) -> None:
        async with self._guard():
            if isinstance(bucket, list):
                self.keep(await self._owner._members[0].engine.share(bucket))
                await self._on_each("send_shared", self._buckets[-1])
            else:
                await self._on_each("send", bucket)

    def keep(self, copy: Any) -> None:
        self._buckets.append(copy)

    async def groups(self) -> list[str | None]:
        """Of the engines that live, in their order."""
        async with self._guard():
            answers = await self._on_each("groups")
            self._num_workers = {member: len(ids) for member, ids in answers.items()}
            return [group_id for ids in answers.values() for group_id in ids]

    async def join(self, meeting: Meeting, *, first_rank: int = 1) -> None:
        """One that has died since `groups` is missed by the others, and by the trainer."""
        async with self._guard():
            calls = {}
            for member, num_workers in self._num_workers.items():
                if member in self._updates:
                    calls[member] = self._updates[member].join(meeting, first_rank=first_rank)
                first_rank += num_workers
            await self._of_the_living(calls)

    async def commit(self, version: int) -> None:
        async with self._guard():
            if version != self._manifest.version:
                raise EngineError(
                    f"commit of version {version} to an update whose manifest says {self._manifest.version}."
                )
            await self._on_each("commit", version)
            owner, self._is_open = self._owner, False
            for member in self._updates:
                if member.is_alive:
                    member.become(_State.READY)
            owner._version = version
            owner._weights = _Weights(self._manifest, self._buckets)
            owner._writing.release()
            owner._end_update(None)

    async def abort(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            await self._on_each("abort")
        finally:
            self._owner._writing.release()
            self._owner._end_update("its last weight update did not complete")

    async def _on_each(self, method: str, *arguments: Any) -> dict[_Member, Any]:
        return await self._of_the_living(
            {member: getattr(update, method)(*arguments) for member, update in self._updates.items()}
        )

    async def _of_the_living(self, calls: Mapping[_Member, Coroutine[Any, Any, Any]]) -> dict[_Member, Any]:
        """The dead drop out: they are started again with these weights, once they are complete."""
        answers = await self._owner._on_each(calls)
        self._updates = {member: self._updates[member] for member in answers}
        return answers

    @contextlib.asynccontextmanager
    async def _guard(self) -> AsyncIterator[None]:
        if not self._is_open:
            raise EngineError("this weight update has ended.")
        try:
            if (reason := self._owner._end_reason()) is not None:
                raise EngineError(reason)
            yield
        except BaseException:
            await self.abort()
            raise
