"""How long an engine in another process may be silent, and who notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rl.protocols import EngineError, RolloutEngine

BEAT_INTERVAL_S = 1.0
PROCESS_LIMIT_S = 7.0
"""Silence of the process's event loop after which it is killed. With the interval below 10 s; the longest pauses of a
sound loop are copies of a bucket and calls that hold the interpreter's lock, a second or two."""
LONE_PROCESS_LIMIT_S = 25.0
"""Likewise of a run's only engine. Nobody can take its groups over, so killing it ends the run, and a sound loop that
gets no core is as silent as a hanging one: on an overloaded CPU 7 s were not enough."""
STEP_LIMIT_S = 7.0
"""Silence of the engine itself while nothing but requests runs. It may answer only between two steps, and a step is
bounded: a prefill of 16,384 tokens by 8 billion parameters is 0.3 PFLOP, less than a second of one GPU."""
LONG_STEP_LIMIT_S = 300.0
"""Likewise on a CPU, where such a step takes minutes, and anywhere until the first sample: kernels are compiled as
they are first used."""
COMMAND_LIMIT_S = 1800.0
"""Of one command. Beginning an update is one, and waits for running requests; all others take minutes at most."""

_TICK_S = 0.5


class Probe:
    """Keeps asking an engine for its version. An error says that it died, a long silence that it hangs.

    What a command overlapped says nothing.
    """

    def __init__(self) -> None:
        self.has_bounded_steps = True
        self.has_sampled = False
        self._answer: asyncio.Task[int] | None = None
        self._asked_s = 0.0
        self._num_commands = 0
        self._commands_when_asked = 0
        self._running_since: dict[int, float] = {}
        """By the number of the command."""

    @contextmanager
    def command(self) -> Iterator[None]:
        self._num_commands += 1
        number = self._num_commands
        self._running_since[number] = time.monotonic()
        try:
            yield
        finally:
            del self._running_since[number]
            self._asked_s = time.monotonic()  # what was asked before waited for the command

    @property
    def limit_s(self) -> float:
        return STEP_LIMIT_S if self.has_bounded_steps and self.has_sampled else LONG_STEP_LIMIT_S

    def look_at(self, engine: RolloutEngine) -> EngineError | None:
        """What the last question brought to light; asks the next one."""
        if self._running_since:
            taken_s = time.monotonic() - min(self._running_since.values())
            if taken_s < COMMAND_LIMIT_S:
                return None
            return EngineError(f"the engine has worked at one command for {taken_s:.0f} s: it hangs.")
        if self._answer is not None and not self._answer.done():
            silence_s = time.monotonic() - self._asked_s
            if silence_s < self.limit_s:
                return None
            return EngineError(f"the engine has not answered for {silence_s:.0f} s: it hangs.")
        answer, self._answer = self._answer, asyncio.ensure_future(engine.policy_version())
        was_undisturbed = self._commands_when_asked == self._num_commands
        self._asked_s, self._commands_when_asked = time.monotonic(), self._num_commands
        error = None if answer is None or answer.cancelled() else answer.exception()
        return as_engine_error(error) if error is not None and was_undisturbed else None


async def is_done_within(work: asyncio.Future[Any], limit_s: float) -> bool:
    """Counts the time in which this event loop ran: one that was held up itself has no right to call others late."""
    ticks = round(limit_s / _TICK_S)
    while not work.done() and ticks > 0:
        await asyncio.wait({work}, timeout=_TICK_S)
        ticks -= 1
    return work.done()


def as_engine_error(error: BaseException) -> EngineError:
    return error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
