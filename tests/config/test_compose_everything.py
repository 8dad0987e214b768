"""Every option of every group and every experiment composes, loads, names a real class, and survives a run.yaml."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from rl.config.compose import compose_run_config
from rl.config.load import load_run_config, load_run_yaml, save_run_yaml, to_plain
from rl.config.register import GROUPS, SCHEMA_NAMES, experiment_files, option_names, package_folder, schema_of_target
from rl.config.schema import ConfigError, TinyModelConfig, WarmStartConfig
from tests.composed import config_of

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {"model=hf": ["model.path=some/model"], "task=jsonl": ["task.path=train.jsonl"]}
"""What an option asks of its user."""

OPTIONS = [f"{group}={name}" for group in [*GROUPS, "backend"] for name in option_names(group)]
EXPERIMENTS = sorted(experiment_files())
SCHEMAS = [config_class for classes in GROUPS.values() for config_class in classes]


def words_of(option: str) -> list[str]:
    return [option, *NEEDED.get(option, [])]


def test_there_is_something_to_compose():
    assert len(OPTIONS) > 15 and "quickstart" in EXPERIMENTS
    assert all(option in OPTIONS for option in NEEDED)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_survives_a_run_yaml(option, tmp_path):
    config = config_of(*words_of(option))
    save_run_yaml(config, tmp_path / "run.yaml")
    assert load_run_yaml(tmp_path / "run.yaml") == config


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_survives_a_run_yaml(name, tmp_path):
    config = config_of(f"experiment={name}")
    assert config.experiment == name
    save_run_yaml(config, tmp_path / "run.yaml")
    assert load_run_yaml(tmp_path / "run.yaml") == config
    assert load_run_config(to_plain(config)) == config


def test_a_null_stays_a_null_where_the_default_is_a_value(tmp_path):
    words = ["experiment=quickstart", "backend.trainer.optimizer.grad_clip=null", "model.warm_start=null", "steps=null"]
    config = compose_run_config(words)
    assert isinstance(config.model, TinyModelConfig)
    assert (config.backend.trainer.optimizer.grad_clip, config.model.warm_start, config.steps) == (None, None, None)
    save_run_yaml(config, tmp_path / "run.yaml")
    assert load_run_yaml(tmp_path / "run.yaml") == config


@pytest.mark.parametrize("key", ["model.hf_overrides", "hardware.trainer_env"])
def test_an_open_mapping_is_set_key_by_key(key):
    with pytest.raises(ConfigError, match=rf"each key of {key} is set by a word of its own\. Write {key}\.KEY=VALUE"):
        config_of("experiment=qwen3_8b_grpo", f"{key}={{a: 1}}")
    assert config_of("experiment=quickstart", f"{key}={{}}")


def test_open_mappings_and_lists_survive(tmp_path):
    words = [
        "model=hf",
        "model.path=x",
        "model.hf_overrides.rope_parameters.rope_theta=5e5",
        "task.sampling.stop=[a,b]",
    ]
    words += ["task.chat_template_kwargs.enable_thinking=false", "hardware.trainer_env.A=1"]
    config = compose_run_config(words)
    assert config.model.hf_overrides == {"rope_parameters": {"rope_theta": 5e5}}
    assert config.task.chat_template_kwargs == {"enable_thinking": False}
    assert config.hardware.trainer_env == {"A": "1"}
    assert config.task.sampling.stop == ["a", "b"]
    save_run_yaml(config, tmp_path / "run.yaml")
    assert load_run_yaml(tmp_path / "run.yaml") == config


def test_the_quickstart_asks_for_a_warm_start_with_its_defaults():
    config = compose_run_config(["experiment=quickstart"])
    assert isinstance(config.model, TinyModelConfig) and config.model.warm_start == WarmStartConfig()


def test_the_command_line_wins_over_the_experiment_and_the_experiment_over_the_option():
    config = compose_run_config(["experiment=quickstart", "algorithm.group_size=4"])
    assert (config.algorithm.prompts_per_step, config.algorithm.group_size) == (64, 4)
    assert compose_run_config([]).algorithm.prompts_per_mini_batch is None
    assert config.algorithm.prompts_per_mini_batch == 32


def test_no_experiment_is_null():
    assert compose_run_config([]).experiment is None


@pytest.mark.parametrize("config_class", SCHEMAS, ids=lambda c: c.__name__)
def test_every_target_is_a_class_of_its_own(config_class):
    target = getattr(config_class, "_target_", None)
    if config_class.__name__ == "HardwareConfig":
        assert target is None  # facts, not a part
        return
    assert schema_of_target(target) is config_class
    # Read, not imported: torch, vLLM or Megatron would take seconds, and need not be installed here.
    module, _, name = target.rpartition(".")
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def test_every_schema_has_a_name_and_every_option_starts_from_one_of_its_group():
    assert set(SCHEMA_NAMES) == set(SCHEMAS)
    for group, classes in GROUPS.items():
        names = {f"schema_{SCHEMA_NAMES[config_class]}" for config_class in classes}
        assert len(names) == len(classes)
        for option in option_names(group):
            start, file = option, Path()
            while start not in names:  # an option may build on another
                file = package_folder("conf") / group / f"{start}.yaml"
                start, last = yaml.safe_load(file.read_text(encoding="utf-8"))["defaults"]
                assert last == "_self_", file


def test_yaml_files_name_no_python_class():
    for file in [*package_folder("conf").rglob("*.yaml"), *experiment_files().values()]:
        assert "_target_" not in file.read_text(encoding="utf-8"), file


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_files_are_global_and_only_override(name):
    text = experiment_files()[name].read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n")
    for entry in yaml.safe_load(text)["defaults"]:
        assert entry == "_self_" or str(next(iter(entry))).startswith(("override /", "/experiment"))


def test_an_experiment_may_build_on_another(own_files):
    child = "# @package _global_\ndefaults:\n  - /experiment/quickstart\n  - _self_\nalgorithm:\n  group_size: 4\n"
    (own_files / "experiments" / "child.yaml").write_text(child)
    config = compose_run_config(["experiment=child"])
    assert (config.experiment, config.algorithm.group_size, config.algorithm.prompts_per_mini_batch) == ("child", 4, 32)
