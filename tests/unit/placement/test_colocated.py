"""Who is on the devices when: on a CPU sleep, wake, offload and onload move nothing, so only their order can tell."""

from __future__ import annotations

from typing import Any

import pytest

from rl.clock import Clock
from rl.config.schema import ColocatedConfig
from rl.placement.colocated import Colocated
from rl.protocols import PauseMode
from rl.rollout.engine import Engine
from rl.weights.transport import Handed
from scripts.simulated_time import simulate
from tests.recorder import Recorder
from tests.unit.test_in_flight import TimedSampler, TimedTrainer


class MovingTrainer(TimedTrainer):
    async def onload(self) -> None: ...

    async def release_cache(self) -> None: ...

    async def offload(self) -> None: ...


def recorded_placement() -> tuple[Colocated, list[str]]:
    """With what trainer and engine are asked for, in order."""
    calls: list[str] = []
    engine: Any = Recorder(Engine(TimedSampler()), calls=calls, prefix="engine.")
    trainer: Any = Recorder(MovingTrainer(), calls=calls, prefix="trainer.")
    return Colocated(ColocatedConfig(), trainer=trainer, engine=engine, transport=Handed()), calls


def test_the_trainer_starts_and_leaves_before_the_engine_sizes_its_cache():
    placement, calls = recorded_placement()
    simulate(placement.start())
    assert calls == ["trainer.start", "trainer.offload", "engine.start"]


def test_the_trainer_moves_in_when_the_engine_sleeps_and_out_before_the_engine_has_its_cache_again():
    """P122: what still runs ends before the engine sleeps."""

    async def main() -> list[str]:
        placement, calls = recorded_placement()
        await placement.start()
        async with placement.training(Clock().phase) as residency:
            calls.append("trains")
            await residency.publish(0)
        return calls

    assert simulate(main())[3:] == [
        f"engine.pause:{PauseMode.WAIT}",  # a request whose caller has left may still run
        "engine.resume",
        "engine.sleep",
        "trainer.onload",
        "trains",
        "trainer.release_cache",  # what it kept of the training would be lacking for
        "engine.wake_weights",  # which it is to be given; its cache waits
        "trainer.manifest",
        "engine.open_update",
        "trainer.buckets",
        "engine.policy_version",
        "trainer.offload",
        "engine.wake",  # when the trainer is out
    ]


def test_after_an_error_in_training_nothing_is_moved_back():
    async def main() -> list[str]:
        placement, calls = recorded_placement()
        await placement.start()
        with pytest.raises(ValueError, match="not finite"):
            async with placement.training(Clock().phase):
                raise ValueError("not finite")
        return calls

    assert simulate(main())[-1] == "trainer.onload"
