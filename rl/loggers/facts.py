"""What a run is, besides its rows: what a tracker shows of it and what a report says about it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.published import SPEED_METRICS
from rl.loggers.names import Reduction, find

_POINT_OF_SWEEP = re.compile(r"\d{3,}")


@dataclass(frozen=True, slots=True)
class ReferenceLine:
    """A published number that a curve of the run can be compared with by eye."""

    claim: str
    metric: str
    """Key of metrics.jsonl that it belongs to."""
    value: float
    """In the metric's unit, of one row."""
    first_step: int | None
    """None: the run's first."""
    last_step: int | None
    """None: the run's last."""

    @property
    def key(self) -> str:
        return f"published/{self.claim}"

    @property
    def window(self) -> str:
        """For people: `3 to 5`."""
        if self.first_step is not None and self.first_step == self.last_step:
            return str(self.first_step)
        return f"{self.first_step or 0} to {'the last' if self.last_step is None else self.last_step}"

    def holds_at(self, step: int) -> bool:
        return (self.first_step is None or step >= self.first_step) and (
            self.last_step is None or step <= self.last_step
        )


@dataclass(frozen=True, slots=True)
class RunFacts:
    name: str
    group: str
    """The sweep's folder name where the run is a point of one, else the experiment."""
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    """Resolved settings and, under `provenance`, what made the run. Plain and free of secrets: it is uploaded."""

    @property
    def published(self) -> list[ReferenceLine]:
        return reference_lines(self.config)


def reference_lines(config: Mapping[str, Any]) -> list[ReferenceLine]:
    """Claims in a run's plain config that are values of a curve; a ratio to another run is none.

    Nor is a speed on other hardware than the source's, unless it claims the same there.
    """
    published = config.get("published") or {}
    of_speed = (config.get("hardware") or {}).get("name") in _hardware_of(published)
    claims = [(name, claim) for name, claim in (published.get("claims") or {}).items() if claim["statistic"] != "ratio"]
    return [_line(name, claim) for name, claim in claims if of_speed or not claim["metric"].startswith(SPEED_METRICS)]


def _hardware_of(published: Mapping[str, Any]) -> tuple[str | None, ...]:
    return published.get("measured_on") or None, *(published.get("carried_over") or ())


def run_facts(run_folder: Path, *, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> RunFacts:
    """Of the run in `run_folder`; both mappings are free of secrets."""
    experiment = config["experiment"] or "default"
    is_point = _POINT_OF_SWEEP.fullmatch(run_folder.name) is not None
    status = provenance.get("published") or {}
    return RunFacts(
        name=f"{experiment}/{run_folder.name}",
        group=run_folder.parent.name if is_point else experiment,
        tags=(experiment, *([status["tag"]] if status else [])),
        config={**config, "provenance": provenance},
    )


def read_provenance(run_folder: Path) -> dict[str, Any]:
    """Facts of the run's first start, as they were written; empty where it did not come so far."""
    path = run_folder / "provenance.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _line(name: str, claim: Mapping[str, Any]) -> ReferenceLine:
    """A step of the source may be several rows here: their times add up to its time. A start is claimed of one step."""
    metric = find(claim["metric"])
    rows = claim.get("rows_per_step", 1) if metric is not None and metric.reduction is Reduction.SUM else 1
    first, last = claim["first_step"], claim["last_step"]
    if claim["statistic"] == "start":
        first = last = first or 0
    return ReferenceLine(name, claim["metric"], claim["value"] / rows, first, last)
