"""hardware.trainer_env and rollout_env reach the process that holds trainer or engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.assemble import build_engine, build_trainer, engine_seat
from rl.config.check import check_run_config
from rl.config.compose import compose_run_config
from rl.config.replicas import engine_config, replicas_of
from rl.config.schema import ConfigError, RunConfig, VLLMRolloutConfig
from rl.placement import ray_runtime
from rl.placement.ray_runtime import Seat
from rl.trainer.group import TrainerGroup, _Actors

THREE_HEADS = ["model=tiny", "model.heads=3", "model.kv_heads=3"]
TWO_OF_THREE_GPUS = ["backend.rollout.replicas=2", "backend.rollout.tensor_parallel=3", *THREE_HEADS]
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
    assert engine_seat(config, None, 0).env == {"CUDA_VISIBLE_DEVICES": expected}


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
    engines = [engine_seat(config, None, index).env for index in range(replicas_of(config).count)]
    assert engines == [{"CUDA_VISIBLE_DEVICES": names} for names in expected.split()]


@pytest.mark.parametrize(("visible", "expected"), [(None, ["0", "1"]), ("5,7,6", ["5", "7"])])
def test_trainer_ranks_get_the_first_gpus_by_the_names_that_this_process_may_use(
    visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Not by Ray's count, which needs amdsmi to find AMD's GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    words = ["hardware=h200x1", "hardware.gpus_per_node=3", "placement=fully_async", "placement.trainer_ranks=2"]
    seats = ranks_of(compose_run_config(words), tmp_path)._seats
    assert seats == [Seat(0, {"CUDA_VISIBLE_DEVICES": name}) for name in expected]


def ranks_of(config: RunConfig, folder: Path) -> _Actors:
    trainer = build_trainer(config, folder, total_steps=1)
    assert isinstance(trainer, TrainerGroup)
    assert isinstance(trainer._ranks, _Actors)
    return trainer._ranks


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("num_machines", "users", "expected"),
    [(None, None, "lo"), (1, None, "lo"), (2, None, None), (1, "eth7", "eth7"), (2, "eth7", "eth7")],
)
def test_ranks_meet_on_loopback_only_where_the_whole_run_is_on_one_machine_and_the_user_says_nothing(
    num_machines: int | None,
    users: str | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    """All ranks are on the first of the machines; the engines may be on the second."""
    claim = None if num_machines is None else SimpleNamespace(bundle_count=num_machines)
    monkeypatch.setattr(ray_runtime._Runtime, "claim", claim)
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
        if users is not None:
            monkeypatch.setenv(name, users)
    ranks = ranks_of(compose_run_config(["placement.trainer_ranks=2"]), tmp_path)
    env = ranks._env_on(Seat(0, {}))
    assert [env.get(name) for name in INTERFACES] == [expected] * 2


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


@pytest.mark.parametrize(("visible", "num_left"), [("3", 1), ("", 0)])
def test_too_few_visible_gpus_are_refused(visible: str, num_left: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = compose_run_config(["hardware=h200x1", "hardware.gpus_per_node=2", "placement=fully_async"])
    with pytest.raises(ConfigError, match=rf"CUDA_VISIBLE_DEVICES={visible} leaves {num_left} GPU"):
        engine_seat(config, None, 0)
