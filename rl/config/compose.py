"""From command-line words to a plain config, with errors that name the nearest real key or option."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl.config.load import explain, load_run_config, nearest
from rl.config.register import GROUPS, option_names, package_folder, register_all
from rl.config.schema import ConfigError, RunConfig

CONFIG_NAME = "train"

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
    return load_run_config(compose_plain(words))


def open_node_words(words: list[str]) -> list[str]:
    """Hydra wants `+` for a new key of a mapping; a person need not know which mappings are open."""
    return ["++" + word.lstrip("+") if word.lstrip("+").startswith(OPEN_NODES) else word for word in words]


def compose_plain(words: list[str]) -> dict[str, Any]:
    words = open_node_words(words)
    overrides = parse_overrides(words)
    register_all([str(override.value()) for override in overrides if override.key_or_group == "experiment"])
    for override in overrides:
        _check_option(override)
    for override in overrides:
        changes_keys = override.is_add() or override.is_force_add() or override.is_delete()
        if changes_keys and not override.key_or_group.startswith(OPEN_NODES):
            raise ConfigError(_added_key_message(override, overrides))
    try:
        # Hydra keeps one global instance; a sweep composes many points in one process.
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(package_folder("conf")), version_base="1.3"):
            composed = compose(CONFIG_NAME, overrides=words)
        plain = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_compose_message(error, overrides)) from error
    assert isinstance(plain, dict)
    experiment: Any = next((o.value() for o in overrides if o.key_or_group == "experiment"), None)
    return {**{str(key): value for key, value in plain.items()}, "experiment": experiment}


def parse_overrides(words: list[str]) -> list[Override]:
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"'{word}' is not an override. Write key=value; `rl --help` lists groups and options.")
    try:
        return OverridesParser.create().parse_overrides(words)
    except HydraException as error:
        raise ConfigError(f"cannot read the command line: {str(error).splitlines()[0]}") from error


def _groups() -> list[str]:
    return [*GROUPS, "backend", "experiment"]


def _check_option(override: Override) -> None:
    """A group must be given one of its options."""
    group = override.key_or_group
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
    lines = [override.input_line or "" for override in overrides if override.key_or_group in _groups()]
    choices = [line for line in lines if not line.startswith(("+", "~"))]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(package_folder("conf")), version_base="1.3"):
        try:
            composed = compose(CONFIG_NAME, overrides=choices)
        except HydraException:  # the choices do not fit together, which is not what this error is about
            composed = compose(CONFIG_NAME)
    return _flatten(OmegaConf.to_container(composed, resolve=False, enum_to_str=True))


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
    return f"unknown key '{key}'.{nearest(key, keys)} (on the command line: {override.input_line})"


def _compose_message(error: BaseException, overrides: list[Override]) -> str:
    """Hydra's errors wrap OmegaConf's: say which word or file, then what is wrong with it."""
    first_line = str(error).splitlines()[0]
    message = explain(error)
    if "Ambiguous value" in first_line:
        return f"{first_line.split(';')[0]}: several values make a sweep. Write rl -m ..., or quote the value."
    for override in overrides:
        if f"'{override.key_or_group}'" in first_line or f"'{override.input_line}'" in first_line:
            if "Could not override" in first_line and "Did you mean" not in message and _is_unknown(error):
                key = override.key_or_group
                message = f"unknown key '{key}'.{nearest(key, _keys(overrides) + _groups())}"
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
