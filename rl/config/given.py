"""What a person wrote, key by key and with its place, before defaults and conversions: values of exactly the type that
the key has, each key once."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from rl.config.flat import leaves
from rl.config.register import PARENT, experiment_node, register_all
from rl.config.schema import ConfigError, RunConfig

LARGEST_INT = 2**63 - 1
"""Seeds, counts and sizes go to libraries that hold them in 64 bits."""
MAY_BE_EMPTY = ("hardware.trainer_env.", "hardware.rollout_env.", "published.")
"""Where an empty text is a value. Elsewhere it is a slip: an empty path would be the current folder."""


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """One value that a person set."""

    key: str
    value: Any
    where: str
    """For errors: `on the command line: seed=1`."""
    text: str | None = None
    """As typed, on a command line."""


def given_words(overrides: Sequence[Override]) -> list[Given]:
    """The values of a command line, without choices of options. A key that stands there twice is an error."""
    found: dict[str, Given] = {}
    for override in overrides:
        key, line = override.key_or_group, override.input_line or ""
        if key in found:
            raise ConfigError(
                f"{key} is set twice ({found[key].text} and {line.partition('=')[2]}), and only one could count. "
                "Leave one of the two."
            )
        value = None if override.is_sweep_override() else override.value()
        found[key] = Given(key, value, f"on the command line: {line}", line.partition("=")[2])
    return list(found.values())


def given_experiment(name: str) -> list[Given]:
    """What an experiment's file sets, and those that it builds on; of a key that several set, the nearest file's."""
    register_all([name])
    node = OmegaConf.to_container(experiment_node(name), resolve=False)
    assert isinstance(node, dict)
    del node["experiment"]  # which is not of the file
    found: dict[str, Given] = {}
    for entry in node.pop("defaults", None) or []:
        if isinstance(entry, str) and entry.startswith(PARENT):
            found |= {given.key: given for given in given_experiment(entry.removeprefix(PARENT))}
    where = f"in experiment {name}"
    return list((found | {key: Given(key, value, where) for key, value in leaves(node)}).values())


def check_types(config: RunConfig, given: Iterable[Given]) -> None:
    """Raises ConfigError where a value is not of its key's type. OmegaConf would take `clean=2` for true."""
    for one in given:
        for key, value in leaves(one.value, one.key):
            wanted = type_at(config, key)
            problem = None if wanted is None else _problem(wanted, value, one.text if key == one.key else None)
            if value == "" and wanted is str and not key.startswith(MAY_BE_EMPTY):
                problem = "must not be empty. null is none."
            if problem:
                shown = one.text if key == one.key and one.text is not None else value
                raise ConfigError(f"{key}: '{short(shown)}' {problem} ({short(one.where)})")


def type_at(config: Any, key: str) -> Any:
    """Annotation of a dotted key, without `None`; None where there is no such key, or anything may stand there."""
    node, annotation = config, type(config)
    for name in key.split("."):
        if typing.get_origin(annotation) is dict:
            annotation = typing.get_args(annotation)[1]
            node = node.get(name) if isinstance(node, dict) else None
        elif dataclasses.is_dataclass(annotation):
            # The class of the chosen option, which has more keys than the one that the field is declared with.
            owner = type(node) if dataclasses.is_dataclass(node) else annotation
            hints = hints_of(owner)
            if name not in hints:
                return None
            parts = parts_of(hints[name])
            annotation, node = parts[0] if len(parts) == 1 else None, getattr(node, name, None)
        else:
            return None
    return annotation


hints_of = functools.cache(typing.get_type_hints)
"""Annotations of a class by name."""


def parts_of(annotation: Any) -> list[Any]:
    """What a union is of, without `None`; anything else alone."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return [part for part in typing.get_args(annotation) if part is not types.NoneType] if is_union else [annotation]


_RULES: tuple[tuple[type, Callable[[Any], bool], str], ...] = (
    (bool, lambda value: isinstance(value, bool), "must be true or false."),
    (int, lambda value: _is_number(value, int), "must be a whole number, written without quotes."),
    (int, lambda value: abs(value) <= LARGEST_INT, "has more than 63 bits: no library holds such a number."),
    (float, lambda value: _is_number(value, int | float), "must be a number, written without quotes."),
    (float, math.isfinite, "must be a finite number. Where a limit may be left out, null leaves it out."),
)
"""Type of a key, what its value must be, the end of a sentence that says so."""


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _problem(wanted: Any, value: Any, text: str | None) -> str | None:
    """What is wrong with `value`, as the end of a sentence; None if nothing, or if OmegaConf says it."""
    if value is None or (isinstance(value, str) and "${" in value):
        return None
    broken = next((words for kind, rule, words in _RULES if wanted is kind and not rule(value)), None)
    if broken is None and wanted is str and not isinstance(value, str) and str(value) != text:
        # output_dir=5 is the same as text; model.revision=007 is not.
        broken = "is text, and would be read as something else. Put it in quotes inside the word: KEY='\"...\"'."
    if isinstance(wanted, type) and issubclass(wanted, Enum) and value not in wanted.__members__:
        broken = f"must be one of {', '.join(wanted.__members__)}."
    if typing.get_origin(wanted) is list and isinstance(value, list):
        (item,) = typing.get_args(wanted)
        found = ((one, _problem(item, one, None)) for one in value)
        broken = next((f"holds {one!r}, which {problem}" for one, problem in found if problem), None)
    return broken


def short(value: Any) -> str:
    """For a message: a value of a hundred thousand characters says no more than its beginning."""
    text = str(value)
    return text if len(text) <= 100 else f"{text[:60]}... ({len(text):,} characters)"
