"""The canary with a real trainer and a real engine, of which one in these tests does not take what it is sent."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl import canary as canary_module
from rl.algorithms.grpo import GRPO
from rl.canary import BFLOAT16_BOUND, FLOAT32_BOUND, Canary, CanaryError, Comparison, default_bound
from rl.config.algorithms import GRPOConfig
from rl.config.schema import (
    CanaryAction,
    CanaryConfig,
    ColocatedConfig,
    Dtype,
    FSDPConfig,
    FullyAsyncConfig,
    LocalRolloutConfig,
    OptimizerConfig,
    Packing,
    RunConfig,
)
from rl.config.sentinels import SentinelsConfig
from rl.loggers.names import unlisted
from rl.loop import Cadence, Progress, Run, fit
from rl.placement.colocated import Colocated
from rl.placement.fully_async import FullyAsync
from rl.protocols import Bucket, PauseMode, RequestError, UpdateManifest, UpdateSession
from rl.rollout.local_engine import LocalEngine, LocalSampler
from rl.run_folder import Checkpoints
from rl.sentinels import Sentinels
from rl.stream import GroupStream, StreamConfigValues
from rl.trainer.group import TrainerGroup
from rl.trainer.packing import pack
from rl.types import FinishReason, Prompt, Reward, Rollout, RolloutGroup, Sampling
from rl.weights.digest import tensor_digest
from rl.weights.transport import Handed, Overlapped, Transport
from tests.made_task import TrainingOnly

P, G = 4, 4
HANDED = Handed()
DEAF_LAYER = "model.layers.1."
PLACEMENTS = [pytest.param(ColocatedConfig, id="colocated"), pytest.param(FullyAsyncConfig, id="fully_async")]


class EvenTokens(TrainingOnly):
    """Prompts of different lengths; the reward is the share of even token ids in the answer."""

    num_prompts = 1000

    def prompt(self, seed: int, index: int) -> Prompt:
        rng = np.random.default_rng([seed, index])
        ids = rng.integers(2, 40, 3 + index % 5).astype(np.int32)
        return Prompt(f"even:{index}", (), ids, answer="", task="even")

    async def grade(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        shares = [float((rollout.token_ids[rollout.loss_mask] % 2 == 0).mean()) for rollout in rollouts]
        return [Reward(share, correct=share == 1.0) for share in shares]


class DeafEngine(LocalEngine):
    """Its `deaf_at`-th update leaves one layer as it was: what arrives for it is replaced by what arrived before."""

    def __init__(self, *arguments: Any, deaf_at: int | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.deaf_at = deaf_at
        self.before: dict[str, Any] = {}
        self.sent: list[dict[str, str]] = []
        """Digests of what each update brought."""
        self.held: list[dict[str, str]] = []
        """Digests of what the engine held after it."""
        self.versions: list[int] = []
        self.asked: list[int] = []
        """Group ids."""

    def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        self.asked.append(group_id)
        return super().generate(prompt, group_id=group_id, n=n, sampling=sampling)

    async def open_update(self, manifest: UpdateManifest) -> Any:
        self.versions.append(manifest.version)
        if self.deaf_at is None:
            return await super().open_update(manifest)
        self.sent.append({})
        return _DeafSession(self, await super().open_update(manifest))


class _DeafSession:
    def __init__(self, engine: DeafEngine, session: UpdateSession) -> None:
        self._engine, self._session = engine, session

    async def send(self, bucket: Bucket) -> None:
        engine = self._engine
        engine.sent[-1] |= {name: tensor_digest(tensor) for name, tensor in bucket}
        is_deaf = len(engine.sent) == engine.deaf_at
        new = {name: tensor.clone() for name, tensor in bucket if name.startswith(DEAF_LAYER)}
        await self._session.send([(name, engine.before[name] if is_deaf and name in new else t) for name, t in bucket])
        engine.before |= new

    async def commit(self, version: int) -> None:
        await self._session.commit(version)
        self._engine.held.append(await self._engine.weight_digests())

    async def abort(self) -> None:
        await self._session.abort()


class Rows:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        assert unlisted(metrics) == []
        self.rows.append({"step": step, **metrics})

    def log_rollouts(self, groups: Sequence[RolloutGroup], *, step: int) -> None: ...

    def log_digests(self, digests: Mapping[str, str], *, step: int) -> None: ...

    def close(self, *, failed: bool) -> None: ...

    def of(self, key: str) -> dict[int, float]:
        return {int(row["step"]): row[key] for row in self.rows if key in row}


class NoEvaluation:
    async def evaluate(self, engine: Any, *, step: int) -> list[Any]:
        raise AssertionError("no evaluation was asked for")


def run_of(
    model: Path,
    folder: Path,
    *,
    steps: int,
    placement: type[ColocatedConfig] | type[FullyAsyncConfig] = ColocatedConfig,
    transport: Transport = HANDED,
    deaf_at: int | None = None,
    action: CanaryAction = CanaryAction.warn,
    every: int = 1,
    checkpoint_every: int = 0,
) -> Run:
    algorithm = GRPOConfig(prompts_per_step=P, group_size=G)
    config = RunConfig(algorithm=algorithm, placement=placement(), canary=CanaryConfig(every=every, action=action))
    trainer = trainer_of(model, algorithm, steps=steps)
    engine = DeafEngine(LocalRolloutConfig(dtype=Dtype.float32), model_folder=model, device="cpu", deaf_at=deaf_at)
    sampling = Sampling(temperature=0.9, max_new_tokens=12, seed=0)
    built: Any = {ColocatedConfig: Colocated, FullyAsyncConfig: FullyAsync}[placement]
    values = StreamConfigValues(
        seed=0,
        sampling=sampling,
        prompts_per_step=P,
        group_size=G,
        groups_per_publish=config.groups_per_publish,
        max_admitted=config.max_admitted,
        max_surplus=config.max_surplus,
        window=config.window,
        max_failed_fraction=0.1,
        reward_timeout_s=300.0,
        stall_timeout_s=60.0,
    )
    task = EvenTokens()
    return Run(
        trainer=trainer,
        engine=engine,
        placement=built(config.placement, trainer=trainer, engine=engine, transport=transport),
        stream=GroupStream(values, task=task, engine=engine, algorithm=GRPO(algorithm)),
        evaluator=NoEvaluation(),
        canary=canary_of(config.canary, trainer, engine),
        algorithm=GRPO(algorithm),
        sentinels=Sentinels(SentinelsConfig(), compute_dtype=Dtype.float32),
        log=Rows(),
        checkpoints=Checkpoints(folder, keep_last=2),
        pack=_pack,
        cadence=Cadence(steps, 1, 0, False, False, checkpoint_every=checkpoint_every),
        progress=Progress(),
        staleness_bound=config.staleness_bound,
        publish_timeout_s=60.0,
        restore_from=None,
    )


def _pack(groups: list[RolloutGroup], policy_version: int) -> Any:
    return pack(
        groups,
        prompts_per_mini_batch=None,
        num_ranks=1,
        max_tokens_per_micro_batch=200,
        packing=Packing.tokens,
        policy_version=policy_version,
        skip_zero_advantage=True,
    )


def trainer_of(model: Path, algorithm: GRPOConfig, *, steps: int) -> TrainerGroup:
    return TrainerGroup(
        FSDPConfig(optimizer=OptimizerConfig(lr=5e-3), compute_dtype=Dtype.float32, recompute=False),
        model_folder=model,
        algorithm=algorithm,
        device="cpu",
        num_ranks=1,
        seed=0,
        total_updates=steps,
    )


def canary_of(config: CanaryConfig, trainer: TrainerGroup, engine: LocalEngine) -> Canary:
    return Canary(
        config,
        bound=FLOAT32_BOUND,
        prompts=[EvenTokens().prompt(0, index) for index in range(config.prompts)],
        sampling=Sampling(temperature=0.9, max_new_tokens=config.new_tokens, seed=0),
        engine=engine,
        trainer=trainer,
    )


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def fit_and_close(run: Run) -> Any:
    try:
        await fit(run)
    finally:
        await run.placement.close()
    return run.log


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_a_layer_that_misses_the_third_update_trips_at_step_3_is_named_and_mended(
    placement, tiny_qwen3, tmp_path, caplog
):
    """P162. Update 1 is version 0 and update 3 is version 2, which the trainer scores as it begins step 3."""
    caplog.set_level(logging.WARNING)
    run = run_of(tiny_qwen3, tmp_path, steps=5, placement=placement, deaf_at=3)
    log = await fit_and_close(run)
    engine: Any = run.engine

    assert log.of("canary/trips") == {1: 0.0, 2: 0.0, 3: 1.0, 4: 0.0, 5: 0.0}
    found = log.of("canary/logprob_difference_mean")
    assert found.pop(3) > 10 * FLOAT32_BOUND
    assert max(found.values()) < 1e-5

    stale = {name for name, digest in engine.held[2].items() if digest != engine.sent[2][name]}
    assert stale == {name for name in engine.sent[2] if name.startswith(DEAF_LAYER)}
    assert log.of("canary/differing_parameters") == {3: float(len(stale))}
    (message,) = [record.message for record in caplog.records if record.name == "rl.canary"]
    assert "weights of version 2 were not the trainer's" in message
    assert f"the first of {len(stale)} parameters that differ is {DEAF_LAYER}self_attn.q_proj.weight " in message

    # From the fourth update on, which is version 2 again, the engine holds what it was sent.
    assert engine.versions == [0, 1, 2, 2, 3, 4, 5]
    assert engine.sent[3] == engine.sent[2]
    assert engine.held[3:] == engine.sent[3:]
    assert run.progress.step == run.progress.policy_version == 5


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_stop_ends_the_run_before_the_step_and_keeps_the_checkpoint(placement, tiny_qwen3, tmp_path):
    options: Any = {"deaf_at": 3, "action": CanaryAction.stop, "checkpoint_every": 1}
    run = run_of(tiny_qwen3, tmp_path, steps=5, placement=placement, **options)
    with pytest.raises(
        CanaryError, match=r"version 2 .* the first of \d+ parameters that differ is model\.layers\.1\."
    ):
        await fit_and_close(run)
    assert run.progress.step == 2
    checkpoint = Checkpoints(tmp_path, keep_last=2).newest()
    assert checkpoint is not None and checkpoint.step == 2


async def test_nothing_is_asked_where_the_canary_is_off(tiny_qwen3, tmp_path):
    run = run_of(tiny_qwen3, tmp_path, steps=3, deaf_at=2, every=0)
    log = await fit_and_close(run)
    assert not [key for row in log.rows for key in row if key.startswith("canary/")]


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_thirty_healthy_steps_never_trip(placement, tiny_qwen3, tmp_path):
    log = await fit_and_close(run_of(tiny_qwen3, tmp_path, steps=30, placement=placement))
    assert log.of("canary/trips") == dict.fromkeys(range(1, 31), 0.0)
    assert log.of("canary/skipped_rollouts") == dict.fromkeys(range(1, 31), 0.0)
    assert max(log.of("canary/logprob_difference_mean").values()) < FLOAT32_BOUND / 100
    reward = log.of("reward/mean")
    assert np.mean([reward[step] for step in range(26, 31)]) > reward[1] + 0.1  # the weights did move


async def test_weights_of_an_overlapped_publish_are_digested_once_they_have_arrived(tiny_qwen3, tmp_path, monkeypatch):
    """Their publish returns before; asked at once, the engine would tell of older ones, or refuse amid the update."""
    run = run_of(tiny_qwen3, tmp_path, steps=6, placement=FullyAsyncConfig, transport=Overlapped())
    engine, versions = run.engine, list[int]()
    digests = engine.weight_digests

    async def recorded() -> dict[str, str]:
        versions.append(await engine.policy_version())
        return await digests()

    monkeypatch.setattr(engine, "weight_digests", recorded)
    log = await fit_and_close(run)
    assert versions == [0, 1, 2, 3, 4, 5]
    assert log.of("canary/trips") == dict.fromkeys(range(1, 7), 0.0)
    assert log.of("canary/skipped_rollouts") == dict.fromkeys(range(1, 7), 0.0)


async def test_a_canary_changes_no_batch_of_the_engine_and_no_rollout(tiny_qwen3, tmp_path, monkeypatch):
    """So that a resumed run, which asks after its own first publish, continues bit for bit."""
    rounds: list[list[tuple[int, int]]] = []
    next_round = LocalSampler._next_round

    def record(sampler: LocalSampler) -> Any:
        requests = next_round(sampler)
        rounds.append([(part.sampling.max_new_tokens, part.seed) for part in sampler._decoding])
        return requests

    monkeypatch.setattr(LocalSampler, "_next_round", record)
    without = await fit_and_close(run_of(tiny_qwen3, made(tmp_path / "without"), steps=6, every=0))
    expected, rounds[:] = list(rounds), []
    with_canary = await fit_and_close(run_of(tiny_qwen3, made(tmp_path / "with"), steps=6))
    of_canary = [parts for parts in rounds if parts[0][0] == CanaryConfig.new_tokens]
    assert [len(parts) for parts in of_canary] == [CanaryConfig.prompts] * 6
    assert [parts for parts in rounds if parts not in of_canary] == expected
    for key in ("train/loss", "train/grad_norm", "reward/mean", "mismatch/logprob_diff_max"):
        assert with_canary.of(key) == without.of(key)


async def test_it_asks_after_the_first_publish_and_every_kth(tiny_qwen3, tmp_path):
    """Each answer shows in the row of the step after its publish. Nobody comes back to the publish of the last step."""
    run = run_of(tiny_qwen3, tmp_path, steps=8, every=3)
    run.progress = Progress(step=0, policy_version=1)  # as after a resume: version 1 is the first published here
    log = await fit_and_close(run)
    assert list(log.of("canary/trips")) == [1, 3, 6]  # versions 1, 3 and 6, not 9
    engine: Any = run.engine
    assert engine.versions[-1] == 9
    assert [group_id for group_id in engine.asked if group_id < 0] == [-1, -2, -3, -4] * 3


@pytest.fixture
async def published(tiny_qwen3):
    """A canary whose engine holds the trainer's weights as version 0."""
    trainer = trainer_of(tiny_qwen3, GRPOConfig(prompts_per_step=P, group_size=G), steps=1)
    engine = LocalEngine(LocalRolloutConfig(dtype=Dtype.float32), model_folder=tiny_qwen3, device="cpu")
    placement = FullyAsync(FullyAsyncConfig(), trainer=trainer, engine=engine, transport=Handed())
    await placement.start()
    await placement.publish(0)
    yield canary_of(CanaryConfig(), trainer, engine), engine, placement
    await placement.close()


async def test_answers_that_do_not_come_are_not_waited_for(published, monkeypatch, caplog):
    canary, engine, _ = published
    monkeypatch.setattr(canary_module, "PATIENCE_S", 0.05)
    await engine.pause(PauseMode.WAIT)
    await canary.watch(0)
    await canary.settle()
    assert "did not answer 4 prompts on version 0" in caplog.text
    assert await canary.check() is None
    assert canary.metrics() == {"canary/skipped_rollouts": 4.0}
    assert canary.metrics() == {}
    await engine.resume()


async def test_answers_of_another_version_are_not_compared(published):
    canary, engine, placement = published
    await engine.pause(PauseMode.WAIT)
    await canary.watch(0)
    await placement.publish(1)
    await engine.resume()
    await canary.settle()
    assert await canary.check() is None
    assert canary.metrics() == {"canary/skipped_rollouts": 4.0}


async def test_a_request_that_fails_is_left_out_and_the_others_are_compared(published, monkeypatch, caplog):
    canary, engine, _ = published
    generate = engine.generate

    async def failing(prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        if group_id == -2:
            raise RequestError("its processor died")
        async for rollout in generate(prompt, group_id=group_id, n=n, sampling=sampling):
            yield rollout

    monkeypatch.setattr(engine, "generate", failing)
    await canary.watch(0)
    await canary.settle()
    assert await canary.check() is None
    metrics = canary.metrics()
    assert metrics["canary/skipped_rollouts"] == 1.0 and metrics["canary/logprob_difference_mean"] < 1e-5
    assert "even:1 is not compared: its processor died" in caplog.text


async def test_a_difference_with_no_parameter_behind_it_is_said_to_be_one_of_computation(
    published, monkeypatch, caplog
):
    canary, _, placement = published
    monkeypatch.setattr(canary, "_bound", 1e-12)
    await canary.watch(0)
    await canary.settle()
    trip = await canary.check()
    assert trip is not None and 0 < trip.comparison.mean < 1e-5
    await placement.publish(0)
    await canary.report(trip)
    assert "changed none of the engine's" in caplog.text
    assert canary.metrics()["canary/differing_parameters"] == 0.0


async def test_leaving_it_ends_what_it_asked(published):
    canary, engine, _ = published
    await engine.pause(PauseMode.WAIT)
    async with canary:
        await canary.watch(0)
        tasks = canary._asked.tasks
    assert all(task.done() for task in tasks)
    await engine.resume()


def answer(logprobs: list[float]) -> Rollout:
    """One prompt token, then these."""
    is_response = np.arange(1 + len(logprobs)) >= 1
    return Rollout(
        group_id=-1,
        index=0,
        token_ids=np.full(1 + len(logprobs), 2, np.int32),
        loss_mask=is_response,
        rollout_logprobs=np.array([0.0, *logprobs], np.float32),
        temperature=1.0,
        policy_versions=np.where(is_response, 0, -1).astype(np.int32),
        finish_reason=FinishReason.STOP,
    )


def test_a_comparison_by_hand():
    """Differences ln 2, -ln 2 and 0: mean 2/3 ln 2, k3 = ((2 - 1 - ln 2) + (1/2 - 1 + ln 2) + 0) / 3 = 1/6."""
    log2 = math.log(2.0)
    engine = [answer([-1.0, -1.0]), answer([-3.0])]
    trainer = [np.array([9.0, -1.0 + log2, -1.0 - log2], np.float32), np.array([9.0, -3.0], np.float32)]
    found = Comparison.of(engine, trainer)
    assert found.num_tokens == 3
    assert found.mean == pytest.approx(2 / 3 * log2, rel=1e-6)
    assert found.largest == pytest.approx(log2, rel=1e-6)
    assert found.kl_k3 == pytest.approx(1 / 6, rel=1e-6)


async def test_log_probs_that_are_no_numbers_trip(published, monkeypatch):
    canary, _, _ = published

    async def logprobs(prompts, rollouts):
        return [np.full(len(rollout.token_ids), np.nan, np.float32) for rollout in rollouts]

    monkeypatch.setattr(canary._trainer, "logprobs", logprobs)
    await canary.watch(0)
    await canary.settle()
    assert await canary.check() is not None


def test_the_bound_is_that_of_the_coarser_dtype():
    assert default_bound(engine=Dtype.float32, trainer=Dtype.float32) == FLOAT32_BOUND
    for engine, trainer in ((Dtype.bfloat16, Dtype.float32), (Dtype.float32, Dtype.bfloat16)):
        assert default_bound(engine=engine, trainer=trainer) == BFLOAT16_BOUND
