"""CPU seconds that the driver takes per step, between the processes of engine and trainer.

    python -m scripts.driver_cost
    python -m scripts.driver_cost --rollouts 8192 --tokens 2000

Admission, advantages, order, packing and metrics are those of a run. Answers come from a Ray actor, a group a message,
go to the processes that a task grades in, 8 groups at once, and packed shares go to two actors, as they do between
machines. Not counted: what the other processes take, and the writing of rollouts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from typing import Any

from rl.config.algorithms import GRPOConfig
from rl.config.schema import FullyAsyncConfig, Packing, RunConfig, StreamConfig
from rl.placement.ray_runtime import ensure_ray, shutdown_ray
from rl.tasks.scoring import ScoringProcesses
from rl.trainer.packing import pack
from rl.types import MicroBatch, Rollout, RolloutGroup, TrainBatch
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


class _Far:
    """What the driver speaks to: the process of an engine, or of a rank."""

    async def answers(self, group_id: int, tokens: int) -> list[tuple[int, Rollout]]:
        engine = ReadyEngine(tokens=tokens)
        made = [engine.made(PROMPT_TOKENS, group_id, index) for index in range(GROUP)]
        for rollout in made:
            rollout.text = "four" * tokens
        return [(group_id, rollout) for rollout in made]

    async def step(self, mini_batches: list[list[MicroBatch]], loss_counts: list[Any]) -> None: ...


async def cost_of_grading(groups: list[list[Rollout]]) -> float:
    task: Any = SimulatedTask(prompt_tokens=PROMPT_TOKENS)
    scoring, prompt = ScoringProcesses(task), task.prompt(0, 0)
    at_once = [groups[first : first + GROUPS_AT_ONCE] for first in range(0, len(groups), GROUPS_AT_ONCE)]
    try:
        await asyncio.gather(*(scoring.score(prompt, group) for group in at_once[0]))  # starts them
        began = time.process_time()
        for some in at_once:
            await asyncio.gather(*(scoring.score(prompt, group) for group in some))
        return time.process_time() - began
    finally:
        scoring.close()


def cost_between_processes(num_rollouts: int, batch: TrainBatch, *, tokens: int) -> tuple[float, float, float]:
    """(`Cost.receiving`, `Cost.grading`, `Cost.sending`) of one step."""
    import ray

    ensure_ray()
    far_class = ray.remote(_Far).options(num_cpus=0)
    ranks: list[Any] = [far_class.remote() for _ in range(NUM_RANKS)]
    ray.get([rank.step.remote([], []) for rank in ranks])
    began, groups = time.process_time(), []
    for group_id in range(num_rollouts // GROUP):
        groups.append([rollout for _, rollout in ray.get(ranks[0].answers.remote(group_id, tokens))])
    receiving = time.process_time() - began
    grading = asyncio.run(cost_of_grading(groups))
    shares = [[of_ranks[rank] for of_ranks in batch.mini_batches] for rank in range(NUM_RANKS)]
    began = time.process_time()
    ray.get([rank.step.remote(share, batch.loss_counts) for rank, share in zip(ranks, shares, strict=True)])
    sending = time.process_time() - began
    assert sum(len(group) for group in groups) == num_rollouts
    for rank in ranks:
        ray.kill(rank)
    return receiving, grading, sending


def driver_cost(num_rollouts: int, *, tokens: int) -> Cost:
    loop, packing, batch = cost_of_loop(num_rollouts, tokens=tokens)
    return Cost(loop, packing, *cost_between_processes(num_rollouts, batch, tokens=tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--tokens", type=int, default=2000)
    arguments = parser.parse_args()
    if arguments.tokens <= 50:
        parser.error(f"--tokens={arguments.tokens}: answers differ by up to 50 tokens, so it must be above 50.")
    print(f"CPU seconds per step, {GROUP} answers of {arguments.tokens:,} tokens a prompt")
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
