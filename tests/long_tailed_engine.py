"""The local engine with injected waits: a small model on a CPU has no answers that take long, so some are made to.

Named in a run's settings: `backend.rollout._target_=tests.long_tailed_engine.LongTailedEngine`.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rl.config.schema import LocalRolloutConfig
from rl.rollout.engine import Engine
from rl.rollout.local_engine import LocalSampler
from rl.rollout.sampler import NOTHING_SAMPLED, Part

ONE_IN = 8
LONG_S, SHORT_S = 6.0, 0.2


def injected_s(prompt_id: str) -> float:
    """One prompt in eight takes thirty times as long as the others, in every run."""
    return LONG_S if zlib.crc32(prompt_id.encode()) % ONE_IN == 0 else SHORT_S


class LongTailedSampler(LocalSampler):
    """Waits before it samples. A wait that a publish interrupts goes on after it, as the tokens of an answer would."""

    def __init__(self, config: LocalRolloutConfig, *, model_folder: Path | str, device: str) -> None:
        super().__init__(config, model_folder=model_folder, device=device)
        self._due: dict[int, float] = {}
        """By the seed of a sample that has been asked for: when its wait is over."""
        self._asleep: dict[Part, asyncio.TimerHandle] = {}

    def submit(self, parts: Sequence[Part]) -> None:
        now = time.monotonic()
        together: defaultdict[float, list[Part]] = defaultdict(list)
        for part in parts:
            injected = 0.0 if part.sampling.temperature == 0 else injected_s(part.prompt.prompt_id)  # not evaluations
            together[self._due.setdefault(part.seed, now + injected)].append(part)
        for due, group in together.items():
            timer = self._loop.call_later(max(0.0, due - now), self._wake, group)
            self._asleep.update(dict.fromkeys(group, timer))

    def _wake(self, parts: Sequence[Part]) -> None:
        """Those that were not aborted meanwhile."""
        super().submit([part for part in parts if self._asleep.pop(part, None) is not None])

    def abort(self, parts: Sequence[Part]) -> None:
        asleep = [part for part in parts if self._asleep.pop(part, None) is not None]
        if asleep:
            self._loop.call_soon(self._deliver, [(part, NOTHING_SAMPLED) for part in asleep])
        super().abort([part for part in parts if part not in asleep])


class LongTailedEngine(Engine):
    config_class = LocalRolloutConfig

    def __init__(self, config: LocalRolloutConfig, *, model_folder: Path | str, device: str) -> None:
        super().__init__(LongTailedSampler(config, model_folder=model_folder, device=device))
