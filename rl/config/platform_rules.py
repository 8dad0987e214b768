"""Combinations of hardware, settings and environment that are known to fail, each refused by name with its remedy.

Sources are beside each rule; P is the platform notes of verl's ROCm image (docker/rocm, docs/amd_tutorial, 2026-07).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rl.config.replicas import engine_has_own_process
from rl.config.schema import (
    ALLOCATOR_VARIABLES,
    ConfigError,
    RunConfig,
    ServerRolloutConfig,
    SGLangRolloutConfig,
    VLLMRolloutConfig,
)

MAX_HIP_GRAPH_BATCH = 64
FP4_VARIABLES = ("VLLM_ROCM_USE_AITER_FP4BMM", "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM")


@dataclass(frozen=True, slots=True)
class Platform:
    """What the rules look at."""

    config: RunConfig
    environ: Mapping[str, str]
    """Of the machine that the run starts on; empty in a plan, which may be made anywhere."""
    engine_env: Mapping[str, str]
    """Of the process that holds an engine: the machine's own values win."""

    @property
    def is_rocm(self) -> bool:
        return (self.config.hardware.architecture or "").startswith("gfx")


def check_platform(config: RunConfig, *, environ: Mapping[str, str]) -> None:
    """Raises ConfigError on the first combination that is known to fail. `environ`: see `Platform`."""
    if config.hardware.device == "cpu":
        return
    own = config.hardware.rollout_env if engine_has_own_process(config) else config.driver_env
    platform = Platform(config, environ, {**own, **environ})
    for rule in RULES:
        for message in rule(platform):
            raise ConfigError(message)


def _device_variables(platform: Platform) -> Iterator[str]:
    """P: HIP's name must be equal to CUDA's, and ROCR's is an error with either, because both would choose."""
    hardware = platform.config.hardware
    for where, env in (
        ("the environment", platform.environ),
        ("hardware.trainer_env", {**platform.environ, **hardware.trainer_env}),
        ("hardware.rollout_env", {**platform.environ, **hardware.rollout_env}),
    ):
        cuda, hip = env.get("CUDA_VISIBLE_DEVICES"), env.get("HIP_VISIBLE_DEVICES")
        rocr = env.get("ROCR_VISIBLE_DEVICES")
        if cuda is not None and hip is not None and cuda != hip:
            yield (
                f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} in {where} differ, and ROCm would use what "
                "both leave. Unset HIP_VISIBLE_DEVICES and name the GPUs in CUDA_VISIBLE_DEVICES, which ROCm reads too."
            )
        if rocr is not None and (cuda is not None or hip is not None):
            other = "CUDA_VISIBLE_DEVICES" if cuda is not None else "HIP_VISIBLE_DEVICES"
            yield (
                f"ROCR_VISIBLE_DEVICES={rocr} and {other}={cuda if cuda is not None else hip} in {where} would both "
                "choose GPUs, the second among those that the first leaves. Unset ROCR_VISIBLE_DEVICES and name the "
                "GPUs in CUDA_VISIBLE_DEVICES."
            )


def _expandable_segments(platform: Platform) -> Iterator[str]:
    """vLLM's sleep keeps a memory pool, which PyTorch refuses to have in expandable segments. SGLang's is by
    torch_memory_saver, which with PYTORCH_CUDA_ALLOC_CONF does not start and with the other names frees nothing (its
    #24 and #25). Nor has such memory a handle for an engine's own all-reduce (P, vllm#42609, ROCm/aiter#4174), which
    works without them, under ROCm too."""
    rollout = platform.config.backend.rollout
    found = [name for name in ALLOCATOR_VARIABLES if "expandable_segments:true" in _value(platform, name).lower()]
    if not found or not isinstance(rollout, ServerRolloutConfig):
        return
    engine = "vLLM" if isinstance(rollout, VLLMRolloutConfig) else "SGLang"
    why = f"{engine} cannot put memory to sleep that lies in expandable segments"
    if rollout.tensor_parallel > 1 and rollout.custom_all_reduce:
        why += (
            f", and with backend.rollout.tensor_parallel={rollout.tensor_parallel} its own all-reduce "
            "(backend.rollout.custom_all_reduce) cannot share it"
        )
    if found[0] in platform.environ:
        remedy = (
            "Unset it where the run is started, whose own values win; hardware.trainer_env sets it for trainer ranks "
            "that have processes of their own"
        )
    else:
        remedy = (
            f"Keep it to the trainer's: hardware.rollout_env.{found[0]}=expandable_segments:False, and where trainer "
            f"and engine share a process hardware.trainer_env.{found[0]}=expandable_segments:False, too"
        )
    yield f"{found[0]}={platform.engine_env[found[0]]} in the engine's process: {why}. {remedy}."


def _sglang_attention(platform: Platform) -> Iterator[str]:
    """P, quick start: triton is mandatory; SGLang's own choice under HIP is aiter."""
    rollout = platform.config.backend.rollout
    if not platform.is_rocm or not isinstance(rollout, SGLangRolloutConfig):
        return
    if rollout.attention_backend != "triton":
        value = rollout.attention_backend or "null"
        yield (
            f"backend.rollout.attention_backend={value} with SGLang on {platform.config.hardware.architecture}: "
            "only triton is known to work there, and SGLang's own choice is another. Set "
            "backend.rollout.attention_backend=triton."
        )
    variable = platform.engine_env.get("SGLANG_ATTENTION_BACKEND")
    if variable is not None and variable != rollout.attention_backend:
        yield (
            f"SGLANG_ATTENTION_BACKEND={variable} and backend.rollout.attention_backend={rollout.attention_backend} "
            "contradict. Unset the variable."
        )


def _aiter(platform: Platform) -> Iterator[str]:
    """AITER's kernels are switched as a whole and one by one; parts of what is off have no effect."""
    rollout, env = platform.config.backend.rollout, platform.engine_env
    if not platform.is_rocm:
        return
    if isinstance(rollout, VLLMRolloutConfig):
        is_on = _is_on(env.get("VLLM_ROCM_USE_AITER"))
        parts = [name for name in env if name.startswith("VLLM_ROCM_USE_AITER_") and _is_on(env[name])]
        if parts and not is_on:
            yield (
                f"{parts[0]}={env[parts[0]]} has no effect while VLLM_ROCM_USE_AITER is not 1. Set "
                f"hardware.rollout_env.VLLM_ROCM_USE_AITER=1, or {parts[0]}=0."
            )
        if "AITER" in (rollout.attention_backend or "") and not is_on:
            yield (
                f"backend.rollout.attention_backend={rollout.attention_backend} needs AITER, and VLLM_ROCM_USE_AITER "
                "is not 1. Set hardware.rollout_env.VLLM_ROCM_USE_AITER=1, or attention_backend=TRITON_ATTN."
            )
    if isinstance(rollout, SGLangRolloutConfig) and "SGLANG_ROCM_USE_AITER" in env:
        yield "SGLANG_ROCM_USE_AITER is no variable of SGLang's. Its name is SGLANG_USE_AITER."


def _fp4(platform: Platform) -> Iterator[str]:
    """vllm#34641, vllm#35250: gfx942 has no FP4 and crashes in its kernels, which some versions switch on."""
    if platform.config.hardware.architecture != "gfx942" or not _is_on(platform.engine_env.get("VLLM_ROCM_USE_AITER")):
        return
    if isinstance(platform.config.backend.rollout, VLLMRolloutConfig):
        for name in FP4_VARIABLES:
            if _is_on(platform.engine_env.get(name)):
                yield (
                    f"{name}={platform.engine_env[name]} on gfx942, which has no FP4: vLLM crashes in the first such "
                    f"kernel. Set hardware.rollout_env.{name}=0."
                )


def _hip_graphs(platform: Platform) -> Iterator[str]:
    """P: the capture of big batches may crash under HIP; sizes of 1 to 64 are known to work."""
    rollout = platform.config.backend.rollout
    if not platform.is_rocm or not isinstance(rollout, ServerRolloutConfig) or rollout.enforce_eager:
        return
    largest = rollout.max_num_seqs if rollout.max_graph_batch is None else rollout.max_graph_batch
    if largest > MAX_HIP_GRAPH_BATCH:
        key = "max_num_seqs" if rollout.max_graph_batch is None else "max_graph_batch"
        yield (
            f"backend.rollout.{key}={largest} on {platform.config.hardware.architecture}: to capture graphs of more "
            f"than {MAX_HIP_GRAPH_BATCH} sequences may crash under HIP. Set backend.rollout.max_graph_batch="
            f"{MAX_HIP_GRAPH_BATCH}, or backend.rollout.enforce_eager=true."
        )


RULES: tuple[Callable[[Platform], Iterator[str]], ...] = (
    _device_variables,
    _expandable_segments,
    _sglang_attention,
    _aiter,
    _fp4,
    _hip_graphs,
)


def _is_on(value: str | None) -> bool:
    return (value or "0").strip().lower() in ("1", "true")


def _value(platform: Platform, name: str) -> str:
    return platform.engine_env.get(name, "")
