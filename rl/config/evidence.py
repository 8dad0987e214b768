"""Which settings of a published experiment must say where their value comes from."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from rl.config.compose import compose_plain
from rl.config.flat import flat
from rl.config.load import to_plain
from rl.config.published import PublishedConfig
from rl.config.register import schema_of_target
from rl.config.schema import RunConfig

CHOICES = ("model", "algorithm", "backend.trainer", "backend.rollout", "placement", "hardware", "task")
"""Chosen by name, which needs evidence of its own whatever the default is."""
FACTS = ("model", "hardware")
"""Of these the option's file holds facts, with their sources there; what an experiment changes in them is a setting."""
NOT_SETTINGS = ("experiment", "mode", "output_dir", "clean", "logger", "published")


def settings_to_justify(config: RunConfig) -> list[str]:
    """The parts that were chosen, and dotted keys of all settings that differ from the defaults of their classes."""
    ours = _settings(to_plain(config))
    options = compose_plain([f"{name}={getattr(config, name).name}" for name in FACTS])
    defaults = _settings({**_default_plain(config), **{name: options[name] for name in FACTS}})
    differing = [key for key, value in ours.items() if key not in defaults or defaults[key] != value]
    return sorted([*CHOICES, *differing])


def evidence_of(published: PublishedConfig) -> list[tuple[str, str, str]]:
    """(key, kind, note) of every entry."""
    evidence = published.evidence
    kinds = {"source": evidence.source, "assumed": evidence.assumed, "deviation": evidence.deviation}
    return [(key, kind, note) for kind, notes in kinds.items() for key, note in notes.items()]


def evidence_problems(config: RunConfig) -> list[str]:
    """Settings without evidence, entries without a setting, and settings that have two."""
    if config.published is None:
        return []
    needed, given = settings_to_justify(config), [key for key, _, _ in evidence_of(config.published)]
    problems = [f"{key} differs from its default and has no evidence" for key in needed if key not in given]
    problems += [f"{key} has evidence, but is what it is by default" for key in given if key not in needed]
    problems += [f"{key} has evidence of two kinds" for key in dict.fromkeys(given) if given.count(key) > 1]
    return problems


def _default_plain(config: RunConfig) -> dict[str, Any]:
    """A run of the same parts that changes none of their settings; `???` where a part has no default."""
    plain = OmegaConf.structured(RunConfig)
    for name in CHOICES:
        target = getattr(OmegaConf.select(OmegaConf.structured(config), name), "_target_", None)
        if target is not None:
            OmegaConf.update(plain, name, OmegaConf.structured(schema_of_target(target)), merge=False)
    container = OmegaConf.to_container(plain, enum_to_str=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _settings(plain: dict[str, Any]) -> dict[str, Any]:
    chosen = flat({key: value for key, value in plain.items() if key not in NOT_SETTINGS})
    return {key: value for key, value in chosen.items() if not key.endswith("_target_")}
