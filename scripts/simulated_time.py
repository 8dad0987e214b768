"""An event loop whose seconds cost nothing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class SimulatedTime(selectors.DefaultSelector):
    """Instead of sleeping until the next timer is due, moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "deadlock: every coroutine waits and no timer is set"
        self.now += max(0.0, timeout)
        return super().select(0)


def simulate(main: Coroutine[Any, Any, Any]) -> Any:
    def loop() -> asyncio.SelectorEventLoop:
        clock = SimulatedTime()
        loop = asyncio.SelectorEventLoop(clock)
        loop.time = lambda: clock.now  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main)
