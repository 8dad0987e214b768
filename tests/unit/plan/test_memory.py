"""Terms of the memory plan against numbers worked out by hand, and what fits where."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from rl.config.compose import compose_run_config
from rl.plan.forecast import Forecast, best_knob, forecast
from rl.plan.memory import GIB, Phase, cache_of, count, host_bytes, phases
from rl.plan.sizes import RunSizes, sizes_of

QWEN3_8B = ["experiment=qwen3_8b_grpo"]
N = 8_190_735_360


@functools.cache  # composing takes most of the time
def run_of(*words: str) -> RunSizes:
    sizes = sizes_of(compose_run_config(list(words)))
    assert sizes is not None
    return sizes


def forecast_of(*words: str) -> Forecast:
    found = forecast(compose_run_config(list(words)))
    assert found is not None
    return found


def terms(run: RunSizes, name: str) -> dict[str, float]:
    (phase,) = [phase for phase in phases(run) if phase.name == name]
    return {line.what: line.num_bytes for line in phase.lines}


def named(run: RunSizes, name: str) -> Phase:
    return next(phase for phase in phases(run) if phase.name == name)


def test_of_a_dense_model_under_fsdp_each_term_is_what_a_hand_gets():
    train = terms(run_of(*QWEN3_8B), "train")
    assert train["fp32 masters, gradients, AdamW"] == 16 * N / 8  # 15.3 GiB
    assert train["reference policy"] == 2 * N / 8
    # Embeddings and head of 151,936 x 4,096 and the last norm; one layer has 192,946,432 parameters.
    assert train["gathered embeddings and head, with gradients"] == 4 * (2 * 151936 * 4096 + 4096)
    assert train["gathered layers, gradients of one"] == 10 * 192_946_432
    assert train["activations kept: inputs of layers"] == 36 * 2 * 24576 * 4096  # 6.75 GiB
    # 6 x 4,096 + 2 x 4,096 queries + 2 x 1,024 keys + 4 x 12,288 feed-forward = 83,968 numbers a token.
    layer, logits = 1.5 * 2 * 24576 * 83968, 5 * 4 * 2048 * 151936  # one after the other: the larger one counts
    assert train["fp32 logits of a chunk, with gradients"] == logits > layer
    smaller = terms(run_of(*QWEN3_8B, "backend.trainer.logprob_chunk_tokens=1024"), "train")
    assert smaller["a layer computed again, with gradients, estimated"] == layer


def test_the_cache_is_what_memory_fraction_leaves_beside_the_weights():
    run = run_of(*QWEN3_8B)
    generate = terms(run, "generate")
    assert generate["engine weights"] == 2 * N / 2
    free = 0.6 * 288 * GIB - N
    assert generate["engine cache of keys and values"] == pytest.approx(free)
    # 147,456 bytes a token, half of them on each of two GPUs.
    assert cache_of(run).tokens == int(free // 73728)
    assert cache_of(run).sequences == int(free // (3072 * 73728))


def test_colocated_the_trainer_leaves_the_gpu_before_the_cache_wakes():
    run = run_of(*QWEN3_8B)
    assert [phase.name for phase in phases(run)] == ["train", "publish", "wake", "generate"]
    assert not any("masters" in what for what in terms(run, "wake"))
    assert not any("cache" in what for what in terms(run, "publish"))
    assert terms(run, "publish")["fp32 masters, AdamW"] == 12 * N / 8  # gradients are freed after each update
    assert host_bytes(run)[0] == (12 + 2) * N
    largest = 151936 * 4096
    assert terms(run, "publish")["buckets of weights, trainer's"] == 3 * 2 * largest


def test_apart_nobody_moves_and_each_kind_of_gpu_has_its_own_phases():
    run = run_of("experiment=qwen2_5_math_7b_dapo_fully_async")
    assert [phase.where.split(",")[0] for phase in phases(run)] == ["trainer's GPUs", "trainer's GPUs", "engines' GPUs"]
    assert host_bytes(run)[0] == 0
    assert terms(run, "train")["fp32 masters, gradients, AdamW"] == 16 * 7_615_616_512 / 16
    assert "reference policy" not in terms(run, "train")


def test_on_shared_gpus_at_the_same_time_trainer_and_engine_add_up():
    words = ["experiment=quickstart", "hardware=h200x1", "backend/rollout=vllm", "placement=fully_async"]
    run = run_of(*words, "placement.share_devices=true")
    train, generate = named(run, "train"), named(run, "generate")
    assert train.gib == generate.gib > 0.6 * 139


def test_experts_are_divided_by_expert_parallelism_and_the_rest_by_tensor_parallelism():
    shape = run_of("experiment=qwen3_5_35b_a3b_grpo_colocated").shape
    experts, rest = 32_212_254_720, 34_660_610_688 - 32_212_254_720
    run = run_of("experiment=qwen3_5_35b_a3b_grpo_colocated")
    held = rest / 2 + experts / 8
    assert terms(run, "train")["fp32 masters, gradients, AdamW"] == 16 * held  # 78 GB
    assert terms(run, "train")["bf16 copy that computes"] == 2 * held
    assert shape.num_params == experts + rest
    # Two key-value heads on eight GPUs: each GPU holds one, so half of the 20,480 bytes a token.
    assert cache_of(run).tokens == int(cache_of(run).gib * GIB // 10240)
    # The largest tensor: gate and up of 256 experts of 512 x 2,048.
    assert terms(run, "publish")["buckets of weights, engine's"] == 2 * 256 * 2 * 512 * 2048


def test_a_single_sequence_longer_than_the_budget_decides_the_micro_batch():
    run = run_of("experiment=qwen2_5_math_7b_dapo_fully_async", "backend.trainer.max_tokens_per_micro_batch=8192")
    assert run.trainer.micro_batch_tokens == 2048 + 28672


def test_a_micro_batch_with_its_logits_at_once_is_the_usual_surprise():
    """fp32 logits of 24,576 positions x 151,936 are 13.9 GiB, five such tensors 69.5."""
    run = run_of(*QWEN3_8B, "backend.trainer.logprob_chunk_tokens=1000000")
    assert terms(run, "train")["fp32 logits of a chunk, with gradients"] == 20 * 24576 * 151936


@pytest.mark.parametrize(
    ("words", "named_problem", "knob"),
    [
        (["backend.trainer.recompute=false"], "train takes", "backend.trainer.recompute=true"),
        (["backend.rollout.memory_fraction=0.05"], "lacks 0.7 GiB", "backend.rollout.memory_fraction=0.15"),
        (["backend.rollout.memory_fraction=0.99"], "wake takes", "backend.rollout.memory_fraction=0.79"),
    ],
)
def test_what_does_not_fit_is_said_with_the_setting_that_makes_it_fit(words, named_problem, knob):
    words = [*QWEN3_8B, "hardware=h200x8", *words]
    now = forecast_of(*words)
    assert now.problem is not None and named_problem in now.problem
    found = best_knob(compose_run_config(words), now)
    assert found is not None and found.fits and found.words == knob
    key = knob.partition("=")[0]
    assert forecast_of(*(word for word in words if not word.startswith(f"{key}=")), knob).problem is None


def test_a_knob_is_never_one_that_changes_what_is_learned():
    words = [*QWEN3_8B, "hardware=h200x8", "hardware.memory_gib=8"]
    now = forecast_of(*words)
    found = best_knob(compose_run_config(words), now)
    assert now.problem is not None
    assert found is None or not found.words.startswith(("algorithm.", "task.", "model."))


def test_more_ranks_never_take_more_of_a_gpu():
    fewer = run_of(*QWEN3_8B)
    more = replace(fewer, trainer=replace(fewer.trainer, ranks=16, data_ranks=16))
    assert named(more, "train").gib < named(fewer, "train").gib


def test_on_a_cpu_everything_is_in_the_host_s_memory_at_once():
    run = run_of("experiment=quickstart")
    (phase,) = phases(run)
    held = {line.what: line.num_bytes for line in phase.lines}
    assert held["fp32 masters, gradients, AdamW"] == 16 * 298_112
    assert held["engine weights"] == 4 * 298_112
    two = run_of("experiment=quickstart", "placement.trainer_ranks=2")
    held = {line.what: line.num_bytes for line in phases(two)[0].lines}
    assert held["fp32 masters, gradients, AdamW"] == 16 * 298_112  # two shards, one host


def test_counts_are_written_as_people_say_them():
    assert [count(8_190_735_360), count(298_112), count(192_946_432), count(12)] == ["8.19 G", "298 k", "193 M", "12"]


def test_an_overlapped_publish_keeps_the_weights_in_the_hosts_memory():
    words = ["experiment=quickstart", "placement=fully_async", "placement.weight_transport=overlapped"]
    run = run_of(*words)
    held, what = host_bytes(run)
    assert held == run.trainer.compute_bytes * run.shape.num_params
    assert what == "the weights that engines take while the trainer goes on"
