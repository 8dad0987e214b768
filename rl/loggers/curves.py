"""curves.png from metrics.jsonl. `python -m rl.loggers.curves RUN_FOLDER [TITLE]` draws it at any time.

A run draws in a child process, of low priority while steps go on, so that matplotlib neither takes the interpreter lock
from the training step nor can end the run.
"""

from __future__ import annotations

import itertools
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml

from rl.loggers.facts import ReferenceLine, reference_lines
from rl.loggers.jsonl import Row, points, read_metrics
from rl.loggers.names import find

if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = logging.getLogger(__name__)

LIMIT_S = 60.0
"""For one drawing; the first on a machine builds matplotlib's font cache."""
NUM_BINS = 250
"""Bars of the step-time panel at most; more steps are averaged."""
KL_FLOOR = 1e-9
"""What is below is rounding: equal weights and equal kernels."""
MAX_ENTRIES_ABOVE, MAX_LETTERS_ABOVE = 6, 40
"""Of a legend between a panel's title and its frame; a longer one goes inside."""
BLUE, ORANGE, GREEN, RED, PURPLE, GRAY = "#3366aa", "#dd8833", "#338855", "#bb4444", "#7755aa", "#888888"
PHASES = (
    ("wait_for_batch", "wait", BLUE),
    ("train", "train", ORANGE),
    ("publish", "publish", GREEN),
    ("eval", "eval", PURPLE),
    ("checkpoint", "checkpoint", RED),
)


def series(rows: Sequence[Row], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have a value for `key`."""
    found = points(rows, key)
    return np.array([step for step, _ in found]), np.array([value for _, value in found], dtype=float)


def draw_curves(rows: Sequence[Row], path: Path, *, title: str, published: Sequence[ReferenceLine] = ()) -> None:
    """Eight panels against the step. A panel without values says so. The file appears complete or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 7), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    last_step = max((row["step"] for row in rows), default=1)
    for axes, (draw, metrics) in zip(figure.subplots(2, 4).flat, _panels(), strict=True):
        draw(axes, rows)
        draw_published(axes, [line for line in published if line.metric.startswith(metrics)], last_step)
        _finish_panel(axes, last_step)
    partial = path.with_suffix(".partial.png")
    canvas.print_png(str(partial))
    partial.replace(path)


def _panels() -> list[tuple[Callable[[Axes, Sequence[Row]], None], tuple[str, ...]]]:
    """What draws each panel, and prefixes of the metrics whose published values belong in it."""
    return [
        (_draw_reward, ("reward/mean", "reward/shaped_mean")),
        (_draw_eval, ("eval/",)),
        (_draw_length, ("rollout/response_tokens_",)),
        (_draw_entropy, ("train/entropy",)),
        (_draw_kl, ("mismatch/kl_k3", "offpolicy/kl_k3", "train/kl_ref", "train/approx_kl")),
        (_draw_staleness, ("staleness/",)),
        (_draw_throughput, ("rollout/tokens_per_s",)),
        (_draw_time, ("time/step_s",)),
    ]


def draw_published(axes: Axes, lines: Sequence[ReferenceLine], last_step: int) -> None:
    """Each over the steps of which it is claimed, its ends marked, once the run has come to them."""
    reached = [line for line in lines if (line.first_step or 0) <= last_step]
    for line, style in zip(reached, itertools.cycle(("--", ":", "-."))):
        first = line.first_step or 0
        last = last_step if line.last_step is None else min(line.last_step, last_step)
        axes.plot(
            (first, last), (line.value,) * 2, color="black", linestyle=style, linewidth=1.0, marker="|", label=line.key
        )
    if reached and not axes.get_autoscaley_on():
        (low, high), values = axes.get_ylim(), [line.value for line in reached]
        axes.set_ylim(min(low, 0.9 * min(values)), max(high, 1.1 * max(values)))


def _finish_panel(axes: Axes, last_step: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    margin = max(0.03 * last_step, 0.6)
    axes.set_xlim(-margin, last_step + margin)
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > MAX_ENTRIES_ABOVE or sum(map(len, labels)) > MAX_LETTERS_ABOVE:
        axes.legend(fontsize=7, framealpha=0.7, edgecolor="none", ncols=2 if len(handles) > MAX_ENTRIES_ABOVE else 1)
    elif handles:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0.0, 0.985),
            ncols=len(handles),
            frameon=False,
            fontsize=8 if len(handles) <= MAX_ENTRIES_ABOVE // 2 else 7,
            handlelength=1.0,
            handletextpad=0.4,
            columnspacing=0.9,
            borderaxespad=0.0,
        )
    if not axes.has_data():
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color=GRAY)
        axes.set_yticks([])


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10.5, fontweight="bold", pad=20)


def _line(axes: Axes, rows: Sequence[Row], key: str, *, label: str, color: str) -> None:
    """The values, with dots where they are few; where they are many, pale, with a moving average over them."""
    steps, values = series(rows, key)
    if len(steps) == 0:
        return
    marker = "o" if len(steps) <= 15 else ""
    window = max(len(values) // 25, 1)
    if window > 1:
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
        kernel = np.ones(window)
        counts = np.convolve(np.ones(len(values)), kernel, mode="same")
        values = np.convolve(values, kernel, mode="same") / counts
    axes.plot(steps, values, color=color, label=label, linewidth=1.6, marker=marker, markersize=3)


def _draw_reward(axes: Axes, rows: Sequence[Row]) -> None:
    _title(axes, "Training reward")
    axes.set_ylabel("reward")
    _line(axes, rows, "reward/mean", label="mean", color=BLUE)
    if any(row.get("reward/shaped_mean") != row.get("reward/mean") for row in rows):
        _line(axes, rows, "reward/shaped_mean", label="shaped, that advantages come from", color=ORANGE)


def _draw_eval(axes: Axes, rows: Sequence[Row]) -> None:
    _title(axes, "Held-out accuracy, with standard error")
    axes.set_ylabel("accuracy")
    keys = [key for row in rows for key in row if _is_accuracy(key)]
    colors = (GREEN, BLUE, ORANGE, PURPLE, RED, GRAY)
    for index, key in enumerate(dict.fromkeys(keys)):
        points = [(row["step"], row[key], row.get(f"{key}/stderr") or 0.0) for row in rows if row.get(key) is not None]
        if not points:
            continue
        steps, values, errors = (np.array(column, dtype=float) for column in zip(*points, strict=True))
        color = colors[index % len(colors)]
        label = (
            f"{key.removeprefix('eval/')}: {' to '.join(f'{v:.3f}' for v in dict.fromkeys((values[0], values[-1])))}"
        )
        axes.errorbar(
            steps, values, errors, color=color, label=label, linewidth=1.6, marker="o", markersize=3, capsize=2
        )
    if axes.has_data():
        axes.set_ylim(0.0, 1.05)


def _is_accuracy(key: str) -> bool:
    metric = find(key)
    return metric is not None and metric.key == "eval/<benchmark>/<metric>"


def _draw_length(axes: Axes, rows: Sequence[Row]) -> None:
    _title(axes, "Response length")
    axes.set_ylabel("tokens")
    _line(axes, rows, "rollout/response_tokens_mean", label="mean", color=BLUE)
    _line(axes, rows, "rollout/response_tokens_max", label="longest", color=GRAY)
    if axes.has_data():
        axes.set_ylim(0.0, 1.1 * axes.dataLim.y1)


def _draw_entropy(axes: Axes, rows: Sequence[Row]) -> None:
    _title(axes, "Entropy of the policy")
    axes.set_ylabel("nats")
    _line(axes, rows, "train/entropy", label="mean over tokens", color=BLUE)
    if axes.has_data():
        axes.set_ylim(bottom=0.0)


def _draw_kl(axes: Axes, rows: Sequence[Row]) -> None:
    _title(axes, "KL")
    axes.set_ylabel("nats (log scale)")
    _line(axes, rows, "mismatch/kl_k3", label="engine, trainer", color=RED)
    _line(axes, rows, "offpolicy/kl_k3", label="off-policy", color=ORANGE)
    _line(axes, rows, "train/kl_ref", label="reference", color=BLUE)
    _line(axes, rows, "train/approx_kl", label="updates", color=GREEN)
    largest = max((line.get_ydata().max() for line in axes.lines), default=1.0)  # type: ignore[union-attr]
    if largest > KL_FLOOR:
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(bottom=max(axes.get_ylim()[0], KL_FLOOR))
    else:
        axes.text(0.5, 0.5, f"all below {KL_FLOOR:g}", transform=axes.transAxes, ha="center", va="center", color=GRAY)
        axes.set_ylim(0.0, KL_FLOOR)
        axes.set_yticks([])


def _draw_throughput(axes: Axes, rows: Sequence[Row]) -> None:
    _title(axes, "Throughput")
    axes.set_ylabel("response tokens/s")
    _line(axes, rows, "rollout/tokens_per_s", label="over the whole step", color=GREEN)
    if axes.has_data():
        axes.set_ylim(bottom=0.0)


def _draw_staleness(axes: Axes, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import MaxNLocator

    _title(axes, "Staleness of rollouts")
    axes.set_ylabel("policy versions")
    _line(axes, rows, "staleness/max", label="max", color=RED)
    _line(axes, rows, "staleness/mean", label="mean", color=BLUE)
    if axes.has_data():
        axes.set_ylim(bottom=-0.05, top=max(axes.get_ylim()[1], 1.05))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _draw_time(axes: Axes, rows: Sequence[Row]) -> None:
    _title(axes, "Step time")
    axes.set_ylabel("seconds per step")
    steps, totals = series(rows, "time/step_s")
    if len(steps) == 0:
        return
    timed = [row for row in rows if row.get("time/step_s") is not None]
    size = math.ceil(len(steps) / NUM_BINS)
    bins = [slice(begin, begin + size) for begin in range(0, len(steps), size)]
    edges = [*(steps[members][0] - 0.5 for members in bins), steps[-1] + 0.5]
    bottom = np.zeros(len(bins))
    for phase, label, color in PHASES:
        values = np.array([row.get(f"time/{phase}_s") or 0.0 for row in timed])
        heights = np.array([values[members].mean() for members in bins])
        if heights.any():
            axes.stairs(bottom + heights, edges, baseline=bottom, fill=True, color=color, label=label)
            bottom = bottom + heights
    # Phases that run at the same time can add up to more than the step: then nothing is left over.
    rest = np.maximum(np.array([totals[members].mean() for members in bins]) - bottom, 0.0)
    axes.stairs(bottom + rest, edges, baseline=bottom, fill=True, color="#cccccc", label="other")


class CurvesProcess:
    """Draws curves.png of a run folder in a child process, one at a time."""

    def __init__(self, run_folder: Path, *, title: str) -> None:
        self._command = [sys.executable, "-m", "rl.loggers.curves", str(run_folder), title]
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns at once. Does nothing while the last drawing is still going on."""
        if self._child is None or self._child.poll() is not None:
            self._child = self._draw("nice", "-n", "10")

    def start_last(self) -> None:
        """Draws the last state; a drawing that is going on is given up. Returns at once."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._child = self._draw()

    def finish(self) -> bool:
        """Waits for the drawing; False (and a warning) if it failed or took over `LIMIT_S`."""
        assert self._child is not None, "start_last() comes first"
        try:
            _, errors = self._child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            log.warning("curves.png was not drawn within %.0f s", LIMIT_S)
            return False
        if self._child.returncode != 0:
            lines = errors.decode(errors="replace").strip().splitlines()
            log.warning("curves.png was not drawn: %s", lines[-1] if lines else f"exit code {self._child.returncode}")
            return False
        return True

    def _draw(self, *wrapper: str) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C in the terminal is for the run.
        return subprocess.Popen(
            [*wrapper, *self._command], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    title = arguments[1] if len(arguments) > 1 else folder.name
    config = folder / "run.yaml"
    claims = reference_lines(yaml.safe_load(config.read_text(encoding="utf-8"))) if config.exists() else []
    draw_curves(read_metrics(folder / "metrics.jsonl"), folder / "curves.png", title=title, published=claims)


if __name__ == "__main__":
    main(sys.argv[1:])
