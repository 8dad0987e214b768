"""Whether a run has the settings of its experiment as they are locked in experiments/resolved, and what differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl.config.comparable import keys_that_matter, named
from rl.config.flat import ABSENT, differing, flat
from rl.config.load import to_plain
from rl.config.published import is_of_source, origin_on
from rl.config.register import package_folder
from rl.config.schema import RunConfig

LINES_SHOWN = 12
"""Of settings that differ."""

HARDWARE_NAME = "hardware.name"
"""In no lock, because the host decides nothing; but a source speaks of some cards, and not of each that is set up
alike."""
_NOT_SETTINGS = ("logger", "output_dir", "clean", "mode", "published", "plan", "ray")
_FACTS = {
    "hardware": (
        "name",
        "nodes",
        "gpus_per_node",
        "memory_gib",
        "memory_bandwidth_tb_s",
        "bf16_tflops",
        "link_gb_s",
        "network_gb_s",
    ),
    "model": ("shape",),
}
"""Keys of a node that are facts about the host, or about model.path."""


def deciding_settings(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a run's outcome: all but logger, folder, mode, Ray's address and the host's name, size, speed.

    Claims, the plan's assumptions and the model's sizes are no settings.
    """
    settings = {key: value for key, value in plain.items() if key not in _NOT_SETTINGS}
    for node, facts in _FACTS.items():
        if node in settings:
            settings[node] = {key: value for key, value in settings[node].items() if key not in facts}
    return settings


def config_digest(plain: Mapping[str, Any]) -> str:
    """sha256 of `deciding_settings`."""
    canonical = json.dumps(deciding_settings(plain), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class PublishedStatus:
    """How a run stands to the experiment that it is named after."""

    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Dotted key -> (locked value, ours); None where one side does not have the key."""

    @property
    def tag(self) -> str:
        """`published` or `modified`."""
        return "modified" if self.changed else "published"

    def facts(self) -> dict[str, Any]:
        """For provenance.json."""
        return {"tag": self.tag, "changed": {key: list(values) for key, values in self.changed.items()}}


def lock_file(experiment: str) -> Path:
    return package_folder("experiments") / "resolved" / f"{experiment}.yaml"


def published_status(config: RunConfig) -> PublishedStatus | None:
    """None where the experiment publishes nothing or is not locked."""
    if config.experiment is None or config.published is None or not lock_file(config.experiment).is_file():
        return None
    locked = flat(yaml.safe_load(lock_file(config.experiment).read_text(encoding="utf-8")))
    ours = flat(deciding_settings(to_plain(config)))
    changed = {key: _without_absent(pair) for key, pair in differing(locked, ours).items()}
    hardware = config.hardware.name
    if not is_of_source(config.published, hardware):
        changed[HARDWARE_NAME] = (config.published.measured_on, hardware)
    return PublishedStatus(changed)


def _without_absent(pair: tuple[Any, ...]) -> tuple[Any, Any]:
    """provenance.json has no word for it."""
    locked, ours = (None if value is ABSENT else value for value in pair)
    return locked, ours


def published_lines(config: RunConfig, status: PublishedStatus | None) -> list[str]:
    """For people, at the start of a run: which settings are not the locked ones, and what follows from the hardware.

    `status` is the config's own; without one there are no lines.
    """
    if status is None:
        return []
    settings = [key for key in status.changed if key != HARDWARE_NAME]
    others = [key for key in settings if not key.startswith("hardware.")]
    lines = [f"{status.tag}: the settings of {config.experiment} as locked"]
    if settings:
        are_not = "setting is not that" if len(settings) == 1 else "settings are not those"
        lines = [f"{status.tag}: {len(settings)} {are_not} locked for {config.experiment}"]
    for key in others[:LINES_SHOWN]:
        locked, ours = status.changed[key]
        lines.append(f"  {key}: {_shown(locked)} -> {_shown(ours)}")
    if len(others) > LINES_SHOWN:
        lines.append(f"  and {len(others) - LINES_SHOWN} more, see provenance.json")
    if len(others) < len(status.changed):
        of_platform = len(settings) - len(others)
        what = f"{of_platform} of its architecture and environment" if of_platform else "its source speaks of no such"
        lines.append(f"  hardware={config.hardware.name}: {what}")
    return lines + _claim_lines(config, status)


def _claim_lines(config: RunConfig, status: PublishedStatus) -> list[str]:
    published, hardware = config.published, config.hardware.name
    assert published is not None
    because = {name: keys_that_matter(claim, status.changed) for name, claim in published.claims.items()}
    modified = [name for name, keys in because.items() if keys]
    left = {name: claim for name, claim in published.claims.items() if name not in modified}
    lines, other, they = [], "", "all"
    if modified:
        keys = [key for key in status.changed if any(key in keys for keys in because.values())]
        lines.append(f"  not comparable, because of {named(keys)}: {', '.join(modified) if left else 'every claim'}")
        other, they = "other ", "the others"
    if hardware == published.measured_on or not left:
        return lines
    if hardware in published.carried_over:
        return [*lines, f"  every {other}claim is derived on {hardware}: {published.carried_over[hardware]}"]
    lost = [name for name, claim in left.items() if origin_on(published, claim, hardware) is None]
    measured = f"published of {published.measured_on} ({published.hardware})"
    if not lost:
        return [*lines, f"  {measured}; no {other}claim is about speed, so {they} stay comparable"]
    return [*lines, f"  {measured}: not comparable on {hardware}, because they are about speed: {', '.join(lost)}"]


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
