"""Default < experiment < command line: every value is traced to where it stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rl.comparison.differences import diff_lines
from rl.comparison.origins import explain, origins
from rl.comparison.settings import read_lock, read_settings
from rl.config.compose import compose_run_config
from rl.config.load import save_run_yaml
from rl.config.schema import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def levels(key: str, *words: str) -> list[tuple[str, object]]:
    return [(origin.level, origin.value) for origin in origins(key, words)]


def test_the_stronger_level_comes_later():
    key = "backend.trainer.optimizer.lr"
    assert levels(key) == [("default", 1e-6)]
    assert levels(key, "experiment=quickstart") == [("default", 1e-6), ("experiment", 4e-4)]
    assert levels(key, "experiment=quickstart", f"{key}=0.1", "steps=null") == [
        ("default", 1e-6),
        ("experiment", 4e-4),
        ("command line", 0.1),
    ]


def test_a_file_is_given_with_its_line():
    (_, of_experiment) = origins("backend.trainer.optimizer.lr", ["experiment=quickstart"])
    name, _, line = of_experiment.where.partition(":")
    assert name == "experiments/quickstart.yaml"
    assert "lr: 4.0e-4" in (ROOT / name).read_text().splitlines()[int(line) - 1]


def test_an_option_belongs_to_the_level_that_chose_it():
    """`algorithm=dapo` brings conf/algorithm/dapo.yaml, whoever wrote it."""
    key = "hardware.name"
    assert levels(key)[-1] == ("default", "cpu")
    assert levels(key, "experiment=smollm2_one_digit")[-1] == ("experiment", "h200x1")
    assert levels(key, "experiment=smollm2_one_digit", "hardware=cpu")[-1] == ("command line", "cpu")


def test_a_section_has_the_defaults_of_where_it_stands():
    assert levels("sentinels.entropy.limit") == [("default", 0.001)]
    assert levels("model.warm_start.batch_size", "experiment=quickstart") == [("default", 128)]


def test_null_is_a_value():
    key = "backend.trainer.optimizer.lr"
    assert levels("steps", "experiment=quickstart", f"{key}=0.1", "steps=null")[-1] == ("command line", None)


@pytest.mark.parametrize("experiment", ["quickstart", "qwen3_5_35b_a3b_grpo_fully_async"])
def test_the_last_origin_of_every_setting_is_its_value(experiment: str):
    settings = read_settings(experiment)
    assert settings.words is not None
    wrong = {key: value for key, value in settings.values.items() if not origins(key, settings.words)[-1].gives(value)}
    assert wrong == {}


def test_a_value_may_refer_to_another_key():
    (*_, origin) = origins("algorithm.horizon", ["algorithm=dr_grpo"])
    assert origin.value == "${task.sampling.max_new_tokens}"
    assert origin.where.startswith("conf/algorithm/dr_grpo.yaml:")


def test_an_unknown_key_and_a_section_are_refused():
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm\.clip_hihg'\. Did you mean 'algorithm\.clip_high'"):
        origins("algorithm.clip_hihg", [])
    with pytest.raises(ConfigError, match="is no setting but a section"):
        origins("algorithm", [])


def test_an_explanation_shows_every_level():
    lines = explain("algorithm.prompts_per_mini_batch", read_settings("quickstart"))
    assert lines[0] == "algorithm.prompts_per_mini_batch = 32   (quickstart)"
    assert [line.split()[:2] for line in lines[1:]] == [["default", "null"], ["experiment", "32"], ["command", "line"]]


def test_a_file_of_settings_has_no_command_line_to_explain(tmp_path: Path):
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump({"seed": 3}))
    with pytest.raises(ConfigError, match="the command line behind these settings is unknown"):
        explain("seed", read_settings(str(path)))


def test_experiments_are_compared_key_by_key_with_their_places():
    lines, differs = diff_lines(read_settings("quickstart"), read_settings("smollm2_one_digit"))
    assert differs
    place = lines.index("  backend.trainer.optimizer.lr")
    assert lines[place + 1].split() == ["A", "0.0004", "experiment,", "experiments/quickstart.yaml:21"]
    assert diff_lines(read_settings("quickstart"), read_settings("quickstart"))[1] is False


def test_an_experiment_is_what_its_lock_says():
    settings = read_settings("quickstart")
    lines, differs = diff_lines(settings, read_lock(settings))
    assert (differs, lines[2:]) == (False, ["settings: none differs"])


def test_what_is_no_run_experiment_or_file_is_refused():
    with pytest.raises(ConfigError, match="'quickstrat' is no run folder, experiment or YAML file"):
        read_settings("quickstrat")


def test_runs_without_digests_are_compared_by_their_settings(tmp_path: Path):
    config = compose_run_config(["experiment=quickstart"])
    for name, seed in [("a", 0), ("b", 1)]:
        (tmp_path / name).mkdir()
        config.seed = seed
        save_run_yaml(config, tmp_path / name / "run.yaml")
        provenance = {"overrides": ["experiment=quickstart", f"seed={seed}"], "packages": {"torch": f"2.{seed}"}}
        (tmp_path / name / "provenance.json").write_text(json.dumps(provenance))
    lines, differs = diff_lines(*(read_settings(str(tmp_path / name)) for name in "ab"))
    assert differs
    assert [line.split() for line in lines[2:6]] == [
        ["settings:", "1", "differ"],
        ["seed"],
        ["A", "0", "command", "line,", "seed=0"],
        ["B", "1", "command", "line,", "seed=1"],
    ]
    assert lines[6] == "packages.torch: A 2.0, B 2.1"
    assert lines[7].startswith("digests: ") and "has no digests.jsonl" in lines[7]
