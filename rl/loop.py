"""The training loop: one, for every placement. Synchronous training is its `max_staleness=0` case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rl.canary import Canary
from rl.clock import Clock
from rl.digests import loss_digest, rollout_digests
from rl.protocols import (
    Algorithm,
    CheckpointStore,
    EngineError,
    Evaluator,
    Placement,
    Residency,
    RolloutEngine,
    RolloutStream,
    RunLogger,
    Trainer,
)
from rl.resident import resident_gib
from rl.sentinels import Sentinels
from rl.throughput import Devices, throughput, utilization
from rl.types import PublishStats, RolloutGroup, StepStats, TrainBatch


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often what happens, in steps. 0: never."""

    total_steps: int
    publish_every: int
    evaluate_every: int
    evaluate_at_start: bool
    evaluate_at_end: bool
    checkpoint_every: int


@dataclass(slots=True)
class Progress:
    """How far the run is. Saved with every checkpoint."""

    step: int = 0
    """Finished steps."""
    policy_version: int = 0
    """Of the last publish."""
    unpublished_steps: int = 0
    prompts_trained: int = 0
    tokens_trained: int = 0


class Background:
    """The first error of tasks that somebody will wait for later."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._has_failed = asyncio.Event()

    def watch(self, *tasks: asyncio.Task[Any]) -> None:
        for task in tasks:
            task.add_done_callback(self._note)

    async def failure(self) -> BaseException:
        await self._has_failed.wait()
        assert self._error is not None
        return self._error

    def _note(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._has_failed.set()


@dataclass(slots=True)
class Run:
    """The parts of one run, put together by `rl/assemble.py`."""

    trainer: Trainer
    engine: RolloutEngine
    placement: Placement
    stream: RolloutStream
    evaluator: Evaluator
    canary: Canary
    algorithm: Algorithm
    sentinels: Sentinels
    log: RunLogger
    checkpoints: CheckpointStore
    pack: Callable[[list[RolloutGroup], int], TrainBatch]
    """(groups, current policy version) -> batch."""
    cadence: Cadence
    progress: Progress
    staleness_bound: int
    """In published versions."""
    publish_timeout_s: float
    restore_from: Path | None
    """Folder that the trainer continues from; None: a new run."""
    devices: Devices = field(default_factory=Devices)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: end at the next step boundary, with a checkpoint."""
    checkpoint_facts: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint records besides progress and stream, for the resumed run to compare."""
    background: Background = field(default_factory=Background)
    """Evaluation and canary, while training goes on beside them."""

    async def failure(self) -> BaseException:
        """Waits for the error of a part that the loop does not wait for now: it may wait for another for many minutes.

        The parts come in the order in which one's end explains another's.
        """
        parts = (
            self.trainer.failure(),
            self._engine_failure(),
            self.placement.failure(),
            self.stream.failure(),
            self.background.failure(),
        )
        watches = [asyncio.ensure_future(part) for part in parts]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return next(watch for watch in watches if watch.done()).result()
        finally:
            for watch in watches:
                watch.cancel()

    async def _engine_failure(self) -> EngineError:
        return EngineError(await self.engine.wait_for_death())


async def fit(run: Run) -> None:
    """Publishes the first weights, then trains: one step takes one rollout batch in and gives one row of metrics.

    A row is logged before its step's checkpoint: killed in between, the step is done again and its row set aside.
    """
    progress, cadence = run.progress, run.cadence
    await _start(run)
    saved_step = progress.step
    await _watch_with_canary(run)
    async with run.canary, run.stream, _Rows(run.log) as rows:
        while progress.step < cadence.total_steps:
            with rows.clock.phase("wait_for_batch"):
                groups = await _next_batch_or_stop(run)
            if groups is None:
                break
            await _step(run, groups, rows)
            if _is_due(progress.step, cadence.checkpoint_every) or progress.step == cadence.total_steps:
                await rows.settle()
                with rows.clock.phase("checkpoint"):
                    await save_checkpoint(run)
                saved_step = progress.step
            if progress.unpublished_steps == 0:
                run.stream.release()
        await rows.settle()
        if progress.step > saved_step:
            await save_checkpoint(run)


async def _start(run: Run) -> None:
    """Starts the parts and publishes the first weights. Of a new run that, and the first evaluation, is row 0."""
    progress, clock = run.progress, Clock()
    with clock.phase("start"):
        await run.placement.start()
    async with _training(run, clock) as residency:
        if run.restore_from is not None:
            with clock.phase("load"):
                await run.trainer.load(run.restore_from)
        with clock.phase("publish"):
            await _publish(run, residency, progress.policy_version)
        if progress.step == 0:
            run.log.log_digests({"weights": await run.trainer.weights_digest()}, step=0)
    if progress.step > 0:
        return
    metrics: dict[str, Any] = {"prompts_trained": progress.prompts_trained, "tokens_trained": progress.tokens_trained}
    if run.cadence.evaluate_at_start:
        with clock.phase("eval"):
            metrics |= await evaluation_metrics(run)
    _, phases = clock.end_row(device_uses=await run.trainer.device_uses())
    run.log.log(metrics | phases, step=0)


async def _step(run: Run, groups: list[RolloutGroup], rows: _Rows) -> None:
    """Trains on one batch, publishes and evaluates when due, and logs the row."""
    progress, cadence, clock = run.progress, run.cadence, rows.clock
    with clock.phase("canary"):
        await run.canary.settle()
    done = await _take_devices(run, groups, rows)
    metrics: dict[str, Any] = {}
    evaluation: asyncio.Task[dict[str, float]] | None = None
    is_last = progress.step == cadence.total_steps
    if done.has_published and not is_last:  # nobody would come back to the last answers
        await _watch_with_canary(run)
    if _is_due(progress.step, cadence.evaluate_every) or (is_last and cadence.evaluate_at_end):
        evaluation = asyncio.create_task(evaluation_metrics(run))
        run.background.watch(evaluation)
        if is_last or not run.placement.samples_while_training:
            with clock.phase("eval"):
                metrics |= await evaluation
            evaluation = None
    metrics["engine/policy_version"] = await run.engine.policy_version()
    metrics |= {f"engine/{name}": count for name, count in run.engine.counters().items()}
    metrics |= _step_metrics(run, done) | run.canary.metrics()
    busy_s = run.stream.busy_s()
    step_s, phases = clock.end_row(device_uses=await run.trainer.device_uses())
    metrics |= phases | _times(done, step_s=step_s, busy_s=busy_s - rows.busy_s)
    rows.busy_s = busy_s
    metrics |= throughput(groups, step_s=step_s, devices=run.devices)
    metrics |= utilization(done.batch, seconds=done.stats.seconds, devices=run.devices)
    trips = run.sentinels.find(metrics)
    metrics["sentinel/trips"] = len(trips)
    rows.add(_Row(progress.step, metrics, groups, done.digests), evaluation)
    run.sentinels.act(trips, step=progress.step)


@dataclass(slots=True)
class _Trained:
    """What one step did while the trainer held the devices."""

    batch: TrainBatch
    stats: StepStats
    digests: dict[str, str]
    """By stage, see `rl/digests.py`."""
    overlap_s: float
    has_published: bool = False
    published_bytes: int = 0
    pause_s: float = 0.0
    """Until the engine's requests had finished or stopped, so that it could be published to."""


async def _take_devices(run: Run, groups: list[RolloutGroup], rows: _Rows) -> _Trained:
    """One residency, or two where the first only repairs what the canary found."""
    clock = rows.clock
    async with _training(run, clock) as residency:
        with clock.phase("canary"):
            trip = await run.canary.check()
        if trip is None:
            return await _train(run, residency, groups, rows)
        await rows.settle()
        with clock.phase("publish"):
            repair = await _publish(run, residency, run.progress.policy_version)
    with clock.phase("canary"):
        await run.placement.arrived()
        await run.canary.report(trip)
    async with _training(run, clock) as residency:
        done = await _train(run, residency, groups, rows)
    done.published_bytes += repair.num_bytes
    done.pause_s += repair.pause_s
    return done


async def _train(run: Run, residency: Residency, groups: list[RolloutGroup], rows: _Rows) -> _Trained:
    """Advantages, the optimizer's part of a step, and the publish when it is due."""
    progress, cadence, clock = run.progress, run.cadence, rows.clock
    if run.algorithm.penalizes_reward:
        with clock.phase("reference"):
            await _score_with_reference(run.trainer, groups)
    with clock.phase("pack"):
        run.algorithm.assign_advantages(groups)
        batch = run.pack(groups, progress.policy_version)
    assert batch.metrics["staleness/max"] <= run.staleness_bound, "admission let a group become too stale"
    busy_before = run.stream.busy_s()
    with clock.phase("train"):
        stats = await run.trainer.step(batch)
    overlap_s = run.stream.busy_s() - busy_before
    with clock.phase("digest"):
        digests = rollout_digests(groups)
        digests |= {"loss": loss_digest(stats), "weights": await run.trainer.weights_digest()}
    done = _Trained(batch, stats, digests, overlap_s)
    _advance(progress, groups)
    if _is_due(progress.step, cadence.publish_every) or progress.step == cadence.total_steps:
        await rows.settle()
        with clock.phase("publish"):
            published = await _publish(run, residency, progress.policy_version + 1)
        progress.policy_version, progress.unpublished_steps = published.version, 0
        done.has_published, done.published_bytes, done.pause_s = True, published.num_bytes, published.pause_s
    return done


async def _score_with_reference(trainer: Trainer, groups: list[RolloutGroup]) -> None:
    prompts = [group.prompt for group in groups for _ in group.rollouts]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout, logprobs in zip(rollouts, await trainer.reference_logprobs(prompts, rollouts), strict=True):
        rollout.ref_logprobs = logprobs


@asynccontextmanager
async def _training(run: Run, clock: Clock) -> AsyncIterator[Residency]:
    """The placement's residency. Its beginning waits for running requests, and its end for the engine."""
    async with AsyncExitStack() as stack:
        async with _limited(run, "giving the devices to the trainer"):
            residency = await stack.enter_async_context(run.placement.training(clock.phase))
        yield residency
        async with _limited(run, "giving the devices back to the engine"):
            await stack.aclose()


async def _publish(run: Run, residency: Residency, version: int) -> PublishStats:
    async with _limited(run, f"publishing version {version}"):
        return await residency.publish(version)


@asynccontextmanager
async def _limited(run: Run, what: str) -> AsyncIterator[None]:
    """What waits for running requests or for the engine itself. One that hangs must not hang the run."""
    limit = asyncio.timeout(run.publish_timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise EngineError(
            f"{what} took over {run.publish_timeout_s:.0f} s (stream.stall_timeout_s): a request does not end, or the "
            "engine does not answer."
        ) from error


async def _watch_with_canary(run: Run) -> None:
    await run.canary.watch(run.progress.policy_version, arrived=run.placement.arrived)
    run.background.watch(*run.canary.tasks)


def _advance(progress: Progress, groups: list[RolloutGroup]) -> None:
    progress.step += 1
    progress.unpublished_steps += 1
    progress.prompts_trained += len(groups)
    progress.tokens_trained += sum(rollout.num_response_tokens for group in groups for rollout in group.rollouts)


def _step_metrics(run: Run, done: _Trained) -> dict[str, Any]:
    progress = run.progress
    return {
        **done.batch.metrics,
        **done.stats.metrics,
        **{f"time/{phase}_s": seconds for phase, seconds in done.stats.seconds.items()},
        **run.stream.metrics(),
        "publish/bytes": done.published_bytes,
        "publish/pause_s": done.pause_s,
        "policy_version": progress.policy_version,
        "prompts_trained": progress.prompts_trained,
        "tokens_trained": progress.tokens_trained,
        "memory/rss_gib": resident_gib(),
    }


def _times(done: _Trained, *, step_s: float, busy_s: float) -> dict[str, float]:
    """`busy_s`: how long the engine had requests in the step."""
    return {
        "time/step_s": step_s,
        "time/overlap_fraction": min(done.overlap_s / step_s, 1.0),
        "time/engine_busy_fraction": min(busy_s / step_s, 1.0),
        "rollout/tokens_per_s": sum(counts.tokens for counts in done.batch.loss_counts) / step_s,
    }


async def evaluation_metrics(run: Run) -> dict[str, float]:
    """One row's worth of evaluation on the version that the engine holds, and that no publish may change meanwhile."""
    version = run.progress.policy_version
    metrics: dict[str, float] = {}
    for result in await run.evaluator.evaluate(run.engine, step=run.progress.step):
        assert result.policy_version == version, f"{result.key} is of version {result.policy_version}, not {version}"
        metrics[result.key] = result.value
        metrics[f"{result.key}/stderr"] = result.stderr
        metrics[f"eval/{result.benchmark}/truncated_fraction"] = result.truncated_fraction
        metrics[f"eval/{result.benchmark}/errors"] = result.num_errors
    return metrics


async def save_checkpoint(run: Run) -> None:
    state = {"progress": asdict(run.progress), "stream": run.stream.state(), **run.checkpoint_facts}
    await run.checkpoints.save(step=run.progress.step, state=state, trainer=run.trainer)


async def _next_batch_or_stop(run: Run) -> list[RolloutGroup] | None:
    """The next batch; None once the run is asked to stop. A batch that is already taken is still trained on."""
    if run.stop.is_set():
        return None
    batch = asyncio.ensure_future(run.stream.next_batch())
    stop = asyncio.ensure_future(run.stop.wait())
    try:
        await asyncio.wait({batch, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not batch.done():
            batch.cancel()
            await asyncio.wait({batch})
        return None if batch.cancelled() else batch.result()
    finally:
        stop.cancel()
        batch.cancel()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclass(slots=True)
class _Row:
    """Of one finished step."""

    step: int
    metrics: dict[str, Any]
    groups: list[RolloutGroup]
    digests: dict[str, str]


class _Rows:
    """The log's rows, in order. While an evaluation goes on beside training, its row and those after it wait for it.

    `settle` before every publish, so that an evaluation is of one version, and before every checkpoint.
    """

    def __init__(self, log: RunLogger) -> None:
        self.clock = Clock()
        self.busy_s = 0.0
        """`RolloutStream.busy_s` when the last row ended."""
        self._log = log
        self._waiting: list[_Row] = []
        self._evaluation: asyncio.Task[dict[str, float]] | None = None
        """Of the first row that waits."""

    async def __aenter__(self) -> _Rows:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error the rows that wait are written without the evaluation."""
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            evaluation.cancel()
            await asyncio.gather(evaluation, return_exceptions=True)
        self._write()

    def add(self, row: _Row, evaluation: asyncio.Task[dict[str, float]] | None) -> None:
        """`evaluation`: one that has begun and belongs in this row."""
        assert evaluation is None or self._evaluation is None, "a publish, and so settle, comes between two evaluations"
        self._waiting.append(row)
        if evaluation is not None:
            self._evaluation = evaluation
        elif self._evaluation is None or self._evaluation.done():
            self._write()

    async def settle(self) -> None:
        """Waits for the evaluation, if one is going on."""
        if self._evaluation is not None:
            with self.clock.phase("eval"):
                await asyncio.wait({self._evaluation})
            self._write()

    def _write(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            self._waiting[0].metrics |= evaluation.result()
        for row in self._waiting:
            self._log.log_rollouts(row.groups, step=row.step)
            self._log.log(row.metrics, step=row.step)
            self._log.log_digests(row.digests, step=row.step)
        self._waiting.clear()
