"""CPU seconds that the driver takes per step, between the processes of engine and trainer.

    python -m scripts.driver_cost
    python -m scripts.driver_cost --rollouts 8192 --tokens 2000

Admission, advantages, order, packing and metrics are those of a run. Answers come from an engine in a process of its
own, one by one as it makes them: 25 groups a second, each over up to 4 s. They go to the processes that a task grades
in, 8 groups at once, and packed shares to two actors, as they do between machines. Not counted: what the other
processes take, and the writing of rollouts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.algorithms import GRPOConfig
from rl.config.schema import FullyAsyncConfig, LocalRolloutConfig, Packing, RunConfig, StreamConfig
from rl.placement.ray_runtime import shutdown_ray
from rl.rollout.remote import RemoteEngine
from rl.tasks.scoring import ScoringProcesses
from rl.trainer.packing import pack
from rl.types import MicroBatch, Prompt, Rollout, RolloutGroup, Sampling, TrainBatch
from scripts.simulated_run import (
    ReadyEngine,
    RowsInMemory,
    SimulatedTask,
    SimulatedTrainer,
    Speed,
    run_to_end,
    simulated_run,
)
from scripts.simulated_time import simulate

GROUP, MINI_BATCHES, NUM_RANKS = 16, 8, 2
GROUPS_AT_ONCE = 8
GROUPS_PER_S = 25
GROUP_S = 4.0
"""Within which the answers of a group are made."""
PROMPT_TOKENS = 150
STEPS = 3
FOREVER = 1e9


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds per step."""

    loop: float
    """In one process: everything but what crosses to others."""
    packing: float
    """Of `loop`."""
    receiving: float
    grading: float
    sending: float

    @property
    def total(self) -> float:
        return self.loop + self.receiving + self.grading + self.sending


def cost_of_loop(num_rollouts: int, *, tokens: int, steps: int = STEPS) -> tuple[float, float, TrainBatch]:
    """(`Cost.loop`, `Cost.packing`, the last batch)."""
    num_prompts = num_rollouts // GROUP
    config = RunConfig(
        algorithm=GRPOConfig(
            prompts_per_step=num_prompts, group_size=GROUP, prompts_per_mini_batch=num_prompts // MINI_BATCHES
        ),
        placement=FullyAsyncConfig(max_staleness=0.0),
        stream=StreamConfig(stall_timeout_s=FOREVER),
    )
    packing_s = 0.0
    batches: list[TrainBatch] = []

    async def main() -> float:
        run = simulated_run(
            config,
            steps=steps,
            engine=ReadyEngine(tokens=tokens),
            trainer=SimulatedTrainer(Speed(0.0, 0.0, 10.0, 0.0)),
            prompt_tokens=PROMPT_TOKENS,
            log=RowsInMemory(),
        )

        def timed_pack(groups: list[RolloutGroup], version: int) -> TrainBatch:
            nonlocal packing_s
            began = time.process_time()
            batches[:] = [
                pack(
                    groups,
                    prompts_per_mini_batch=config.algorithm.prompts_per_mini_batch,
                    num_ranks=NUM_RANKS,
                    max_tokens_per_micro_batch=2**16,
                    packing=Packing.tokens,
                    policy_version=version,
                    skip_zero_advantage=True,
                )
            ]
            packing_s += time.process_time() - began
            return batches[0]

        run.pack = timed_pack
        began = time.process_time()
        await run_to_end(run)
        return time.process_time() - began

    return simulate(main()) / steps, packing_s / steps, batches[0]


class PacedEngine(ReadyEngine):
    """Hosted as any engine is, by its configuration, and makes what it is asked for as the head of this file says."""

    def __init__(self, config: LocalRolloutConfig, *, model_folder: Path, device: str) -> None:
        super().__init__(tokens=int(model_folder.name))

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        draw = random.Random(group_id)
        moments = sorted(group_id / GROUPS_PER_S + draw.random() * GROUP_S for _ in range(n))
        began = time.monotonic()
        for index, moment in enumerate(moments):
            await asyncio.sleep(began + moment - time.monotonic())
            rollout = self.made(len(prompt.token_ids), group_id, index)
            rollout.text = "four" * self._tokens
            yield rollout


class _Rank:
    """What the driver sends to."""

    async def step(self, mini_batches: list[list[MicroBatch]], loss_counts: list[Any]) -> None: ...


class _Between:
    """CPU seconds that messages cost, summed over steps."""

    def __init__(self, engine: RemoteEngine, scoring: ScoringProcesses, ranks: list[Any], *, tokens: int) -> None:
        self._engine, self._scoring, self._ranks = engine, scoring, ranks
        self._prompt = SimulatedTask(prompt_tokens=PROMPT_TOKENS).prompt(0, 0)
        self._sampling = Sampling(temperature=1.0, max_new_tokens=tokens + 50, seed=0)
        self.receiving = self.grading = self.sending = 0.0

    async def step(self, num_groups: int, batch: TrainBatch) -> None:
        began = time.process_time()
        groups = await asyncio.gather(*(self._group(group_id) for group_id in range(num_groups)))
        received = time.process_time()
        for first in range(0, num_groups, GROUPS_AT_ONCE):
            at_once = groups[first : first + GROUPS_AT_ONCE]
            await asyncio.gather(*(self._scoring.score(self._prompt, group) for group in at_once))
        graded = time.process_time()
        shares = [[of_ranks[rank] for of_ranks in batch.mini_batches] for rank in range(NUM_RANKS)]
        sent = [rank.step.remote(s, batch.loss_counts) for rank, s in zip(self._ranks, shares, strict=True)]
        await asyncio.gather(*sent)
        self.receiving += received - began
        self.grading += graded - received
        self.sending += time.process_time() - graded

    async def _group(self, group_id: int) -> list[Rollout]:
        samples = self._engine.generate(self._prompt, group_id=group_id, n=GROUP, sampling=self._sampling)
        return [rollout async for rollout in samples]


async def cost_between_processes(
    num_rollouts: int, batch: TrainBatch, *, tokens: int, steps: int = STEPS
) -> tuple[float, float, float]:
    """(`Cost.receiving`, `Cost.grading`, `Cost.sending`). Starts of processes are not counted."""
    import ray

    task: Any = SimulatedTask(prompt_tokens=PROMPT_TOKENS)
    config = LocalRolloutConfig(_target_="scripts.driver_cost.PacedEngine")
    engine = RemoteEngine(config, model_folder=Path(str(tokens)), device="cpu")
    scoring = ScoringProcesses(task)
    await engine.start()
    rank_class = ray.remote(_Rank).options(num_cpus=0)
    ranks: list[Any] = [rank_class.remote() for _ in range(NUM_RANKS)]
    try:
        await _Between(engine, scoring, ranks, tokens=tokens).step(GROUPS_AT_ONCE, TrainBatch([], [], {}))
        between = _Between(engine, scoring, ranks, tokens=tokens)
        for _ in range(steps):
            await between.step(num_rollouts // GROUP, batch)
        return between.receiving / steps, between.grading / steps, between.sending / steps
    finally:
        scoring.close()
        await engine.close()
        for rank in ranks:
            ray.kill(rank)


def driver_cost(num_rollouts: int, *, tokens: int) -> Cost:
    loop, packing, batch = cost_of_loop(num_rollouts, tokens=tokens)
    return Cost(loop, packing, *asyncio.run(cost_between_processes(num_rollouts, batch, tokens=tokens)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--tokens", type=int, default=2000)
    arguments = parser.parse_args()
    if arguments.tokens <= 50:
        parser.error(f"--tokens={arguments.tokens}: answers differ by up to 50 tokens, so it must be above 50.")
    print(f"CPU seconds per step, means of {STEPS}, {GROUP} answers of {arguments.tokens:,} tokens a prompt")
    print("rollouts   total    loop  of it packing  receiving  grading  sending")
    try:
        for num_rollouts in arguments.rollouts:
            cost = driver_cost(num_rollouts, tokens=arguments.tokens)
            print(
                f"{num_rollouts:>8} {cost.total:>7.2f} {cost.loop:>7.2f} {cost.packing:>14.2f} {cost.receiving:>10.2f} "
                f"{cost.grading:>8.2f} {cost.sending:>8.2f}",
                flush=True,
            )
    finally:
        shutdown_ray()


if __name__ == "__main__":
    main()
