"""What the engine adds to a sampler, over a sampler that does exactly as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rl.protocols import EngineCapabilities, EngineError, EngineUnfit, PauseMode, RequestError, UpdateManifest
from rl.rollout.engine import Engine
from rl.rollout.sampler import Outcome, Part, Sampled
from rl.types import FinishReason, Prompt, Rollout, Sampling

PROMPT = Prompt("test:0", (), np.array([1, 2, 3], dtype=np.int32), "", "test")
SAMPLING = Sampling(temperature=1.0, max_new_tokens=10, seed=0)


class ScriptedSampler:
    """Token t is the letter chr(t). The test decides when which part ends, and with what."""

    name = "scripted"
    capabilities = EngineCapabilities(seeded=True, loses_weights_asleep=True, renormalizes=True)

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.aborted: list[Part] = []

    async def start(self, *, deliver: Callable[[Sequence[Outcome]], None], die: Callable[[str], None]) -> None:
        self.deliver, self.die = deliver, die

    def check(self, prompt: Prompt, sampling: Sampling) -> None: ...

    def submit(self, parts: Sequence[Part]) -> None:
        self.parts += parts

    def abort(self, parts: Sequence[Part]) -> None:
        self.aborted += parts

    def decode(self, token_ids: Sequence[int], *, keep_special: bool) -> str:
        return "".join(map(chr, token_ids))

    def end(self, part: Part, text: str, reason: FinishReason, logprob: float = -1.0) -> None:
        token_ids = np.array([ord(letter) for letter in text], dtype=np.int32)
        self.deliver([(part, Sampled(token_ids, np.full(len(text), logprob, np.float32), text, reason))])

    async def begin_update(self, manifest: UpdateManifest) -> None: ...

    async def finish_update(self, version: int) -> None: ...

    async def sleep(self) -> None: ...

    async def wake_weights(self) -> None: ...

    async def wake_cache(self) -> None: ...

    async def close(self) -> None: ...


async def started() -> tuple[Engine, Any]:
    sampler: Any = ScriptedSampler()
    engine = Engine(sampler)
    await engine.start()
    await publish(engine, 0)
    return engine, sampler


async def publish(engine: Engine, version: int) -> None:
    update = await engine.open_update(UpdateManifest(version, ()))
    await update.commit(version)


async def sample(engine: Engine, n: int = 1, sampling: Sampling = SAMPLING) -> list[Rollout]:
    return [rollout async for rollout in engine.generate(PROMPT, group_id=7, n=n, sampling=sampling)]


async def begun(work: Any) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    return task


async def paused(engine: Engine, mode: PauseMode) -> asyncio.Task[None]:
    return await begun(engine.pause(mode))


async def interrupted(engine: Engine, sampler: Any, text: str, sampling: Sampling = SAMPLING) -> asyncio.Task[Any]:
    """A sample that a pause has stopped after `text`, to go on later."""
    generation = await begun(sample(engine, sampling=sampling))
    pausing = await paused(engine, PauseMode.KEEP)
    sampler.end(sampler.parts[0], text, FinishReason.ABORT)
    await pausing
    return generation


async def test_an_interrupted_sample_goes_on_from_its_tokens_with_what_is_left_of_its_budget():
    engine, sampler = await started()
    generation = await begun(sample(engine))
    pausing = await paused(engine, PauseMode.KEEP)
    assert sampler.aborted == sampler.parts
    sampler.end(sampler.parts[0], "abcd", FinishReason.ABORT, logprob=-0.25)
    await pausing
    await publish(engine, 1)
    assert len(sampler.parts) == 1
    await engine.resume()
    again = sampler.parts[1]
    assert again.token_ids.tolist() == [1, 2, 3, *map(ord, "abcd")]
    assert again.sampling.max_new_tokens == 6
    assert again.seed != sampler.parts[0].seed
    sampler.end(again, "efghij", FinishReason.LENGTH, logprob=-0.5)
    (rollout,) = await generation
    assert rollout.text == "abcdefghij"
    assert rollout.policy_versions.tolist() == [-1] * 3 + [0] * 4 + [1] * 6
    assert rollout.rollout_logprobs.tolist() == [0.0] * 3 + [-0.25] * 4 + [-0.5] * 6
    assert (rollout.min_policy_version, rollout.max_policy_version) == (0, 1)
    assert rollout.finish_reason is FinishReason.LENGTH


async def test_a_sample_may_be_interrupted_again_and_again():
    engine, sampler = await started()
    generation = await begun(sample(engine))
    for version, text in enumerate(["ab", "", "c"], start=1):
        pausing = await paused(engine, PauseMode.KEEP)
        sampler.end(sampler.parts[-1], text, FinishReason.ABORT)
        await pausing
        await publish(engine, version)
        await engine.resume()
    sampler.end(sampler.parts[-1], "d", FinishReason.STOP)
    (rollout,) = await generation
    assert (rollout.text, rollout.policy_versions.tolist()[3:]) == ("abcd", [0, 0, 2, 3])


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.ABORT, PauseMode.RESTART])
async def test_a_sample_aborted_with_its_last_token_is_truncated_and_not_asked_for_again(mode: PauseMode):
    engine, sampler = await started()
    generation = await begun(sample(engine))
    pausing = await paused(engine, mode)
    sampler.end(sampler.parts[0], "abcdefghij", FinishReason.ABORT)
    await pausing
    await engine.resume()
    (rollout,) = await generation
    assert (rollout.text, rollout.finish_reason) == ("abcdefghij", FinishReason.LENGTH)
    assert len(sampler.parts) == 1


async def test_a_sample_that_ends_before_the_abort_reaches_it_is_whole():
    engine, sampler = await started()
    generation = await begun(sample(engine))
    pausing = await paused(engine, PauseMode.KEEP)
    sampler.end(sampler.parts[0], "ab", FinishReason.STOP)
    await pausing
    assert (await generation)[0].text == "ab"


async def test_abort_starts_what_runs_anew_whole_with_its_seed_and_counts_what_is_lost():
    engine, sampler = await started()
    generation = await begun(sample(engine, n=3))
    pausing = await paused(engine, PauseMode.RESTART)
    first, second, third = sampler.parts
    sampler.end(first, "ab", FinishReason.ABORT)
    sampler.end(second, "", FinishReason.ABORT)
    sampler.end(third, "whole", FinishReason.STOP)  # it was faster than the abort
    await pausing
    await publish(engine, 1)
    await engine.resume()
    again = sampler.parts[3:]
    assert [(part.seed, len(part.prefix), part.sampling) for part in again] == [
        (part.seed, 0, SAMPLING) for part in (first, second)
    ]
    sampler.end(again[0], "uvw", FinishReason.STOP)
    sampler.end(again[1], "xy", FinishReason.STOP)
    rollouts = sorted(await generation, key=lambda rollout: rollout.index)
    assert [(r.text, r.min_policy_version, r.max_policy_version, r.num_discarded_tokens) for r in rollouts] == [
        ("uvw", 1, 1, 2),
        ("xy", 1, 1, 0),
        ("whole", 0, 0, 0),
    ]
    assert all(r.finish_reason is FinishReason.STOP for r in rollouts)


async def test_abort_throws_away_what_earlier_pauses_kept_too():
    engine, sampler = await started()
    generation = await begun(sample(engine))
    for version, (mode, text) in enumerate([(PauseMode.KEEP, "abc"), (PauseMode.RESTART, "d")], start=1):
        pausing = await paused(engine, mode)
        sampler.end(sampler.parts[-1], text, FinishReason.ABORT)
        await pausing
        await publish(engine, version)
        await engine.resume()
    assert (sampler.parts[2].seed, len(sampler.parts[2].prefix)) == (sampler.parts[0].seed, 0)
    sampler.end(sampler.parts[2], "xy", FinishReason.STOP)
    (rollout,) = await generation
    assert (rollout.text, rollout.num_discarded_tokens, rollout.min_policy_version) == ("xy", 4, 2)


async def test_abort_ends_samples_with_what_they_have_and_starts_those_anew_that_have_nothing():
    engine, sampler = await started()
    generation = await begun(sample(engine, n=2))
    pausing = await paused(engine, PauseMode.ABORT)
    first, second = sampler.parts
    sampler.end(first, "ab", FinishReason.ABORT)
    sampler.end(second, "", FinishReason.ABORT)
    await pausing
    await engine.resume()
    assert (sampler.parts[2].seed, len(sampler.parts[2].prefix)) == (second.seed, 0)
    sampler.end(sampler.parts[2], "xy", FinishReason.STOP)
    rollouts = await generation
    assert [(r.index, r.text, r.finish_reason) for r in rollouts] == [
        (0, "ab", FinishReason.ABORT),
        (1, "xy", FinishReason.STOP),
    ]


async def test_a_cancelled_second_pause_leaves_the_first_one_in_force():
    engine, sampler = await started()
    generation = await begun(sample(engine))
    first = await paused(engine, PauseMode.WAIT)
    second = await paused(engine, PauseMode.KEEP)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    sampler.end(sampler.parts[0], "a", FinishReason.ABORT)
    await first
    assert len(sampler.parts) == 1
    await engine.resume()
    sampler.end(sampler.parts[1], "b", FinishReason.STOP)
    assert (await generation)[0].text == "ab"


async def test_requests_made_during_a_pause_wait_for_its_end():
    engine, sampler = await started()
    await engine.pause(PauseMode.WAIT)
    generation = await begun(sample(engine))
    assert not sampler.parts
    await engine.resume()
    sampler.end(sampler.parts[0], "a", FinishReason.STOP)
    assert len(await generation) == 1


async def test_after_a_pause_the_oldest_samples_go_first():
    engine, sampler = await started()
    generation = await begun(sample(engine, n=3))
    pausing = await paused(engine, PauseMode.KEEP)
    late = await begun(sample(engine))
    for part in reversed(sampler.parts):
        sampler.end(part, "a", FinishReason.ABORT)
    await pausing
    first = [part.prompt for part in sampler.parts]
    await engine.resume()
    assert len(sampler.parts) == 7
    assert [len(part.prefix) for part in sampler.parts[3:]] == [1, 1, 1, 0]
    assert len(first) == 3
    for part in sampler.parts[3:]:
        sampler.end(part, "b", FinishReason.STOP)
    assert [rollout.index for rollout in await generation] == [0, 1, 2]
    await late


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("one </ans", "wer> two", "one </answer>"),  # across the seam
        ("one ", "</answer> two", "one </answer>"),  # after it: a sampler ends there by itself, and later is too late
        ("one <", "/answer> </answer>", "one </answer>"),
        ("one </answer>", " two", "one </answer>"),  # aborted with the token that completed it
        ("one </ans", "wer", "one </answer"),  # none
    ],
)
async def test_a_stop_string_across_two_parts_ends_the_sample(before: str, after: str, expected: str):
    engine, sampler = await started()
    sampling = Sampling(1.0, 40, 0, stop=("</answer>", "never so"))
    generation = await interrupted(engine, sampler, before, sampling)
    await engine.resume()
    sampler.end(sampler.parts[1], after, FinishReason.LENGTH)
    (rollout,) = await generation
    assert rollout.text == expected
    assert rollout.num_response_tokens == len(expected)
    assert rollout.finish_reason is (FinishReason.STOP if expected.endswith(">") else FinishReason.LENGTH)


async def test_an_abort_that_nobody_asked_for_is_an_error_and_never_a_short_answer():
    engine, sampler = await started()
    generation = await begun(sample(engine))
    sampler.end(sampler.parts[0], "ab", FinishReason.ABORT)
    with pytest.raises(RequestError, match="scripted aborted a request of group 7 by itself"):
        await generation


async def test_what_befalls_one_request_of_a_living_engine_is_told_from_its_death():
    engine, sampler = await started()
    generation = await begun(sample(engine))
    sampler.deliver([(sampler.parts[0], EngineError("no log-prob"))])
    with pytest.raises(RequestError, match="no log-prob"):
        await generation
    others = await begun(sample(engine))
    sampler.die("process 7 was ended by signal 9 (SIGKILL)")
    with pytest.raises(EngineError, match="signal 9") as death:
        await others
    assert not isinstance(death.value, RequestError)


async def test_an_engine_paused_with_requests_kept_may_sleep_and_be_updated():
    engine, sampler = await started()
    generation = await interrupted(engine, sampler, "ab")
    await engine.sleep()
    await engine.wake_weights()
    await publish(engine, 1)
    await engine.wake()
    await engine.resume()
    sampler.end(sampler.parts[1], "c", FinishReason.STOP)
    assert (await generation)[0].policy_versions.tolist()[3:] == [0, 0, 1]


async def test_kept_samples_are_refused_if_the_weights_are_lost():
    engine, sampler = await started()
    generation = await interrupted(engine, sampler, "ab")
    await engine.sleep()
    await engine.wake()
    await engine.resume()
    with pytest.raises(EngineUnfit, match="dropped when it slept"):
        await generation


async def test_a_pause_that_is_cancelled_lets_everything_go_on():
    engine, sampler = await started()
    generation = await begun(sample(engine))
    pausing = await paused(engine, PauseMode.KEEP)
    pausing.cancel()
    await asyncio.gather(pausing, return_exceptions=True)
    sampler.end(sampler.parts[0], "ab", FinishReason.ABORT)
    sampler.end(sampler.parts[1], "c", FinishReason.STOP)
    assert (await generation)[0].text == "abc"


async def test_a_death_during_a_pause_ends_the_pause_and_every_call():
    engine, sampler = await started()
    generation = await begun(sample(engine))
    pausing = await paused(engine, PauseMode.KEEP)
    sampler.die("process 7 was ended by signal 9 (SIGKILL)")
    for work in (generation, pausing, sample(engine), engine.policy_version()):
        with pytest.raises(EngineError, match="signal 9"):
            await work


async def test_what_a_sampler_delivers_after_its_death_or_close_is_ignored():
    engine, sampler = await started()
    generation = await begun(sample(engine))
    await engine.close()
    sampler.end(sampler.parts[0], "ab", FinishReason.STOP)
    with pytest.raises(EngineError, match="closed"):
        await generation
