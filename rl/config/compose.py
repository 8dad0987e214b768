"""From command-line words to a plain config, with errors that name the nearest real key or option."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl.config.check import check_run_config
from rl.config.given import Given, check_types, given_experiment, given_words, short
from rl.config.load import explain, load_run_config, nearest
from rl.config.lock import lock_file
from rl.config.other_names import OURS, hint
from rl.config.register import GROUPS, knows, lacking, option_names, package_folder, register_all
from rl.config.schema import ConfigError, RunConfig
from rl.config.unused import check_unused

CONFIG_NAME = "train"
LONGEST_KEY = 300
"""Characters. Of longer ones not even the depth of the dots can be parsed."""

OPEN_NODES = (
    "model.hf_overrides.",
    "task.chat_template_kwargs.",
    "task.params.",
    "hardware.trainer_env.",
    "hardware.rollout_env.",
)
"""Mappings whose keys belong to the person; everywhere else a new key is a mistake."""


_DOTTED_GROUPS = {group.replace("/", "."): group for group in GROUPS if "/" in group}
"""A nested group written as a key, which would set a whole part to a word."""


def compose_run_config(words: list[str]) -> RunConfig:
    """The checked-for-type config of `words` (overrides such as `seed=1`). Raises ConfigError."""
    overrides = parse_overrides(words)
    config = load_run_config(compose_plain(words))
    check_types(config, given_words(overrides))
    if config.experiment is not None:
        check_types(config, given_experiment(config.experiment))
    return config


def checked_run_config(words: list[str]) -> RunConfig:
    """The config of a command line that obeys every rule and uses every key that was set. Raises ConfigError."""
    config = compose_run_config(words)
    given = given_words(parse_overrides(words))
    _check_published(given)
    check_run_config(config)
    check_unused(config, given)
    if config.experiment is not None and not lock_file(config.experiment).is_file():
        _check_experiment(config.experiment)
    return config


def _check_published(given: Iterable[Given]) -> None:
    """Else a run could widen a tolerance, keep its tag `published` and be recorded as reproduced."""
    for one in given:
        if one.key.startswith("published.") or (one.key == "published" and one.text != "null"):
            raise ConfigError(
                f"{one.key} says what a source has published, and that is not a run's to change ({short(one.where)}). "
                "To correct it, edit the experiment's file; published=null runs without it."
            )


@cache
def _check_experiment(name: str) -> None:
    """As it stands: with other parts it may leave some of its own settings without a use. Locked ones have a test."""
    try:
        alone = compose_run_config([f"experiment={name}"])
    except ConfigError:
        return  # it needs words that fill it in, and those were given
    check_unused(alone, given_experiment(name))


def open_node_words(words: list[str]) -> list[str]:
    """Hydra wants `+` for a new key of a mapping; a person need not know which mappings are open."""
    return ["++" + word.lstrip("+") if word.lstrip("+").startswith(OPEN_NODES) else word for word in words]


def compose_plain(words: list[str]) -> dict[str, Any]:
    words = open_node_words(words)
    overrides = parse_overrides(words)
    given_words(overrides)  # refuses a key that is set twice
    register_all([str(override.value()) for override in overrides if override.key_or_group == "experiment"])
    for override in overrides:
        _check_option(override)
    for override in overrides:
        changes_keys = override.is_add() or override.is_force_add() or override.is_delete()
        if changes_keys and not override.key_or_group.startswith(OPEN_NODES):
            raise ConfigError(_added_key_message(override, overrides))
    try:
        with _hydra(overrides):
            composed = compose(CONFIG_NAME, overrides=words)
        plain = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_compose_message(error, overrides)) from error
    except ValueError as error:  # Hydra's, of a defaults list that holds something else than options
        raise ConfigError(f"the `defaults` of an experiment or option cannot be read: {short(error)}") from error
    except (AssertionError, AttributeError) as error:  # OmegaConf's, where a key's parent is null
        message = _null_parent_message(overrides)
        if message is None:
            raise
        raise ConfigError(message) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@contextmanager
def _hydra(overrides: list[Override]) -> Iterator[None]:
    """Where `compose` works for a command line. Hydra keeps one global instance, and a sweep composes many points."""
    with lacking(_experiment(overrides), settings_left_out(overrides)):
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(package_folder("conf")), version_base="1.3"):
            yield


def _experiment(overrides: list[Override]) -> str | None:
    return next((str(override.value()) for override in overrides if override.key_or_group == "experiment"), None)


def settings_left_out(overrides: list[Override]) -> dict[str, Any]:
    """What the experiment sets for a part that other words replace by one that has no such setting.

    `experiment=X algorithm=grpo` is X with another algorithm, though X sets what only its own one has. A setting that
    no option of the group has stays, and is refused.
    """
    experiment = _experiment(overrides)
    chosen = [
        override
        for override in overrides
        if override.key_or_group in (*GROUPS, "backend")
        and not override.is_delete()
        and not override.is_sweep_override()
    ]
    if experiment is None or not chosen:
        return {}
    parts = _parts(tuple(override.input_line or "" for override in chosen))
    groups = [override.key_or_group for override in chosen]
    replaced = [group for group in GROUPS if group in groups or group.partition("/")[0] in groups]
    left_out = {}
    for group in replaced:
        part = f"{group.replace('/', '.')}."
        for given in given_experiment(experiment):
            setting = given.key.removeprefix(part).partition(".")[0]
            if given.key.startswith(part) and setting not in parts[group] and knows(group, setting):
                left_out[given.key] = given.value
    return left_out


def left_out_text(words: list[str]) -> str:
    """For people; empty where nothing is left out."""
    overrides = parse_overrides(words)
    left_out = settings_left_out(overrides)
    if not left_out:
        return ""
    settings = ", ".join(f"{key}={value}" for key, value in left_out.items())
    return f"left out of {_experiment(overrides)}, because the parts chosen instead have no such settings: {settings}"


@cache
def _parts(choices: tuple[str, ...]) -> dict[str, list[str]]:
    """Group -> names of its option's settings under `choices` (`group=option`), with no experiment."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(package_folder("conf")), version_base="1.3"):
        composed = compose(CONFIG_NAME, overrides=list(choices))
    return {group: list(OmegaConf.select(composed, group.replace("/", "."))) for group in GROUPS}


def parse_overrides(words: list[str]) -> list[Override]:
    for word in words:
        if word.startswith("=") or ("=" not in word and not word.startswith("~")):
            raise ConfigError(
                f"'{short(word)}' is not an override. Write key=value; `rl --help` lists groups and options."
            )
    return [_parse(word) for word in words]


@cache
def _parse(word: str) -> Override:
    """One word; the grammar takes its time, and the same word is asked for several times."""
    if len(word.partition("=")[0]) > LONGEST_KEY:
        raise ConfigError(f"unknown key '{short(word.partition('=')[0])}': no setting has so long a name.")
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
        if not override.is_sweep_override():
            override.value()  # some words cannot be read until their value is asked for
    except (HydraException, ValueError, RecursionError) as error:
        key, _, value = word.partition("=")
        raise ConfigError(
            f"cannot read '{short(word)}': {short(str(error).splitlines()[0])}. A value with spaces, commas, "
            "brackets or letters other than a to z goes in quotes inside the word: "
            f"'{short(key)}=\"{short(value)}\"'."
        ) from error
    if not override.key_or_group or override.package is not None:
        raise ConfigError(f"'{short(word)}' is not an override. Write key=value or group=option, without @.")
    return override


def _groups() -> list[str]:
    return [*GROUPS, "backend", "experiment"]


def _check_option(override: Override) -> None:
    """A group must be given one of its options."""
    group = override.key_or_group
    if group.partition("/")[0].partition(".")[0] == "hydra":
        raise ConfigError(
            f"{override.input_line}: Hydra only composes the config here, so its own settings would do nothing. The "
            "run folder is output_dir; a sweep's settings are sweep.*, see `rl sweep --help`."
        )
    if group.partition(".")[0] == "smoke":
        raise ConfigError(
            f"{override.input_line}: smoke=cpu changes a run after its settings were composed, and --cfg shows those. "
            "Leave one of the two; mode=plan prints what it replaces."
        )
    if group.partition(".")[0] == "sweep":
        raise ConfigError(f"{override.input_line}: it is a setting of a sweep. Write rl -m ... {override.input_line}")
    if f"{group}." in OPEN_NODES and not override.is_sweep_override() and override.value():
        raise ConfigError(
            f"{override.input_line}: each key of {group} is set by a word of its own. Write {group}.KEY=VALUE."
        )
    if group in _DOTTED_GROUPS:
        raise ConfigError(
            f"{override.input_line}: an option of a nested group is chosen by "
            f"{_DOTTED_GROUPS[group]}={override.value()}."
        )
    if "/" in group and group not in _groups():
        raise ConfigError(
            f"unknown config group '{group}'.{nearest(group, _groups())} (on the command line: {override.input_line})"
        )
    if group not in _groups() or override.is_delete() or override.is_sweep_override():
        return
    options = option_names(group)
    chosen = str(override.value())
    if chosen not in options:
        raise ConfigError(
            f"{group} '{chosen}' not found.{nearest(chosen, options)} Options of {group}: {', '.join(options)}."
        )


def _keys(overrides: list[Override]) -> list[str]:
    """Dotted keys of the parts and the experiment that `overrides` choose: the pool that suggestions come from."""
    return _flatten(_chosen(overrides))


def _chosen(overrides: list[Override]) -> Any:
    """The parts and the experiment that `overrides` choose, without any other word."""
    lines = [override.input_line or "" for override in overrides if override.key_or_group in _groups()]
    choices = [line for line in lines if not line.startswith(("+", "~"))]
    with _hydra(overrides):
        try:
            composed = compose(CONFIG_NAME, overrides=choices)
        except (HydraException, ValueError):  # the choices do not fit together, which this error is not about
            composed = compose(CONFIG_NAME)
    return OmegaConf.to_container(composed, resolve=False, enum_to_str=True)


def _null_parent_message(overrides: list[Override]) -> str | None:
    """Of the first word that sets a key, or a mapping, where the parts chosen, or a word, have null."""
    chosen = _chosen(overrides)
    nulls = {override.key_or_group for override in overrides if not override.is_delete() and override.value() is None}
    for override in overrides:
        node, names = chosen, override.key_or_group.split(".")
        for depth, name in enumerate(names):
            node = node.get(name) if isinstance(node, dict) else None
            key = ".".join(names[: depth + 1])
            is_mapping = depth == len(names) - 1 and isinstance(override.value(), dict)
            if (node is None or key in nulls) and (depth < len(names) - 1 or is_mapping):
                return (
                    f"{key} is null for the parts chosen, so nothing in it can be set (on the command line: "
                    f"{override.input_line}). Choose an option or experiment that has it."
                )
    return None


def _flatten(node: Any, prefix: str = "") -> list[str]:
    if not isinstance(node, dict):
        return []
    keys = []
    for name, value in node.items():
        keys += [f"{prefix}{name}", *_flatten(value, f"{prefix}{name}.")]
    return keys


def _added_key_message(override: Override, overrides: list[Override]) -> str:
    key = override.key_or_group
    keys = _keys(overrides)
    if key in keys:
        return f"'{override.input_line}' adds or deletes a setting that exists. Write {key}=value without + or ~."
    return f"unknown key '{key}'.{hint(key, keys + _groups())} (on the command line: {override.input_line})"


def _compose_message(error: BaseException, overrides: list[Override]) -> str:
    """Hydra's errors wrap OmegaConf's: say which word or file, then what is wrong with it."""
    first_line = str(error).splitlines()[0]
    message = explain(error)
    if "Ambiguous value" in first_line:
        return f"{first_line.split(';')[0]}: several values make a sweep. Write rl -m ..., or quote the value."
    for override in overrides:
        if f"'{override.key_or_group}'" in first_line or f"'{override.input_line}'" in first_line:
            key = override.key_or_group
            has_hint = "Did you mean" in message and key not in OURS
            if "Could not override" in first_line and not has_hint and _is_unknown(error):
                message = f"unknown key '{key}'.{hint(key, _keys(overrides) + _groups())}"
            return f"{message} (on the command line: {override.input_line})"
    if first_line.startswith("In '") and message != first_line:
        return f"{message} (in {first_line.split(':')[0].removeprefix('In ')})"
    return message


def _is_unknown(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if "not in" in str(cause) or "not found" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
