"""Runs that differ in their seed alone, averaged: a table and a picture of settings against each other."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rl.config.register import option_of
from rl.loggers.console import accuracies
from rl.loggers.jsonl import Row, points, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_COLUMNS = 5
"""Numbers of samples shown beside the last value."""


@dataclass(frozen=True, slots=True)
class RunCurve:
    """A finished run's metrics, by the samples (prompts times answers) that it had trained on."""

    rows: list[Row]
    group_size: int

    def of(self, metric: str) -> dict[int, float]:
        found = points(self.rows, metric, x="prompts_trained")
        return {int(prompts) * self.group_size: value for prompts, value in found}


@dataclass(slots=True)
class Setting:
    """The runs of one setting, which differ in their seed."""

    name: str
    runs: list[RunCurve]
    unfinished: int = 0
    """Runs that failed or have not ended; they are in no number."""


def read_run(folder: Path) -> RunCurve:
    config = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    return RunCurve(read_metrics(folder / "metrics.jsonl"), config["algorithm"]["group_size"])


def settings_by_keys(folders: Sequence[Path], keys: Sequence[str]) -> list[Setting]:
    """The runs below `folders`, a setting for each combination of values of `keys` of their run.yaml."""
    found: defaultdict[str, Setting] = defaultdict(lambda: Setting("", []))
    for path in sorted(file for folder in folders for file in folder.rglob("run.yaml")):
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        name = " ".join(f"{key}={_value_of(config, key)}" for key in keys) or "all"
        setting = found[name]
        setting.name = name
        steps = [row["step"] for row in read_metrics(path.parent / "metrics.jsonl")]
        wanted = config.get("steps")
        if not steps or (wanted is not None and max(steps) < wanted):
            setting.unfinished += 1
        else:
            setting.runs.append(read_run(path.parent))
    return list(found.values())


def _value_of(config: Mapping[str, Any], key: str) -> Any:
    """A part stands for the option that it was chosen by."""
    node: Any = config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return option_of(node) if isinstance(node, dict) and "_target_" in node else node


def default_metric(settings: Sequence[Setting]) -> str:
    keys = [key for setting in settings for run in setting.runs for row in run.rows for key in accuracies(row)]
    return keys[0] if keys else "reward/mean"


def mean_and_std(values: Sequence[float]) -> str:
    """`0.900 +/- 0.141` with the sample standard deviation (n - 1); a single value has none."""
    if not values:
        return "-"
    spread = f" +/- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def comparison(settings: Sequence[Setting], metric: str) -> str:
    """A Markdown table: the metric at equal samples and at the end of each run. The best end is marked, ties alike."""
    curves = {setting.name: [run.of(metric) for run in setting.runs] for setting in settings}
    curves = {name: [curve for curve in runs if curve] for name, runs in curves.items()}
    columns = _columns([curve for runs in curves.values() for curve in runs])
    ends = {name: [curve[max(curve)] for curve in runs] for name, runs in curves.items()}
    means = [round(statistics.mean(values), 9) for values in ends.values() if values]
    best = max(means) if len(means) > 1 else None
    lines = [f"| {metric} | seeds | {' | '.join(f'{samples:,}' for samples in columns)}{' | ' if columns else ''}end |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    for setting in settings:
        runs, values = curves[setting.name], ends[setting.name]
        cells = [mean_and_std([curve[samples] for curve in runs]) for samples in columns]
        mark = " (best)" if values and best is not None and round(statistics.mean(values), 9) == best else ""
        seeds = str(len(runs)) if not setting.unfinished else f"{len(runs)} of {len(runs) + setting.unfinished}"
        lines.append(f"| {' | '.join([setting.name, seeds, *cells, mean_and_std(values) + mark])} |")
    if means and max(len(values) for values in ends.values()) == 1:
        lines.append("one seed each: how far seeds spread is not known")
    return "\n".join(lines)


def _columns(curves: Sequence[Mapping[int, float]]) -> list[int]:
    """Some numbers of samples at which every run has a value, the first among them; not the end, if that is common."""
    if not curves:
        return []
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    if common and all(max(curve) == common[-1] for curve in curves):
        common.pop()
    if len(common) <= MAX_COLUMNS:
        return common
    return [common[round(index * (len(common) - 1) / (MAX_COLUMNS - 1))] for index in range(MAX_COLUMNS)]


def draw(settings: Sequence[Setting], path: Path, *, metric: str, title: str) -> None:
    """Two panels, training reward and `metric`: a line for each setting, the mean over its seeds, in a band of one
    standard deviation. The file appears complete or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys(["reward/mean", metric]))
    figure = Figure(figsize=(6.5 * len(metrics), 4.8), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    for axes, key in zip(figure.subplots(1, len(metrics), squeeze=False).flat, metrics, strict=True):
        _draw_panel(axes, settings, key)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    canvas.print_png(str(partial))
    partial.replace(path)


def _draw_panel(axes: Axes, settings: Sequence[Setting], metric: str) -> None:
    axes.set_title(metric, loc="left", fontsize=10.5, fontweight="bold")
    axes.set_xlabel("samples trained on (prompts x answers)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    for setting in settings:
        samples, means, stds = band([run.of(metric) for run in setting.runs])
        if not samples:
            continue
        label = f"{setting.name} ({len(setting.runs)})"
        (line,) = axes.plot(
            samples, means, label=label, linewidth=1.6, marker="o" if len(samples) <= 15 else "", markersize=3
        )
        low, high = ([m + sign * s for m, s in zip(means, stds, strict=True)] for sign in (-1, 1))
        axes.fill_between(samples, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
    if axes.has_data():
        axes.legend(frameon=False, fontsize=8, title="setting (seeds), mean +/- std", title_fontsize=8)
    else:
        axes.text(0.5, 0.5, "no finished run has it", transform=axes.transAxes, ha="center", va="center")


def band(curves: Sequence[Mapping[int, float]]) -> tuple[list[int], list[float], list[float]]:
    """(samples, means, standard deviations) where every curve has a value; of one curve the deviations are 0."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return [], [], []
    samples = sorted(set.intersection(*(set(curve) for curve in curves)))
    columns = [[curve[number] for curve in curves] for number in samples]
    stds = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in columns]
    return samples, [statistics.mean(values) for values in columns], stds
