"""Runs points as child processes, as many at a time as have a place, and ends them in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from rl.config.schema import RunConfig
from rl.sweeps.devices import Slots
from rl.sweeps.ledger import CONSOLE_FILE

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    folder: Path
    words: list[str]
    label: str
    config: RunConfig

    def command(self) -> list[str]:
        return [sys.executable, "-m", "rl.sweeps.child", str(os.getpid()), str(self.folder), *self.words]


@dataclass(slots=True)
class _Running:
    job: Job
    child: subprocess.Popen[bytes]
    gpus: list[str]
    console: BinaryIO
    """Read from where this attempt begins."""


class Queue:
    """`on_end(job, exit code)` is called as each child ends, in this thread.

    A child has a session of its own, so that Ctrl-C reaches it once, from here; its output goes to a file, so that it
    outlives this process and can save its checkpoint, and is shown from there.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        slots: Slots,
        *,
        on_end: Callable[[Job, int], None],
        command: Callable[[Job], list[str]] = Job.command,
    ) -> None:
        self._waiting = list(jobs)
        self._slots = slots
        self._on_end = on_end
        self._command = command
        self._running: list[_Running] = []
        self._stops = 0

    def run(self) -> bool:
        """Returns when all have ended: True if none was kept from starting by a signal."""
        with self._signals():
            while self._running or (self._waiting and not self._stops):
                self._start_what_fits()
                time.sleep(POLL_S)
                for running in list(self._running):
                    self._show(running)
                    exit_code = running.child.poll()
                    if exit_code is not None:
                        self._finish(running, exit_code)
        return not self._stops

    def _start_what_fits(self) -> None:
        """In order; a small point does not overtake a large one, which might then wait for ever."""
        while self._waiting and not self._stops:
            gpus = self._slots.take(self._waiting[0].config)
            if gpus is None:
                return
            self._start(self._waiting.pop(0), gpus)

    def _start(self, job: Job, gpus: list[str]) -> None:
        where = f"  GPU {','.join(gpus)}" if gpus else ""
        print(f"\n[{job.folder.name}] {job.label}{where}", flush=True)
        path = job.folder / CONSOLE_FILE
        environment = {**os.environ, **self._slots.environment(gpus)}
        with path.open("ab") as log:
            begins = log.tell()
            child = subprocess.Popen(
                self._command(job),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        console = path.open("rb")
        console.seek(begins)
        self._running.append(_Running(job, child, gpus, console))

    def _show(self, running: _Running, *, all_of_it: bool = False) -> None:
        """Whole lines; with several at a time each says whose it is."""
        prefix = f"[{running.job.folder.name}] " if self._slots.jobs > 1 else ""
        while True:
            begins = running.console.tell()
            line = running.console.readline()
            if not line:
                return
            if not line.endswith(b"\n") and not all_of_it:
                running.console.seek(begins)
                return
            print(prefix + line.decode(errors="replace").rstrip("\n"), flush=True)

    def _finish(self, running: _Running, exit_code: int) -> None:
        self._show(running, all_of_it=True)
        running.console.close()
        self._running.remove(running)
        self._slots.give_back(running.gpus)
        self._on_end(running.job, exit_code)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends running points with a checkpoint, the second at once, the third kills."""

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            self._stops += 1
            if self._stops == 1:
                print(
                    "\nstopping: running points save a checkpoint, no other starts; once more to stop at once",
                    flush=True,
                )
            number = signal.SIGKILL if self._stops > 2 else signal.SIGINT
            for running in self._running:
                if running.child.poll() is None:
                    running.child.send_signal(number)

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
