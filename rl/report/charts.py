"""Which curves a report shows, and their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.loggers.facts import ReferenceLine
from rl.loggers.jsonl import Row, points
from rl.loggers.names import AXES, find, is_score
from rl.report.runs import ReportedRun

SIGNIFICANT_DIGITS = 6
MEMORY_OF_STEPS = ("memory/rss_gib", "memory/gpu_peak_gib")
"""Other metrics of memory are of one phase."""
TRAIN_PARTS = ("old_logprobs", "forward_backward", "optimizer")
"""Phases inside `train`; all others follow one another in a step."""

SHOWN = {
    "Learning": ("reward/mean", "eval/", "rollout/response_tokens_mean", "train/entropy"),
    "Policy": ("train/kl_ref", "mismatch/kl_k3", "offpolicy/kl_k3", "train/grad_norm", "staleness/mean"),
    "Speed": ("time/step_s", "rollout/tokens_per_s", "throughput/", *MEMORY_OF_STEPS),
}
"""Heading -> keys, or prefixes of keys, in the order shown. All others can be chosen on the page."""
LOGARITHMIC = ("mismatch/kl_k3", "offpolicy/kl_k3")


@dataclass(frozen=True, slots=True)
class Phase:
    """Of one run: mean seconds per step, over the steps that were timed, and the memory of its largest step."""

    name: str
    seconds: float
    share: float
    """Of the step."""
    is_part: bool
    """Inside `train`, whose seconds have it already."""
    resident_gib: float | None
    """Of the driver's process. None: not measured."""
    gpu_gib: float | None
    """Of the trainer's allocator. None: not measured, which it is only for parts of `train`."""


def page_data(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """What the page's script draws, as plain JSON."""
    keys = dict.fromkeys(key for run in runs for row in run.rows for key, value in row.items() if value is not None)
    metrics = [key for key in keys if key not in AXES and not key.startswith("plan/") and not key.endswith("/stderr")]
    sections = {title: _chosen(metrics, wanted) for title, wanted in SHOWN.items()}
    published = _published(runs)
    claimed = dict.fromkeys(line["metric"] for line in published if line["metric"] in metrics)
    shown = {key for chosen in sections.values() for key in chosen}
    return {
        "runs": [{"name": run.name, "varied": run.varied, "columns": _columns(run, keys)} for run in runs],
        "axes": AXES,
        "sections": sections | {"Other published claims": [key for key in claimed if key not in shown]},
        "metrics": {key: _describe(key) for key in sorted(metrics)},
        "lines": [*published, *_planned(runs)],
    }


def all_published(runs: Sequence[ReportedRun]) -> dict[ReferenceLine, list[ReportedRun]]:
    """What is claimed -> the runs that it is claimed of."""
    found: dict[ReferenceLine, list[ReportedRun]] = {}
    for run in runs:
        for line in run.facts.published:
            found.setdefault(line, []).append(run)
    return found


def _published(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Claims whose window a run has come to, with that window along each axis: as of the run that came furthest."""
    found = []
    for line, of in all_published(runs).items():
        rows = max((run.rows for run in of if run.rows), key=lambda rows: rows[-1]["step"], default=[])
        if rows and rows[-1]["step"] >= (line.first_step or 0):
            ends = (line.first_step, line.last_step)
            window = {axis: [_reached(rows, axis, step) for step in ends] for axis in AXES}
            label = _label(line.key, [run.name for run in of], runs)
            found.append({"metric": line.metric, "label": label, "value": line.value, "window": window})
    return found


def _label(text: str, names: Sequence[str], runs: Sequence[ReportedRun]) -> str:
    """With the runs that it is of, unless it is of all."""
    return f"{text} ({', '.join(names)})" if len(names) < len(runs) else text


def _reached(rows: Sequence[Row], axis: str, step: int | None) -> float | None:
    """`axis` after `step`, or after the last step before it; None: no step is named, so the window has no end."""
    if step is None:
        return None
    return max((value for at, value in points(rows, axis) if at <= step), default=0.0)


def _planned(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """What the plan predicted of a metric; a value that several runs share is there once."""
    found: dict[tuple[str, float], list[str]] = {}
    for run in runs:
        planned = {
            key.removeprefix("plan/"): value
            for row in run.rows
            for key, value in row.items()
            if key.startswith("plan/") and value is not None
        }
        for predicted in planned.items():
            found.setdefault(predicted, []).append(run.name)
    return [
        {
            "metric": metric,
            "label": _label("plan", names, runs),
            "value": value,
            "window": {axis: [None, None] for axis in AXES},
        }
        for (metric, value), names in found.items()
    ]


def phases(run: ReportedRun) -> list[Phase]:
    """Phases that took any time, the longest first, each part of training after it."""
    timed = [row for row in run.rows if row.get("time/step_s")]
    step_s = sum(row["time/step_s"] for row in timed)
    names = dict.fromkeys(key[5:-2] for row in timed for key in row if key.startswith("time/") and key.endswith("_s"))
    found = []
    for name in names:
        seconds = sum(row.get(f"time/{name}_s") or 0.0 for row in timed)
        if name != "step" and seconds > 0:
            peaks = (_largest(run, f"memory/{name}_gib"), _largest(run, f"memory/gpu_{name}_gib"))
            found.append(Phase(name, seconds / len(timed), seconds / step_s, name in TRAIN_PARTS, *peaks))
    found.sort(key=lambda phase: -phase.seconds)
    parts = [phase for phase in found if phase.is_part]
    whole = [phase for phase in found if not phase.is_part]
    return [shown for phase in whole for shown in (phase, *(parts if phase.name == "train" else ()))]


def memory(run: ReportedRun) -> dict[str, float]:
    """Memory metric of whole steps -> its largest value, in GiB."""
    peaks = {key: _largest(run, key) for key in MEMORY_OF_STEPS}
    return {key: value for key, value in peaks.items() if value is not None}


def _largest(run: ReportedRun, key: str) -> float | None:
    return max((value for _, value in points(run.rows, key)), default=None)


def results(runs: Sequence[ReportedRun]) -> dict[str, list[Mapping[str, float] | None]]:
    """Score -> of each run first, last and best value, its standard error where there is one; None: not logged."""
    keys = dict.fromkeys(key for run in runs for row in run.rows for key in row if is_score(key))
    return {key: [_result(run, key) for run in runs] for key in keys}


def _result(run: ReportedRun, key: str) -> dict[str, float] | None:
    found = [row for row in run.rows if row.get(key) is not None]
    if not found:
        return None
    best = max(found, key=lambda row: row[key])
    result = {"first": found[0][key], "last": found[-1][key], "best": best[key], "best_step": best["step"]}
    error = found[-1].get(f"{key}/stderr")
    return result if error is None else result | {"stderr": error}


def _chosen(metrics: Sequence[str], wanted: Sequence[str]) -> list[str]:
    chosen = [key for want in wanted for key in metrics if key == want or (want[-1] == "/" and key.startswith(want))]
    return [key for key in chosen if not key.startswith("eval/") or is_score(key)]


def _columns(run: ReportedRun, keys: Mapping[str, None]) -> dict[str, list[float | None]]:
    columns = {key: [_short(row.get(key)) for row in run.rows] for key in keys}
    return {key: values for key, values in columns.items() if any(value is not None for value in values)}


def _short(value: float | None) -> float | None:
    if value is None or isinstance(value, int):
        return value
    return int(value) if value.is_integer() else float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _describe(key: str) -> dict[str, Any]:
    metric = find(key)
    return {
        "unit": metric.unit if metric else "",
        "meaning": metric.meaning if metric else "",
        "log": key in LOGARITHMIC,
        "smooth": not key.startswith("eval/"),
    }
