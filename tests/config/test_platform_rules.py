"""P163: combinations of hardware, settings and environment that are known to fail are refused with the remedy."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest

from rl.config.check import check_devices, missing_packages
from rl.config.platform_rules import check_platform
from rl.config.register import option_names
from rl.config.schema import ConfigError, RunConfig
from tests.composed import config_of

SGLANG = "experiment=qwen3_8b_grpo"
VLLM = "experiment=qwen2_5_math_7b_dapo_colocated"  # on gfx942
VLLM_GFX950 = "experiment=qwen3_5_35b_a3b_grpo_fully_async"
ROCM = ("mi300xx8", "mi325xx8", "mi350xx8", "mi355xx8")


def with_settings(*words: str, settings: Mapping[str, Any] | None = None) -> RunConfig:
    config = config_of(*words)
    for key, value in (settings or {}).items():
        node: Any = config
        *path, last = key.split(".")
        for name in path:
            node = node[name] if isinstance(node, dict) else getattr(node, name)
        if isinstance(node, dict):
            node[last] = value
        else:
            setattr(node, last, value)
    return config


ENGINE = "backend.rollout"
ENV = "hardware.rollout_env"
EXPANDABLE = "expandable_segments:True"

REFUSED: list[tuple[str, dict[str, Any], dict[str, str], str]] = [
    # Device variables: HIP's must equal CUDA's, ROCR's is wrong beside either.
    (SGLANG, {}, {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0,1"}, r"HIP_VISIBLE_DEVICES=0 .*differ.*Unset"),
    (SGLANG, {}, {"ROCR_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}, r"ROCR_VISIBLE_DEVICES=0 and CUDA_VIS"),
    (SGLANG, {}, {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}, r"ROCR_VISIBLE_DEVICES=0 and HIP_VIS"),
    (
        SGLANG,
        {f"{ENV}.ROCR_VISIBLE_DEVICES": "1"},
        {"CUDA_VISIBLE_DEVICES": "0"},
        r"ROCR_VISIBLE_DEVICES=1 .*hardware\.rollout_env",
    ),
    # Expandable segments: not where an engine sleeps, nor with its own all-reduce.
    (
        VLLM,
        {f"{ENV}.PYTORCH_ALLOC_CONF": EXPANDABLE},
        {},
        r"PYTORCH_ALLOC_CONF=.*vLLM cannot put memory to sleep.*rollout_env\.PYTORCH_ALLOC_CONF=.*False",
    ),
    # The environment's own values win, so there only unsetting helps.
    (
        VLLM,
        {},
        {"PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:64,{EXPANDABLE}"},
        r"=max_split.*sleep.* Unset it where",
    ),
    (
        SGLANG,
        {f"{ENV}.PYTORCH_HIP_ALLOC_CONF": EXPANDABLE, f"{ENGINE}.custom_all_reduce": True},
        {},
        r"PYTORCH_HIP_ALLOC_CONF=.*SGLang cannot.*tensor_parallel=2 its own all-reduce .*custom_all_reduce.* share it",
    ),
    (
        SGLANG,
        {f"{ENV}.PYTORCH_ALLOC_CONF": EXPANDABLE},
        {},
        r"PYTORCH_ALLOC_CONF=.*SGLang cannot .* segments\. Keep it to the trainer's",
    ),
    (SGLANG, {f"{ENGINE}.tensor_parallel": 1}, {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}, r"SGLang cannot put memory to"),
    # SGLang's attention under ROCm.
    (SGLANG, {f"{ENGINE}.attention_backend": None}, {}, r"attention_backend=null with SGLang on gfx950.*=triton"),
    (SGLANG, {f"{ENGINE}.attention_backend": "aiter"}, {}, r"attention_backend=aiter with SGLang on gfx950.*=triton"),
    (SGLANG, {}, {"SGLANG_ATTENTION_BACKEND": "aiter"}, r"SGLANG_ATTENTION_BACKEND=aiter .*contradict"),
    # AITER, as a whole and in parts.
    (VLLM, {f"{ENV}.VLLM_ROCM_USE_AITER_MHA": "1"}, {"VLLM_ROCM_USE_AITER": "0"}, r"USE_AITER_MHA=1 has no effect"),
    (
        VLLM,
        {f"{ENV}.VLLM_ROCM_USE_AITER": "0", f"{ENGINE}.attention_backend": "ROCM_AITER_FA"},
        {},
        r"attention_backend=ROCM_AITER_FA needs AITER",
    ),
    (SGLANG, {}, {"SGLANG_ROCM_USE_AITER": "1"}, r"Its name is SGLANG_USE_AITER"),
    # gfx942 has no FP4.
    (VLLM, {f"{ENV}.VLLM_ROCM_USE_AITER_FP4BMM": "1"}, {}, r"VLLM_ROCM_USE_AITER_FP4BMM=1 on gfx942.*=0"),
    (VLLM, {}, {"VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": "True"}, r"FP4_ASM_GEMM=True on gfx942"),
    # Graphs of big batches under HIP.
    (SGLANG, {f"{ENGINE}.max_graph_batch": None}, {}, r"max_num_seqs=256 on gfx950.*max_graph_batch=64"),
    (VLLM, {f"{ENGINE}.max_graph_batch": 65}, {}, r"max_graph_batch=65 on gfx942.*enforce_eager=true"),
]

ACCEPTED: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    (SGLANG, {}, {}),
    (VLLM, {}, {}),
    (VLLM_GFX950, {}, {}),
    ("experiment=qwen2_5_math_7b_dapo_fully_async", {}, {}),
    ("experiment=qwen3_5_35b_a3b_grpo_colocated", {}, {}),
    (SGLANG, {}, {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}),
    (SGLANG, {}, {"ROCR_VISIBLE_DEVICES": "0,1"}),
    # An all-reduce of the engine's own works under ROCm: what it fails with is expandable segments.
    (SGLANG, {f"{ENGINE}.custom_all_reduce": True}, {}),
    (VLLM, {f"{ENGINE}.custom_all_reduce": True}, {}),
    (VLLM, {f"{ENV}.PYTORCH_ALLOC_CONF": "expandable_segments:False"}, {}),
    (VLLM, {"hardware.trainer_env.PYTORCH_ALLOC_CONF": EXPANDABLE}, {}),  # in processes of its own
    (SGLANG, {}, {"SGLANG_ATTENTION_BACKEND": "triton"}),
    (SGLANG, {f"{ENV}.SGLANG_USE_AITER": "1"}, {}),  # for other kernels than attention
    (VLLM_GFX950, {f"{ENV}.VLLM_ROCM_USE_AITER_FP4BMM": "1"}, {}),
    (VLLM, {f"{ENGINE}.max_graph_batch": None, f"{ENGINE}.max_num_seqs": 64}, {}),
    (VLLM, {f"{ENGINE}.max_graph_batch": None, f"{ENGINE}.enforce_eager": True}, {}),
]


@pytest.mark.parametrize(("experiment", "settings", "environ", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_known_to_fail_is_refused(experiment, settings, environ, message):
    with pytest.raises(ConfigError, match=message):
        check_platform(with_settings(experiment, settings=settings), environ=environ)


@pytest.mark.parametrize(("experiment", "settings", "environ"), ACCEPTED, ids=lambda value: str(value)[:40])
def test_what_is_next_to_it_is_accepted(experiment, settings, environ):
    check_platform(with_settings(experiment, settings=settings), environ=environ)


def test_a_trainer_s_expandable_segments_count_where_an_engine_shares_its_process():
    settings: dict[str, Any] = {"placement.trainer_ranks": 1, f"{ENGINE}.replicas": 1, f"{ENGINE}.tensor_parallel": 1}
    config = with_settings(VLLM, settings=settings)
    with pytest.raises(ConfigError, match=r"hardware\.trainer_env\.PYTORCH_ALLOC_CONF=expandable_segments:False"):
        check_platform(config, environ={})
    off = {f"hardware.{env}_env.PYTORCH_ALLOC_CONF": "expandable_segments:False" for env in ("trainer", "rollout")}
    check_platform(with_settings(VLLM, settings=settings | off), environ={})


def test_sixteen_and_sixteen_gpus_fit_four_machines_of_eight_and_not_three():
    experiment = "experiment=qwen2_5_math_7b_dapo_fully_async"
    check_devices(with_settings(experiment))
    with pytest.raises(
        ConfigError, match=r"mi300xx8 with hardware\.nodes=3 has 24 GPU\(s\) and this run needs 32: .*each on their"
    ):
        check_devices(with_settings(experiment, settings={"hardware.nodes": 3}))


def test_the_rules_of_rocm_leave_other_hardware_alone():
    settings = {f"{ENGINE}.max_graph_batch": None, f"{ENGINE}.attention_backend": None}
    check_platform(with_settings(SGLANG, "hardware=h200x8", settings=settings), environ={})
    on_cpu = with_settings("experiment=quickstart", "backend/rollout=vllm")
    check_platform(on_cpu, environ={"PYTORCH_ALLOC_CONF": EXPANDABLE, "ROCR_VISIBLE_DEVICES": "0"})


def test_the_published_runs_start_in_the_environment_of_the_published_image():
    """ENV of verl's Dockerfile.rocm, but for what scripts/rocm_container.sh unsets."""
    image = {
        "SGLANG_USE_AITER": "0",
        "SGLANG_ATTENTION_BACKEND": "triton",
        "HSA_ENABLE_IPC_MODE_LEGACY": "1",
        "MIOPEN_DEBUG_FORCE_IMMED_MODE_FALLBACK": "1",
        "NVTE_USE_GROUPED_GEMM_TRITON": "1",
    }
    published = [name for name in option_names("experiment") if name.startswith("qwen")]
    assert len(published) == 5
    for name in published:
        config = with_settings(f"experiment={name}")
        check_platform(config, environ=image)
        with pytest.raises(ConfigError, match="Unset it where the run is started"):
            check_platform(config, environ=image | {"PYTORCH_ALLOC_CONF": EXPANDABLE})


@pytest.mark.parametrize("name", ROCM)
def test_profiles_of_rocm_pass_their_own_rules_with_every_engine(name):
    graphs = "backend.rollout.max_graph_batch=64"
    for placement in ("colocated", "fully_async"):
        words = [f"hardware={name}", "backend/rollout=vllm", f"placement={placement}", graphs]
        check_platform(with_settings(*words), environ={})
    triton = "backend.rollout.attention_backend=triton"
    check_platform(with_settings(f"hardware={name}", "backend/rollout=sglang", graphs, triton), environ={})


def test_rays_missing_package_is_named_where_a_cluster_of_rocm_machines_is_joined(monkeypatch):
    """Without amdsmi Ray counts 0 GPUs."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    has_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "amdsmi" else has_spec(name))
    config = with_settings(SGLANG)
    assert "amdsmi" not in missing_packages(config)
    assert "amd_smi" in missing_packages(with_settings(SGLANG, settings={"ray.address": "10.0.0.1:6379"}))["amdsmi"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "amdsmi" in missing_packages(config)
    assert "amdsmi" not in missing_packages(with_settings(SGLANG, "hardware=h200x8"))


# GPUs, memory of each, dense bf16 rate, memory bandwidth, links: facts of conf/hardware, with their sources there.
KNOWN = {
    "h100x8": ("sm_90", 8, 79, 989, 3.35, 900),
    "h200x1": ("sm_90", 1, 139, 989, 4.8, None),
    "h200x8": ("sm_90", 8, 139, 989, 4.8, 900),
    "b200x8": ("sm_100", 8, 179, 2250, 8.0, 1800),
    "mi300xx8": ("gfx942", 8, 192, 1307, 5.3, 896),
    "mi325xx8": ("gfx942", 8, 256, 1307, 6.0, 896),
    "mi350xx8": ("gfx950", 8, 288, 2300, 8.0, 1075),
    "mi355xx8": ("gfx950", 8, 288, 2500, 8.0, 1075),
    "cpu": (None, 0, 16, None, None, None),
}


def test_the_peak_rate_of_every_card_is_known_and_of_an_unknown_one_null():
    """P165: a rate taken as infinite would make every utilization 0."""
    assert set(KNOWN) == set(option_names("hardware"))
    for name, expected in KNOWN.items():
        hardware = with_settings(f"hardware={name}").hardware
        assert hardware.name == name and hardware.nodes == 1
        assert expected == (
            hardware.architecture,
            hardware.gpus_per_node,
            hardware.memory_gib,
            hardware.bf16_tflops,
            hardware.memory_bandwidth_tb_s,
            hardware.link_gb_s,
        )
        assert hardware.network_gb_s is None  # nobody knows another's network
