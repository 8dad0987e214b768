"""Pauses, updates, deaths and callers that leave, in random order, over a sampler that runs by itself.

A token is 1000 x the version that sampled it + its place in the response, so that a token that was lost, doubled or
sampled from other weights than its stamp says is seen in the token itself.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rl.protocols import Bucket, EngineCapabilities, EngineError, EngineUnfit, PauseMode, UpdateManifest
from rl.rollout.engine import Engine, _Call, _Sample
from rl.rollout.sampler import Outcome, Part, Sampled
from rl.types import FinishReason, Prompt, Rollout, Sampling

NUM_PROMPT_TOKENS = 3
PROMPT = Prompt("test:0", (), np.array([1, 2, 3], dtype=np.int32), "", "test")
NO_TENSORS: tuple[Any, ...] = ()


class SelfRunningSampler:
    """Adds a token to each of its parts at every tick, and hears of aborts and delivers ticks later, as engines do."""

    name = "self-running"
    capabilities = EngineCapabilities(seeded=True, loses_weights_asleep=False, renormalizes=True)

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.parts: dict[Part, list[int]] = {}
        self.aborted: set[Part] = set()
        self.peak = 0
        self.version = -1
        self.is_asleep = self.is_updating = False
        self.fails_next_update = False

    async def start(self, *, deliver: Callable[[Sequence[Outcome]], None], die: Callable[[str], None]) -> None:
        self.deliver, self.die = deliver, die
        self.ticking = asyncio.create_task(self.tick())

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(0)
            assert not (self.parts and (self.is_asleep or self.is_updating)), "a request runs where none may"
            self.peak = max(self.peak, len(self.parts))
            ended: list[Outcome] = []
            for part, tokens in list(self.parts.items()):
                place = len(part.prefix) + len(tokens)
                if part in self.aborted and self.random.random() < 0.5:
                    ended.append((part, self.sampled(part, FinishReason.ABORT)))
                    continue
                tokens.append(1000 * self.version + place)
                if len(tokens) == part.sampling.max_new_tokens:
                    ended.append((part, self.sampled(part, FinishReason.LENGTH)))
                elif self.random.random() < 0.03:
                    ended.append((part, self.sampled(part, FinishReason.STOP)))
            if ended:
                asyncio.get_running_loop().call_soon(self.deliver, ended)

    def sampled(self, part: Part, reason: FinishReason) -> Sampled:
        self.aborted.discard(part)
        token_ids = np.array(self.parts.pop(part), dtype=np.int32)
        return Sampled(token_ids, -np.arange(len(token_ids), dtype=np.float32), "", reason)

    def check(self, prompt: Prompt, sampling: Sampling) -> None: ...

    def submit(self, parts: Sequence[Part]) -> None:
        assert not self.is_asleep
        assert not self.is_updating
        for part in parts:
            assert part.sampling.max_new_tokens > 0
            self.parts[part] = []

    def abort(self, parts: Sequence[Part]) -> None:
        self.aborted |= self.parts.keys() & set(parts)

    def decode(self, token_ids: Sequence[int], *, keep_special: bool) -> str:
        return ""

    async def policy_version(self) -> int:
        return self.version

    async def begin_update(self, manifest: UpdateManifest) -> None:
        self.is_updating = True
        await asyncio.sleep(0)

    async def receive(self, bucket: Bucket) -> None:
        await asyncio.sleep(0)
        if self.fails_next_update:
            self.fails_next_update = False
            raise EngineError("a tensor is wrong")

    async def finish_update(self, version: int) -> None:
        await asyncio.sleep(0)
        self.is_updating, self.version = False, version

    async def abort_update(self) -> None:
        await asyncio.sleep(0)
        self.is_updating = False

    async def sleep(self) -> None:
        self.is_asleep = True

    async def wake_weights(self) -> None: ...

    async def wake_cache(self) -> None:
        self.is_asleep = False

    async def close(self) -> None:
        self.ticking.cancel()
        await asyncio.gather(self.ticking, return_exceptions=True)


async def started(seed: int) -> tuple[Engine, SelfRunningSampler]:
    sampler = SelfRunningSampler(seed)
    engine = Engine(sampler)  # type: ignore[arg-type]  # it has no digests
    await engine.start()
    await publish(engine, 0)
    return engine, sampler


async def publish(engine: Engine, version: int) -> None:
    update = await engine.open_update(UpdateManifest(version, NO_TENSORS))
    for _ in range(3):
        await update.send([])
    await update.commit(version)


def assert_is_whole(rollout: Rollout, limit: int) -> None:
    """Every token of the response once, in its place, stamped with the version that sampled it."""
    response = rollout.token_ids[NUM_PROMPT_TOKENS:]
    assert (response % 1000).tolist() == list(range(len(response)))
    assert rollout.policy_versions.tolist() == [-1] * NUM_PROMPT_TOKENS + (response // 1000).tolist()
    assert rollout.loss_mask.tolist() == [False] * NUM_PROMPT_TOKENS + [True] * len(response)
    assert 0 < len(response) <= limit
    if len(response) == limit:
        assert rollout.finish_reason is FinishReason.LENGTH
    else:
        assert rollout.finish_reason in (FinishReason.STOP, FinishReason.ABORT)


@pytest.mark.parametrize("seed", range(8))
async def test_in_any_order_of_pauses_updates_and_leavers_every_token_comes_once_with_its_version(seed: int):
    engine, sampler = await started(seed)
    chance = random.Random(1000 + seed)
    seen: Counter[tuple[int, int]] = Counter()
    is_over, is_awake = asyncio.Event(), asyncio.Event()
    is_awake.set()

    async def ask(group_id: int) -> None:
        limit = chance.randint(1, 60)
        for _ in range(chance.randint(0, 400)):
            await asyncio.sleep(0)
        left = 0 if group_id % 5 else chance.randint(1, 4)
        await is_awake.wait()  # asleep, it refuses
        samples: Any = engine.generate(PROMPT, group_id=group_id, n=4, sampling=Sampling(1.0, limit, 0))
        async for rollout in samples:
            assert_is_whole(rollout, limit)
            seen[group_id, rollout.index] += 1
            left -= 1
            if left == 0:
                break
        await samples.aclose()

    async def disturb() -> int:
        version = 0
        while not is_over.is_set():
            for _ in range(chance.randint(1, 20)):
                await asyncio.sleep(0)
            pausing = asyncio.create_task(engine.pause(chance.choice(list(PauseMode))))
            if chance.random() < 0.3:
                for _ in range(chance.randint(0, 3)):
                    await asyncio.sleep(0)
                pausing.cancel()
            if isinstance((await asyncio.gather(pausing, return_exceptions=True))[0], asyncio.CancelledError):
                continue
            if chance.random() < 0.5:
                is_awake.clear()
                await engine.sleep()
                await engine.wake_weights()
                await publish(engine, version := version + 1)
                await engine.wake()
                is_awake.set()
            else:
                await publish(engine, version := version + 1)
            await engine.resume()
        return version

    disturbing = asyncio.create_task(disturb())
    await asyncio.wait_for(asyncio.gather(*(ask(group_id) for group_id in range(90))), 20)
    is_over.set()
    assert await asyncio.wait_for(disturbing, 20) > 2
    assert set(seen.values()) == {1}
    per_group = Counter(group_id for group_id, _ in seen)
    assert all(per_group[group_id] == 4 for group_id in range(90) if group_id % 5)
    await asyncio.wait_for(engine._idle.wait(), 20)
    assert not sampler.parts
    await engine.close()
    gc.collect()
    kept = [thing for thing in gc.get_objects() if type(thing) in (_Sample, _Call)]
    assert not kept, "the engine still holds requests that have ended"


@pytest.mark.parametrize("seed", range(8))
async def test_whenever_an_update_fails_or_is_cancelled_every_call_ends_and_a_complete_one_heals(seed: int):
    engine, sampler = await started(seed)
    chance = random.Random(2000 + seed)
    ends: Counter[type] = Counter()

    async def ask(group_id: int) -> None:
        for _ in range(chance.randint(0, 150)):
            await asyncio.sleep(0)
        try:
            async for rollout in engine.generate(PROMPT, group_id=group_id, n=2, sampling=Sampling(1.0, 30, 0)):
                assert_is_whole(rollout, 30)
        except EngineUnfit:
            ends[EngineUnfit] += 1
        else:
            ends[Rollout] += 1

    async def spoil() -> None:
        for version in range(1, 9):
            publishing = asyncio.create_task(publish(engine, version))
            if chance.random() < 0.5:
                sampler.fails_next_update = True
            else:
                for _ in range(chance.randint(0, 60)):
                    await asyncio.sleep(0)
                publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            sampler.fails_next_update = False
            for _ in range(chance.randint(0, 10)):
                await asyncio.sleep(0)
            await publish(engine, 100 + version)

    asking = asyncio.gather(*(ask(group_id) for group_id in range(80)))
    await asyncio.wait_for(asyncio.gather(asking, spoil()), 20)
    assert ends.total() == 80
    assert ends[Rollout] > 0
    await asyncio.wait_for(ask(99), 20)
    assert await engine.policy_version() == 108
    await engine.close()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("end", ["die", "close"])
async def test_whenever_it_dies_or_is_closed_nobody_waits_for_it(end: str, seed: int):
    engine, sampler = await started(seed)
    chance = random.Random(3000 + seed)

    async def live() -> None:
        while True:
            await engine.pause(chance.choice(list(PauseMode)))
            await publish(engine, 1)
            await engine.resume()

    async def ask(group_id: int) -> list[Rollout]:
        samples = engine.generate(PROMPT, group_id=group_id, n=4, sampling=Sampling(1.0, 10_000, 0))
        return [rollout async for rollout in samples]

    calls = [asyncio.create_task(ask(group_id)) for group_id in range(10)]
    living = asyncio.create_task(live())
    for _ in range(chance.randint(1, 60)):
        await asyncio.sleep(0)
    if end == "die":
        sampler.die("signal 9")
    else:
        await engine.close()
    results = await asyncio.wait_for(asyncio.gather(living, *calls, return_exceptions=True), 20)
    assert isinstance(results[0], EngineError)
    assert all(isinstance(result, EngineError | list) for result in results)
    assert any(isinstance(result, EngineError) for result in results[1:])
    with pytest.raises(EngineError):
        await ask(99)
    await engine.close()


async def test_as_many_samples_run_at_once_as_are_asked_for():
    engine, sampler = await started(0)

    async def ask(group_id: int) -> None:
        async for _ in engine.generate(PROMPT, group_id=group_id, n=1, sampling=Sampling(1.0, 3, 0)):
            pass

    await asyncio.wait_for(asyncio.gather(*(ask(group_id) for group_id in range(1500))), 20)
    assert sampler.peak == 1500
    await engine.close()


async def test_what_goes_wrong_as_a_rollout_is_put_together_is_its_callers_error():
    engine, sampler = await started(0)

    def fail(token_ids: Sequence[int], *, keep_special: bool) -> str:
        raise ValueError("no such token")

    sampler.decode = fail  # type: ignore[method-assign]
    samples: Any = engine.generate(PROMPT, group_id=0, n=1, sampling=Sampling(1.0, 10, 0))
    generation = asyncio.ensure_future(anext(samples))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await engine.pause(PauseMode.KEEP)
    await engine.resume()
    with pytest.raises(ValueError, match="no such token"):
        await asyncio.wait_for(generation, 20)
    await asyncio.wait_for(engine.sleep(), 20)
    await engine.close()
