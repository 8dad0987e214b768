"""A run whose model server and trainer take simulated seconds; loop, stream, placement and engine are the real ones.

The server is as fast as two numbers say: a decoding step of a replica takes `step_s + sequence_s x (sequences that
run)` seconds and gives each of them one token.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from rl.algorithms.grpo import GRPO
from rl.canary import Canary
from rl.config.algorithms import GRPOConfig
from rl.config.build import build
from rl.config.schema import CanaryConfig, Dtype, RunConfig
from rl.loop import Cadence, Progress, Run, fit
from rl.protocols import Bucket, EngineCapabilities, Meeting, PauseMode, RemoteBucket, RunLogger, UpdateManifest
from rl.rollout.sampler import Outcome, Part, Sampled
from rl.sentinels import Sentinels
from rl.stream import GroupStream, StreamConfigValues
from rl.trainer.packing import batch_metrics
from rl.types import (
    DeviceUse,
    EvalSet,
    FinishReason,
    Prompt,
    Reward,
    Rollout,
    RolloutGroup,
    Sampling,
    StepStats,
    TrainBatch,
)
from rl.weights.transport import Handed

LengthOf = Callable[[int], int]
"""Tokens of the answer with this seed."""


def lognormal_lengths(*, mean: float, sigma: float, limit: int) -> LengthOf:
    """Cut at `limit`. `mean` is that of the uncut distribution, `sigma` that of the logarithm."""
    normal = NormalDist(np.log(mean) - sigma**2 / 2, sigma)

    def length_of(seed: int) -> int:
        return min(limit, max(1, round(float(np.exp(normal.inv_cdf((seed + 1) / (2**63 + 1)))))))

    return length_of


@dataclass(frozen=True, slots=True)
class Speed:
    """What the simulated parts take, in seconds."""

    step_s: float
    sequence_s: float
    train_s: float
    """Of one step of the trainer."""
    publish_s: float


@dataclass(slots=True, order=True)
class _Running:
    end: float
    """In decoding steps of its replica, as `begin`."""
    number: int
    begin: float = field(compare=False)
    total: int = field(compare=False)
    """Tokens of the whole answer."""
    part: Part = field(compare=False)


class _Replica:
    """Decodes up to `max_num_seqs` sequences at once; the others wait, first in, first out."""

    def __init__(self, speed: Speed, max_num_seqs: int, deliver: Callable[[Sequence[Outcome]], None]) -> None:
        self._speed, self._max_num_seqs, self._deliver = speed, max_num_seqs, deliver
        self._loop = asyncio.get_running_loop()
        self._steps, self._since = 0.0, self._loop.time()
        self._running: list[_Running] = []
        self._waiting: deque[tuple[Part, int]] = deque()
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    def submit(self, parts: Sequence[tuple[Part, int]]) -> None:
        """With the tokens of each whole answer."""
        self._catch_up()
        self._waiting += parts
        self._fill()

    def abort(self, parts: set[Part]) -> list[Outcome]:
        self._catch_up()
        outcomes: list[Outcome] = []
        for one in self._running:
            if one.part in parts:
                num_tokens = min(int(self._steps - one.begin), int(one.end - one.begin) - 1)
                outcomes.append((one.part, _sampled(num_tokens, one.total, FinishReason.ABORT)))
        outcomes += [(part, _sampled(0, total, FinishReason.ABORT)) for part, total in self._waiting if part in parts]
        self._running = [one for one in self._running if one.part not in parts]
        heapq.heapify(self._running)
        self._waiting = deque(one for one in self._waiting if one[0] not in parts)
        self._fill()
        return outcomes

    def _cost(self) -> float:
        return self._speed.step_s + self._speed.sequence_s * len(self._running)

    def _catch_up(self) -> None:
        now = self._loop.time()
        if self._running:
            self._steps += (now - self._since) / self._cost()
        self._since = now

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            part, total = self._waiting.popleft()
            begin = self._steps
            one = _Running(begin + total - len(part.prefix), next(self._numbers), begin, total, part)
            heapq.heappush(self._running, one)
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            steps_left = max(0.0, self._running[0].end - self._steps)
            self._timer = self._loop.call_later(steps_left * self._cost(), self._end_first)

    def _end_first(self) -> None:
        self._catch_up()
        outcomes: list[Outcome] = []
        while self._running and self._running[0].end <= self._steps + 1e-6:
            one = heapq.heappop(self._running)
            outcomes.append((one.part, _sampled(round(one.end - one.begin), one.total, FinishReason.STOP)))
        self._fill()
        self._deliver(outcomes)


def _sampled(num_tokens: int, total: int, reason: FinishReason) -> Sampled:
    """Each token's id is the length of its whole answer, so that one that goes on knows how long it is."""
    return Sampled(np.full(num_tokens, total, np.int32), np.full(num_tokens, -1.0, np.float32), "", reason)


class SimulatedSampler:
    """Implements `rl.rollout.sampler.Sampler` with replicas. A group goes whole to the one with the least to do."""

    name = "simulated"
    capabilities = EngineCapabilities(seeded=True, loses_weights_asleep=False, renormalizes=True)

    def __init__(self, speed: Speed, *, num_replicas: int, max_num_seqs: int, length_of: LengthOf) -> None:
        self._speed, self._length_of = speed, length_of
        self._num_replicas, self._max_num_seqs = num_replicas, max_num_seqs
        self._version = -1
        self.publish_times: list[float] = []

    async def start(self, *, deliver: Callable[[Sequence[Outcome]], None], die: Callable[[str], None]) -> None:
        self._deliver, self._loop = deliver, asyncio.get_running_loop()
        self._replicas = [_Replica(self._speed, self._max_num_seqs, deliver) for _ in range(self._num_replicas)]

    def check(self, prompt: Prompt, sampling: Sampling) -> None: ...

    def submit(self, parts: Sequence[Part]) -> None:
        loads = [[replica.load, number] for number, replica in enumerate(self._replicas)]
        heapq.heapify(loads)
        shares: list[list[tuple[Part, int]]] = [[] for _ in self._replicas]
        for _, group in itertools.groupby(parts, key=lambda part: part.prompt.prompt_id):
            sized = [(p, int(p.prefix[0]) if len(p.prefix) else self._length_of(p.seed)) for p in group]
            load, number = loads[0]
            shares[number] += sized
            heapq.heapreplace(loads, [load + len(sized), number])
        for replica, share in zip(self._replicas, shares, strict=True):
            if share:
                replica.submit(share)

    def abort(self, parts: Sequence[Part]) -> None:
        if parts:
            wanted = set(parts)
            outcomes = [outcome for replica in self._replicas for outcome in replica.abort(wanted)]
            self._loop.call_soon(self._deliver, outcomes)

    def decode(self, token_ids: Sequence[int], *, keep_special: bool) -> str:
        return ""

    async def policy_version(self) -> int:
        return self._version

    async def weight_digests(self) -> dict[str, str]:
        return {}

    async def begin_update(self, manifest: UpdateManifest) -> None:
        await asyncio.sleep(self._speed.publish_s)

    async def receive(self, bucket: Bucket | RemoteBucket) -> None: ...

    async def weight_groups(self) -> list[str | None]:
        return [None]

    async def join_group(self, meeting: Meeting, first_rank: int) -> None: ...

    async def finish_update(self, version: int) -> None:
        self._version = version
        self.publish_times.append(self._loop.time())

    async def abort_update(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake_weights(self) -> None: ...

    async def wake_cache(self) -> None: ...

    async def close(self) -> None: ...


class ReadyEngine:
    """Implements `rl.protocols.RolloutEngine` as a driver sees one in another process: answers arrive ready made.

    A group takes a second; answer i of group g has `tokens` + (g + i) % 101 - 50 tokens. Arrays of equal length are
    shared, so that making them costs next to nothing.
    """

    capabilities = SimulatedSampler.capabilities

    def __init__(self, *, tokens: int) -> None:
        self._tokens = tokens
        self._version = -1
        self._arrays: dict[tuple[int, int, int], dict[str, Any]] = {}

    async def start(self) -> None: ...

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        version = self._version
        await asyncio.sleep(1.0)
        for index in range(n):
            yield self.made(len(prompt.token_ids), group_id, index, version)

    def made(self, num_prompt: int, group_id: int, index: int, version: int = 0) -> Rollout:
        arrays = self._arrays_of(num_prompt, self._tokens + (group_id + index) % 101 - 50, version)
        return Rollout(group_id, index, temperature=1.0, finish_reason=FinishReason.STOP, **arrays)

    def _arrays_of(self, num_prompt: int, num_response: int, version: int) -> dict[str, Any]:
        key = (num_prompt, num_response, version)
        if key not in self._arrays:
            is_response = np.arange(num_prompt + num_response) >= num_prompt
            self._arrays[key] = {
                "token_ids": np.ones(len(is_response), dtype=np.int32),
                "loss_mask": is_response,
                "rollout_logprobs": np.where(is_response, -1.0, 0.0).astype(np.float32),
                "policy_versions": np.where(is_response, version, -1).astype(np.int32),
            }
        return self._arrays[key]

    async def policy_version(self) -> int:
        return self._version

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def open_update(self, manifest: UpdateManifest) -> ReadyEngine:
        return self

    async def send(self, bucket: Bucket) -> None: ...

    async def commit(self, version: int) -> None:
        self._version = version

    async def abort(self) -> None: ...

    def counters(self) -> dict[str, int]:
        return {}

    async def close(self) -> None: ...


class SimulatedTrainer:
    num_ranks = 1

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self.step_began: list[float] = []

    async def start(self) -> None: ...

    async def step(self, batch: Any) -> StepStats:
        self.step_began.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self._speed.train_s)
        return StepStats(1)

    async def manifest(self, version: int) -> UpdateManifest:
        return UpdateManifest(version, ())

    async def buckets(self) -> AsyncIterator[Bucket]:
        yield []

    async def weights_digest(self) -> str:
        return ""

    async def device_uses(self) -> list[list[DeviceUse]]:
        return []

    async def release_cache(self) -> None: ...

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...

    async def close(self) -> None: ...


class SimulatedTask:
    """Every other answer of a group is right."""

    name = "simulated"
    num_prompts = 10**9

    def __init__(self, *, prompt_tokens: int) -> None:
        self._token_ids = np.ones(prompt_tokens, dtype=np.int32)

    def prompt(self, seed: int, index: int) -> Prompt:
        return Prompt(str(index), (), self._token_ids, answer="", task="simulated")

    async def grade(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        return [self.score(prompt, rollout) for rollout in rollouts]

    def score(self, prompt: Prompt, rollout: Rollout) -> Reward:
        is_right = rollout.index % 2 == 0
        return Reward(float(is_right), correct=is_right)

    def eval_sets(self) -> list[EvalSet]:
        return []

    def demonstrations(self) -> list[tuple[Prompt, str]]:
        return []

    validation_demonstrations = demonstrations

    def fingerprint(self) -> str:
        return "simulated"


class _NoEvaluation:
    async def evaluate(self, engine: Any, *, step: int) -> list[Any]:
        return []


class _NoCheckpoints:
    async def save(self, *, step: int, state: Mapping[str, Any], trainer: Any) -> None: ...


class RowsInMemory:
    """Implements `rl.protocols.RunLogger`. Rows of finished steps."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, float]] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if step > 0:
            self.rows.append(metrics)

    def log_rollouts(self, groups: Sequence[RolloutGroup], *, step: int) -> None: ...

    def log_digests(self, digests: Mapping[str, str], *, step: int) -> None: ...

    def close(self, *, failed: bool) -> None: ...


def simulated_run(
    config: RunConfig, *, steps: int, engine: Any, trainer: Any, prompt_tokens: int, log: RunLogger
) -> Run:
    """Needs a running event loop. Of `config` count algorithm, placement and stream. Batches hold metrics alone."""
    task: Any = SimulatedTask(prompt_tokens=prompt_tokens)
    assert isinstance(config.algorithm, GRPOConfig)
    algorithm = GRPO(config.algorithm)
    values = StreamConfigValues(
        seed=config.seed,
        sampling=Sampling(temperature=1.0, max_new_tokens=2**31, seed=config.seed),
        prompts_per_step=config.algorithm.prompts_per_step,
        group_size=config.algorithm.group_size,
        groups_per_publish=config.groups_per_publish,
        max_admitted=config.max_admitted,
        max_surplus=config.max_surplus,
        window=config.window,
        max_failed_fraction=config.stream.max_failed_fraction,
        reward_timeout_s=config.stream.reward_timeout_s,
        stall_timeout_s=config.stream.stall_timeout_s,
    )
    return Run(
        trainer=trainer,
        engine=engine,
        placement=build(config.placement, trainer=trainer, engine=engine, transport=Handed()),
        stream=GroupStream(values, task=task, engine=engine, algorithm=algorithm),
        algorithm=algorithm,
        sentinels=Sentinels(config.sentinels, compute_dtype=Dtype.float32),
        evaluator=_NoEvaluation(),
        canary=Canary(
            CanaryConfig(every=0), bound=1.0, prompts=[], sampling=values.sampling, engine=engine, trainer=trainer
        ),
        log=log,
        checkpoints=_NoCheckpoints(),
        pack=lambda groups, version: TrainBatch([], [], batch_metrics(groups, policy_version=version)),
        cadence=Cadence(steps, config.placement.publish_every, 0, False, False, 0),
        progress=Progress(),
        staleness_bound=config.staleness_bound,
        publish_timeout_s=config.stream.stall_timeout_s,
        restore_from=None,
    )


async def run_to_end(run: Run) -> None:
    await fit(run)
    await run.placement.close()
