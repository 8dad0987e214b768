"""hardware.trainer_env and rollout_env reach the process that holds trainer or engine."""

from __future__ import annotations

import pytest

from rl.assemble import engine_devices
from rl.config.check import check_run_config
from rl.config.compose import compose_run_config
from rl.config.schema import ConfigError

BOTH = ["hardware.trainer_env.A=1", "hardware.rollout_env.B=2"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"A": "1", "B": "2"}),
        (["placement=fully_async"], {"A": "1"}),
        (["placement=fully_async", "placement.trainer_ranks=2"], {}),
        (["placement.trainer_ranks=2"], {"B": "2"}),
    ],
)
def test_the_driver_takes_what_its_own_parts_need(words: list[str], expected: dict[str, str]):
    assert compose_run_config([*BOTH, *words]).driver_env == expected


def test_values_that_contradict_in_one_process_are_refused():
    words = ["hardware.trainer_env.A=1", "hardware.rollout_env.A=2"]
    with pytest.raises(ConfigError, match=r"hardware\.trainer_env\.A=1 and hardware\.rollout_env\.A=2 differ"):
        check_run_config(compose_run_config(words))
    check_run_config(compose_run_config([*words, "placement=fully_async"]))


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


def test_too_few_visible_gpus_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    config = compose_run_config(["hardware=h200x1", "hardware.gpus_per_node=2", "placement=fully_async"])
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=3 leaves 1"):
        engine_devices(config)
