"""The run's logger: one place that takes the metrics of each step and hands them on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rl.config.schema import LoggerConfig
from rl.loggers.console import ConsoleReport, health_notes, summary_table
from rl.loggers.curves import CurvesProcess
from rl.loggers.jsonl import MetricsFile, read_metrics, set_aside_after, to_number
from rl.loggers.names import clean_key, unlisted
from rl.loggers.samples import Sample, SamplesFile
from rl.loggers.tracker import Tracker
from rl.types import RolloutGroup

log = logging.getLogger(__name__)

DRAW_EVERY_S = 60.0
"""Between two drawings of curves.png during the run, at least; a short run draws once, at its end."""


class RunLog:
    """metrics.jsonl first, then terminal, tracker and curves. One row per step, in order; its samples come before it.

    Step 0 is before training. `planned` is logged beside what each step took. `resume_step`: the step of the
    checkpoint that the run continues from, -1 if it starts again without one; rows past it are set aside. None: a new
    run.
    """

    def __init__(
        self,
        config: LoggerConfig,
        *,
        run_folder: Path,
        name: str,
        total_steps: int,
        tracker: Tracker,
        planned: Mapping[str, float] | None = None,
        resume_step: int | None = None,
        console: Console | None = None,
    ) -> None:
        self._config = config
        self._run_folder = run_folder
        self._name = name
        self._total_steps = total_steps
        self._tracker = tracker
        self._planned = dict(planned or {})
        self._metrics_path = run_folder / "metrics.jsonl"
        self._samples = SamplesFile(run_folder)
        self._samples_of_step: list[Sample] = []
        self._last_step = -1
        digests_path = run_folder / "digests.jsonl"
        if resume_step is not None:
            set_aside_after(self._metrics_path, resume_step)
            set_aside_after(digests_path, resume_step)
            self._samples.resume(resume_step)
            self._last_step = resume_step
        self._metrics = MetricsFile(self._metrics_path)
        self._digests = MetricsFile(digests_path)
        self._report = ConsoleReport(total_steps=total_steps, first_step=max(resume_step or 0, 0), console=console)
        self._curves = CurvesProcess(run_folder, title=name)
        self._start = self._last_drawn = time.monotonic()
        self._is_closed = False

    def log_rollouts(self, groups: Sequence[RolloutGroup], *, step: int) -> None:
        """Writes samples of the first step and of every `sample_every`-th."""
        every = self._config.sample_every
        if self._config.samples > 0 and every > 0 and (step == 1 or step % every == 0):
            self._samples_of_step = self._samples.write(groups, step=step, count=self._config.samples)

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        assert step > self._last_step, (
            f"step {step} was logged after step {self._last_step}: one row per step, in order"
        )
        planned = self._planned if step > 0 else {}
        row = {clean_key(key): to_number(value) for key, value in {**metrics, **planned}.items()}
        unknown = unlisted(row)
        assert not unknown, f"metric keys that rl/loggers/names.py does not list: {unknown}"
        self._last_step = step
        self._metrics.write(row, step=step)
        self._report.step(row, step=step)
        self._tracker.log(row, step=step, samples=[sample for sample in self._samples_of_step if sample.step == step])
        if time.monotonic() - self._last_drawn >= DRAW_EVERY_S:
            self._last_drawn = time.monotonic()
            self._curves.start()

    def log_digests(self, digests: Mapping[str, str], *, step: int) -> None:
        self._digests.write(digests, step=step)

    def close(self, *, failed: bool) -> None:
        """Safe to call twice. The tracker takes 12 s at most; the picture, drawn meanwhile, `curves.LIMIT_S` more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._metrics.close()
        self._digests.close()
        self._report.close()
        rows = read_metrics(self._metrics_path)
        if rows:
            self._curves.start_last()
        self._tracker.close(failed=failed)
        drawn = bool(rows) and self._curves.finish()
        self._print_summary(rows, failed=failed, drawn=drawn)

    def _print_summary(self, rows: list[dict[str, Any]], *, failed: bool, drawn: bool) -> None:
        ending = "stopped early" if failed else "finished"
        title = f"{self._name}: {ending} at step {max(self._last_step, 0)} of {self._total_steps}"
        console = self._report.console
        console.print()
        console.print(summary_table(rows, title=title, seconds=time.monotonic() - self._start))
        for note in health_notes(rows):
            console.print(Text(f"note: {note}"), soft_wrap=True)
        names = ["metrics.jsonl", *(["curves.png"] if drawn else []), "samples.txt"]
        present = [name for name in names if (self._run_folder / name).exists()]
        console.print(Text(f"files: {self._run_folder}  ({', '.join(present)})"), soft_wrap=True)
        if self._tracker.location is not None:
            console.print(Text(f"tracker: {self._tracker.location}"), soft_wrap=True)
