"""What the loop waits for has an end: by a limit (P118), or by the error of a part that it does not wait for (P119)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rl.clock import Clock
from rl.loop import Background, _training
from rl.protocols import EngineError, Phases
from scripts.simulated_time import simulate


class HangingPlacement:
    """Waits an hour for the engine, before or after the trainer's time on the devices."""

    def __init__(self, *, before_s: float = 0.0, after_s: float = 0.0) -> None:
        self.before_s, self.after_s = before_s, after_s

    @asynccontextmanager
    async def training(self, phase: Phases) -> AsyncIterator[str]:
        del phase
        await asyncio.sleep(self.before_s)
        yield "residency"
        await asyncio.sleep(self.after_s)


async def train(placement: HangingPlacement, *, for_s: float) -> float:
    """Simulated seconds."""
    run: Any = SimpleNamespace(placement=placement, publish_timeout_s=60.0)
    async with _training(run, Clock()) as residency:
        assert residency == "residency"  # type: ignore[comparison-overlap]
        await asyncio.sleep(for_s)
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("placement", "what"),
    [
        (HangingPlacement(before_s=3600.0), "giving the devices to the trainer"),
        (HangingPlacement(after_s=3600.0), "giving the devices back to the engine"),
    ],
)
def test_an_engine_that_does_not_give_way_ends_the_run_by_the_limit(placement: HangingPlacement, what: str):
    with pytest.raises(EngineError, match=rf"^{what} took over 60 s \(stream\.stall_timeout_s\)"):
        simulate(train(placement, for_s=5.0))


def test_the_trainers_own_time_on_the_devices_has_no_limit():
    assert simulate(train(HangingPlacement(before_s=59.0, after_s=59.0), for_s=7200.0)) == 59.0 + 7200.0 + 59.0


def test_an_error_inside_keeps_its_own_type_though_it_is_a_timeout():
    async def main() -> None:
        run: Any = SimpleNamespace(placement=HangingPlacement(), publish_timeout_s=60.0)
        async with _training(run, Clock()):
            raise TimeoutError("of a socket")

    with pytest.raises(TimeoutError, match="of a socket"):
        simulate(main())


def test_the_first_error_of_what_goes_on_in_the_background_is_told_at_once_and_a_cancelled_task_is_none():
    async def fails(after_s: float) -> None:
        await asyncio.sleep(after_s)
        raise ValueError(f"after {after_s:g} s")

    async def main() -> tuple[str, float]:
        background = Background()
        cancelled = asyncio.create_task(fails(1.0))
        background.watch(cancelled, asyncio.create_task(fails(3.0)), asyncio.create_task(fails(2.0)))
        await asyncio.sleep(0)
        cancelled.cancel()
        return str(await background.failure()), asyncio.get_running_loop().time()

    assert simulate(main()) == ("after 2 s", 2.0)
