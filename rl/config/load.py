"""The one strict door: every config, composed by Hydra or read from a run.yaml, becomes a RunConfig here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl.config.flat import leaves
from rl.config.given import Given, check_types, short
from rl.config.register import known_keys, schema_of_target
from rl.config.schema import ConfigError, RunConfig

SELECTED_NODES = (
    "model",
    "algorithm",
    "backend.trainer",
    "backend.rollout",
    "placement",
    "task",
    "logger",
)
"""Nodes whose schema is chosen by the `_target_` in them."""


def load_run_config(plain: dict[str, Any]) -> RunConfig:
    """A checked-for-type RunConfig of real dataclasses. Raises ConfigError on unknown, missing or ill-typed keys."""
    config = OmegaConf.structured(RunConfig)
    given = OmegaConf.create(plain)
    assert isinstance(given, DictConfig)
    for node in SELECTED_NODES:
        target = _target_of(plain, node)
        if target is None:
            raise ConfigError(f"{node} is not chosen. Name an option of its config group; `rl --help` lists them.")
        try:
            chosen = schema_of_target(target)
        except ConfigError as error:
            raise ConfigError(f"{node}.{error}") from error
        if chosen is None:
            raise ConfigError(
                f"{node}._target_={target} has no schema. Name its config class in a class attribute `config_class`, "
                "or register it with rl.config.register.register_schema(group, name, config_class)."
            )
        try:
            OmegaConf.update(config, node, OmegaConf.structured(chosen), merge=False)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{node}._target_={target} is no {node.rpartition('.')[2]}. {explain(error)}") from error
    try:
        merged = OmegaConf.merge(config, given)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(f"{missing[0]} has no value and no default. Set it: {missing[0]}=...{_also(missing[1:])}")
        loaded = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(loaded, RunConfig)
    return loaded


def _target_of(plain: dict[str, Any], node: str) -> str | None:
    value: Any = plain
    for name in (*node.split("."), "_target_"):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def _also(missing: list[str]) -> str:
    return f" (also missing: {', '.join(missing)})" if missing else ""


def to_plain(config: RunConfig) -> dict[str, Any]:
    """The inverse of `load_run_config`: nulls stay nulls, enums become their names. The caller's own, to change."""
    return _plain(config)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def save_run_yaml(config: RunConfig, path: Path) -> None:
    """Whole whenever it exists: a resume that is killed as it writes leaves the run's config as it was."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
    os.replace(temporary, path)


def load_run_yaml(path: Path) -> RunConfig:
    try:
        plain = yaml.load(path.read_text(encoding="utf-8"), Loader=_EachKeyOnce)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a run's config: {short(error)}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} holds no mapping of settings.")
    try:
        config = load_run_config(plain)
        check_types(config, (Given(key, value, f"in {path}") for key, value in leaves(plain)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return config


class _EachKeyOnce(yaml.SafeLoader):
    """YAML whose mappings have each key once: of two values one would do nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) < len(node.value):
            names = [key.value for key, _ in node.value]
            twice = next(name for name in names if names.count(name) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"the key '{twice}' is there twice", node.start_mark)
        return mapping


def nearest(key: str, candidates: list[str]) -> str:
    """` Did you mean '...'?` or an empty string. Compares last components too: people forget the prefix."""
    close = difflib.get_close_matches(key, candidates, n=1, cutoff=0.6)
    if not close:
        leaf = key.rpartition(".")[2]
        by_leaf = {candidate.rpartition(".")[2]: candidate for candidate in candidates}
        close = [by_leaf[name] for name in difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.6)]
    return f" Did you mean '{close[0]}'?" if close else ""


def explain(error: BaseException) -> str:
    """One line for a person from an OmegaConf error: the key, what is wrong, the nearest real key."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return str(error).splitlines()[0]
    key = str(cause.full_key or cause.key or "")
    first_line = str(cause.msg or cause).splitlines()[0]
    owner = cause.object_type
    if "not in" in first_line and isinstance(owner, type) and hasattr(owner, "__dataclass_fields__"):
        prefix = key.rpartition(".")[0]
        keys = [f"{prefix}.{name}" if prefix else name for name in known_keys(owner)]
        hint = nearest(key, keys) or f" It has {', '.join(name for name in known_keys(owner) if '.' not in name)}."
        return f"unknown key '{key}': {owner.__name__} has no such setting.{hint}"
    return f"{key}: {first_line}" if key and key not in first_line else first_line
