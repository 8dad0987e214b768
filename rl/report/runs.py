"""Runs as their folders tell of them, and what differs between several."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rl.config.flat import differing, flat
from rl.config.schema import ConfigError
from rl.loggers.facts import RunFacts, read_provenance, run_facts
from rl.loggers.jsonl import Row, read_metrics
from rl.loggers.samples import Sample, read_samples

_NOT_COMPARED = ("output_dir", "logger", "published", "clean", "provenance")
_MAX_KEYS_SHOWN = 3
_MAX_CHARACTERS_OF_VALUE = 16


@dataclass(frozen=True)
class ReportedRun:
    folder: Path
    name: str
    """Unlike that of every other run of the report."""
    varied: str
    """The first settings in which the runs differ, with this run's values; empty if there are none."""
    facts: RunFacts
    rows: list[Row]
    samples: list[Sample]

    @property
    def provenance(self) -> Mapping[str, Any]:
        return self.facts.config["provenance"]

    @property
    def seconds(self) -> float:
        """Wall time of its steps."""
        return sum(row.get("time/step_s") or 0.0 for row in self.rows)


def find_runs(folder: Path) -> list[Path]:
    """The run folder itself, or all runs in a sweep's folder. Raises ConfigError if there is none."""
    if (folder / "run.yaml").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/run.yaml"))
    if not found:
        raise ConfigError(f"{folder} holds no run: there is no run.yaml in it, nor in a folder of it.")
    return found


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Runs of an older version of this suite are read, too: their settings are not checked, only shown.

    Raises ConfigError if none of them has a row.
    """
    configs = [_read_config(folder) for folder in folders]
    names, varied = _names(folders), _varied(configs)
    runs = [
        ReportedRun(
            folder=folder,
            name=names[index],
            varied=varied[index],
            facts=run_facts(folder, config=configs[index], provenance=read_provenance(folder)),
            rows=read_metrics(folder / "metrics.jsonl"),
            samples=read_samples(folder),
        )
        for index, folder in enumerate(folders)
    ]
    if not any(run.rows for run in runs):
        raise ConfigError(f"no row in {folders[0] / 'metrics.jsonl'} yet: there is nothing to report.")
    return runs


def settings_that_differ(runs: Sequence[ReportedRun]) -> dict[str, tuple[Any, ...]]:
    """Settings, and after them commit and package versions, that are not the same in all runs."""
    return _compared([run.facts.config for run in runs]) | differing(*(flat(_made_with(run)) for run in runs))


def _compared(configs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    pairs = differing(*map(flat, configs))
    return {key: values for key, values in pairs.items() if not key.startswith(_NOT_COMPARED)}


def _made_with(run: ReportedRun) -> dict[str, Any]:
    code = run.provenance.get("code") or {}
    return {
        "code": {key: code.get(key) for key in ("commit", "dirty")},
        "packages": run.provenance.get("packages") or {},
    }


def provenance_line(run: ReportedRun) -> str:
    """When, from which commit, and on what a run was made; what is not known is left out."""
    facts = run.provenance
    code, packages = facts.get("code") or {}, facts.get("packages") or {}
    commit = code.get("commit")
    parts = [
        facts.get("time"),
        f"commit {commit[:10]}{' with changes' if code.get('dirty') else ''}" if commit else None,
        f"config {facts['config_digest'][:10]}" if facts.get("config_digest") else None,
        f"torch {packages['torch']}" if "torch" in packages else None,
        ", ".join(facts["gpu"]) if facts.get("gpu") else (facts.get("cpu") or {}).get("model"),
    ]
    return ", ".join(part for part in parts if part)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder / 'run.yaml'} cannot be read: {error}") from error
    if not isinstance(config, dict) or "experiment" not in config:
        raise ConfigError(f"{folder / 'run.yaml'} is not a run's config.")
    return config


def _names(folders: Sequence[Path]) -> list[str]:
    """Each folder's name, with its parent's where that is needed."""
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [f"{folder.parent.name}/{folder.name}" for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _varied(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    settings = _compared(configs)
    first = list(settings)[:_MAX_KEYS_SHOWN]
    more = ", ..." if len(settings) > len(first) else ""
    pairs = [[f"{_leaf(key)}={_short(settings[key][index])}" for key in first] for index in range(len(configs))]
    return [", ".join(texts) + more for texts in pairs]


def _leaf(key: str) -> str:
    """The last word of a key; of a chosen part its group."""
    parts = [part for part in key.split(".") if part != "_target_"]
    return parts[-1]


def _short(value: Any) -> str:
    """A class by its own name, and no more than fits in a legend."""
    text = "null" if value is None else str(value)
    last = text.rpartition(".")[2] if text.startswith("rl.") else text
    return last if len(last) <= _MAX_CHARACTERS_OF_VALUE else f"...{last[-_MAX_CHARACTERS_OF_VALUE:]}"
