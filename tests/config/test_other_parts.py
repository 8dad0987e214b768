"""An experiment with another part than its own, of whose settings the other has fewer."""

from __future__ import annotations

import pytest

from rl.config.algorithms import DAPOConfig
from rl.config.compose import compose_run_config, left_out_text
from rl.config.lock import published_status
from rl.config.register import experiment_node
from rl.config.schema import ConfigError, FSDPConfig
from rl.config.smoke import run_config

DAPO = "experiment=qwen2_5_math_7b_dapo_colocated"
MOE = "experiment=qwen3_5_35b_a3b_grpo_colocated"


def test_settings_that_the_other_part_lacks_are_left_out_and_told_and_those_it_has_stay():
    config, told = run_config([MOE, "backend/trainer=fsdp"])
    trainer = config.backend.trainer
    assert isinstance(trainer, FSDPConfig) and trainer.packing.value == "one_sequence"
    assert told == (
        "left out of qwen3_5_35b_a3b_grpo_colocated, because the parts chosen instead have no such settings: "
        "backend.trainer.tensor_parallel=2, backend.trainer.expert_parallel=8"
    )


def test_a_part_within_a_bundle_is_another_one_too():
    assert "backend.trainer.expert_parallel=8" in left_out_text([MOE, "backend=fsdp_vllm"])


def test_a_sweep_over_algorithms_reaches_an_experiment_of_an_algorithm_with_more_settings():
    grpo, dapo = (compose_run_config([DAPO, f"algorithm={name}"]).algorithm for name in ("grpo", "dapo"))
    assert not isinstance(grpo, DAPOConfig) and isinstance(dapo, DAPOConfig) and dapo.overlong_buffer == 4096
    assert grpo.prompts_per_step == dapo.prompts_per_step


def test_the_experiment_itself_is_whole_again_afterwards():
    compose_run_config([DAPO, "algorithm=grpo"])
    assert experiment_node("qwen2_5_math_7b_dapo_colocated").algorithm.overlong_buffer == 4096
    assert left_out_text([DAPO]) == left_out_text([DAPO, "algorithm=dapo"]) == ""


def test_what_is_left_out_makes_the_run_a_modified_one():
    status = published_status(compose_run_config([DAPO, "algorithm=grpo"]))
    assert status is not None and status.changed["algorithm.overlong_buffer"] == (4096, None)


def test_an_experiment_that_builds_on_another_leaves_out_what_the_other_sets(tmp_path, monkeypatch):
    (tmp_path / "base.yaml").write_text(
        "# @package _global_\ndefaults: [override /algorithm: dapo]\nalgorithm: {overlong_buffer: 2, group_size: 3}\n"
    )
    (tmp_path / "child.yaml").write_text("# @package _global_\ndefaults: [/experiment/base]\nsteps: 7\n")
    files = {path.stem: path for path in tmp_path.glob("*.yaml")}
    monkeypatch.setattr("rl.config.register.experiment_files", lambda: files)
    monkeypatch.setattr("rl.config.compose.option_names", lambda group: [*files, "grpo"])
    config = compose_run_config(["experiment=child", "algorithm=grpo"])
    assert (config.steps, config.algorithm.group_size) == (7, 3)


def test_a_setting_that_no_option_has_is_refused_whatever_the_part_is(tmp_path, monkeypatch):
    (tmp_path / "typo.yaml").write_text("# @package _global_\nalgorithm: {group_sice: 3}\n")
    monkeypatch.setattr("rl.config.register.experiment_files", lambda: {"typo": tmp_path / "typo.yaml"})
    monkeypatch.setattr("rl.config.compose.option_names", lambda group: ["typo", "dapo"])
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm\.group_sice'.*algorithm\.group_size"):
        compose_run_config(["experiment=typo", "algorithm=dapo"])
