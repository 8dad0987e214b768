"""What a person sees: one live line, or plain lines where there is no terminal, and a table at the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from rl.loggers.jsonl import Row
from rl.loggers.names import find, is_healthy

NUM_RECENT_STEPS = 20
PLAIN_LINE_EVERY_S = 10.0


class ConsoleReport:
    """Shows each step as it is logged. `first_step` is where the run starts or resumes, normally 0."""

    def __init__(
        self,
        *,
        total_steps: int,
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self._total_steps = total_steps
        self._clock = clock
        self._last_step = first_step
        self._last_time = clock()
        self._last_line_time = -float("inf")
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._eval = ""
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def step(self, metrics: Mapping[str, float | None], *, step: int) -> None:
        now = self._clock()
        if step > self._last_step:
            self._recent_s.append((now - self._last_time) / (step - self._last_step))
        self._last_step, self._last_time = step, now
        evals = accuracies(metrics)
        if evals:
            self._eval = "  ".join(f"{key.removeprefix('eval/')} {value:.3f}" for key, value in evals.items())
        text = self._line(metrics, step)
        if self.console.is_terminal:
            self._live(text, step)
        elif evals or step >= self._total_steps or now - self._last_line_time >= PLAIN_LINE_EVERY_S:
            self._last_line_time = now
            self.console.print(Text(f"step {step}/{self._total_steps}  {text}"), soft_wrap=True)

    def eta_s(self) -> float | None:
        """Seconds to the last step at the median pace of recent steps; None before the first step."""
        if not self._recent_s:
            return None
        return median(self._recent_s) * max(self._total_steps - self._last_step, 0)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _line(self, metrics: Mapping[str, float | None], step: int) -> str:
        parts = []
        for label, key, form in (
            ("reward", "reward/mean", "{:.3f}"),
            ("length", "rollout/response_tokens_mean", "{:.1f}"),
            ("tokens/s", "rollout/tokens_per_s", "{:,.0f}"),
        ):
            value = metrics.get(key)
            if value is not None:
                parts.append(f"{label} {form.format(value)}")
        if self._eval:
            parts.append(self._eval)
        eta_s = self.eta_s()
        if eta_s is not None and step < self._total_steps:
            parts.append(f"ETA {duration(eta_s)}")
        return "  ".join(parts)

    def _live(self, text: str, step: int) -> None:
        if self._progress is None:
            step_width = len(f"step {self._total_steps}/{self._total_steps}")
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}", table_column=Column(min_width=step_width)),
                BarColumn(bar_width=12, table_column=Column(min_width=12)),
                TextColumn("{task.fields[line]}", markup=False, table_column=Column(ratio=1)),
                console=self.console,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("", total=self._total_steps, line=text)
            self._progress.start()
            self.console.show_cursor(True)  # rich hides it, and a run that is killed could not bring it back
        self._progress.update(self._task, completed=step, line=text)


def accuracies(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The eval/<benchmark>/<metric> values among `metrics`."""
    found = {}
    for key, value in metrics.items():
        metric = find(key)
        if value is not None and metric is not None and metric.key == "eval/<benchmark>/<metric>":
            found[key] = value
    return found


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary_table(rows: Sequence[Row], *, title: str, seconds: float) -> Table:
    """Start and end of what was learned, and how long it took. `rows` are those of metrics.jsonl."""
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    for column in ("start", "end", "best"):
        table.add_column(column, justify="right")
    keys = [key for row in rows for key in accuracies(row)]
    for key in dict.fromkeys(["reward/mean", *keys]):
        shown = [(row["step"], row[key], row.get(f"{key}/stderr")) for row in rows if row.get(key) is not None]
        if shown:
            best = max(shown, key=lambda point: point[1])
            table.add_row(Text(key), _value(*shown[0][1:]), _value(*shown[-1][1:]), f"{best[1]:.3f} (step {best[0]})")
    table.add_section()
    if rows:
        table.add_row("steps", "", str(rows[-1]["step"]), "")
    table.add_row("time", "", duration(seconds), "")
    return table


def _value(value: float, stderr: float | None) -> str:
    return f"{value:.3f}" if stderr is None else f"{value:.3f} +/- {stderr:.3f}"


def health_notes(rows: Sequence[Row]) -> list[str]:
    """One line for each metric that left its healthy range: where, how often, and the range."""
    bad: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key, value in row.items():
            if key != "step" and value is not None and not is_healthy(key, value):
                bad.setdefault(key, []).append((row["step"], value))
    notes = []
    for key, points in bad.items():
        metric = find(key)
        assert metric is not None
        assert metric.healthy is not None
        low, high = metric.healthy
        step, worst = max(points, key=lambda point: max(low - point[1], point[1] - high))
        notes.append(
            f"{key} was outside {low:g} to {high:g} in {len(points)} of {len(rows)} rows: {worst:g} at step {step}"
        )
    return notes
