"""The picture of a verdict: our curve, what it was compared with, and the tolerance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl.comparison.curves import Axis, Curves, NotComparable
from rl.comparison.verdict import Finding, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED, GRAY = "#3366aa", "#dd8833", "#338855", "#bb4444", "#888888"
COLORS = {
    Verdict.REPRODUCED: GREEN,
    Verdict.PARTIAL: ORANGE,
    Verdict.FAILED: RED,
    Verdict.NOT_COMPARABLE: GRAY,
}
COLUMNS = 3


def draw_verdict(
    path: Path, findings: Sequence[Finding], *, ours: Curves, others: Sequence[Curves], axis: Axis, title: str
) -> None:
    """A panel for each metric. The file appears complete or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys(finding.metric for finding in findings))
    columns = min(COLUMNS, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.8 * rows), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, metric in zip(panels, metrics, strict=False):
        of_metric = [finding for finding in findings if finding.metric == metric]
        _draw_panel(axes, metric, of_metric, ours=ours, others=others, axis=axis)
    for axes in list(panels):
        axes.set_axis_off()
    partial = path.with_suffix(".partial.png")
    canvas.print_png(str(partial))
    partial.replace(path)


def _draw_panel(
    axes: Axes, metric: str, findings: Sequence[Finding], *, ours: Curves, others: Sequence[Curves], axis: Axis
) -> None:
    axes.set_title(metric, loc="left", fontsize=10.5, fontweight="bold")
    axes.set_xlabel("step" if axis is Axis.STEP else f"{axis.value} trained on")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    joined = max(finding.rows_per_step for finding in findings)
    label = "ours" if joined == 1 else f"ours, {joined} rows a point"
    _draw_curve(axes, ours, metric, axis, label=label, color=BLUE, rows_per_step=joined)
    tolerance = next((finding.tolerance for finding in findings if finding.tolerance), 0.0)
    for curves in others:
        _draw_curve(axes, curves, metric, axis, label=Path(curves.name).name, color=ORANGE, tolerance=tolerance)
    for finding in findings:
        if finding.theirs is not None and finding.window is not None and not others:
            _draw_claim(axes, finding, end=ours.end(axis))
    if not axes.has_data():
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color=GRAY)
    else:
        axes.legend(frameon=False, fontsize=7)


def _draw_curve(
    axes: Axes,
    curves: Curves,
    metric: str,
    axis: Axis,
    *,
    label: str,
    color: str,
    tolerance: float = 0.0,
    rows_per_step: int = 1,
) -> None:
    try:
        curve = curves.curve(metric, axis, rows_per_step=rows_per_step)
    except NotComparable:
        return
    style = "none" if curves.is_tabled else "-"
    marker = "o" if curves.is_tabled or len(curve.x) <= 30 else ""
    axes.plot(curve.x, curve.values, color=color, label=label, linewidth=1.4, linestyle=style, marker=marker, ms=3.5)
    if tolerance:
        axes.fill_between(
            curve.x, curve.values - tolerance, curve.values + tolerance, color=color, alpha=0.15, linewidth=0
        )


def _draw_claim(axes: Axes, finding: Finding, *, end: float) -> None:
    """A line over the claim's window, in the color of its verdict, and the tolerance around it."""
    assert finding.window is not None and finding.theirs is not None and finding.tolerance is not None
    span = (max(finding.window.low, 0.0), min(finding.window.high, end) or 1.0)
    color, value = COLORS[finding.verdict], finding.theirs
    axes.plot(span, (value, value), color=color, linewidth=1.2, linestyle="--", label=f"{finding.name}: {value:g}")
    axes.fill_between(span, value - finding.tolerance, value + finding.tolerance, color=color, alpha=0.12, linewidth=0)
