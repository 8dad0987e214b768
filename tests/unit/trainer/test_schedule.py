from __future__ import annotations

import pytest

from rl.config.schema import OptimizerConfig, Schedule
from rl.trainer.schedule import lr_at


def plan(total: int, **settings) -> list[float]:
    config = OptimizerConfig(lr=1.0, **settings)
    return [lr_at(update, total, config) for update in range(total)]


@pytest.mark.parametrize(
    ("total", "warmup", "schedule", "rates"),
    [
        (3, 0, Schedule.constant, [1.0, 1.0, 1.0]),
        (4, 2, Schedule.constant, [0.5, 1.0, 1.0, 1.0]),
        (5, 0, Schedule.linear, [1.0, 0.75, 0.5, 0.25, 0.0]),
        (6, 2, Schedule.linear, [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]),
        (5, 0, Schedule.cosine, [1.0, 0.853553, 0.5, 0.146447, 0.0]),
        (1, 0, Schedule.linear, [1.0]),
        (2, 4, Schedule.linear, [0.25, 0.5]),
    ],
)
def test_plans_by_hand(total, warmup, schedule, rates):
    assert plan(total, lr_warmup_updates=warmup, schedule=schedule) == pytest.approx(rates, abs=1e-6)


def test_first_update_of_a_constant_plan_has_the_full_rate():
    assert lr_at(0, 100, OptimizerConfig(lr=1e-6)) == 1e-6


@pytest.mark.parametrize("schedule", [Schedule.linear, Schedule.cosine])
def test_minimum_is_at_the_end_of_the_plan_not_a_warm_up_earlier(schedule):
    rates = plan(100, lr_warmup_updates=10, schedule=schedule)
    assert rates.index(max(rates)) == 9
    assert min(rates) == rates[-1] == 0.0
    assert rates[89] > 0.0


def test_rate_stays_at_its_end_past_the_plan():
    assert lr_at(12, 10, OptimizerConfig(lr=1.0, schedule=Schedule.linear)) == 0.0
