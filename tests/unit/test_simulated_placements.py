"""Placements under injected long-tailed generation times: real loop, stream, placements and engine, simulated seconds.

What is injected are the lengths of the answers (lognormal, or all alike) and the speeds of server and trainer.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rl.config.algorithms import GRPOConfig
from rl.config.schema import ColocatedConfig, FullyAsyncConfig, InFlight, PlacementConfig, RunConfig, StreamConfig
from rl.loop import Run
from rl.rollout.engine import Engine
from scripts import simulate_placements
from scripts.driver_cost import cost_of_loop
from scripts.simulated_run import (
    LengthOf,
    RowsInMemory,
    SimulatedSampler,
    SimulatedTrainer,
    Speed,
    lognormal_lengths,
    run_to_end,
    simulated_run,
)
from scripts.simulated_time import simulate

P, G, STEPS = 16, 4, 24
LONG_TAILED = lognormal_lengths(mean=900.0, sigma=1.2, limit=20_000)


def alike(seed: int) -> int:
    return 900


def trained(placement: PlacementConfig, *, replicas: int, train_s: float, length_of: LengthOf) -> tuple[float, float]:
    """(simulated seconds of STEPS x P prompts, largest staleness)."""

    async def main() -> tuple[float, float]:
        config = RunConfig(algorithm=GRPOConfig(prompts_per_step=P, group_size=G), placement=placement)
        speed = Speed(step_s=0.01, sequence_s=0.0002, train_s=train_s, publish_s=1.0)
        sampler = SimulatedSampler(speed, num_replicas=replicas, max_num_seqs=64, length_of=length_of)
        log = RowsInMemory()
        run = simulated_run(
            config, steps=STEPS, engine=Engine(sampler), trainer=SimulatedTrainer(speed), prompt_tokens=10, log=log
        )
        run.staleness_bound = config.staleness_bound  # the loop asserts it of every batch
        await run_to_end(run)
        assert run.progress.prompts_trained == STEPS * P
        return asyncio.get_running_loop().time(), max(row["staleness/max"] for row in log.rows)

    return simulate(main())


@pytest.mark.parametrize("in_flight", [InFlight.finish, InFlight.continue_on_new_weights])
def test_with_injected_long_tails_fully_async_beats_colocated_on_as_many_devices(in_flight: InFlight):
    """Colocated all four devices do both in turn; apart, two sample and two train, at half the speed each."""
    colocated, stale = trained(ColocatedConfig(), replicas=4, train_s=20.0, length_of=LONG_TAILED)
    assert stale == 0
    placement = FullyAsyncConfig(max_staleness=1.0, in_flight=in_flight)
    apart, stale = trained(placement, replicas=2, train_s=40.0, length_of=LONG_TAILED)
    assert apart < 0.85 * colocated
    assert 1 <= stale <= RunConfig(algorithm=GRPOConfig(prompts_per_step=P), placement=placement).staleness_bound


@pytest.mark.parametrize("max_staleness", [0.0, 0.5, 1.0])
def test_a_run_resumed_between_two_publishes_publishes_when_it_would_have(max_staleness: float):
    """A publish every 4 steps, and an end after 6: due again at 8, or evaluations there would be of older weights."""
    config = RunConfig(
        algorithm=GRPOConfig(prompts_per_step=P, group_size=G),
        placement=FullyAsyncConfig(max_staleness=max_staleness, publish_every=4),
        stream=StreamConfig(window=P),  # first in, first out, where the bound is exact
    )
    speed = Speed(step_s=0.01, sequence_s=0.0002, train_s=5.0, publish_s=1.0)

    def run_of(steps: int, log: RowsInMemory) -> Run:
        sampler = SimulatedSampler(speed, num_replicas=2, max_num_seqs=64, length_of=LONG_TAILED)
        run = simulated_run(
            config, steps=steps, engine=Engine(sampler), trainer=SimulatedTrainer(speed), prompt_tokens=10, log=log
        )
        run.staleness_bound = config.staleness_bound  # the loop asserts it of every batch
        return run

    async def main() -> dict[int, float]:
        first = run_of(6, RowsInMemory())
        await run_to_end(first)
        log = RowsInMemory()
        resumed = run_of(16, log)
        resumed.stream.restore(first.stream.state())
        resumed.progress = first.progress
        await run_to_end(resumed)
        return {step: row["engine/policy_version"] for step, row in enumerate(log.rows, start=7)}

    assert simulate(main()) == {7: 2} | dict.fromkeys(range(8, 12), 3) | dict.fromkeys(range(12, 16), 4) | {16: 5}


def test_the_simulated_server_takes_what_its_two_numbers_say():
    """64 answers of 900 tokens on one replica: 900 steps of 0.01 s + 64 x 0.0002 s; then train and publish."""
    seconds, _ = trained(ColocatedConfig(), replicas=1, train_s=5.0, length_of=alike)
    assert seconds == pytest.approx(1.0 + STEPS * (900 * (0.01 + 64 * 0.0002) + 5.0 + 1.0))


def test_the_fit_finds_the_speeds_that_made_the_rows(monkeypatch: pytest.MonkeyPatch):
    columns = np.array([[2.0, 1 / 32], [3.0, 1 / 64], [5.0, 1 / 128]])
    values = (columns @ np.array([7.0, 640.0])).tolist()
    assert simulate_placements.fit(columns, values) == pytest.approx((7.0, 640.0))
    # More work on fewer GPUs than nothing explains: a coefficient below zero is none.
    assert simulate_placements.fit(columns, (columns @ np.array([7.0, -1.0])).tolist())[1] == 0.0


def test_the_driver_takes_no_more_per_rollout_when_there_are_eight_times_as_many():
    small, *_ = cost_of_loop(256, tokens=200, steps=4)
    large, *_ = cost_of_loop(2048, tokens=200, steps=4)
    assert large < 2.0 * 8 * small  # twice is the room for a busy machine; a square would be 8 times
