"""Rates of a step, over all GPUs of the run and over those that train (P125)."""

from __future__ import annotations

import pytest

from rl.assemble import devices_of
from rl.config.shape import ModelShape
from rl.loggers.names import unlisted
from rl.throughput import Devices, throughput, utilization
from rl.types import TrainBatch
from tests.composed import config_of
from tests.made_groups import made_group, packed

GROUPS = [
    made_group([1.0, 0.0], prompt_tokens=4, response_tokens=[2, 3], group_id=0),
    made_group([1.0, 0.0], prompt_tokens=6, response_tokens=[1, 4], group_id=1),
]
"""(4 + 2) + (4 + 3) + (6 + 1) + (6 + 4) = 30 tokens of prompts and answers."""


def test_tokens_of_prompts_and_answers_are_divided_by_all_gpus_and_by_those_that_train():
    rates = throughput(GROUPS, step_s=2.0, devices=Devices(6, 2))
    assert rates == {
        "throughput/prompts_per_s": 1.0,
        "throughput/tokens_per_s_per_gpu": 2.5,
        "throughput/tokens_per_s_per_training_gpu": 7.5,
    }
    assert unlisted(rates) == []


def test_on_a_cpu_there_is_no_rate_per_gpu():
    assert throughput(GROUPS, step_s=0.5, devices=Devices()) == {"throughput/prompts_per_s": 4.0}


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
    devices = devices_of(config_of(*words))
    assert (devices.num_gpus, devices.training_gpus) == expected


SHAPE = ModelShape(
    layers=1, hidden=4, heads=2, kv_heads=2, head_dim=2, ffn=8, vocab=16, tied_embeddings=True, num_params=1000
)
SECONDS = {"old_logprobs": 9.0, "forward_backward": 1.5, "optimizer": 0.5}


def test_utilization_is_forward_and_backward_over_the_peak_of_the_gpus_that_train():
    """A sequence of L tokens takes L x (2 x 1000 + 4 x 2 x 2 x L / 2) = 2000 L + 8 L^2, and three times of it.

    Lengths 6, 7, 7 and 10: 60,000 + 8 x 234 = 61,872. In 2 s on 2 GPUs of 92,808 a second: half of what they could.
    What fills up the third rank's share is no work.
    """
    batch = packed(GROUPS, num_ranks=3, max_tokens_per_micro_batch=13)
    used = utilization(batch, seconds=SECONDS, devices=Devices(6, 2, peak_flops=92_808.0, shape=SHAPE))
    assert used == {"throughput/mfu": pytest.approx(0.5)}
    assert unlisted(used) == []


@pytest.mark.parametrize("devices", [Devices(6, 2, None, SHAPE), Devices(6, 2, 1e12, None)])
def test_of_an_unknown_peak_or_shape_there_is_no_utilization_and_not_none_of_it(devices: Devices):
    assert utilization(TrainBatch([], []), seconds=SECONDS, devices=devices) == {"throughput/mfu": None}


@pytest.mark.parametrize(
    ("name", "tflops"), [("mi300xx8", 1307), ("mi325xx8", 1307), ("mi350xx8", 2300), ("mi355xx8", 2500)]
)
def test_the_peaks_of_the_amd_gpus_are_known(name: str, tflops: float):
    assert devices_of(config_of(f"hardware={name}")).peak_flops == tflops * 1e12


def test_a_cpu_has_no_utilization():
    assert utilization(TrainBatch([], []), seconds=SECONDS, devices=Devices()) == {}
