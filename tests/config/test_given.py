"""What a person writes is of exactly the key's type, there once, and the same after it was saved."""

from __future__ import annotations

import dataclasses
import math
import random
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.config.compose import checked_run_config, compose_plain, compose_run_config
from rl.config.flat import flat, leaves
from rl.config.given import given_experiment, type_at
from rl.config.load import load_run_config, load_run_yaml, save_run_yaml, to_plain
from rl.config.register import GROUPS, experiment_files, option_names, package_folder, schema_of_target
from rl.config.schema import ConfigError, RunConfig
from tests.composed import config_of
from tests.config.test_compose_everything import EXPERIMENTS, OPTIONS, words_of

BASE = "experiment=quickstart"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["clean=2"], r"clean: '2' must be true or false.*command line: clean=2"),
        (["clean=yes"], r"clean: 'yes' must be true or false"),
        (["evaluation.at_start=1"], r"at_start: '1' must be true or false"),
        (['seed="7"'], r"seed: .* must be a whole number, written without quotes"),
        ([f"seed={10**30}"], r"seed: '1000.*' has more than 63 bits"),
        ([f"seed={'9' * 5000}"], r"cannot read 'seed=999999"),
        (["algorithm.clip_high=inf"], r"clip_high: 'inf' must be a finite number"),
        (["algorithm.clip_high=1e400"], r"clip_high: '1e400' must be a finite number"),
        (["sentinels.mismatch.limit=nan"], r"limit: 'nan' must be a finite number"),
        (["mode=Mode.plan"], r"mode: 'Mode\.plan' must be one of train, eval, plan"),
        (["output_dir="], r"output_dir: '' must not be empty"),
        (["model=hf", "model.path=x", "model.revision=1e5"], r"model\.revision: '1e5' is text, and would be read as"),
        (["task.sampling.stop=[1,a]"], r"task\.sampling\.stop: .*holds 1, which is text"),
        (["seed=1", "seed=2"], r"seed is set twice \(1 and 2\)"),
        (["hydra.run.dir=/x"], r"hydra\.run\.dir=/x: Hydra only composes"),
        (["hydra/launcher=basic"], r"hydra/launcher=basic: Hydra only composes"),
        (["model.warm_start=null", "model.warm_start.lr=1"], r"model\.warm_start is null.*model\.warm_start\.lr=1"),
        (["model=tiny", "model.warm_start.max_steps=3"], r"model\.warm_start is null.*Choose an option"),
        (["model=tiny", "model.warm_start={max_steps: 3}"], r"model\.warm_start is null"),
        (["published.claims.x.value=0.3"], r"published is null"),
        (["published.hardware=x"], r"published is null"),
        (["output_dir=папка"], r"cannot read 'output_dir=папка'.*goes in quotes inside the word"),
        (["=1"], r"'=1' is not an override"),
    ],
)
def test_a_value_that_would_be_changed_or_lost_is_refused(words, message):
    base = [] if any(word.startswith("model=tiny") for word in words) else [BASE]
    with pytest.raises(ConfigError, match=message):
        compose_run_config([*base, *words])


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["output_dir=5"], "output_dir", "5"),
        (["output_dir=a-1.5"], "output_dir", "a-1.5"),
        (["output_dir='папка 1'"], "output_dir", "папка 1"),
        (["algorithm.clip_high=1"], "algorithm.clip_high", 1.0),
        (["model=hf", "model.path=x", "model.revision=007"], "model.revision", "007"),
        (["model=hf", "model.path=x", "model.revision='1e5'"], "model.revision", "1e5"),
        (["hardware.trainer_env.A=1"], "hardware.trainer_env", {"A": "1"}),
        (["hardware.trainer_env.A=''"], "hardware.trainer_env", {"A": ""}),
        (["seed=${steps}"], "seed", 250),
    ],
)
def test_what_is_as_it_was_written_is_taken(words, key, value):
    node: Any = compose_run_config([BASE, *words])
    for name in key.split("."):
        node = getattr(node, name)
    assert node == value and type(node) is type(value)


@pytest.mark.parametrize(
    "word", ["output_dir=" + "x" * 300, "output_dir=" + "a/" * 3000, "evaluation.checkpoint=" + "x" * 9000]
)
def test_a_path_that_no_file_can_have_is_refused_and_not_printed_whole(word):
    with pytest.raises(ConfigError, match="cannot be the path of a file") as error:
        checked_run_config([BASE, word])
    assert len(str(error.value)) < 400


def test_precedence_is_default_then_experiment_then_command_line(own_files: Path):
    keys = ("backend.trainer.optimizer.lr", "backend.trainer.optimizer.beta1")
    (own_files / "experiments" / "mine.yaml").write_text(
        "# @package _global_\nbackend:\n  trainer:\n    optimizer:\n      lr: 3.0e-6\n"
    )

    def values(*words: str) -> tuple[float, float]:
        optimizer = compose_run_config(list(words)).backend.trainer.optimizer
        return optimizer.lr, optimizer.beta1

    assert values() == (1e-6, 0.9)
    assert values("experiment=mine") == (3e-6, 0.9)
    assert values("experiment=mine", f"{keys[0]}=2e-6", f"{keys[1]}=0.8") == (2e-6, 0.8)
    assert [given.key for given in given_experiment("mine")] == [keys[0]]


def test_an_experiment_gives_what_it_builds_on_and_the_nearest_file_counts(own_files: Path):
    (own_files / "experiments" / "child.yaml").write_text(
        "# @package _global_\ndefaults:\n  - /experiment/quickstart\n  - _self_\nsteps: 7\n"
    )
    given = {one.key: (one.value, one.where) for one in given_experiment("child")}
    assert given["steps"] == (7, "in experiment child")
    assert given["algorithm.group_size"] == (16, "in experiment quickstart")
    assert compose_run_config(["experiment=child"]).experiment == "child"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clean: 2\n", r"clean: '2' must be true or false.*in experiment mine"),
        ("model:\n  revision: 007\n", r"model\.revision: '7' is text, and would be read"),
        ("steps: 1\nsteps: 2\n", r"(?s)mine\.yaml is not valid YAML.*duplicate"),
        ("experiment: other\n", r"mine\.yaml must be a mapping.*not set `experiment`"),
        ("- 1\n", r"mine\.yaml must be a mapping"),
    ],
)
def test_an_experiment_s_file_is_read_as_strictly(own_files: Path, text: str, message: str):
    (own_files / "experiments" / "mine.yaml").write_text("# @package _global_\n" + text)
    with pytest.raises(ConfigError, match=message):
        compose_run_config(["experiment=mine"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain.update(clean=2), r"run\.yaml: clean: '2' must be true or false"),
        (lambda plain: plain.update(seed="7"), r"run\.yaml: seed: '7' must be a whole number"),
        (lambda plain: plain["model"].update(_target_="rl.algorithms.grpo.GRPO"), r"model\._target_=.*is no model"),
        (lambda plain: plain.update(model=5), r"model is not chosen"),
        (lambda plain: plain.update(backend=None), r"backend\.trainer is not chosen"),
    ],
)
def test_a_run_yaml_is_read_as_strictly(tmp_path: Path, change, message: str):
    plain = to_plain(compose_run_config([BASE]))
    change(plain)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(plain))
    with pytest.raises(ConfigError, match=message):
        load_run_yaml(tmp_path / "run.yaml")


@pytest.mark.parametrize("text", [b"seed: 1\nseed: 2\n", b"\xff\xfe", b"seed: " + b"9" * 5000])
def test_a_run_yaml_that_cannot_be_read_is_named(tmp_path: Path, text: bytes):
    (tmp_path / "run.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=r"run\.yaml cannot be read as a run's config"):
        load_run_yaml(tmp_path / "run.yaml")


def test_a_key_that_begins_like_another_sets_only_itself():
    before = flat(compose_plain([BASE]))
    for key in ("backend.trainer.optimizer.lr", "task.warm_start", "steps"):
        assert sum(other.startswith(key) for other in before) >= 1
        after = flat(compose_plain([BASE, f"{key}=1"]))
        assert {name for name in before if before[name] != after[name]} == {key}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_value_of_an_option_has_the_type_of_its_key_and_booleans_go_both_ways(option):
    config = config_of(*words_of(option))
    plain = to_plain(config)
    assert not any(isinstance(value, Enum) for _, value in leaves(plain))
    switches = [key for key in flat(plain) if type_at(config, key) is bool]
    for wanted in (True, False):
        changed = to_plain(config)
        for key in switches:
            *parents, name = key.split(".")
            node = changed
            for parent in parents:
                node = node[parent]
            node[name] = wanted
        loaded = flat(to_plain(load_run_config(changed)))
        assert [key for key in switches if loaded[key] is not wanted] == []


def _drawn(rng: random.Random, annotation: Any) -> Any:
    """A value of the type that YAML could take for another."""
    if annotation is bool:
        return rng.random() < 0.5
    if annotation is int:
        return rng.choice([0, 1, -1, 8, 10**12, 2**63 - 1])
    if annotation is float:
        return rng.choice([0.0, 1e-7, 1e300, 2.0, 1 / 3, 5e-324])
    if annotation is str:
        return rng.choice(
            ["null", "None", "007", "1e-3", "on", "12:30", "0x1F", "ü漢字", " a b ", "a: b", "[a]", "a\nb", "~", "'"]
        )
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return rng.choice(list(annotation)).name
    return None


@pytest.mark.parametrize(
    "words", [*(words_of(o) for o in OPTIONS), *([f"experiment={e}"] for e in EXPERIMENTS)], ids=str
)
def test_saving_and_loading_changes_no_value_whatever_it_is(words, tmp_path: Path):
    """Every leaf gets a drawn value of its type, or null where that is a value."""
    config = config_of(*words)
    rng = random.Random(str(words))
    plain = to_plain(config)
    _draw_into(rng, config, plain, "")
    loaded = load_run_config(plain)
    assert to_plain(loaded) == plain
    save_run_yaml(loaded, tmp_path / "run.yaml")
    assert yaml.safe_load((tmp_path / "run.yaml").read_text(encoding="utf-8")) == plain
    assert load_run_config(yaml.safe_load((tmp_path / "run.yaml").read_text(encoding="utf-8"))) == loaded


def _draw_into(rng: random.Random, node: Any, plain: dict[str, Any], prefix: str) -> None:
    hints = typing.get_type_hints(type(node))
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            _draw_into(rng, value, plain[field.name], f"{prefix}{field.name}.")
            continue
        hint = hints[field.name]
        parts = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        if type(None) in parts and rng.random() < 0.4:
            plain[field.name] = None
            continue
        drawn = _drawn(rng, next(part for part in parts if part is not type(None)))
        if drawn is not None and field.name != "_target_":
            plain[field.name] = drawn


def test_a_default_stands_in_one_place():
    """A YAML option gives what its class leaves open or changes; it repeats no default."""
    repeated = []
    for group in GROUPS:
        for option in option_names(group):
            node = yaml.safe_load((package_folder("conf") / group / f"{option}.yaml").read_text(encoding="utf-8"))
            node.pop("defaults")
            target = to_plain(config_of(*words_of(f"{group}={option}")))
            for part in group.split("/"):
                target = target[part]
            config_class = schema_of_target(target["_target_"]) if "_target_" in target else None
            if config_class is None:
                (config_class,) = GROUPS[group]
            for key, value in leaves(node):
                default = _default(config_class, key)
                is_stated = key == "revision" and value is None  # that a published run names none is worth a line
                if default is not dataclasses.MISSING and default == value and not is_stated:
                    repeated.append(f"{group}={option}: {key}={value}")
    assert repeated == []


def _default(config_class: type, key: str) -> Any:
    node: Any = config_class
    for name in key.split("."):
        fields = {field.name: field for field in dataclasses.fields(node)} if dataclasses.is_dataclass(node) else {}
        if name not in fields:
            return dataclasses.MISSING
        field = fields[name]
        node = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if node is None:
            return None
    return node.name if isinstance(node, Enum) else node


def test_an_empty_command_line_is_the_classes_defaults_and_the_options_own_values():
    config = compose_run_config([])
    assert isinstance(config, RunConfig)
    for field in dataclasses.fields(RunConfig):
        if field.default is not dataclasses.MISSING and field.default != "???":
            assert getattr(config, field.name) == field.default
    assert math.isfinite(config.hardware.memory_gib)


def test_the_composed_config_says_which_experiment_it_is_of():
    for name in experiment_files():
        assert compose_plain([f"experiment={name}"])["experiment"] == name


def test_the_order_of_words_changes_nothing_and_one_seed_decides_a_run():
    words = [BASE, "seed=7", "algorithm=dapo", "task.eval_limit=3", "algorithm.clip_high=0.3"]
    plain = compose_plain(words)
    assert compose_plain(words[::-1]) == plain
    other = flat(compose_plain([*words[:1], "seed=8", *words[2:]]))
    assert {key for key, value in leaves(plain) if other[key] != value} == {"seed"}
