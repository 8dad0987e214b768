"""The rollout engine above every sampler: queueing, pauses, versions, weight updates and sleep, once for all.

The caller's event loop owns all state. A call of `generate` is n samples; each becomes a part, a request of its own,
so that its seed is its own and it is handed on the moment it finishes. A sample that a pause interrupts keeps its
tokens, and its next part goes on from them: keys and values of older weights are never continued.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl.protocols import Bucket, EngineError, Meeting, PauseMode, RemoteBucket, RequestError, UpdateManifest
from rl.rollout.lifecycle import Lifecycle, Phase
from rl.rollout.ports import on_free_ports
from rl.rollout.sampler import Outcome, Part, Sampled, Sampler, part_seed, stop_reach
from rl.types import FinishReason, IntArray, Prompt, Rollout, Sampling

NO_TOKENS = np.zeros(0, dtype=np.int32)


@dataclass(eq=False, slots=True)
class _Call:
    """One call of `generate`."""

    prompt: Prompt
    group_id: int
    sampling: Sampling
    results: asyncio.Queue[tuple[_Sample, FinishReason] | EngineError] = field(default_factory=asyncio.Queue)
    running: dict[Part, None] = field(default_factory=dict)
    """Its share of the engine's running parts, in their order."""
    is_over: bool = False
    """Its caller has everything, or has left."""


@dataclass(eq=False, slots=True)
class _Sample:
    """One rollout on its way."""

    call: _Call
    index: int
    number: int
    """Order of arrival in the engine."""
    version: int = -1
    """Of the part that runs."""
    done: list[tuple[int, Sampled]] = field(default_factory=list)
    """Finished and interrupted parts, each with the version that sampled it."""
    interruption: PauseMode | None = None
    """Why the running part was aborted, if it was."""
    num_discarded: int = 0
    """Tokens."""

    @property
    def num_tokens(self) -> int:
        return sum(len(sampled.token_ids) for _, sampled in self.done)

    @property
    def token_ids(self) -> IntArray:
        """Of the response so far."""
        return np.concatenate([NO_TOKENS, *(sampled.token_ids for _, sampled in self.done)])

    def next_part(self, request_id: str) -> Part:
        call, num_before = self.call, self.num_tokens
        sampling = call.sampling
        if num_before:
            sampling = replace(sampling, max_new_tokens=sampling.max_new_tokens - num_before)
        seed = part_seed(call.sampling, call.group_id, self.index, num_before)
        return Part(request_id, call.prompt, self.token_ids, sampling, seed)


class Engine:
    """`protocols.RolloutEngine` over one `Sampler`. Built for one event loop; weights come by updates alone."""

    def __init__(self, sampler: Sampler) -> None:
        self.capabilities = sampler.capabilities
        self._sampler = sampler
        self._lifecycle = Lifecycle(sampler.name)
        self._version = -1
        self._death: str | None = None
        self._is_dead = asyncio.Event()
        self._numbers = itertools.count()
        self._request_ids = itertools.count()
        self._running: dict[Part, _Sample] = {}
        self._queued: list[_Sample] = []
        self._is_paused = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        self._lifecycle.check("start")
        await on_free_ports(self._sampler.name, self._start_sampler)
        self._lifecycle.phase = Phase.AWAKE

    async def _start_sampler(self) -> None:
        self._check_not_closed()
        await self._sampler.start(deliver=self._deliver, die=self._die)
        self._check_not_closed()

    def _check_not_closed(self) -> None:
        if self._lifecycle.phase is Phase.CLOSED:
            raise EngineError(f"the {self._sampler.name} engine was closed while it started.")

    # Requests.

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        self._check("generate")
        try:
            self._sampler.check(prompt, sampling)
        except EngineError as error:
            raise RequestError(str(error)) from error
        call = _Call(prompt, group_id, sampling)
        self._queued += [_Sample(call, index, next(self._numbers)) for index in range(n)]
        self._flush()
        try:
            for _ in range(n):
                result = await call.results.get()
                if isinstance(result, EngineError):
                    raise result
                # Made here and not on delivery, so that what goes wrong in it is the caller's error and not a hang.
                yield self._rollout(*result)
        finally:
            self._discard(call)

    def _flush(self) -> None:
        """Submits what is queued, the oldest first, unless an update or a pause holds it back."""
        if self._is_paused or self._lifecycle.is_updating or not self._queued:
            return
        samples, self._queued = sorted(self._queued, key=lambda sample: sample.number), []
        parts = []
        for sample in samples:
            part = sample.next_part(str(next(self._request_ids)))
            sample.version, sample.interruption = self._version, None
            self._running[part] = sample
            sample.call.running[part] = None
            parts.append(part)
        self._idle.clear()
        self._sampler.submit(parts)

    def _discard(self, call: _Call) -> None:
        """Ends a call of `generate`, whose caller may have left before all its samples came."""
        call.is_over = True
        self._queued = [sample for sample in self._queued if sample.call is not call]
        if call.running and self._death is None and self._lifecycle.phase is not Phase.CLOSED:
            self._sampler.abort(list(call.running))

    def _deliver(self, outcomes: Sequence[Outcome]) -> None:
        for part, result in outcomes:
            sample = self._running.pop(part, None)
            if sample is None:  # the engine has died or was closed
                continue
            del sample.call.running[part]
            if sample.call.is_over:  # the caller has left
                continue
            if isinstance(result, EngineError):
                sample.call.results.put_nowait(_of_request(result))
            else:
                sample.done.append((sample.version, result))
                self._go_on_or_end(sample, result.finish_reason)
        if not self._running:
            self._idle.set()
        self._flush()

    def _go_on_or_end(self, sample: _Sample, reason: FinishReason) -> None:
        call, mode = sample.call, sample.interruption
        if reason is FinishReason.ABORT:
            if mode is None:
                error = RequestError(f"{self._sampler.name} aborted a request of group {call.group_id} by itself.")
                call.results.put_nowait(error)
                return
            if sample.num_tokens == call.sampling.max_new_tokens:
                reason = FinishReason.LENGTH  # the abort came with its last token
            elif mode is not PauseMode.ABORT or sample.num_tokens == 0:
                if mode is PauseMode.RESTART:
                    sample.num_discarded += sample.num_tokens
                    sample.done.clear()
                self._queued.append(sample)
                return
        call.results.put_nowait((sample, reason))

    def _rollout(self, sample: _Sample, reason: FinishReason) -> Rollout:
        call = sample.call
        num_prompt, response = len(call.prompt.token_ids), sample.token_ids
        text, end = sample.done[-1][1].text, len(response)
        if len(sample.done) > 1:
            end, reason = self._end_at_stop(sample, reason)
            text = self._sampler.decode(response[:end].tolist(), keep_special=False)

        def row(dtype: type, prompt_value: float, parts: Iterable[np.ndarray]) -> np.ndarray:
            return np.concatenate([np.full(num_prompt, prompt_value, dtype), *parts])[: num_prompt + end]

        versions = (np.full(len(sampled.token_ids), version, np.int32) for version, sampled in sample.done)
        return Rollout(
            group_id=call.group_id,
            index=sample.index,
            token_ids=np.concatenate([call.prompt.token_ids, response[:end]]),
            loss_mask=np.arange(num_prompt + end) >= num_prompt,
            rollout_logprobs=row(np.float32, 0.0, (sampled.logprobs for _, sampled in sample.done)),
            temperature=call.sampling.temperature,
            policy_versions=row(np.int32, -1, versions),
            finish_reason=reason,
            text=text,
            num_discarded_tokens=sample.num_discarded,
        )

    def _end_at_stop(self, sample: _Sample, reason: FinishReason) -> tuple[int, FinishReason]:
        """Where a response of several parts ends: a sampler cannot see a stop string that began in an earlier part.

        Special tokens count as text here, as they do in the samplers.
        """
        stops, tokens = sample.call.sampling.stop, sample.token_ids.tolist()
        if not stops:
            return len(tokens), reason
        reach = stop_reach(stops)
        seams = itertools.accumulate(len(sampled.token_ids) for _, sampled in sample.done[:-1])
        for seam in seams:
            for end in range(seam, min(seam + reach, len(tokens)) + 1):
                text = self._sampler.decode(tokens[max(0, end - reach) : end], keep_special=True)
                if any(stop in text for stop in stops):
                    return end, FinishReason.STOP
        return len(tokens), reason

    # Pauses.

    async def pause(self, mode: PauseMode) -> None:
        self._check("pause")
        was_paused, self._is_paused = self._is_paused, True
        try:
            if mode is not PauseMode.WAIT:
                for sample in self._running.values():
                    sample.interruption = mode
                self._sampler.abort(list(self._running))
            await self._idle.wait()
            self._check_alive()
        except BaseException:
            self._is_paused = was_paused
            self._flush()
            raise

    async def resume(self) -> None:
        self._check("resume")
        self._is_paused = False
        if self._lifecycle.unfit_reason is not None:
            self._refuse_queued()
        self._flush()

    # Weights.

    async def policy_version(self) -> int:
        self._check_alive()
        return await self._sampler.policy_version()

    async def weight_digests(self) -> dict[str, str]:
        self._check("weight_digests")
        return await self._sampler.weight_digests()

    def counters(self) -> dict[str, int]:
        return {}

    async def open_update(self, manifest: UpdateManifest) -> _UpdateSession:
        self._check("open_update")
        self._lifecycle.is_updating = True
        is_begun = False
        try:
            await self._idle.wait()
            self._check_alive()
            is_begun = True
            await self._sampler.begin_update(manifest)
        except BaseException:
            self._end_update("a weight update failed as it began" if is_begun else self._lifecycle.unfit_reason)
            raise
        return _UpdateSession(self, manifest.version)

    def _end_update(self, unfit_reason: str | None) -> None:
        """Lets queued requests go, on complete weights (None), or refuses them."""
        self._lifecycle.is_updating = False
        self._lifecycle.unfit_reason = unfit_reason
        if unfit_reason is not None:
            self._refuse_queued()
        self._flush()

    def _refuse_queued(self) -> None:
        queued, self._queued = self._queued, []
        for sample in queued:
            # One error each: a shared one would collect the tracebacks of all that raise it.
            error = self._lifecycle.unfit() if self._death is None else EngineError(self._death)
            sample.call.results.put_nowait(error)

    # Memory.

    async def sleep(self) -> None:
        self._check("sleep")
        if self._running:
            raise EngineError(f"sleep while {len(self._running)} requests are running.")
        self._lifecycle.phase = Phase.ASLEEP  # also where this fails: its memory may be gone
        if self.capabilities.loses_weights_asleep:
            self._lifecycle.unfit_reason = "its weights were dropped when it slept"
        await self._sampler.sleep()

    async def wake_weights(self) -> None:
        self._check("wake_weights")
        await self._sampler.wake_weights()
        self._lifecycle.phase = Phase.WEIGHTS_AWAKE

    async def wake(self) -> None:
        """Without a publish since a `sleep` that lost the weights, `generate` raises `EngineUnfit` afterwards."""
        self._check("wake")
        if self._lifecycle.phase is Phase.ASLEEP:
            await self._sampler.wake_weights()
        await self._sampler.wake_cache()
        self._lifecycle.phase = Phase.AWAKE
        self._flush()

    # Life and death.

    async def close(self) -> None:
        """Ends the sampler's processes and fails whatever still waits. May be called twice, and after a death."""
        if self._lifecycle.phase is Phase.CLOSED:
            return
        self._lifecycle.phase = Phase.CLOSED
        self._fail_waiters(f"the {self._sampler.name} engine was closed.")
        await self._sampler.close()

    def _die(self, reason: str) -> None:
        if self._death is None and self._lifecycle.phase is not Phase.CLOSED:
            self._death = reason
            self._is_dead.set()
            self._fail_waiters(reason)

    async def wait_for_death(self) -> str:
        await self._is_dead.wait()
        assert self._death is not None
        return self._death

    def _fail_waiters(self, message: str) -> None:
        samples = [*self._running.values(), *self._queued]
        self._running.clear()
        self._queued.clear()
        self._idle.set()
        for sample in samples:
            sample.call.results.put_nowait(EngineError(message))

    def _check(self, action: str) -> None:
        self._check_alive()
        self._lifecycle.check(action)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineError(self._death)
        if self._lifecycle.phase in {Phase.NEW, Phase.CLOSED}:
            raise EngineError(f"the {self._sampler.name} engine is {self._lifecycle.phase.value}.")


def _of_request(error: EngineError) -> RequestError:
    """An outcome comes from a sampler that lives: its death is reported by `die`."""
    failed = RequestError(str(error))
    failed.__cause__ = error.__cause__ or error
    return failed


class _UpdateSession:
    """Whatever goes wrong in it, a cancellation included, leaves the engine unfit."""

    keeps_copies = False

    def __init__(self, engine: Engine, version: int) -> None:
        self._engine = engine
        self._version = version
        self._is_open = True

    async def send(self, bucket: Bucket | RemoteBucket) -> None:
        async with self._guard():
            await self._engine._sampler.receive(bucket)

    def keep(self, copy: Any) -> None:
        raise AssertionError("one engine starts once, so it keeps no copies")

    async def groups(self) -> list[str | None]:
        async with self._guard():
            return await self._engine._sampler.weight_groups()

    async def join(self, meeting: Meeting, *, first_rank: int = 1) -> None:
        async with self._guard():
            await self._engine._sampler.join_group(meeting, first_rank)

    async def commit(self, version: int) -> None:
        async with self._guard():
            if version != self._version:
                raise EngineError(f"commit of version {version} to an update whose manifest says {self._version}.")
            await self._engine._sampler.finish_update(version)
            self._is_open = False
            self._engine._version = version
            self._engine._end_update(None)

    async def abort(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self._engine._death is None and self._engine._lifecycle.phase is not Phase.CLOSED:
                await self._engine._sampler.abort_update()
        finally:
            self._engine._end_update("its last weight update did not complete")

    @contextlib.asynccontextmanager
    async def _guard(self) -> AsyncIterator[None]:
        if not self._is_open:
            raise EngineError("this weight update has ended.")
        try:
            self._engine._check_alive()
            yield
        except BaseException:
            await self.abort()
            raise
