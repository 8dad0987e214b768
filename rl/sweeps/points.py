"""The points of a sweep: what each word of the command line stands for, composed and checked before anything starts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl.config.compose import parse_overrides
from rl.config.given import check_types, given_words
from rl.config.load import explain, nearest
from rl.config.register import known_keys, option_names
from rl.config.schema import ConfigError, RunConfig
from rl.config.smoke import run_config
from rl.config.sweep import SweepConfig

PREFIX = "sweep."


@dataclass(frozen=True, slots=True)
class Point:
    words: list[str]
    """Overrides of this point, without output_dir."""
    swept: list[str]
    """Those that differ between points."""
    config: RunConfig
    replaced: str
    """By `smoke=cpu`, as text for people; empty without that word."""

    @property
    def label(self) -> str:
        return " ".join(self.swept) or "(one point)"

    @property
    def setting(self) -> str:
        """The label without its seed: points of one setting are averaged."""
        return setting_of(self.swept)


def setting_of(swept: Sequence[str]) -> str:
    return " ".join(word for word in swept if not word.startswith("seed=")) or "all"


def split_words(words: Sequence[str]) -> tuple[SweepConfig, str | None, list[str]]:
    """(settings of the sweep, its output_dir, the words of its points). Raises ConfigError."""
    own = [word.removeprefix(PREFIX) for word in words if word.startswith(PREFIX)]
    folders = [word for word in words if word.startswith("output_dir=")]
    rest = [word for word in words if not word.startswith((PREFIX, "output_dir="))]
    overrides = parse_overrides(own)
    of_sweep = [*overrides, *parse_overrides(folders)]
    for override in of_sweep:
        if override.is_sweep_override():
            prefix = PREFIX if override in overrides else ""
            raise ConfigError(f"{prefix}{override.input_line}: it is of the whole sweep, so it has one value.")
    given = given_words(of_sweep)
    for one in given_words(overrides):
        if one.key.partition(".")[0] not in known_keys(SweepConfig):
            known = [PREFIX + key for key in known_keys(SweepConfig)]
            raise ConfigError(f"unknown key '{PREFIX}{one.key}'.{nearest(PREFIX + one.key, known)}")
    if any(word.lstrip("+").startswith("clean=") for word in rest):
        raise ConfigError("clean: a sweep never deletes a point that has run. Choose another output_dir.")
    config = OmegaConf.structured(SweepConfig)
    try:
        for one in given_words(overrides):
            OmegaConf.update(config, one.key, one.value, force_add=one.key.startswith("slurm."))
        loaded = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{PREFIX}{explain(error)}") from error
    assert isinstance(config, DictConfig) and isinstance(loaded, SweepConfig)
    check_types(loaded, given_words(overrides))  # type: ignore[arg-type]
    if loaded.jobs is not None and loaded.jobs < 1:
        raise ConfigError(f"sweep.jobs={loaded.jobs} is out of range: it must be at least 1, or null.")
    output_dir = next((one.value for one in given if one.key == "output_dir"), None)
    if output_dir == "":
        raise ConfigError("output_dir: '' must not be empty. Leave it out for a new folder.")
    return loaded, None if output_dir is None else str(output_dir), rest


def expand(words: Sequence[str]) -> list[Point]:
    """The grid: the product of every word that holds several values, in the order given, the last fastest.

    Raises one ConfigError that names every bad point.
    """
    points: list[Point] = []
    bad: list[str] = []
    seen: set[tuple[str, ...]] = set()
    for choice, swept in _choices(words):
        if tuple(choice) in seen:
            raise ConfigError(f"the point {' '.join(swept)} is there twice: give each value once.")
        seen.add(tuple(choice))
        try:
            points.append(Point(choice, swept, *run_config(choice)))
        except ConfigError as error:
            bad.append(f"point {' '.join(swept) or '(one point)'}: {error}")
    if bad:
        count = f"{len(bad)} of {len(seen)} points cannot run, so none is started:\n  " if len(seen) > 1 else ""
        raise ConfigError(count + "\n  ".join(bad))
    modes = {point.config.mode for point in points}
    if len(modes) > 1:
        raise ConfigError("mode is swept, and points of different modes cannot be compared. Give one mode.")
    return points


def _choices(words: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """(words of a point, those of them that are swept) for each point."""
    overrides = parse_overrides(list(words))
    given_words(overrides)  # refuses a key that is there twice
    alternatives: list[list[str]] = []
    is_swept: list[bool] = []
    for override, word in zip(overrides, words, strict=True):
        is_swept.append(override.is_sweep_override())
        if not is_swept[-1]:
            alternatives.append([word])
            continue
        key = word.partition("=")[0]
        glob = override.value()
        options = option_names(key)
        try:
            values = glob.filter(options) if isinstance(glob, Glob) else list(override.sweep_string_iterator())
        except HydraException as error:
            raise ConfigError(f"{word}: {error}. Use a list, range(...), choice(...) or glob(...).") from error
        if not values:
            raise ConfigError(f"{word} stands for no value. Options of {key}: {', '.join(options) or 'none'}.")
        alternatives.append([f"{key}={value}" for value in values])
    return [
        (list(choice), [word for word, swept in zip(choice, is_swept, strict=True) if swept])
        for choice in itertools.product(*alternatives)
    ]
