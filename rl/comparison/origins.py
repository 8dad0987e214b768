"""Where the value of a setting came from: default < experiment < command line, with file and value at each level."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf

from rl.comparison.settings import Settings
from rl.config.compose import CONFIG_NAME, compose_plain, open_node_words, parse_overrides
from rl.config.flat import ABSENT, flat
from rl.config.load import nearest
from rl.config.register import experiment_files, package_folder, schema_of_target
from rl.config.schema import ConfigError, RunConfig

DEFAULT, EXPERIMENT, COMMAND_LINE = "default", "experiment", "command line"
LEVELS = (DEFAULT, EXPERIMENT, COMMAND_LINE)
"""From the weakest to the strongest."""


@dataclass(frozen=True, slots=True)
class Origin:
    """One place that gives a setting a value."""

    level: str
    """Of `LEVELS`: who chose this file or wrote this word."""
    where: str
    value: Any
    """As written there: it may refer to another key, `${...}`."""

    def gives(self, value: Any) -> bool:
        return self.value == value or (isinstance(self.value, str) and "${" in self.value)


@dataclass(frozen=True, slots=True)
class _File:
    """One of the files that are merged."""

    level: str
    path: Path
    package: str
    """Key of the section that the file is; empty: it holds whole keys."""
    values: dict[str, Any]
    """Dotted key inside `package` -> value."""

    def inner(self, key: str) -> str | None:
        """`key` as the file writes it; None if it has no say in it."""
        if not self.package:
            return key
        return key.removeprefix(f"{self.package}.") if key.startswith(f"{self.package}.") else None


@dataclass(frozen=True, slots=True)
class _Composition:
    plain: dict[str, Any]
    overrides: list[Override]
    files: list[_File]
    """In the order in which Hydra merges them."""


def origins(key: str, words: Sequence[str]) -> list[Origin]:
    """In the order in which they are merged: the last one counts. Raises ConfigError on a key that nothing gives.

    The files are those of this checkout, which need not be those of an earlier run.
    """
    composed = _compose(tuple(words))
    found = [*_of_class(key, composed.plain), *_of_files(key, composed.files), *_of_words(key, composed.overrides)]
    if not found:
        known = list(flat(composed.plain))
        inside = [name for name in known if name.startswith(f"{key}.")]
        if inside:
            raise ConfigError(f"{key} is no setting but a section: name a key in it, such as {inside[0]}.")
        raise ConfigError(f"unknown key '{key}'.{nearest(key, known)}")
    return found


@functools.lru_cache(maxsize=8)
def _compose(words: tuple[str, ...]) -> _Composition:
    overrides = parse_overrides(open_node_words(list(words)))
    return _Composition(compose_plain(list(words)), overrides, list(_merged_files(overrides)))


def _of_class(key: str, plain: Mapping[str, Any]) -> Iterator[Origin]:
    """The default in the config class of the part that was chosen."""
    *parents, name = key.split(".")
    owner: Any = RunConfig
    node: Any = plain
    defaults: Mapping[str, Any] = _defaults(RunConfig)
    for parent in parents:
        node = node.get(parent) if isinstance(node, Mapping) else None
        target = node.get("_target_") if isinstance(node, Mapping) else None
        owner = schema_of_target(target) if target else _declared(owner, parent)
        inside = defaults.get(parent)  # a section may have other defaults where it stands than by itself
        defaults = inside if isinstance(inside, dict) and not target else _defaults(owner)
    if not is_dataclass(owner):
        return  # a mapping whose keys belong to the person
    assert isinstance(owner, type)
    holder = next((cls for cls in owner.__mro__ if name in inspect.get_annotations(cls)), None)
    if holder is None or defaults[name] == "???":
        return
    file = Path(inspect.getfile(holder))
    yield Origin(DEFAULT, f"{_shown(file)} {holder.__name__}.{name}", defaults[name])


@functools.cache
def _defaults(owner: Any) -> Mapping[str, Any]:
    """Of a config class, nested; of anything else there are none."""
    if not is_dataclass(owner):
        return {}
    plain = OmegaConf.to_container(OmegaConf.structured(owner), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


@functools.cache
def _declared(owner: Any, name: str) -> Any:
    """What stands under `name` in a config class or a mapping: a config class, a mapping type, or None."""
    is_mapping = typing.get_origin(owner) is dict
    annotation = typing.get_args(owner)[1] if is_mapping else typing.get_type_hints(owner).get(name) if owner else None
    options = [annotation, *([] if typing.get_origin(annotation) is dict else typing.get_args(annotation))]
    return next((option for option in options if is_dataclass(option) or typing.get_origin(option) is dict), None)


def _of_files(key: str, files: Sequence[_File]) -> Iterator[Origin]:
    """Options of config groups and the experiment."""
    for file in files:
        inner = file.inner(key)
        if inner is not None and inner in file.values:
            yield Origin(file.level, f"{_shown(file.path)}:{_line_of(file.path, inner)}", file.values[inner])


def _of_words(key: str, overrides: Sequence[Override]) -> Iterator[Origin]:
    for override in overrides:
        if override.key_or_group == key:
            yield Origin(COMMAND_LINE, str(override.input_line), override.value())
        elif key.startswith(f"{override.key_or_group}.") and isinstance(override.value(), dict):
            inside = flat(override.value()).get(key.removeprefix(f"{override.key_or_group}."), ABSENT)
            if inside is not ABSENT:
                yield Origin(COMMAND_LINE, str(override.input_line), inside)


def _merged_files(overrides: Sequence[Override]) -> Iterator[_File]:
    """The defaults list that Hydra merges, without the schemas; who chose an option gives it its level."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(package_folder("conf")), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        words = [override.input_line or "" for override in overrides]
        elements = list(loader.compute_defaults_list(CONFIG_NAME, words, RunMode.RUN).defaults)
    choices = {override.key_or_group for override in overrides}
    experiment = next((str(o.value()) for o in overrides if o.key_or_group == "experiment"), None)
    of_experiment = _chosen_by(experiment) if experiment else set()
    for element in elements:
        assert element.config_path is not None
        group, path = element.config_path.rpartition("/")[0], _file_of(element.config_path)
        if path is None:
            continue
        level = EXPERIMENT if group == "experiment" or _is_chosen(group, of_experiment) else DEFAULT
        if group != "experiment" and _is_chosen(group, choices):
            level = COMMAND_LINE
        node = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        yield _File(level, path, element.package or "", flat(node) if isinstance(node, dict) else {})


def _file_of(config_path: str) -> Path | None:
    """None for a schema."""
    group, _, option = config_path.rpartition("/")
    if group == "experiment":
        return experiment_files().get(option)
    path = package_folder("conf") / f"{config_path}.yaml"
    return path if path.is_file() else None


def _chosen_by(experiment: str) -> set[str]:
    """Groups whose option an experiment's file chooses."""
    path = experiment_files().get(experiment)
    node = yaml.safe_load(path.read_text(encoding="utf-8")) if path else {}
    entries = [next(iter(entry)) for entry in node.get("defaults", []) if isinstance(entry, dict)]
    return {entry.removeprefix("override ").lstrip("/") for entry in entries}


def _is_chosen(group: str, choices: set[str]) -> bool:
    """`backend=...` chooses `backend/trainer` and `backend/rollout`, too."""
    return any(group == choice or group.startswith(f"{choice}/") for choice in choices)


def _line_of(path: Path, key: str) -> int:
    """Line of a dotted key in a YAML file, from 1. A name in it may itself have dots."""
    node, left = _tree(path), key
    while isinstance(node, yaml.MappingNode):
        matches = [(name, value) for name, value in node.value if f"{left}.".startswith(f"{name.value}.")]
        name, value = max(matches, key=lambda match: len(match[0].value))
        if name.value == left:
            return name.start_mark.line + 1
        node, left = value, left.removeprefix(f"{name.value}.")
    raise AssertionError(f"{path} has no {key}")


@functools.cache
def _tree(path: Path) -> yaml.Node | None:
    return yaml.compose(path.read_text(encoding="utf-8"))


def _shown(path: Path) -> str:
    """Relative to the checkout, or to the installed package."""
    root = package_folder("conf").parent
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def explain(key: str, settings: Settings) -> list[str]:
    """For people: the value and, level by level, where it stands."""
    if settings.words is None:
        raise ConfigError(f"{settings.name}: the command line behind these settings is unknown.")
    found = origins(key, settings.words)
    value = settings.values.get(key, ABSENT)
    lines = [f"{key} = {shown(value)}   ({settings.name})"]
    for level in LEVELS:
        of_level = [origin for origin in found if origin.level == level]
        lines += [f"  {level:<13} {shown(origin.value):<14} {origin.where}" for origin in of_level]
        lines += [] if of_level else [f"  {level:<13} -"]
    if value is not ABSENT and not found[-1].gives(value):
        lines.append("  but the run has another value: by smoke=cpu, by a resume, or files here have changed since")
    return lines


def shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    return str(value)
