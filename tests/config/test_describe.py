"""Every setting says what it is: `rl --help KEY`."""

from __future__ import annotations

import dataclasses

import pytest

from rl.config.describe import describe
from rl.config.register import GROUPS
from rl.config.schema import ConfigError
from rl.help import key_help
from tests.composed import config_of
from tests.config.test_compose_everything import OPTIONS, words_of

SIZES = "model.shape."
"""Named as in the model's config.json."""
NODES = [field.name for field in dataclasses.fields(config_of()) if field.name not in (*GROUPS, "backend", "published")]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_setting_of_every_option_has_a_type_and_a_sentence(option: str):
    settings = describe(config_of(*words_of(option)), option.partition("=")[0].replace("/", "."))
    assert settings and all(setting.kind for setting in settings)
    assert [one.key for one in settings if not one.text.endswith(".") and not one.key.startswith(SIZES)] == []


@pytest.mark.parametrize("node", NODES)
def test_every_setting_of_no_group_too(node: str):
    settings = describe(config_of(), node)
    assert settings and all(setting.kind and setting.text.endswith(".") for setting in settings)


def test_value_type_and_text_of_a_setting_are_those_of_its_class():
    text = key_help(["backend.trainer.optimizer.grad_clip", "backend.trainer.optimizer.grad_clip=null"])
    assert text.splitlines() == [
        "backend.trainer.optimizer.grad_clip = null   (float or null)",
        "  Global gradient norm; None: not clipped.",
    ]


def test_a_choice_says_what_each_value_means():
    text = key_help(["placement.in_flight", "placement=fully_async"])
    assert text.splitlines()[0] == "placement.in_flight = finish   (one of finish, abort, continue_on_new_weights)"
    assert "    finish: The publish waits for them." in text.splitlines()


def test_an_inherited_setting_keeps_the_text_of_the_class_that_has_it():
    (setting,) = describe(config_of("algorithm=dapo"), "algorithm.clip_high")
    assert (setting.value, setting.text) == (0.28, "Upper clip: ratio <= 1 + clip_high.")


def test_a_group_s_name_gives_all_its_settings_and_an_unknown_key_the_nearest():
    assert key_help(["backend/rollout"]).count(" = ") == len(describe(config_of(), "backend.rollout")) > 3
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm.clip_hihg'.*Did you mean 'algorithm.clip_high'"):
        key_help(["algorithm.clip_hihg"])


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("smoke", "smoke=cpu, beside experiment=NAME"),
        ("resume", "resume=FOLDER continues"),
        ("published.claims", "mode=plan` prints the claims"),
        ("sweep", "rl -m experiment=NAME"),
        ("sweep.jobs", "rl sweep --help says what sweep.jobs"),
        ("export", "rl export FOLDER"),
        ("report", "rl report FOLDER"),
    ],
)
def test_a_word_that_is_no_setting_of_a_run_is_explained_too(word: str, text: str):
    assert text in " ".join(key_help([word]).split())


def test_a_key_below_a_word_that_has_none_is_unknown():
    with pytest.raises(ConfigError, match=r"unknown key 'export\.folder'"):
        key_help(["export.folder"])
