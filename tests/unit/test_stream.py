"""`GroupStream` over a simulated engine, in simulated time: latencies are drawn, seconds cost nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from rl.algorithms.grpo import GRPO
from rl.config.algorithms import GRPOConfig
from rl.config.schema import ColocatedConfig, FullyAsyncConfig, PlacementConfig, RunConfig, StreamConfig
from rl.grading import REQUEST_RETRIES
from rl.protocols import EngineError, EngineUnfit, RequestError
from rl.stream import GroupStream, StreamConfigValues, StreamError
from rl.types import FinishReason, Prompt, Reward, RewardError, Rollout, RolloutGroup, Sampling
from scripts.simulated_time import simulate
from tests.made_task import TrainingOnly

P, G = 8, 2
SAMPLING = Sampling(temperature=1.0, max_new_tokens=4, seed=0)


class SimulatedEngine:
    """Answers after a delay drawn from the group's id, with the version that it held when the request arrived."""

    def __init__(self, delay: Callable[[int], float]) -> None:
        self.version = 0
        self.requests: list[int] = []
        self.versions: dict[int, int] = {}
        """Of each group's last answers."""
        self.num_running = 0
        self._delay = delay

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        self.requests.append(group_id)
        version = self.version
        self.num_running += 1
        try:
            await asyncio.sleep(self._delay(group_id))
        finally:
            self.num_running -= 1
        self.versions[group_id] = version
        for index in reversed(range(n)):
            yield rollout(group_id, index, version)


def rollout(group_id: int, index: int, version: int) -> Rollout:
    return Rollout(
        group_id=group_id,
        index=index,
        token_ids=np.array([1, 2], dtype=np.int32),
        loss_mask=np.array([False, True]),
        rollout_logprobs=np.array([0.0, -1.0], dtype=np.float32),
        temperature=1.0,
        policy_versions=np.array([-1, version], dtype=np.int32),
        finish_reason=FinishReason.STOP,
    )


class SimulatedTask(TrainingOnly):
    """The reward of sample i is i, except where a grader is given."""

    num_prompts = 10_000

    def __init__(self, grader: Callable[[int], Awaitable[None]] | None = None) -> None:
        self._grader = grader

    def prompt(self, seed: int, index: int) -> Prompt:
        return Prompt(str(index), (), np.array([1], dtype=np.int32), answer="", task="simulated")

    async def grade(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        if self._grader is not None:
            await self._grader(int(prompt.prompt_id))
        return [Reward(float(r.index), correct=r.index == 1, parts={"index": float(r.index)}) for r in rollouts]


class Dropping(GRPO):
    """Keeps a group as its id says."""

    def __init__(self, fraction: float) -> None:
        super().__init__(GRPOConfig(prompts_per_step=P, group_size=G))
        self._fraction = fraction

    def keep(self, group: RolloutGroup) -> bool:
        return not is_dropped(group.group_id, self._fraction)


def is_dropped(group_id: int, fraction: float) -> bool:
    return np.random.default_rng([1, group_id]).uniform() < fraction


def exponential(group_id: int) -> float:
    return float(np.random.default_rng([2, group_id]).exponential(1.0))


def long_tailed(group_id: int) -> float:
    """One group in 50 takes a hundred times as long."""
    rng = np.random.default_rng([3, group_id])
    return float(rng.exponential(1.0) * (100.0 if rng.uniform() < 0.02 else 1.0))


def run_config(placement: PlacementConfig, *, window: int | None = None, oversample: float = 1.0) -> RunConfig:
    algorithm = GRPOConfig(prompts_per_step=P, group_size=G)
    return RunConfig(
        algorithm=algorithm, placement=placement, stream=StreamConfig(window=window, oversample=oversample)
    )


def stream_of(
    config: RunConfig,
    engine: Any,
    *,
    task: SimulatedTask | None = None,
    drop_fraction: float = 0.0,
    max_failed_fraction: float = 0.1,
    reward_timeout_s: float = 300.0,
) -> GroupStream:
    values = StreamConfigValues(
        seed=0,
        sampling=SAMPLING,
        prompts_per_step=P,
        group_size=G,
        groups_per_publish=config.groups_per_publish,
        max_admitted=config.max_admitted,
        max_surplus=config.max_surplus,
        window=config.window,
        max_failed_fraction=max_failed_fraction,
        reward_timeout_s=reward_timeout_s,
        stall_timeout_s=10_000.0,
    )
    return GroupStream(values, task=task or SimulatedTask(), engine=engine, algorithm=Dropping(drop_fraction))


async def train(
    stream: GroupStream, engine: SimulatedEngine, *, steps: int, publish_every: int = 1, train_s: float = 1.0
) -> tuple[list[list[int]], int]:
    """(group ids of each batch, largest staleness). Publishes and releases as `rl.loop` does."""
    batches, staleness = [], 0
    async with stream:
        for step in range(1, steps + 1):
            groups = await stream.next_batch()
            batches.append([group.group_id for group in groups])
            staleness = max(staleness, *(engine.version - group.min_policy_version for group in groups))
            stream.metrics()  # asserts that every started group is accounted for, once
            await asyncio.sleep(train_s)
            if step % publish_every == 0:
                engine.version += 1
                stream.release()
    return batches, staleness


@pytest.mark.parametrize(
    ("placement", "observed"),
    [
        (ColocatedConfig(), 0),
        (FullyAsyncConfig(max_staleness=0.0), 0),
        (FullyAsyncConfig(max_staleness=1.0), 1),
        (FullyAsyncConfig(max_staleness=3.0), 3),
        (FullyAsyncConfig(max_staleness=0.0, publish_every=4), 0),
        (FullyAsyncConfig(max_staleness=0.25, publish_every=4), 1),
        (FullyAsyncConfig(max_staleness=0.5, publish_every=4), 1),
        (FullyAsyncConfig(max_staleness=1.0, publish_every=4), 1),
        (FullyAsyncConfig(max_staleness=2.0, publish_every=4), 2),
    ],
)
def test_oldest_first_order_reaches_the_staleness_that_admission_allows_and_no_more(placement, observed):
    config, engine = run_config(placement, window=P), SimulatedEngine(exponential)
    stream = stream_of(config, engine, drop_fraction=0.3)
    _, staleness = simulate(train(stream, engine, steps=120, publish_every=placement.publish_every, train_s=4.0))
    assert staleness == observed == config.staleness_bound


@pytest.mark.parametrize("delay", [exponential, long_tailed])
@pytest.mark.parametrize(
    ("max_staleness", "publish_every", "window"),
    [(1.0, 1, 12), (1.0, 1, 16), (3.0, 1, 9), (3.0, 1, 32), (1.0, 4, 32), (2.0, 4, 64), (0.0, 4, 32)],
)
def test_a_wider_window_keeps_to_the_bound(delay, max_staleness, publish_every, window):
    config = run_config(FullyAsyncConfig(max_staleness=max_staleness, publish_every=publish_every), window=window)
    assert config.staleness_bound == (config.max_admitted + window - 2) // (P * publish_every)
    engine = SimulatedEngine(delay)
    stream = stream_of(config, engine, drop_fraction=0.3)
    batches, staleness = simulate(train(stream, engine, steps=150, publish_every=publish_every))
    assert staleness <= config.staleness_bound
    trained = [group_id for batch in batches for group_id in batch]
    assert len(set(trained)) == len(trained) == 150 * P


def test_no_group_is_overtaken_by_more_than_the_window():
    """One group that takes very long is waited for, however many batches could be made without it."""
    config = run_config(FullyAsyncConfig(max_staleness=3.0), window=2 * P)
    engine = SimulatedEngine(lambda group_id: 500.0 if group_id == 3 else 1.0)
    batches, _ = simulate(train(stream_of(config, engine), engine, steps=4))
    trained = [group_id for batch in batches for group_id in batch]
    assert sum(group_id > 3 for group_id in trained[: trained.index(3)]) <= 2 * P - 1


def test_a_window_of_one_batch_is_first_in_first_out():
    config, engine = run_config(FullyAsyncConfig(max_staleness=3.0), window=P), SimulatedEngine(long_tailed)
    batches, _ = simulate(train(stream_of(config, engine, drop_fraction=0.3), engine, steps=20))
    kept = [group_id for group_id in range(1000) if not is_dropped(group_id, 0.3)]
    assert [group_id for batch in batches for group_id in batch] == kept[: 20 * P]


def test_the_default_window_is_one_batch_when_colocated_and_one_publish_when_fully_async():
    assert run_config(ColocatedConfig(publish_every=4)).window == P
    assert run_config(FullyAsyncConfig(publish_every=4)).window == 4 * P


def test_nothing_starts_before_the_release_when_colocated():
    engine = SimulatedEngine(exponential)
    stream = stream_of(run_config(ColocatedConfig()), engine)

    async def main() -> None:
        async with stream:
            await stream.next_batch()
            await asyncio.sleep(100)
            assert (len(engine.requests), stream.in_flight) == (P, [])
            stream.release()
            await asyncio.sleep(0)
            assert len(engine.requests) == 2 * P

    simulate(main())


def test_a_dropped_group_returns_its_slot_at_once():
    engine = SimulatedEngine(exponential)
    stream = stream_of(run_config(ColocatedConfig()), engine, drop_fraction=0.5)

    async def main() -> list[RolloutGroup]:
        async with stream:
            return await stream.next_batch()

    groups = simulate(main())
    kept = [group_id for group_id in range(100) if not is_dropped(group_id, 0.5)][:P]
    assert [group.group_id for group in groups] == kept
    num_dropped = kept[-1] + 1 - P
    assert stream.accounting.dropped["filtered"] >= num_dropped > 0
    accounting = stream.accounting
    assert accounting.started == P + accounting.dropped["filtered"] + len(stream.in_flight) == len(engine.requests)


def test_groups_admitted_in_one_turn_reach_the_engine_together_and_in_order():
    engine = SimulatedEngine(exponential)
    stream = stream_of(run_config(FullyAsyncConfig(max_staleness=1.0)), engine)

    async def main() -> None:
        async with stream:
            await asyncio.sleep(0)
            assert engine.requests == list(range(2 * P))
            await stream.next_batch()
            stream.release()
            await asyncio.sleep(0)
            assert engine.requests == list(range(3 * P))

    simulate(main())


def test_a_group_is_graded_in_sample_order():
    stream = stream_of(run_config(ColocatedConfig()), SimulatedEngine(exponential))

    async def main() -> list[RolloutGroup]:
        async with stream:
            return await stream.next_batch()

    group = simulate(main())[0]
    assert [r.index for r in group.rollouts] == [0, 1]
    assert group.rewards.tolist() == [0.0, 1.0]
    assert [r.reward_parts for r in group.rollouts] == [{"correct": 0.0, "index": 0.0}, {"correct": 1.0, "index": 1.0}]


@pytest.mark.parametrize("publish_every", [1, 3])
@pytest.mark.parametrize("oversample", [1.5, 3.0])
def test_over_sampling_at_staleness_0_changes_the_seconds_and_no_batch(oversample, publish_every):
    """Of groups of which a third is kept: the prompts, their order and the versions that answer them stay the same."""

    def run(oversample: float) -> tuple[list[list[int]], list[int], Counter[str], float]:
        placement = FullyAsyncConfig(max_staleness=0.0, publish_every=publish_every)
        config, engine = run_config(placement, oversample=oversample, window=P), SimulatedEngine(exponential)
        stream = stream_of(config, engine, drop_fraction=0.67)

        async def timed() -> tuple[list[list[int]], float]:
            batches, staleness = await train(stream, engine, steps=30, publish_every=publish_every)
            assert staleness == config.staleness_bound == 0
            return batches, asyncio.get_running_loop().time()

        batches, seconds = simulate(timed())
        versions = [engine.versions[group_id] for group_id in range(batches[-1][-1] + 1)]
        return batches, versions, stream.accounting.dropped, seconds

    plain, over = run(1.0), run(oversample)
    assert over[:3] == plain[:3]
    assert over[3] < 0.9 * plain[3]


def test_the_surplus_is_recalled_as_the_batch_before_a_publish_is_taken_and_starts_anew_first():
    """By hand: 8 of 24 are taken, 16 start anew on the next weights, and the 8 after them for the first time."""
    engine = SimulatedEngine(lambda group_id: 1.0 if group_id < 16 else 50.0)
    stream = stream_of(run_config(ColocatedConfig(), oversample=3.0), engine)

    async def main() -> None:
        async with stream:
            await asyncio.sleep(0)
            assert engine.requests == list(range(24))
            await stream.next_batch()
            assert engine.num_running == 0  # the engine may sleep now
            assert stream.metrics() == {
                "rollout/groups_started": 24.0,
                "rollout/groups_trained": 8.0,
                "rollout/groups_in_flight": 16.0,
                "rollout/retried_groups": 0.0,
                "rollout/surplus_groups": 16.0,
            }
            assert stream.state() == {
                "next_index": 24,
                "in_flight": list(range(8, 24)),
                "trained": 8,
                "dropped": {},
                "settled_below": 8,
                "settled_beyond": [],
            }
            stream.release()
            await asyncio.sleep(0)
            assert engine.requests[24:] == list(range(8, 32))
            assert stream.metrics()["rollout/groups_started"] == 32.0

    simulate(main())


def test_a_batch_that_is_cancelled_while_its_surplus_ends_is_still_there():
    class SlowToEnd(SimulatedEngine):
        async def generate(
            self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling
        ) -> AsyncIterator[Rollout]:
            try:
                async for sample in super().generate(prompt, group_id=group_id, n=n, sampling=sampling):
                    yield sample
            except asyncio.CancelledError:
                await asyncio.sleep(5.0)
                raise

    engine = SlowToEnd(lambda group_id: 1.0 if group_id < P else 50.0)
    stream = stream_of(run_config(ColocatedConfig(), oversample=2.0), engine)

    async def main() -> None:
        async with stream:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.next_batch(), 3.0)
            state = stream.state()
            assert (state["trained"], sorted(state["in_flight"])) == (0, list(range(2 * P)))
            assert [group.group_id for group in await stream.next_batch()] == list(range(P))
            stream.metrics()

    simulate(main())


@pytest.mark.parametrize("delay", [exponential, long_tailed])
@pytest.mark.parametrize(
    ("max_staleness", "publish_every", "window"), [(0.0, 4, 32), (0.25, 4, 32), (1.0, 1, 8), (1.0, 2, 16), (2.0, 1, 24)]
)
def test_over_sampling_keeps_to_the_bound_and_trains_on_no_group_twice(delay, max_staleness, publish_every, window):
    placement = FullyAsyncConfig(max_staleness=max_staleness, publish_every=publish_every)
    config, engine = run_config(placement, window=window, oversample=2.5), SimulatedEngine(delay)
    assert config.staleness_bound == run_config(placement, window=window).staleness_bound
    stream = stream_of(config, engine, drop_fraction=0.5)
    batches, staleness = simulate(train(stream, engine, steps=120, publish_every=publish_every, train_s=2.0))
    assert staleness <= config.staleness_bound
    trained = [group_id for batch in batches for group_id in batch]
    assert len(set(trained)) == len(trained) == 120 * P
    state = stream.state()
    dropped = {group_id for group_id in range(state["next_index"]) if is_dropped(group_id, 0.5)}
    assert set(trained) | set(state["in_flight"]) | dropped == set(range(state["next_index"]))
    assert not set(trained) & set(state["in_flight"])


@pytest.mark.parametrize("oversample", [1.0, 2.0])
@pytest.mark.parametrize("drop_fraction", [0.0, 0.3])
@pytest.mark.parametrize("placement", [ColocatedConfig(), FullyAsyncConfig(max_staleness=2.0)])
def test_a_restored_stream_trains_on_every_group_exactly_once(placement, drop_fraction, oversample):
    config = run_config(placement, oversample=oversample)
    engine = SimulatedEngine(long_tailed)
    before = stream_of(config, engine, drop_fraction=drop_fraction)
    after = stream_of(config, SimulatedEngine(exponential), drop_fraction=drop_fraction)

    async def interrupted() -> list[list[int]]:
        batches = []
        async with before:
            for _ in range(7):
                batches.append([group.group_id for group in await before.next_batch()])
                state = before.state()
                await asyncio.sleep(3.0)
                before.release()
            # The run dies here, after the checkpoint of its seventh step.
            after.restore(state)
        return batches

    batches = simulate(interrupted())
    after.metrics()  # asserts that every started group is accounted for, once
    rest, _ = simulate(train(after, after._engine, steps=9))  # type: ignore[arg-type]
    batches += rest
    trained = sorted(group_id for batch in batches for group_id in batch)
    kept = [group_id for group_id in range(1000) if not is_dropped(group_id, drop_fraction)]
    if isinstance(placement, ColocatedConfig):  # first in, first out: what is trained is exactly the beginning
        assert trained == kept[: 16 * P]
    assert len(trained) == len(set(trained)) == 16 * P == after.accounting.trained
    skipped = set(kept[: kept.index(trained[-1])]) - set(trained)
    assert skipped <= set(after.state()["in_flight"])


@pytest.mark.parametrize("max_staleness", [0.0, 1.0, 3.0])
def test_a_restored_stream_admits_as_many_as_a_new_one_however_far_the_run_is(max_staleness):
    """P117, AReaL pull request 1345: after a resume the version counted as room, and 48 groups started where 8 may."""
    config, engine = run_config(FullyAsyncConfig(max_staleness=max_staleness)), SimulatedEngine(exponential)
    stream = stream_of(config, engine)
    settled = {"settled_below": 5, "settled_beyond": [6, 8, *range(10, 100 * P + 3)]}
    in_flight = [5, 7, 9]
    stream.restore({"next_index": 100 * P + 3, "in_flight": in_flight, "trained": 100 * P, "dropped": {}, **settled})

    async def main() -> None:
        async with stream:
            await asyncio.sleep(1000)
            assert engine.requests[:4] == [*in_flight, 100 * P + 3]
            assert len(engine.requests) == len(stream.in_flight) == config.max_admitted == (1 + max_staleness) * P

    simulate(main())


def test_a_stream_that_goes_on_with_another_group_than_was_in_flight_fails_in_its_next_row():
    """By hand: 8 trained + 1 in flight = 9, but 8 was in flight, and 4 is trained on already."""
    stream = stream_of(run_config(ColocatedConfig()), SimulatedEngine(exponential))
    settled = {"settled_below": 8, "settled_beyond": []}
    stream.restore({"next_index": 9, "in_flight": [4], "trained": 8, "dropped": {}, **settled})
    with pytest.raises(AssertionError, match="skipped: position 8; twice: position 4"):
        stream.metrics()


def test_a_state_survives_json_and_lists_what_was_in_flight_once():
    import json

    engine = SimulatedEngine(exponential)
    stream = stream_of(run_config(FullyAsyncConfig(max_staleness=1.0)), engine)

    async def main() -> dict[str, Any]:
        async with stream:
            taken = {group.group_id for group in await stream.next_batch()}
            state = json.loads(json.dumps(stream.state()))
            assert sorted(taken | set(state["in_flight"])) == list(range(state["next_index"]))
            return state

    state = simulate(main())
    assert (state["next_index"], len(state["in_flight"]), state["trained"]) == (2 * P, P, P)
    restored = stream_of(run_config(FullyAsyncConfig(max_staleness=1.0)), engine)
    restored.restore(state)
    assert restored.state() == state


class FailingEngine(SimulatedEngine):
    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        async for sample in super().generate(prompt, group_id=group_id, n=n, sampling=sampling):
            if group_id == 5:
                raise EngineError("the engine died")
            yield sample


def test_an_engine_that_fails_ends_the_run_with_its_own_error():
    engine = FailingEngine(exponential)
    with pytest.raises(EngineError, match="the engine died"):
        simulate(train(stream_of(run_config(ColocatedConfig()), engine), engine, steps=1))


def test_an_error_while_the_trainer_trains_surfaces_at_the_next_batch():
    engine = FailingEngine(lambda group_id: 50.0 if group_id == 5 else 1.0)
    config = run_config(FullyAsyncConfig(max_staleness=3.0), window=4 * P)
    stream = stream_of(config, engine)

    async def main() -> None:
        async with stream:
            await stream.next_batch()
            await asyncio.sleep(100)
            with pytest.raises(EngineError, match="the engine died"):
                await stream.next_batch()

    simulate(main())


def test_a_group_whose_task_is_cancelled_from_outside_is_an_error_and_no_stall():
    class Cancelling(SimulatedEngine):
        async def generate(self, prompt: Prompt, **_: Any) -> AsyncIterator[Rollout]:
            await asyncio.sleep(1.0)
            raise asyncio.CancelledError
            yield

    engine = Cancelling(exponential)
    with pytest.raises(StreamError, match="group 0 was cancelled from outside"):
        simulate(train(stream_of(run_config(ColocatedConfig()), engine), engine, steps=1))


def failing_on(is_failing: Callable[[int], bool]) -> SimulatedTask:
    async def grade(group_id: int) -> None:
        if is_failing(group_id):
            raise RewardError("no grade")

    return SimulatedTask(grade)


def test_a_failed_grade_drops_the_group_and_is_counted():
    """P121: one group in twenty fails; the counts of every row add up."""
    engine = SimulatedEngine(exponential)
    task = failing_on(lambda group_id: group_id % 20 == 3)
    stream = stream_of(run_config(ColocatedConfig()), engine, task=task)
    batches, _ = simulate(train(stream, engine, steps=10))
    trained = [group_id for batch in batches for group_id in batch]
    assert trained == [group_id for group_id in range(100) if group_id % 20 != 3][: 10 * P]
    assert stream.accounting.dropped == {"reward_error": 5}  # 3, 23, 43, 63, 83


def test_a_group_that_was_dropped_after_the_last_row_before_a_stop_is_in_the_next_one():
    engine = SimulatedEngine(lambda group_id: 1.0 if group_id == 0 else 50.0)
    task = failing_on(lambda group_id: group_id == 0)
    stopped = stream_of(run_config(ColocatedConfig()), engine, task=task)

    async def stop_while_waiting() -> dict[str, Any]:
        async with stopped:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stopped.next_batch(), 3.0)
            return stopped.state()

    resumed = stream_of(run_config(ColocatedConfig()), engine, task=task)
    resumed.restore(simulate(stop_while_waiting()))
    row = resumed.metrics()
    assert (row["rollout/groups_started"], row["rollout/dropped/reward_error"]) == (9.0, 1.0)
    assert (row["rollout/groups_trained"], row["rollout/groups_in_flight"]) == (0.0, 8.0)


def test_more_failed_grades_than_allowed_end_the_run():
    engine = SimulatedEngine(exponential)
    stream = stream_of(run_config(ColocatedConfig()), engine, task=failing_on(lambda group_id: group_id % 5 == 0))
    with pytest.raises(StreamError, match=r"max_failed_fraction=0\.1.*not wrong answers"):
        simulate(train(stream, engine, steps=10))
    tolerant = stream_of(
        run_config(ColocatedConfig()),
        engine,
        task=failing_on(lambda group_id: group_id % 5 == 0),
        max_failed_fraction=0.5,
    )
    simulate(train(tolerant, engine, steps=10))


def hanging_on(is_hanging: Callable[[int], bool]) -> SimulatedTask:
    async def grade(group_id: int) -> None:
        if is_hanging(group_id):
            await asyncio.Event().wait()

    return SimulatedTask(grade)


def test_a_grade_that_hangs_delays_its_own_group_is_dropped_after_its_time_and_counted():
    """By hand: of 0 to 7 only 3 hangs. 8 replaces it at second 60, 1 second later the batch is there."""
    engine = SimulatedEngine(lambda group_id: 1.0)
    stream = stream_of(
        run_config(ColocatedConfig()), engine, task=hanging_on(lambda group_id: group_id == 3), reward_timeout_s=59.0
    )

    async def main() -> list[int]:
        async with stream:
            groups = await stream.next_batch()
            assert asyncio.get_running_loop().time() == pytest.approx(61.0)
            assert stream.metrics()["rollout/dropped/reward_timeout"] == 1.0  # the numbers add up, it asserts
            assert stream.state() == {
                "next_index": 9,
                "in_flight": [],
                "trained": 8,
                "dropped": {"reward_timeout": 1},
                "settled_below": 9,
                "settled_beyond": [],
            }
            return [group.group_id for group in groups]

    assert simulate(main()) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_groups_behind_one_whose_grade_hangs_are_trained_on_meanwhile():
    """Fully async, with room in the window: the hanging group holds up no batch before its own time is over."""
    config = run_config(FullyAsyncConfig(max_staleness=3.0), window=3 * P)
    engine = SimulatedEngine(lambda group_id: 1.0)
    stream = stream_of(config, engine, task=hanging_on(lambda group_id: group_id == 3), reward_timeout_s=100.0)

    async def main() -> None:
        async with stream:
            for _ in range(2):
                await stream.next_batch()
                stream.release()
            assert asyncio.get_running_loop().time() < 5.0

    simulate(main())


def test_a_run_whose_every_grade_hangs_ends_with_a_headline():
    engine = SimulatedEngine(exponential)
    stream = stream_of(run_config(ColocatedConfig()), engine, task=hanging_on(lambda _: True), reward_timeout_s=60.0)
    words = r"9 of the last \d+ groups failed \(reward_timeout 9\).*not wrong answers.*stream\.reward_timeout_s"
    with pytest.raises(StreamError, match=words):
        simulate(train(stream, engine, steps=1))


class RefusingEngine(SimulatedEngine):
    """Fails as often as is said for a group, after one of its samples. It lives on."""

    def __init__(self, delay: Callable[[int], float], failures: Callable[[int], int]) -> None:
        super().__init__(delay)
        self._failures = failures
        self.asked: Counter[int] = Counter()

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        self.asked[group_id] += 1
        async for sample in super().generate(prompt, group_id=group_id, n=n, sampling=sampling):
            yield sample
            if self.asked[group_id] <= self._failures(group_id):
                raise RequestError("the engine refused a request")


def test_a_group_that_a_living_engine_fails_on_is_asked_for_again_and_trained_on():
    """P121: it is whole again; one that keeps failing is dropped and counted, below."""
    engine = RefusingEngine(exponential, lambda group_id: REQUEST_RETRIES if group_id == 5 else 0)
    stream = stream_of(run_config(ColocatedConfig()), engine)

    async def main() -> list[RolloutGroup]:
        async with stream:
            return await stream.next_batch()

    groups = simulate(main())
    assert [group.group_id for group in groups] == list(range(P))
    assert [rollout.index for rollout in groups[5].rollouts] == list(range(G))
    assert engine.asked[5] == 1 + REQUEST_RETRIES == engine.asked.total() - (P - 1)
    assert stream.accounting.dropped == {} and stream.metrics()["rollout/retried_groups"] == REQUEST_RETRIES == 2


def test_a_group_that_a_living_engine_keeps_failing_on_is_dropped_and_counted_through_a_resume():
    failures = {4: 3, 21: 3}
    engine = RefusingEngine(exponential, lambda group_id: failures.get(group_id, 0))
    stream = stream_of(run_config(ColocatedConfig()), engine)
    batches, _ = simulate(train(stream, engine, steps=2))
    assert [i for batch in batches for i in batch] == [i for i in range(2 * P + 1) if i != 4]
    assert stream.accounting.dropped == {"engine_error": 1}
    resumed = stream_of(run_config(ColocatedConfig()), engine)
    resumed.restore(stream.state())
    rest, _ = simulate(train(resumed, engine, steps=1))
    assert [i for batch in rest for i in batch] == [17, 18, 19, 20, 22, 23, 24, 25]
    assert resumed.accounting.dropped == {"engine_error": 2}
    assert resumed.accounting.started == 3 * P + 2 + len(resumed.in_flight)


def test_an_engine_that_fails_on_every_request_ends_the_run_with_a_headline():
    engine = RefusingEngine(exponential, lambda _: 100)
    words = r"9 of the last 9 groups failed \(engine_error 9\).*not wrong answers.*the engine refused a request"
    with pytest.raises(StreamError, match=words):
        simulate(train(stream_of(run_config(ColocatedConfig()), engine), engine, steps=1))


@pytest.mark.parametrize("error", [EngineError, EngineUnfit])
def test_an_engine_that_died_or_is_unfit_is_not_asked_again(error):
    class Dead(RefusingEngine):
        async def generate(
            self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling
        ) -> AsyncIterator[Rollout]:
            async for sample in super().generate(prompt, group_id=group_id, n=n, sampling=sampling):
                if group_id == 5:
                    raise error("it is over")
                yield sample

    engine = Dead(exponential, lambda _: 0)
    with pytest.raises(error, match="it is over"):
        simulate(train(stream_of(run_config(ColocatedConfig()), engine), engine, steps=1))
    assert engine.asked[5] == 1


def test_a_stall_names_the_groups_that_are_waited_for():
    """P118: the wait for a batch has a limit, and says what it was for."""
    engine = SimulatedEngine(lambda group_id: 1e6 if group_id in (2, 5) else 1.0)
    stream = stream_of(run_config(ColocatedConfig()), engine)
    with pytest.raises(StreamError, match=r"10000 s \(stream.stall_timeout_s\).*had 6; in flight: \[2, 5\]"):
        simulate(train(stream, engine, steps=1))


def test_leaving_the_stream_cancels_what_is_in_flight():
    finished: list[int] = []

    class Noting(SimulatedEngine):
        async def generate(
            self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling
        ) -> AsyncIterator[Rollout]:
            async for sample in super().generate(prompt, group_id=group_id, n=n, sampling=sampling):
                yield sample
            finished.append(group_id)

    engine = Noting(lambda group_id: 1.0 if group_id < P else 50.0)
    stream = stream_of(run_config(FullyAsyncConfig(max_staleness=1.0)), engine)

    async def main() -> None:
        async with stream:
            await stream.next_batch()
        await asyncio.sleep(1000)

    simulate(main())
    assert sorted(finished) == list(range(P)) and len(engine.requests) == 2 * P
