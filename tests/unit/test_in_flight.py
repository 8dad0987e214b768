"""What becomes of running requests at a publish: the real loop, stream, placement and engine, in simulated time.

Only the model server and the trainer are simulated. The server samples one token a second, and the id of the token is
the version that it holds: so what it sampled says itself which weights that was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rl.algorithms.grpo import GRPO
from rl.canary import Canary
from rl.config.algorithms import GRPOConfig
from rl.config.schema import CanaryConfig, Dtype, FullyAsyncConfig, InFlight, Packing, RunConfig, StreamConfig
from rl.config.sentinels import SentinelsConfig
from rl.loggers.names import unlisted
from rl.loop import Cadence, Progress, Run, fit
from rl.placement.fully_async import PAUSE_MODES, FullyAsync
from rl.protocols import Bucket, EngineCapabilities, EngineError, SharedBucket, UpdateManifest
from rl.rollout.engine import Engine
from rl.rollout.sampler import Outcome, Part, Sampled, part_seed
from rl.sentinels import Sentinels
from rl.stream import GroupStream, StreamConfigValues
from rl.trainer.packing import pack
from rl.types import (
    DeviceUse,
    EvalResult,
    FinishReason,
    Prompt,
    Reward,
    RewardError,
    Rollout,
    RolloutGroup,
    Sampling,
    StepStats,
)
from rl.weights.transport import Handed, Overlapped, Transport
from scripts.simulated_time import simulate
from tests.made_task import TrainingOnly
from tests.recorder import Recorder

P, G = 8, 2
MODES = list(InFlight)
HANDED, OVERLAPPED = Handed(), Overlapped()
TRAIN_S, SEND_S = 3.0, 0.5
LONGEST = 200
EVAL = "eval/timed/greedy"


def length_of(group_id: int, index: int) -> int:
    """Of an answer, in tokens: one in 20 is ten times as long."""
    rng = np.random.default_rng([4, group_id, index])
    return min(LONGEST, 1 + int(rng.exponential(6.0) * (10.0 if rng.uniform() < 0.05 else 1.0)))


def length_of_part(part: Part) -> int:
    """Of the whole answer that `part` belongs to, which its seed tells."""
    group_id, num_before = int(part.prompt.prompt_id), len(part.prefix)
    seeds = [part_seed(part.sampling, group_id, index, num_before) for index in range(G)]
    return length_of(group_id, seeds.index(part.seed))


class TimedSampler:
    """Implements `rl.rollout.sampler.Sampler`; its own record of what it sampled is the truth of these tests."""

    name = "timed"
    capabilities = EngineCapabilities(seeded=True, loses_weights_asleep=False, renormalizes=True)

    def __init__(self) -> None:
        self.version = -1
        self._running: dict[Part, tuple[float, asyncio.TimerHandle, int]] = {}

    async def start(self, *, deliver: Callable[[Sequence[Outcome]], None], die: Callable[[str], None]) -> None:
        self._deliver, self._loop = deliver, asyncio.get_running_loop()

    def check(self, prompt: Prompt, sampling: Sampling) -> None: ...

    def submit(self, parts: Sequence[Part]) -> None:
        for part in parts:
            num_left = length_of_part(part) - len(part.prefix)
            assert num_left > 0
            timer = self._loop.call_later(num_left, self._end, part)
            self._running[part] = (self._loop.time(), timer, num_left)

    def _end(self, part: Part) -> None:
        _, _, num_left = self._running.pop(part)
        self._deliver([(part, self._sampled(num_left, FinishReason.STOP))])

    def abort(self, parts: Sequence[Part]) -> None:
        outcomes = []
        for part in parts:
            if part in self._running:
                began, timer, _ = self._running.pop(part)
                timer.cancel()
                outcomes.append((part, self._sampled(int(self._loop.time() - began), FinishReason.ABORT)))
        self._loop.call_soon(self._deliver, outcomes)

    def _sampled(self, num_tokens: int, reason: FinishReason) -> Sampled:
        return Sampled(np.full(num_tokens, self.version, np.int32), np.full(num_tokens, -1.0, np.float32), "", reason)

    def decode(self, token_ids: Sequence[int], *, keep_special: bool) -> str:
        return ""

    async def policy_version(self) -> int:
        return self.version

    async def weight_digests(self) -> dict[str, str]:
        return {}

    async def begin_update(self, manifest: UpdateManifest) -> None:
        assert not self._running, "weights change under a running request"

    async def receive(self, bucket: Bucket) -> None:
        await asyncio.sleep(SEND_S)
        assert not self._running, "weights change under a running request"

    async def finish_update(self, version: int) -> None:
        self.version = version

    async def abort_update(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake_weights(self) -> None: ...

    async def wake_cache(self) -> None: ...

    async def close(self) -> None: ...


class TimedTrainer:
    num_ranks = 1

    def __init__(self, train_s: float = TRAIN_S) -> None:
        self._train_s = train_s

    async def start(self) -> None: ...

    async def step(self, batch: Any) -> StepStats:
        await asyncio.sleep(self._train_s)
        return StepStats(1)

    async def manifest(self, version: int) -> UpdateManifest:
        return UpdateManifest(version, ())

    async def buckets(self) -> AsyncIterator[Bucket]:
        yield []

    async def outlet(self, method: str, *arguments: Any) -> None: ...

    async def post_buckets(self, method: str, *arguments: Any) -> AsyncIterator[SharedBucket]:
        yield SharedBucket({}, (), 0)

    async def weights_digest(self) -> str:
        return ""

    async def device_uses(self) -> list[list[DeviceUse]]:
        return []

    async def close(self) -> None: ...


class EvenAndOdd(TrainingOnly):
    """The second answer of a group is the right one. Every tenth group is uniform and dropped, see `Dropping`."""

    num_prompts = 10_000

    def prompt(self, seed: int, index: int) -> Prompt:
        return Prompt(str(index), (), np.array([1], dtype=np.int32), answer="", task="timed")

    async def grade(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        return [Reward(float(rollout.index), correct=rollout.index == 1) for rollout in rollouts]


class Dropping(GRPO):
    def keep(self, group: RolloutGroup) -> bool:
        return group.group_id % 10 != 7


class Evaluation:
    """Asks for a few answers, as an evaluator does, and reports which weights gave them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.fails_at: int | None = None

    async def evaluate(self, engine: Any, *, step: int) -> list[EvalResult]:
        began = asyncio.get_running_loop().time()
        sampling = Sampling(temperature=1.0, max_new_tokens=LONGEST, seed=1)
        rollouts = []
        for index in range(4):
            prompt = EvenAndOdd().prompt(0, index)
            rollouts += [r async for r in engine.generate(prompt, group_id=index, n=G, sampling=sampling)]
        if step == self.fails_at:
            raise RewardError("no grade")
        (version,) = {int(v) for r in rollouts for v in r.policy_versions[r.loss_mask]}
        self.seconds += asyncio.get_running_loop().time() - began
        return [EvalResult("timed", "greedy", step / 100, 0.0, 4, G, sampling, version, 0.0)]


class Rows:
    """Of finished steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rows: list[Mapping[str, float]] = []
        self.groups: list[RolloutGroup] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        assert unlisted(metrics) == []
        if step > 0:
            self.steps.append(step)
            self.rows.append(metrics)

    def log_rollouts(self, groups: Sequence[RolloutGroup], *, step: int) -> None:
        self.groups += groups

    def log_digests(self, digests: Mapping[str, str], *, step: int) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class NoCheckpoints:
    async def save(self, *, step: int, state: Mapping[str, Any], trainer: Any) -> None: ...


def run_of(
    config: RunConfig,
    *,
    steps: int,
    evaluate_every: int = 0,
    transport: Transport = HANDED,
    train_s: float = TRAIN_S,
) -> Run:
    engine: Any = Engine(TimedSampler())
    trainer: Any = TimedTrainer(train_s)
    algorithm = config.algorithm
    assert isinstance(config.placement, FullyAsyncConfig) and isinstance(algorithm, GRPOConfig)
    values = StreamConfigValues(
        seed=0,
        sampling=Sampling(temperature=1.0, max_new_tokens=LONGEST, seed=0),
        prompts_per_step=P,
        group_size=G,
        groups_per_publish=config.groups_per_publish,
        max_admitted=config.max_admitted,
        max_surplus=config.max_surplus,
        window=config.window,
        max_failed_fraction=0.1,
        reward_timeout_s=300.0,
        stall_timeout_s=10_000.0,
    )
    return Run(
        trainer=trainer,
        engine=engine,
        placement=FullyAsync(config.placement, trainer=trainer, engine=engine, transport=transport),
        stream=GroupStream(values, task=EvenAndOdd(), engine=engine, algorithm=Dropping(algorithm)),
        evaluator=Evaluation(),
        canary=Canary(
            CanaryConfig(every=0), bound=1.0, prompts=[], sampling=values.sampling, engine=engine, trainer=trainer
        ),
        algorithm=GRPO(algorithm),
        sentinels=Sentinels(SentinelsConfig(), compute_dtype=Dtype.float32),
        log=Rows(),
        checkpoints=NoCheckpoints(),
        pack=lambda groups, version: pack(
            groups,
            prompts_per_mini_batch=None,
            num_ranks=1,
            max_tokens_per_micro_batch=1000,
            packing=Packing.tokens,
            policy_version=version,
            skip_zero_advantage=True,
        ),
        cadence=Cadence(steps, config.placement.publish_every, evaluate_every, False, False, 0),
        progress=Progress(),
        staleness_bound=config.staleness_bound,
        publish_timeout_s=10_000.0,
        restore_from=None,
    )


def config_of(
    in_flight: InFlight, *, max_staleness: float = 1.0, publish_every: int = 1, window: int | None = None
) -> RunConfig:
    return RunConfig(
        algorithm=GRPOConfig(prompts_per_step=P, group_size=G),
        placement=FullyAsyncConfig(max_staleness=max_staleness, publish_every=publish_every, in_flight=in_flight),
        stream=StreamConfig(window=window),
    )


def fitted(
    in_flight: InFlight,
    *,
    steps: int = 60,
    evaluate_every: int = 0,
    transport: Transport = HANDED,
    train_s: float = TRAIN_S,
    **settings: Any,
) -> tuple[Run, Any, float]:
    """(run, its log, simulated seconds)."""

    async def main() -> tuple[Run, Any, float]:
        config = config_of(in_flight, **settings)
        run = run_of(config, steps=steps, evaluate_every=evaluate_every, transport=transport, train_s=train_s)
        await fit(run)
        seconds = asyncio.get_running_loop().time()
        await run.placement.close()
        return run, run.log, seconds

    return simulate(main())


def responses(log: Any) -> list[Rollout]:
    return [rollout for group in log.groups for rollout in group.rollouts]


@pytest.mark.parametrize("transport", [HANDED, OVERLAPPED])
@pytest.mark.parametrize("in_flight", MODES)
@pytest.mark.parametrize(
    ("max_staleness", "publish_every", "window"), [(1.0, 1, None), (3.0, 1, 2 * P), (0.5, 4, None), (0.0, 2, None)]
)
def test_nothing_is_lost_cut_or_doubled_and_the_bound_holds(in_flight, max_staleness, publish_every, window, transport):
    """The loop asserts the bound of every batch, and the stream that the groups of every row add up."""
    run, log, _ = fitted(
        in_flight, max_staleness=max_staleness, publish_every=publish_every, window=window, transport=transport
    )
    assert run.progress.step == len(log.rows) == 60
    assert max(row["staleness/max"] for row in log.rows) <= run.staleness_bound
    trained = [group.group_id for group in log.groups]
    assert len(set(trained)) == len(trained) == 60 * P
    state = run.stream.state()
    dropped = {group_id for group_id in range(state["next_index"]) if group_id % 10 == 7}
    # In flight are also dropped ones that have not been judged yet.
    assert set(trained) | set(state["in_flight"]) | dropped == set(range(state["next_index"]))
    for rollout in responses(log):
        assert rollout.num_response_tokens == length_of(rollout.group_id, rollout.index)
        assert rollout.finish_reason is FinishReason.STOP
    for row in log.rows:
        assert sum(value for key, value in row.items() if key.startswith("staleness/count_")) == P * G


@pytest.mark.parametrize("transport", [HANDED, OVERLAPPED])
@pytest.mark.parametrize("in_flight", MODES)
def test_each_token_has_the_version_that_sampled_it(in_flight, transport):
    _, log, _ = fitted(in_flight, transport=transport)
    rollouts = responses(log)
    for rollout in rollouts:
        versions = rollout.policy_versions[rollout.loss_mask]
        np.testing.assert_array_equal(versions, rollout.token_ids[rollout.loss_mask])
        assert versions.tolist() == sorted(versions)
        is_mixed = len(set(versions)) > 1
        assert not is_mixed or in_flight is InFlight.continue_on_new_weights
    num_mixed = sum(rollout.min_policy_version < rollout.max_policy_version for rollout in rollouts)
    num_restarted = sum(rollout.num_discarded_tokens > 0 for rollout in rollouts)
    assert (num_mixed > 0) == (in_flight is InFlight.continue_on_new_weights)
    assert (num_restarted > 0) == (in_flight is InFlight.abort)
    assert num_mixed / len(rollouts) == pytest.approx(np.mean([r["rollout/mixed_version_fraction"] for r in log.rows]))
    assert sum(r.num_discarded_tokens for r in rollouts) == sum(r["rollout/discarded_tokens"] for r in log.rows)


def test_a_tail_holds_up_a_publish_that_lets_it_finish_and_no_other():
    seconds = {in_flight: fitted(in_flight)[2] for in_flight in MODES}
    assert seconds[InFlight.continue_on_new_weights] < 0.9 * seconds[InFlight.finish]
    # Each step trains for 3 s and publishes for 0.5 s, whatever the engine does.
    assert seconds[InFlight.continue_on_new_weights] >= 60 * (TRAIN_S + SEND_S)


def test_a_tail_holds_up_no_training_where_the_publish_is_overlapped():
    """A step trains about as long as the engine takes for its answers, so one could hide behind the other."""
    (run, _, overlapped), (_, _, blocking) = (
        fitted(InFlight.finish, max_staleness=2.0, transport=transport, train_s=40.0)
        for transport in (OVERLAPPED, HANDED)
    )
    assert overlapped < 0.95 * blocking
    assert run.progress.policy_version == 60


def test_with_no_staleness_an_overlapped_publish_trains_on_the_same_answers():
    of_each = [fitted(InFlight.finish, steps=12, max_staleness=0.0, transport=each)[1] for each in (HANDED, OVERLAPPED)]
    handed, overlapped = ([(r.group_id, r.index, r.token_ids.tolist()) for r in responses(log)] for log in of_each)
    assert handed == overlapped


def test_an_overlapped_publish_that_fails_is_raised_by_the_placement_at_once_and_by_the_next_publish():
    async def main() -> None:
        run: Any = run_of(config_of(InFlight.finish), steps=1, transport=OVERLAPPED)
        await run.placement.start()
        await run.placement.publish(0)
        run.engine._sampler.receive = failing
        await run.placement.publish(1)
        began = asyncio.get_running_loop().time()
        error = await run.placement.failure()
        assert isinstance(error, EngineError) and asyncio.get_running_loop().time() == began
        with pytest.raises(EngineError, match="no room"):
            await run.placement.publish(2)
        await run.placement.close()

    async def failing(bucket: Any) -> None:
        raise EngineError("no room for the weights")

    simulate(main())


@pytest.mark.parametrize("transport", [HANDED, OVERLAPPED])
@pytest.mark.parametrize("in_flight", MODES)
def test_an_evaluation_is_of_one_version_and_whole(in_flight, transport):
    """The loop asserts the version: a publish waits for the evaluation, whose answers it would change or cut."""
    run, log, _ = fitted(in_flight, steps=24, publish_every=2, evaluate_every=4, transport=transport)
    assert log.steps == list(range(1, 25))
    assert {step: row[EVAL] for step, row in zip(log.steps, log.rows, strict=True) if EVAL in row} == {
        step: step / 100 for step in range(4, 25, 4)
    }
    assert run.progress.policy_version == 12


def test_training_goes_on_while_an_evaluation_runs():
    """Requests do not slow each other down here, so what an evaluation costs is what training waits for it."""
    seconds = {}
    for evaluate_every in (0, 4):
        run, _, seconds[evaluate_every] = fitted(
            InFlight.continue_on_new_weights, steps=24, publish_every=4, evaluate_every=evaluate_every
        )
    evaluator: Any = run.evaluator
    assert evaluator.seconds > 6 * 4 * TRAIN_S
    assert seconds[4] - seconds[0] < 0.5 * evaluator.seconds


def test_an_evaluation_that_fails_ends_the_run_and_no_row_is_lost():
    async def main() -> Run:
        config = config_of(InFlight.finish, publish_every=4)
        run: Any = run_of(config, steps=24, evaluate_every=8)
        run.evaluator.fails_at = 8
        with pytest.raises(RewardError, match="no grade"):
            await fit(run)
        return run

    log: Any = simulate(main()).log
    assert log.steps == list(range(1, len(log.steps) + 1))
    assert 8 <= len(log.steps) < 12  # before the next publish
    assert not any(EVAL in row for row in log.rows)


@pytest.mark.parametrize(("in_flight", "pause"), [(mode, PAUSE_MODES[mode]) for mode in MODES])
def test_a_publish_stops_the_requests_before_the_weights_and_lets_them_go_after_them(in_flight, pause):
    """P122; what a pause or an update is broken off by, in any order: tests/unit/rollout/test_engine_races.py."""

    async def main() -> list[str]:
        engine: Any = Recorder(Engine(TimedSampler()))
        trainer: Any = TimedTrainer()
        placement = FullyAsync(
            FullyAsyncConfig(in_flight=in_flight), trainer=trainer, engine=engine, transport=Handed()
        )
        await placement.start()
        stats = await placement.publish(0)
        assert (stats.version, stats.pause_s < 0.1) == (0, True)
        return engine.calls

    assert simulate(main()) == ["start", f"pause:{pause}", "open_update", "policy_version", "resume"]
