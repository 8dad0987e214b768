"""An experiment tracker behind a queue, so that its trouble is never the run's trouble."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from rl.loggers.samples import Sample

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A second place for the rows of metrics.jsonl and samples. No method raises or waits for a network."""

    location: str | None
    """Where a person finds the run; None: nowhere, or not known yet."""

    def log(self, metrics: Mapping[str, float | None], *, step: int, samples: Sequence[Sample] = ()) -> None: ...

    def close(self, *, failed: bool) -> None:
        """Hands over what is queued; returns within 12 s whatever happens."""
        ...


class _Queued(NamedTuple):
    metrics: dict[str, float | None]
    step: int
    samples: tuple[Sample, ...]


class BackgroundTracker(ABC):
    """Calls `open`, `send` per row in order, and `finish`, all on one daemon thread that starts with the first row.

    A call that raises is tried again; after `max_failures` in a row the tracker is off for the rest of the run. A full
    queue drops its oldest row and counts it.
    """

    def __init__(
        self,
        name: str,
        *,
        max_queued: int = 10_000,
        max_failures: int = 3,
        retry_s: float = 1.0,
        close_limit_s: float = 10.0,
    ) -> None:
        self.location: str | None = None
        self.num_dropped = 0
        self._name = name
        self._max_queued = max_queued
        self._max_failures = max_failures
        self._retry_s = retry_s
        self._close_limit_s = close_limit_s
        self._rows: deque[_Queued] = deque()
        self._changed = threading.Condition()
        self._is_sending = False
        self._is_off = False
        self._has_warned = False
        self._failed: bool | None = None
        """None until `close`."""
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def send(self, metrics: Mapping[str, float | None], *, step: int, samples: Sequence[Sample]) -> None: ...

    @abstractmethod
    def finish(self, *, failed: bool) -> None: ...

    def log(self, metrics: Mapping[str, float | None], *, step: int, samples: Sequence[Sample] = ()) -> None:
        with self._changed:
            if self._is_off or self._failed is not None:
                return
            if len(self._rows) == self._max_queued:
                self._rows.popleft()
                self.num_dropped += 1
            self._rows.append(_Queued(dict(metrics), step, tuple(samples)))
            self._changed.notify()
        if self._thread.ident is None:
            self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Rows that were logged and neither sent nor dropped."""
        return len(self._rows) + self._is_sending

    @property
    def is_on(self) -> bool:
        return not self._is_off

    def close(self, *, failed: bool) -> None:
        if self._failed is not None:
            return
        with self._changed:
            self._failed = failed
            self._changed.notify()
        if self._thread.ident is None:
            return
        self._thread.join(self._close_limit_s)
        if self._thread.is_alive():
            with self._changed:
                self._is_off = True
            log.warning("%s did not finish within %.0f s: left behind", self._name, self._close_limit_s)
        if self.num_dropped:
            log.warning("%s was too slow: %d rows were not sent", self._name, self.num_dropped)

    def _work(self) -> None:
        if not self._attempt(self.open):
            return
        while (row := self._next_row()) is not None:
            is_sent = self._attempt(lambda row=row: self.send(row.metrics, step=row.step, samples=row.samples))
            self._is_sending = False
            if not is_sent:
                break
        failed = bool(self._failed) or self._is_off
        self._attempt(lambda: self.finish(failed=failed))

    def _next_row(self) -> _Queued | None:
        """Waits for a row; None once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._failed is not None)
            self._is_sending = bool(self._rows)
            return self._rows.popleft() if self._rows else None

    def _attempt(self, call: Callable[[], None]) -> bool:
        for num_failures in range(1, self._max_failures + 1):
            try:
                call()
                return True
            except Exception as error:  # noqa: BLE001 - a tracker may raise anything, and the run must go on
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            if self._is_off:
                return False
            if not self._has_warned:
                self._has_warned = True
                log.warning("%s failed (%s); the run goes on and metrics.jsonl has every row", self._name, reason)
            if num_failures < self._max_failures:
                with self._changed:
                    self._changed.wait_for(lambda: self._failed is not None, timeout=self._retry_s)
        log.warning("%s is off after %d failures in a row", self._name, self._max_failures)
        with self._changed:
            self._is_off = True
            self._rows.clear()
        return False
