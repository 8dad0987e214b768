"""hardware.trainer_env and rollout_env reach the process that holds trainer or engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.assemble import build_engine, engine_devices
from rl.config.check import check_run_config
from rl.config.compose import compose_run_config
from rl.config.replicas import engine_config, replicas_of
from rl.config.schema import ConfigError, VLLMRolloutConfig

TWO_OF_THREE_GPUS = ["backend.rollout.replicas=2", "backend.rollout.tensor_parallel=3"]
BOTH = ["hardware.trainer_env.A=1", "hardware.rollout_env.B=2"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"A": "1", "B": "2"}),
        (["placement=fully_async"], {"A": "1"}),
        (["placement=fully_async", "placement.trainer_ranks=2"], {}),
        (["placement.trainer_ranks=2"], {"B": "2"}),
        (["backend.rollout.replicas=2"], {"A": "1"}),
        (["backend.rollout.replicas_per_device=2"], {"A": "1"}),
    ],
)
def test_the_driver_takes_what_its_own_parts_need(words: list[str], expected: dict[str, str]):
    assert compose_run_config([*BOTH, *words]).driver_env == expected


def test_values_that_contradict_in_one_process_are_refused():
    words = ["hardware.trainer_env.A=1", "hardware.rollout_env.A=2"]
    with pytest.raises(ConfigError, match=r"hardware\.trainer_env\.A=1 and hardware\.rollout_env\.A=2 differ"):
        check_run_config(compose_run_config(words))
    check_run_config(compose_run_config([*words, "placement=fully_async"]))
    check_run_config(compose_run_config([*words, "backend.rollout.replicas=2"]))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "2,3"), ("4,5,6,7", "6,7")],
)
def test_a_fully_async_engine_gets_the_gpus_after_the_trainer_s(
    visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = compose_run_config(
        [
            *("hardware=h200x1", "hardware.gpus_per_node=4", "placement=fully_async", "placement.trainer_ranks=2"),
            *("backend=fsdp_vllm", "backend.rollout.tensor_parallel=2"),
        ]
    )
    assert engine_devices(config) == {"CUDA_VISIBLE_DEVICES": expected}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["placement=fully_async", "placement.trainer_ranks=2", "backend.rollout.replicas=3"], "2 3 4"),
        (["placement.trainer_ranks=2", "backend.rollout.replicas=3"], "0 1 2"),
        (["placement=fully_async", "placement.share_devices=true", "backend.rollout.replicas=3"], "0 1 2"),
        (["backend.rollout.replicas=2", "backend.rollout.replicas_per_device=2"], "0 1 0 1"),
        (["backend.rollout.replicas_per_device=null"], "0 0"),  # the default model is small
        (["placement=fully_async", "backend=fsdp_vllm", *TWO_OF_THREE_GPUS], "1,2,3 4,5,6"),
    ],
)
def test_each_engine_gets_its_own_gpus(words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = compose_run_config(["hardware=h200x1", "hardware.gpus_per_node=8", *words])
    check_run_config(config)
    engines = [engine_devices(config, index) for index in range(replicas_of(config).count)]
    assert engines == [{"CUDA_VISIBLE_DEVICES": names} for names in expected.split()]


def test_engines_that_share_a_device_split_its_memory():
    words = ["hardware=h200x1", "backend=fsdp_vllm", "backend.rollout.memory_fraction=0.6"]
    for share, expected in [("2", 0.3), ("3", 0.2), ("null", 0.3), ("1", 0.6)]:
        config = compose_run_config([*words, f"backend.rollout.replicas_per_device={share}"])
        engine = engine_config(config)
        assert isinstance(engine, VLLMRolloutConfig)
        assert engine.memory_fraction == pytest.approx(expected)
        assert config.backend.rollout.memory_fraction == 0.6  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([], "LocalEngine"),
        (["backend.rollout.replicas=2"], "ReplicaSet"),
        (["placement=fully_async"], "RemoteEngine"),
        (["placement=fully_async", "backend.rollout.replicas_per_device=2"], "ReplicaSet"),
    ],
)
def test_one_colocated_engine_lives_in_this_process_and_several_in_their_own(
    words: list[str], kind: str, tmp_path: Path
):
    assert type(build_engine(compose_run_config(words), tmp_path)).__name__ == kind


def test_too_few_visible_gpus_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    config = compose_run_config(["hardware=h200x1", "hardware.gpus_per_node=2", "placement=fully_async"])
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=3 leaves 1"):
        engine_devices(config)
