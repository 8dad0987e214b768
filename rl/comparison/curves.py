"""Curves to compare, whatever they were written by: a run folder, points tabled from a source, an export of W&B."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl.config.load import load_run_yaml, nearest
from rl.config.schema import ConfigError, RunConfig
from rl.loggers.jsonl import Row, parse_json, points, read_metrics
from rl.loggers.names import Reduction, find


class Axis(StrEnum):
    """What two curves are laid beside each other by. Steps are comparable only where they hold equal data."""

    STEP = "step"
    PROMPTS = "prompts"
    TOKENS = "tokens"

    @property
    def column(self) -> str:
        return "step" if self is Axis.STEP else f"{self.value}_trained"


ELAPSED = "time/elapsed_s"
"""Not logged, but computed: time/step_s added up since the first step."""
HARDWARE_LINE = "# hardware:"
"""Begins the line of a file of tabled points that names the option of conf/hardware behind them."""
TABLED_COLUMNS = ("step", "prompts", "metric", "value", "read_from")
WANDB_X = {"step": Axis.STEP, "_step": Axis.STEP, "prompts_trained": Axis.PROMPTS, "tokens_trained": Axis.TOKENS}
"""First column of an export, in lower case -> what it counts."""
WANDB_SUFFIXES = ("__MIN", "__MAX", "__STDDEV", "__STDERR")
"""Of the columns that an export holds besides each curve."""


class NotComparable(Exception):
    """Why two numbers must not be compared; the message is for people."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric. Points without a value are left out."""

    x: NDArray[np.float64]
    """[N], rising."""
    values: NDArray[np.float64]
    """[N]"""


@dataclass(frozen=True, slots=True)
class Curves:
    """All metrics of one run, as rows in order."""

    name: str
    rows: list[Row]
    config: RunConfig | None = None
    """None: unknown, as of a file of points."""
    total_steps: int | None = None
    """Of the whole run, however far it is. None: unknown."""
    hardware: str | None = None
    """Option of conf/hardware. None: unknown."""
    is_tabled: bool = False
    """Single points of a source: each is compared by itself."""

    def has(self, axis: Axis) -> bool:
        return any(row.get(axis.column) is not None for row in self.rows)

    def metrics(self) -> list[str]:
        axes = {axis.column for axis in Axis}
        return [key for key in dict.fromkeys(key for row in self.rows for key in row) if key not in axes]

    def curve(self, metric: str, axis: Axis, *, rows_per_step: int = 1) -> Curve:
        """Raises NotComparable if the metric was not logged, or not along `axis`."""
        rows = self._with_elapsed() if metric == ELAPSED else self.rows
        if not any(row.get(metric) is not None for row in rows):
            raise NotComparable(f"{metric} was not logged by {self.name}.{nearest(metric, self.metrics())}".rstrip("."))
        if rows_per_step > 1:
            rows = join_rows(rows, metric, rows_per_step)
        found = sorted(points(rows, metric, x=axis.column), key=lambda point: point[0])
        if not found:
            raise NotComparable(
                f"{self.name} does not say at how many {axis.value} its points are; where steps hold equal data, "
                "compare by --x step"
            )
        x, values = np.array(found, dtype=np.float64).T
        return Curve(x, values)

    def at_step(self, step: int, axis: Axis) -> float:
        """`axis` after that step; 0 before the first."""
        reached = [row[axis.column] for row in self.rows if row.get("step", math.inf) <= step and axis.column in row]
        return max((float(value) for value in reached if value is not None), default=0.0)

    def end(self, axis: Axis) -> float:
        return max((float(row[axis.column]) for row in self.rows if row.get(axis.column) is not None), default=0.0)

    def per_row(self, axis: Axis) -> float | None:
        """What one row adds to `axis`, by the median. None: unknown, or fewer than two rows."""
        values = [row[axis.column] for row in self.rows if row.get(axis.column) is not None]
        return median(after - before for before, after in pairwise(values)) if len(values) > 1 else None

    def _with_elapsed(self) -> list[Row]:
        """Rows with `ELAPSED`, of tables their own."""
        if any(ELAPSED in row for row in self.rows):
            return self.rows
        elapsed, rows = 0.0, []
        for row in self.rows:
            if row.get("time/step_s") is None:
                continue
            elapsed += row["time/step_s"]
            rows.append({**row, ELAPSED: elapsed})
        return rows


def join_rows(rows: Sequence[Row], metric: str, count: int) -> list[Row]:
    """Each `count` rows from step 1 on as one, as the metric's reduction says. Step 0 stays as it is.

    A mean is that of the rows' values, whatever each is over. Fewer rows, left over at the end, are left out.
    """
    reduction = reduction_of(metric)
    joined: list[Row] = [row for row in rows if row["step"] == 0]
    trained = [row for row in rows if row["step"] > 0]
    for first in range(0, len(trained) - count + 1, count):
        members = trained[first : first + count]
        valued = [row for row in members if row.get(metric) is not None]
        joined.append({**members[-1], metric: _joined(valued, metric, reduction) if valued else None})
    return joined


def _joined(rows: Sequence[Row], metric: str, reduction: Reduction) -> float:
    """One value of rows that all have one. Raises NotComparable for rates over an unknown time."""
    values = [row[metric] for row in rows]
    match reduction:
        case Reduction.SUM:
            return sum(values)
        case Reduction.MAX:
            return max(values)
        case Reduction.LAST:
            return values[-1]
        case Reduction.MEAN:
            return sum(values) / len(values)
        case Reduction.RATE:
            if any(row.get("time/step_s") is None for row in rows):
                raise NotComparable(f"{metric} of several rows needs time/step_s of each, and one has none")
            times = [row["time/step_s"] for row in rows]
            return sum(value * time for value, time in zip(values, times, strict=True)) / sum(times)


def reduction_of(metric: str) -> Reduction:
    if metric == ELAPSED:
        return Reduction.LAST
    known = find(metric)
    return Reduction.MEAN if known is None else known.reduction


def read_run(folder: Path) -> Curves:
    """Raises ConfigError if `folder` holds no run, or one without a row."""
    if not (folder / "run.yaml").is_file():
        raise ConfigError(f"{folder} holds no run: there is no run.yaml in it. Give a run folder.")
    config = load_run_yaml(folder / "run.yaml")
    rows = read_metrics(folder / "metrics.jsonl")
    if not rows:
        raise ConfigError(f"{folder} has no row in metrics.jsonl yet.")
    hardware = config.hardware.name
    return Curves(str(folder), rows, config, config.steps or _total_steps(folder), hardware)


def _total_steps(folder: Path) -> int | None:
    """As the run's last start found it from the data."""
    files = sorted(folder.glob("provenance*.json"), key=lambda path: path.stat().st_mtime)
    facts = [parse_json(path.read_bytes(), str(path)) for path in files]
    return next((fact["total_steps"] for fact in reversed(facts) if "total_steps" in fact), None)


def read_csv(path: Path, *, renamed: Mapping[str, str], run: str | None = None) -> Curves:
    """Tabled points (columns as `TABLED_COLUMNS`) or an export of W&B. `renamed`: its name of a metric -> ours.

    `run` is which one of an export with several. Raises ConfigError on a file that is neither.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    comments = [line for line in lines if line.startswith("#")]
    reader = csv.DictReader(line for line in lines if not line.startswith("#"))
    columns = list(reader.fieldnames or [])
    if set(columns) >= {"step", "metric", "value"}:
        hardware = [line.removeprefix(HARDWARE_LINE).strip() for line in comments if line.startswith(HARDWARE_LINE)]
        return _tabled(path, list(reader), hardware[0] if hardware else None)
    if columns and columns[0].lower() in WANDB_X:
        return _exported(path, list(reader), columns, renamed=renamed, run=run)
    raise ConfigError(
        f"{path} is neither tabled points (columns {', '.join(TABLED_COLUMNS)}) nor an export of W&B (first column one "
        f"of {', '.join(WANDB_X)}); its columns are {', '.join(columns[:4]) or 'none'}."
    )


def _tabled(path: Path, lines: list[dict[str, str]], hardware: str | None) -> Curves:
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        step, prompts, value = (_number(line.get(name)) for name in ("step", "prompts", "value"))
        if step is None or value is None or not line["metric"]:
            raise ConfigError(f"{path}: point {number} needs a step, a metric and a value that is a number.")
        rows.append({"step": int(step), "prompts_trained": prompts, line["metric"]: value})
    return Curves(path.name, rows, hardware=hardware, is_tabled=True)


def _exported(
    path: Path, lines: list[dict[str, Any]], columns: list[str], *, renamed: Mapping[str, str], run: str | None
) -> Curves:
    """Columns are `RUN - METRIC`, and for each its bounds, which are left out."""
    chosen = [column for column in columns[1:] if " - " in column and not column.endswith(WANDB_SUFFIXES)]
    runs = list(dict.fromkeys(column.rpartition(" - ")[0] for column in chosen))
    if run is None and len(runs) > 1:
        raise ConfigError(f"{path} holds {len(runs)} runs: choose one by --run NAME, of {', '.join(runs)}.")
    if not runs:
        raise ConfigError(
            f"{path} has no column that is named 'RUN - METRIC', as W&B names them in the export of a chart; its "
            f"columns are {', '.join(columns[:4])}."
        )
    if run is not None and run not in runs:
        raise ConfigError(f"{path} has no column 'RUN - METRIC' of run {run}; runs: {', '.join(runs)}.")
    wanted = run or runs[0]
    x = WANDB_X[columns[0].lower()].column
    rows: list[Row] = []
    for line in lines:
        row: Row = {x: _number(line[columns[0]])}
        for column in chosen:
            name, _, metric = column.rpartition(" - ")
            value = _number(line[column])
            if name == wanted and value is not None:
                row[renamed.get(metric, metric)] = value
        if row[x] is not None:
            rows.append(row)
    return Curves(wanted, rows)


def _number(text: str | None) -> float | None:
    """None for an empty cell, a word, NaN and infinity."""
    try:
        number = float(text or "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) else None
