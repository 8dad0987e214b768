"""Rates of a step, over all GPUs and over those that train."""

from __future__ import annotations

import pytest

from rl.assemble import throughput_devices
from rl.config.compose import compose_run_config
from rl.loggers.names import unlisted
from rl.loop import throughput
from tests.made_groups import made_group

GROUPS = [
    made_group([1.0, 0.0], prompt_tokens=4, response_tokens=[2, 3], group_id=0),
    made_group([1.0, 0.0], prompt_tokens=6, response_tokens=[1, 4], group_id=1),
]
"""(4 + 2) + (4 + 3) + (6 + 1) + (6 + 4) = 30 tokens of prompts and answers."""


def test_tokens_of_prompts_and_answers_are_divided_by_all_gpus_and_by_those_that_train():
    rates = throughput(GROUPS, step_s=2.0, num_gpus=6, training_gpus=2)
    assert rates == {
        "throughput/prompts_per_s": 1.0,
        "throughput/tokens_per_s_per_gpu": 2.5,
        "throughput/tokens_per_s_per_training_gpu": 7.5,
    }
    assert unlisted(rates) == []


def test_on_a_cpu_there_is_no_rate_per_gpu():
    assert throughput(GROUPS, step_s=0.5, num_gpus=0, training_gpus=0) == {"throughput/prompts_per_s": 4.0}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["experiment=qwen3_8b_grpo"], (8, 8)),
        (["experiment=qwen2_5_math_7b_dapo_fully_async"], (32, 16)),
        (["experiment=qwen3_5_35b_a3b_grpo_fully_async"], (8, 4)),
        (["experiment=qwen3_5_35b_a3b_grpo_fully_async", "placement.share_devices=true"], (4, 4)),
        (["experiment=quickstart"], (0, 0)),
    ],
)
def test_the_denominators_are_the_gpus_that_a_run_uses(words: list[str], expected: tuple[int, int]):
    assert throughput_devices(compose_run_config(words)) == expected
