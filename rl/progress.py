"""How far a long piece of work is, for a person who waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PLAIN_LINE_EVERY_S = 10.0


class ProgressLine:
    """Counts up to `total`: one live line on a terminal that goes at the end, elsewhere a line every ten seconds."""

    def __init__(
        self,
        label: str,
        total: int,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console  # a plan imports the tasks, not this

        self._label = label
        self._total = total
        self._console = console or Console()
        self._clock = clock
        self._done = 0
        self._began = self._said = clock()
        self._live: Progress | None = None

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._live = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._live.add_task(self._label, total=self._total)
            self._live.start()
        return self

    def advance(self, count: int = 1) -> None:
        self._done += count
        if self._live is not None:
            self._live.update(self._task, completed=self._done)
            return
        now = self._clock()
        if now - self._said >= PLAIN_LINE_EVERY_S:
            self._said = now
            left_s = (now - self._began) / self._done * (self._total - self._done) if self._done else 0.0
            self._console.print(
                f"{self._label}: {self._done:,} of {self._total:,}, about {left_s:.0f} s left",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
