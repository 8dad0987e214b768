"""Settings of runs and experiments, flat: which differ, and which are not those locked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl.config.compose import compose_run_config
from rl.config.flat import flat
from rl.config.load import load_run_yaml, to_plain
from rl.config.lock import deciding_settings, lock_file, published_status
from rl.config.register import experiment_files
from rl.config.schema import ConfigError, RunConfig
from rl.config.smoke import split_smoke
from rl.loggers.jsonl import parse_json

FACTS = ("code", "packages", "python", "gpu", "cpu", "task_fingerprint")
"""Of provenance.json, besides the settings: what else decides a run's outcome."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a run folder, an experiment, or a file of settings."""

    name: str
    values: Mapping[str, Any]
    """Dotted key -> value."""
    deciding: frozenset[str]
    """Keys that can decide an outcome."""
    words: list[str] | None = None
    """The overrides that they were composed of. None: unknown."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Those of `FACTS` that are known, flat."""
    run_folder: Path | None = None


def read_settings(name: str) -> Settings:
    """`name` is a run folder, the name of an experiment, or a YAML file. Raises ConfigError if it is none of them."""
    path = Path(name)
    if (path / "run.yaml").is_file():
        facts = read_provenance(path)
        flat_facts = flat({key: facts[key] for key in FACTS if key in facts})
        words = facts.get("overrides")
        words = None if words is None else _composed_words(words)
        return _settings(name, to_plain(load_run_yaml(path / "run.yaml")), words, flat_facts, path)
    if name in experiment_files():
        words = [f"experiment={name}"]
        return _settings(name, to_plain(compose_run_config(words)), words)
    if path.is_file():
        return _settings(name, _read_yaml(path))
    raise ConfigError(
        f"'{name}' is no run folder, experiment or YAML file. Experiments: {', '.join(experiment_files())}."
    )


def _composed_words(words: list[str]) -> list[str]:
    """Those that a config is composed of; `smoke=cpu` and `resume=` change it afterwards."""
    return [word for word in split_smoke(words)[0] if not word.startswith("resume=")]


def _settings(name: str, plain: Mapping[str, Any], *rest: Any) -> Settings:
    return Settings(name, flat(plain), frozenset(flat(deciding_settings(plain))), *rest)


def read_lock(settings: Settings) -> Settings:
    """Of the experiment that `settings` are of."""
    experiment = settings.values.get("experiment")
    if not isinstance(experiment, str):
        raise ConfigError(f"{settings.name} is of no experiment, so there is no lock to compare with.")
    path = lock_file(experiment)
    if not path.is_file():
        raise ConfigError(f"there is no lock of {experiment}: {path} does not exist.")
    return _settings(f"{experiment} (locked)", _read_yaml(path))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as settings: {error}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} holds no mapping of settings.")
    return plain


def read_provenance(run_folder: Path) -> dict[str, Any]:
    """Of the run's first start; empty where it did not come so far."""
    path = run_folder / "provenance.json"
    return parse_json(path.read_bytes(), str(path)) if path.is_file() else {}


def locked_changes(config: RunConfig) -> list[str]:
    """Settings of a run that are not those locked for its experiment; empty where nothing is published of that."""
    status = published_status(config)
    return [] if status is None else list(status.changed)
