"""Four nets for a typo: each error names the key, where it stands and the nearest real one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.config.compose import compose_run_config
from rl.config.flat import flat
from rl.config.load import load_run_config, load_run_yaml, to_plain
from rl.config.other_names import OURS
from rl.config.register import GROUPS, register_all
from rl.config.schema import ConfigError, RunConfig

TYPOS = {
    "algorithm.clip_hihg": "algorithm.clip_high",
    "sed": "seed",
    "backend.trainer.optimizer.beta3": "backend.trainer.optimizer.beta",
    "task.sampling.temprature": "task.sampling.temperature",
    "model.warm_start.max_stps": "model.warm_start.max_steps",
    "clip_high": "algorithm.clip_high",
}
ADDED = ("sed", "model.warm_start.max_stps")


@pytest.mark.parametrize(
    ("prefix", "typo"), [("", typo) for typo in TYPOS] + [(p, typo) for p in ("+", "++", "~") for typo in ADDED]
)
def test_a_typo_on_the_command_line(prefix, typo):
    word = f"{prefix}{typo}" if prefix == "~" else f"{prefix}{typo}=1"
    with pytest.raises(ConfigError) as error:
        compose_run_config(["experiment=quickstart", word])
    assert f"'{typo}'" in str(error.value) and word in str(error.value)
    assert f"Did you mean '{TYPOS[typo]}" in str(error.value)


@pytest.mark.parametrize("word", ["+seed=1", "++seed=1", "~seed", "+experiment=quickstart", "~task"])
def test_a_setting_that_exists_is_neither_added_nor_deleted(word):
    with pytest.raises(ConfigError, match=r"adds or deletes a setting that exists.* without \+ or ~"):
        compose_run_config([word])


@pytest.mark.parametrize("theirs", ["actor_rollout_ref.rollout.n", "data.train_batch_size", "engine", "trainer", "lr"])
@pytest.mark.parametrize("prefix", ["", "+"])
def test_what_others_call_a_setting_is_answered_with_our_name(theirs: str, prefix: str):
    with pytest.raises(ConfigError) as error:
        compose_run_config([f"{prefix}{theirs}=8"])
    assert f"unknown key '{theirs}'. Did you mean '{OURS[theirs]}'?" in str(error.value)


def test_our_name_that_the_chosen_option_lacks_is_said_to_be_another_option_s():
    word = "async_training.partial_rollout=true"
    with pytest.raises(ConfigError, match=r"Did you mean 'placement.in_flight'\? Not every option of its group"):
        compose_run_config([word])
    with pytest.raises(ConfigError, match=r"Did you mean 'placement.in_flight'\? \(on the command line"):
        compose_run_config(["placement=fully_async", word])


def test_names_of_others_are_no_answer_to_an_option_or_a_key_of_a_file():
    with pytest.raises(ConfigError) as error:
        compose_run_config(["task=data"])
    assert "'task'?" not in str(error.value)
    with pytest.raises(ConfigError, match=r"unknown key 'trainer'.*'backend\.trainer'"):
        load_run_config({**to_plain(compose_run_config(["experiment=quickstart"])), "trainer": {}})


def test_every_name_that_is_offered_for_another_exists():
    register_all()
    keys = {
        key for option in ("placement=fully_async", "backend/rollout=vllm", "logger=wandb") for key in keys_with(option)
    }
    nodes = {".".join(key.split(".")[:n]) for key in keys for n in range(1, key.count(".") + 1)}
    for ours in OURS.values():
        assert ours in keys or ours in GROUPS or ours in nodes, ours


def keys_with(option: str) -> list[str]:
    return list(flat(to_plain(compose_run_config([option]))))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "experiment=quickstar",
            r"experiment 'quickstar' not found. Did you mean 'quickstart'\? Options of experiment: ",
        ),
        (
            "task=gsm8",
            r"task 'gsm8' not found. Did you mean 'gsm8k'\? Options of task: .*arithmetic, dapo_math, .*gsm8k",
        ),
        ("backend/rollout=vlm", r"backend/rollout 'vlm' not found. Did you mean 'vllm'\?.*local, sglang, vllm"),
        ("placement=async", r"placement 'async' not found.*Options of placement: colocated, fully_async"),
        ("algorithm=null", r"algorithm 'None' not found"),
        ("tsk=gsm8k", r"unknown key 'tsk'.*Did you mean 'task'\?"),
        (
            "task.data.math.subset=algebra",
            r"unknown key 'task\.data\.math\.subset': DataConfig has no such setting.*task\.data\.math\.path",
        ),
        ("backend/rolout=vllm", r"unknown config group 'backend/rolout'.*Did you mean 'backend/rollout'\?"),
        ("model._target_=foo.Bar", r"model\._target_=foo\.Bar: there is no module foo\. Put its file"),
    ],
)
def test_a_wrong_group_or_option(word, message):
    with pytest.raises(ConfigError, match=message):
        compose_run_config(["task=math", word] if word.startswith("task.") else [word])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=x"], "seed: Value 'x' of type 'str' could not be converted to Integer"),
        (["seed=1.5"], "seed: Value '1.5'"),
        (["algorithm.group_size=true"], r"algorithm\.group_size: Value 'True'"),
        (["algorithm.clip_high=abc"], r"algorithm\.clip_high: Value 'abc'"),
        (["mode=trainn"], r"mode: Invalid value 'trainn', expected one of \[train, eval, plan\]"),
        (["placement=fully_async", "placement.in_flight=drop"], r"in_flight: .*expected one of \[finish, abort, "),
        (["model=hf"], r"model\.path has no value and no default\. Set it: model\.path="),
        (["task=jsonl"], r"task\.path has no value"),
        (["word"], "'word' is not an override. Write key=value"),
        (["seed=[1"], r"cannot read 'seed=\[1'.*goes in quotes inside the word"),
    ],
)
def test_wrong_types_and_missing_values(words, message):
    with pytest.raises(ConfigError, match=message):
        compose_run_config(words)


def test_several_values_without_a_sweep_say_how_to_sweep():
    with pytest.raises(ConfigError, match=r"seed=1,2.*several values make a sweep. Write rl -m"):
        compose_run_config(["experiment=quickstart", "seed=1,2"])


def test_a_nested_group_written_with_a_dot_says_how_it_is_written():
    with pytest.raises(ConfigError, match="chosen by backend/rollout=vllm"):
        compose_run_config(["experiment=quickstart", "backend.rollout=vllm"])


def test_a_typo_in_an_option_file_names_the_file(own_files: Path):
    with (own_files / "conf" / "task" / "arithmetic.yaml").open("a") as file:
        file.write("digts: 3\n")
    with pytest.raises(
        ConfigError, match=r"unknown key 'task\.digts'.*Did you mean 'task\.digits'\? \(in .*task/arith"
    ):
        compose_run_config(["experiment=quickstart"])


def test_a_wrong_type_in_an_option_file_names_the_file(own_files: Path):
    with (own_files / "conf" / "task" / "arithmetic.yaml").open("a") as file:
        file.write("digits: many\n")
    with pytest.raises(ConfigError, match=r"digits: Value 'many'.*\(in .*task/arithmetic"):
        compose_run_config([])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("algorithm:\n  clip_hihg: 0.3\n", r"unknown key 'algorithm\.clip_hihg'.*mean 'algorithm\.clip_high'"),
        ("backend:\n  trainer:\n    optimizer:\n      lrr: 1.0\n", r"unknown key 'backend\.trainer\.optimizer\.lrr'"),
        ("algoritm:\n  clip_high: 0.3\n", r"unknown key 'algoritm'.*mean 'algorithm'"),
        ("seed: soon\n", r"seed: Value 'soon'"),
    ],
)
def test_a_typo_in_an_experiment_names_the_experiment(own_files: Path, body, message):
    (own_files / "experiments" / "typo.yaml").write_text(f"# @package _global_\ndefaults: [_self_]\n{body}")
    with pytest.raises(ConfigError, match=message + r".*\(in .*experiment/typo"):
        compose_run_config(["experiment=typo"])


def test_an_experiment_that_overrides_an_unknown_option(own_files: Path):
    text = "# @package _global_\ndefaults:\n  - override /algorithm: grop\n  - _self_\n"
    (own_files / "experiments" / "typo2.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"algorithm.*grop"):
        compose_run_config(["experiment=typo2"])


def test_a_broken_experiment_file_is_named(own_files: Path):
    (own_files / "experiments" / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"experiment file .*broken\.yaml"):
        register_all()


@cache
def _quickstart() -> RunConfig:
    return compose_run_config(["experiment=quickstart"])


def plain_quickstart() -> dict[str, Any]:
    return to_plain(_quickstart())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("algorithm", "clip_hihg"), 0.3, r"unknown key 'algorithm\.clip_hihg'.*mean 'algorithm\.clip_high'"),
        (("stepz",), 3, r"unknown key 'stepz'.*mean 'steps'"),
        (("backend", "trainer", "optimizer", "lr"), "fast", r"lr: Value 'fast'"),
        (
            ("task", "_target_"),
            "rl.tasks.gone.Gone",
            r"task\._target_=rl\.tasks\.gone\.Gone: there is no module rl\.tasks\.gone",
        ),
        (("model", "name"), "???", r"model\.name has no value"),
        (("mode",), "trian", r"mode: Invalid value 'trian'"),
    ],
)
def test_a_saved_config_goes_through_the_same_door(path, value, message):
    plain = plain_quickstart()
    node = plain
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    with pytest.raises(ConfigError, match=message):
        load_run_config(plain)


def test_a_part_that_is_missing_from_a_saved_config_is_named():
    plain = plain_quickstart()
    del plain["algorithm"]
    with pytest.raises(ConfigError, match="algorithm is not chosen"):
        load_run_config(plain)


@pytest.mark.parametrize("text", ["a: [1\n", "- 1\n", ""])
def test_a_run_yaml_that_is_no_config_is_named(tmp_path: Path, text):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_run_yaml(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        load_run_yaml(tmp_path / "none.yaml")


def test_a_run_yaml_holds_names_and_plain_values(tmp_path: Path):
    text = yaml.safe_dump(plain_quickstart())
    assert "mode: train" in text and "notation: reversed_digits" in text and "!!" not in text
