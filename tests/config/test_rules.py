"""Each range and each cross-field rule refuses what it is for, and nothing next to it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rl.config import check
from rl.config.check import RANGES, check_machine, check_ranges, check_run_config
from rl.config.schema import ConfigError, RunConfig
from rl.config.sentinels import SentinelsConfig
from tests.composed import config_of

# Key -> values just outside its range, and values just inside.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "algorithm.prompts_per_step": ([0, -1], [1]),
    "algorithm.group_size": ([0, -1], [1]),
    "algorithm.clip_low": ([0.0, 1.0], [0.2]),
    "algorithm.clip_high": ([0.0], [0.01, 5.0]),
    "algorithm.kl_coef": ([-0.1], [0.0]),
    "algorithm.entropy_coef": ([-0.1], [0.0]),
    "algorithm.gamma": ([0.0, 1.1], [1.0]),
    "algorithm.max_sampled_batches": ([0], [1]),
    "algorithm.overlong_penalty": ([-0.1], [0.0]),
    "backend.trainer.optimizer.lr": ([0.0, -1e-6], [1e-9]),
    "backend.trainer.optimizer.lr_warmup_updates": ([-1], [0]),
    "backend.trainer.optimizer.beta1": ([1.0, -0.1], [0.0, 0.9]),
    "backend.trainer.optimizer.beta2": ([1.0, -0.1], [0.0, 0.999]),
    "backend.trainer.optimizer.weight_decay": ([-0.1], [0.0]),
    "backend.trainer.optimizer.grad_clip": ([0.0], [None, 1.0]),
    "backend.trainer.max_tokens_per_micro_batch": ([0], [1]),
    "backend.trainer.logprob_chunk_tokens": ([0], [1]),
    "backend.trainer.tensor_parallel": ([0], [1, 2]),
    "backend.trainer.expert_parallel": ([0, -1], [1, 8]),
    "backend.rollout.max_num_seqs": ([0], [1]),
    "backend.rollout.replicas": ([0, -1], [1, 8]),
    "backend.rollout.replicas_per_device": ([0, -1], [1, 2, None]),
    "backend.rollout.tensor_parallel": ([0], [1]),
    "backend.rollout.memory_fraction": ([0.0, 1.1], [1.0]),
    "backend.rollout.max_graph_batch": ([0], [None, 1, 64]),
    "backend.rollout.cpu_cache_gib": ([0], [1]),
    "placement.trainer_ranks": ([0], [1]),
    "placement.max_staleness": ([-0.5], [0.0]),
    "placement.publish_every": ([0], [1]),
    "task.max_prompt_tokens": ([0], [1]),
    "task.epochs": ([0], [1]),
    "task.sampling.max_new_tokens": ([0], [1]),
    "task.eval_sampling.max_new_tokens": ([0], [1]),
    "task.eval_sampling.temperature": ([-0.1], [0.0]),
    "task.eval_sampling.top_p": ([0.0, 1.1], [1.0]),
    "task.eval_sampling.top_k": ([0, -2], [-1, 1]),
    "task.eval_sampling.samples_per_problem": ([0], [1]),
    "task.train_limit": ([0], [None, 1]),
    "task.eval_limit": ([0], [None, 1]),
    "task.checker.workers": ([0], [None, 1]),
    "task.checker.timeout_s": ([0.0], [0.1]),
    "task.checker.memory_mib": ([511], [512]),
    "stream.window": ([0], [None]),
    "stream.oversample": ([0.99, 0.0], [1.0, 3.0]),
    "stream.max_failed_fraction": ([-0.1, 1.1], [0.0, 1.0]),
    "stream.reward_timeout_s": ([0.0, -1.0], [0.1]),
    "stream.stall_timeout_s": ([0.0], [0.1]),
    "evaluation.every": ([-1], [0]),
    "checkpoint.every": ([-1], [0]),
    "backend.trainer.collective_timeout_s": ([0], [0.5]),
    "checkpoint.keep_last": ([0], [1]),
    "canary.every": ([-1], [0]),
    "canary.prompts": ([0], [1]),
    "canary.new_tokens": ([0], [1]),
    "canary.max_logprob_difference": ([0.0, -1.0], [None, 1e-4]),
    "hardware.nodes": ([0, -1], [1]),
    "hardware.gpus_per_node": ([-1], [0]),
    "hardware.memory_gib": ([0.0, -1.0], [0.5]),
    "hardware.memory_bandwidth_tb_s": ([0.0, -1.0], [0.1, None]),
    "hardware.bf16_tflops": ([0.0, -1.0], [0.1, None]),
    "hardware.link_gb_s": ([0.0, -1.0], [0.1, None]),
    "hardware.network_gb_s": ([0.0, -1.0], [0.1, None]),
    "model.num_params": ([0, -3], [1, None]),
    **{f"model.shape.{size}": ([0, -1], [1]) for size in check.SIZES},
    **{f"model.shape.{size}": ([-1], [0, 1]) for size in check.SIZES_OF_SOME},
    **{f"model.shape.vision.{size}": ([0, -1], [1]) for size in check.SIZES_OF_TOWERS},
    **{f"model.shape.vision.{size}": ([-1], [0, 1]) for size in check.SIZES_OF_SOME_TOWERS},
    "model.shape.max_positions": ([0, -1], [1, None]),
    "ray.address": (
        ["[::1]:6379", "::1:6379", "host", "host:", ":6379", "host:0", "host:65536", "host:x"],
        [None, "host:6379", "10.0.0.1:1"],
    ),
    **{f"sentinels.{sentinel.name}.limit": ([-0.1], [None, 0.0, 1.0]) for sentinel in fields(SentinelsConfig)},
    "logger.mode": (["maybe", "on"], ["online", "offline"]),
    "logger.sample_every": ([0], [1]),
    "logger.samples": ([-1], [0]),
    "steps": ([0], [None, 1]),
    "seed": ([-1], [0]),
}


PART_OF = {
    "algorithm.gamma": ["algorithm=reinforce_pp"],
    "algorithm.max_sampled_batches": ["algorithm=dapo"],
    "algorithm.overlong_penalty": ["algorithm=dapo"],
    "backend.trainer.tensor_parallel": ["backend/trainer=megatron"],
    "backend.trainer.expert_parallel": ["backend/trainer=megatron"],
    "logger.mode": ["logger=wandb"],
    "model.num_params": ["model=qwen3_8b"],
    **{f"model.shape.{size}": ["model=qwen3_8b"] for size in (*check.SIZES, *check.SIZES_OF_SOME, "max_positions")},
    **{
        f"model.shape.vision.{size}": ["model=qwen3_5_35b_a3b"]
        for size in (*check.SIZES_OF_TOWERS, *check.SIZES_OF_SOME_TOWERS)
    },
}
"""Keys that only one part has."""

GPUS = ["hardware=h200x1", "backend/rollout=vllm"]
QWEN3_8B = ["model=qwen3_8b", *GPUS]
THREE_WAY_TRAINER = ["backend/trainer=megatron", "placement.trainer_ranks=3", "backend.trainer.tensor_parallel=3"]
SHORT_ANSWERS = ["task.sampling.max_new_tokens=4", "task.eval_sampling.max_new_tokens=4"]
EIGHT_GPU_ENGINES = ["backend.rollout.replicas=4", "backend.rollout.tensor_parallel=2"]


def config_with(*words: str) -> RunConfig:
    return config_of(*([] if words and words[0].startswith("experiment=") else ["experiment=quickstart"]), *words)


def put(config: RunConfig, key: str, value: Any) -> RunConfig:
    *parents, name = key.split(".")
    node: Any = config
    for parent in parents:
        node = getattr(node, parent)
    assert hasattr(node, name), key
    setattr(node, name, value)
    return config


def test_every_range_has_values_here():
    assert {key for key, _, _ in RANGES} <= set(VALUES)


@pytest.mark.parametrize("key", [key for key, _, _ in RANGES])
def test_a_range_refuses_what_is_outside_and_takes_what_is_inside(key):
    outside, inside = VALUES[key]
    for value in outside:
        with pytest.raises(ConfigError, match=rf"^{re.escape(f'{key}={value}')} is out of range: it must be "):
            check_ranges(put(config_with("backend/rollout=vllm", *PART_OF.get(key, [])), key, value))
    for value in inside:
        check_ranges(put(config_with("backend/rollout=vllm", *PART_OF.get(key, [])), key, value))


def test_the_quickstart_obeys_every_rule():
    check_run_config(config_with())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.prompts_per_mini_batch=48"], r"prompts_per_mini_batch=48 must divide .*prompts_per_step=64"),
        (["algorithm.prompts_per_mini_batch=0"], r"prompts_per_mini_batch=0 must divide"),
        (["task.sampling.temperature=0"], r"task\.sampling\.temperature=0\.0 must be above 0"),
        (["task.sampling.temperature=-1"], r"task\.sampling\.temperature=-1\.0 must be above 0"),
        (["task.sampling.top_p=0.9"], r"top_p=0\.9, top_k=-1: truncated sampling"),
        (["task.sampling.top_k=50"], r"top_p=1\.0, top_k=50: truncated sampling"),
        (
            ["placement.max_staleness=1"],
            r"placement=colocated needs placement\.max_staleness=0 \(got 1\.0\).*fully_async",
        ),
        (["placement.publish_every=2"], r"placement=colocated needs placement\.publish_every=1 \(got 2\)"),
        (
            ["placement=fully_async", "placement.publish_every=4"],
            r"evaluation\.every=50 must be a multiple of placement\.publish_every=4",
        ),
        (
            ["placement=fully_async", "placement.in_flight=continue_on_new_weights"],
            r"in_flight=continue_on_new_weights needs algorithm\.old_logprobs=rollout \(got trainer\)",
        ),
        (["algorithm.group_size=1"], r"algorithm\.group_size=1 must be at least 2: .*algorithm=reinforce_pp"),
        (
            ["algorithm=cispo", "placement=fully_async", "algorithm.old_logprobs=trainer"],
            r"old_logprobs=trainer with algorithm=cispo and answers that may be 1 version",
        ),
        (
            ["algorithm=dapo", "algorithm.response_limit=99"],
            r"response_limit=99 must be task\.sampling\.max_new_tokens=",
        ),
        (["algorithm=dapo", "algorithm.overlong_buffer=99"], r"overlong_buffer=99 must be between 0 and"),
        (["algorithm.dual_clip=1.2"], r"algorithm\.dual_clip=1\.2 must be above 1 \+ clip_high = 1\.2"),
        (["algorithm=cispo", "algorithm.weight_high=1"], r"weight_low=0\.0 and weight_high=1\.0 are out of range"),
        (
            ["algorithm.aggregation=seq_mean_token_sum_norm"],
            r"horizon=None with algorithm\.aggregation=seq_mean_token_sum_norm",
        ),
        (["algorithm.horizon=8"], r"horizon=8 with algorithm\.aggregation=token_mean"),
        (["algorithm=dr_grpo", "algorithm.horizon=0"], r"horizon=0 is out of range"),
        (["stream.window=63"], r"stream\.window=63 must be at least algorithm\.prompts_per_step=64"),
        (["stream.window=65"], r"stream\.window=65 is more than the 64 groups"),
        (["placement=fully_async", "stream.window=129"], r"stream\.window=129 is more than the 128 groups"),
        (["checkpoint.keep_best=reward/mean"], r"checkpoint\.keep_best=reward/mean must be an evaluation's"),
        (
            ["checkpoint.keep_best=eval/arithmetic/greedy", "checkpoint.every=0"],
            r"must be a multiple of checkpoint\.every=0",
        ),
        (
            ["checkpoint.keep_best=eval/arithmetic/greedy", "checkpoint.every=20"],
            r"evaluation\.every=50 must be a multiple of checkpoint\.every=20",
        ),
        (["hardware.device=tpu"], r"hardware\.device=tpu must be cpu or cuda"),
        (["hardware=h200x1", "placement.trainer_ranks=2"], r"has 1 GPU\(s\) and this run needs 2: .*on the same"),
        (
            ["hardware=h200x1", "placement=fully_async"],
            r"has 1 GPU\(s\) and this run needs 2: .*each on their own.*placement\.share_devices=true",
        ),
        (
            ["hardware=h200x1", "placement=fully_async", "placement.share_devices=true", "backend.rollout.replicas=2"],
            r"has 1 GPU\(s\) and this run needs 2: .*on the same",
        ),
        (
            ["hardware=h200x1", "backend.rollout.replicas=2"],
            r"has 1 GPU\(s\) and this run needs 2: .*on the same.*lower .*backend\.rollout\.replicas",
        ),
        (
            [*GPUS, "hardware.gpus_per_node=8", "placement=fully_async", *EIGHT_GPU_ENGINES],
            r"has 8 GPU\(s\) and this run needs 9: .*each on their own",
        ),
        (
            ["backend/rollout=vllm", "backend.rollout.replicas_per_device=2", "backend.rollout.tensor_parallel=2"],
            r"replicas_per_device=2 needs tensor_parallel=1 \(got 2\).*backend\.rollout\.replicas",
        ),
        (
            [*QWEN3_8B, "hardware.gpus_per_node=9", "backend.rollout.tensor_parallel=6"],
            r"rollout\.tensor_parallel=6: Qwen/Qwen3-8B has 32 query and 8 .*over 6 GPUs\..* such as 2",
        ),
        (  # 28 query heads, and 4 of keys cannot be copied to 7 GPUs equally often
            ["model=qwen2_5_math_7b", *GPUS, "hardware.gpus_per_node=7", "backend.rollout.tensor_parallel=7"],
            r"rollout\.tensor_parallel=7: .* has 28 query and 4 key-value heads, .*over 7 GPUs",
        ),
        (
            [*QWEN3_8B, "hardware.gpus_per_node=3", *THREE_WAY_TRAINER],
            r"trainer\.tensor_parallel=3: .* has 32 query and 8 key-value heads",
        ),
        (
            ["hardware=h200x1", "backend/rollout=sglang", "backend.rollout.dtype=float32"],
            r"backend\.rollout\.dtype=float32: SGLang's GPU kernels.*bfloat16",
        ),
        (
            ["experiment=qwen3_8b_grpo", "backend/rollout=vllm"],  # the experiment's is of SGLang
            r"attention_backend=triton: vLLM writes its names of them in capitals, such as TRITON_ATTN.*or null",
        ),
        (
            ["hardware=h200x1", "backend/rollout=sglang", "backend.rollout.attention_backend=TRITON_ATTN"],
            r"attention_backend=TRITON_ATTN: SGLang writes its names of them in small letters, such as triton",
        ),
        (["model=hf", "model.path=/no/such/folder"], r"model\.path=/no/such/folder: there is no such folder"),
        (["task=jsonl", "task.path=/no/such.jsonl"], r"task\.path=/no/such\.jsonl: there is no such file"),
        (["task.held_out=9000"], r"task\.held_out=9000.*leave -1300 of the 10000 problems"),
        (["model.heads=3"], r"model\.heads=3 must be a multiple"),
    ],
)
def test_a_rule_refuses_and_names_key_value_and_remedy(words, message):
    with pytest.raises(ConfigError, match=message):
        check_run_config(config_with(*words))


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.prompts_per_mini_batch=64"],
        ["task.sampling.temperature=0.01"],
        ["placement=fully_async", "placement.max_staleness=0"],
        ["placement=fully_async", "placement.publish_every=5", "placement.max_staleness=0.25"],
        ["placement=fully_async", "placement.in_flight=abort"],
        [
            "placement=fully_async",
            "placement.in_flight=continue_on_new_weights",
            "algorithm.old_logprobs=rollout",
        ],
        ["placement=fully_async", "stream.window=128"],
        ["hardware=h200x1"],
        ["hardware=h200x1", "placement=fully_async", "placement.share_devices=true"],
        ["hardware=h200x1", "backend.rollout.replicas_per_device=4"],
        ["hardware=h200x1", "hardware.gpus_per_node=2", "backend.rollout.replicas=2"],
        [*GPUS, "hardware.gpus_per_node=9", "placement=fully_async", *EIGHT_GPU_ENGINES],
        [*GPUS, "hardware.gpus_per_node=8", "backend.rollout.replicas_per_device=null", *EIGHT_GPU_ENGINES],
        ["backend/rollout=sglang", "backend.rollout.dtype=float32"],
        ["hardware=h200x1", "backend/rollout=sglang", "backend.rollout.dtype=bfloat16"],
        [*QWEN3_8B, "hardware.gpus_per_node=16", "backend.rollout.tensor_parallel=16"],  # each key head on two GPUs
        ["backend.rollout.replicas=3"],  # on a CPU they share its cores
    ],
)
def test_what_stands_next_to_a_rule_is_allowed(words):
    check_run_config(config_with(*words))


def test_a_batch_larger_than_the_data_is_refused_with_the_arithmetic(tmp_path: Path):
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}", "answer": "1"}) + "\n" for i in range(100)))
    words = ("task=jsonl", f"task.path={rows}", "steps=null", "task.max_prompt_tokens=16", *SHORT_ANSWERS)
    message = r"100 training rows, algorithm\.prompts_per_step=128: 1 epoch\(s\) x \(100 // 128\) = 0 steps"
    with pytest.raises(ConfigError, match=message):
        check_run_config(config_with(*words, "algorithm.prompts_per_step=128"))
    check_run_config(config_with(*words, "algorithm.prompts_per_step=96"))
    check_run_config(put(config_with(*words, "algorithm.prompts_per_step=128"), "steps", 3))


@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_a_missing_package_is_named_before_a_model_loads(monkeypatch, package):
    real = importlib.util.find_spec
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None if name == package else real(name))
    check_machine(config_with())
    message = rf"needs the package '{package}', which is not installed.*install_{package}_cpu\.sh"
    with pytest.raises(ConfigError, match=message):
        check_machine(config_with(f"backend/rollout={package}"))


def test_a_machine_without_a_gpu_is_told_so(monkeypatch):
    on_gpu, on_cpu = config_with("hardware=h200x1"), config_with()  # Hydra looks for its own files
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(ConfigError, match=r"hardware=h200x1 needs a GPU and this machine shows none"):
        check_machine(on_gpu)
    check_machine(on_cpu)


def test_steps_admission_and_staleness_by_hand():
    config = config_with("placement=fully_async", "placement.publish_every=4", "placement.max_staleness=0.5")
    # P = 64, so 256 groups a publish; 1.5 x 256 = 384 admitted; window 256: (384 + 256 - 2) // 256.
    assert (config.window, config.max_admitted, config.staleness_bound) == (256, 384, 2)
    assert put(config, "stream.window", 64).staleness_bound == 1  # (384 - 1) // 256
    assert config_with().algorithm.updates_per_step == 2
    assert config_with().num_steps(6700) == 250
    assert put(put(config_with(), "steps", None), "task.epochs", 3).num_steps(6700) == 3 * 104


def test_the_rules_run_without_torch():
    import subprocess

    code = (
        "import sys; from rl.config.compose import compose_run_config; from rl.config.check import check_run_config; "
        "check_run_config(compose_run_config(['experiment=quickstart'])); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


MATH_7B = "experiment=qwen2_5_math_7b_dapo_fully_async"
POSITIONS = "model.hf_overrides.max_position_embeddings"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [MATH_7B, f"{POSITIONS}=4096", "mode=plan"],
            r"task\.max_prompt_tokens=2048 and task\.sampling\.max_new_tokens=28672 make 30,720 tokens, and "
            r"Qwen/Qwen2\.5-Math-7B has 4,096 positions: .*Lower one of the two, or give .*max_position_embeddings",
        ),
        (
            ["experiment=qwen3_8b_grpo", "task.sampling.max_new_tokens=39937"],
            r"task\.sampling\.max_new_tokens=39937 make 40,961 tokens, and Qwen/Qwen3-8B has 40,960 positions",
        ),
        (["task.eval_sampling.max_new_tokens=497"], r"task\.eval_sampling\..* 513 tokens, and tiny has 512 positions"),
    ],
)
def test_a_prompt_and_answer_longer_than_the_model_s_positions_are_refused(words: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        check_run_config(config_with(*words))


@pytest.mark.parametrize(
    "words",
    [
        [MATH_7B, f"{POSITIONS}=30720"],
        ["experiment=qwen3_8b_grpo", "task.sampling.max_new_tokens=39936"],
        ["experiment=qwen3_8b_grpo", "task.sampling.max_new_tokens=60000", "model.shape.max_positions=null"],
        ["task.eval_sampling.max_new_tokens=496"],
        ["mode=eval", "task.sampling.max_new_tokens=9999"],  # nothing is sampled for training
    ],
)
def test_as_long_as_the_model_s_positions_or_of_unknown_many_they_are_not(words: list[str]):
    check_run_config(config_with(*words))
