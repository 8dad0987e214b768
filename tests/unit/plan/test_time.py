"""The time model: by hand where it is a product, by direction where it is a model."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from rl.config.compose import compose_run_config
from rl.config.schema import WeightTransport
from rl.plan.sizes import RunSizes, Sharing, sizes_of
from rl.plan.time import (
    FITTED,
    Lengths,
    decode_s,
    exchange_s,
    predict,
    publish_seconds,
    score_flops,
    train_flops,
    train_s,
)


@functools.cache  # composing takes most of the time
def run_of(*words: str) -> RunSizes:
    sizes = sizes_of(compose_run_config(["experiment=qwen3_8b_grpo", *words]))
    assert sizes is not None
    return sizes


def step_s(run: RunSizes) -> float:
    times = predict(run)
    assert times is not None
    return times.step


def test_arithmetic_of_a_step_is_two_operations_a_parameter_and_pass():
    """5,120 answers of 1,024 tokens and 200 of prompt; attention sees half of the 1,224 on average."""
    run = run_of()
    per_token = 2 * (8_190_735_360 - 151936 * 4096) + 4 * 36 * 32 * 128 * 612
    assert train_flops(run) == pytest.approx(4 * 5120 * 1224 * per_token)
    assert train_flops(run_of("backend.trainer.recompute=false")) == pytest.approx(3 * 5120 * 1224 * per_token)
    # Three of four updates need old log-probs from a pass of their own, and all tokens those of the reference.
    assert score_flops(run) == pytest.approx(1.75 * 5120 * 1224 * per_token)
    assert score_flops(run_of("algorithm.kl_coef=0")) == pytest.approx(0.75 * 5120 * 1224 * per_token)
    assert score_flops(run_of("algorithm.kl_coef=0", "algorithm.old_logprobs=rollout")) == 0


def test_training_takes_flops_over_what_the_gpus_reach_and_the_exchange_of_weights():
    run = run_of()
    rate = 8 * 2300e12
    expected = train_flops(run) / (FITTED.train_share * rate) + score_flops(run) / (FITTED.score_share * rate)
    assert train_s(run, FITTED) == pytest.approx(expected + exchange_s(run, FITTED))
    # 1,566,720 tokens an update on 8 ranks are 8 micro-batches of 24,576; each moves 8 B a parameter, and 2 B x 1.75
    # for scoring, at half of one direction of 1,075 GB/s.
    assert exchange_s(run, FITTED) == pytest.approx(4 * 8 * (8 + 3.5) * 8_190_735_360 / (0.5 * 1075e9 / 2))


def test_a_decoding_step_reads_the_weights_once_and_the_cache_of_each_sequence():
    run = run_of()
    context = 1224
    read = 2 * (8_190_735_360 - 151936 * 4096) / 2 + 10 * context * 147456 / 2
    flops = 10 * (2 * (8_190_735_360 - 151936 * 4096) + 4 * 36 * 32 * 128 * context) / 2
    expected = read / (0.8 * 8e12) + flops / (FITTED.train_share * 2300e12) + 36 * FITTED.layer_s + 10 * FITTED.token_s
    assert decode_s(run, FITTED, 10) == pytest.approx(expected)


def test_of_experts_a_step_reads_those_that_some_sequence_visits():
    sizes = sizes_of(compose_run_config(["experiment=qwen3_5_35b_a3b_grpo_fully_async"]))
    assert sizes is not None
    bare = replace(FITTED, layer_s=0.0, token_s=0.0)
    one, many = decode_s(sizes, bare, 1), decode_s(sizes, bare, 1000)
    active, total = 2_946_429_568, 34_660_610_688 - 508_559_360
    assert one == pytest.approx(2 * active / 4 / (0.8 * 8e12), rel=0.05)
    assert many > 2 * total / 4 / (0.8 * 8e12)


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ([], 2 * 8_190_735_360 / 12.5e9),  # SGLang, each engine beside a rank
        (["placement.weight_transport=bytes"], 2 * 8_190_735_360 / 1.5e9),
        (["placement.weight_transport=disk"], 2 * 8_190_735_360 / 0.25e9),
    ],
)
def test_a_publish_takes_its_bytes_over_the_rate_that_was_measured(words, seconds):
    assert publish_seconds(run_of(*words)) == pytest.approx(seconds)


def test_answers_are_as_spread_as_lets_the_longest_of_a_publish_reach_the_limit():
    """For 8,192 answers of 890 tokens and a limit of 28,672 that is the sigma that the simulation assumes, 1.115."""
    lengths = Lengths(890, 28672, 8192)
    assert lengths.sigma == pytest.approx(1.115, abs=0.002)
    assert lengths.quantile(1.0) == 28672
    assert lengths.quantile(0.5) == pytest.approx(890 * 2.718281828 ** (-(lengths.sigma**2) / 2))
    assert Lengths(100, 100, 50).quantile(0.5) == 100


def test_staleness_hides_the_longest_answers_and_never_costs():
    run = sizes_of(compose_run_config(["experiment=qwen2_5_math_7b_dapo_fully_async", "plan.response_tokens=890"]))
    assert run is not None and run.sharing is Sharing.apart
    seconds = [step_s(replace(run, step=replace(run.step, max_staleness=s))) for s in (0.0, 0.1, 0.3, 0.5, 1.0)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


def test_a_faster_gpu_and_shorter_answers_take_less_time():
    assert step_s(run_of()) < step_s(run_of("hardware=h200x8"))
    assert step_s(run_of("plan.response_tokens=300")) < step_s(run_of())


def test_without_peak_rates_nothing_is_predicted():
    assert predict(run_of("hardware.bf16_tflops=null")) is None


def test_a_graphics_card_apart_gets_weights_by_broadcast():
    run = sizes_of(compose_run_config(["experiment=qwen2_5_math_7b_dapo_fully_async"]))
    assert run is not None and run.transport is WeightTransport.collective
