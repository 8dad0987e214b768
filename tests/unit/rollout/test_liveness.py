"""Who counts as dead or hanging, and who is only busy."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rl.protocols import EngineError
from rl.rollout import liveness
from rl.rollout.liveness import (
    BEAT_INTERVAL_S,
    LONE_PROCESS_LIMIT_S,
    PROCESS_LIMIT_S,
    STEP_LIMIT_S,
    Probe,
    is_done_within,
)


class Core:
    """The one method of an engine that a probe calls. It answers when it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def policy_version(self) -> int:
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return 3


def probe_of(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Probe, Any]:
    monkeypatch.setattr(liveness, "STEP_LIMIT_S", limit_s)
    probe = Probe()
    probe.has_sampled = True
    return probe, Core()


def test_a_lone_engine_may_be_silent_for_longer_and_is_missed_within_thirty_seconds():
    assert PROCESS_LIMIT_S < BEAT_INTERVAL_S + LONE_PROCESS_LIMIT_S < 30


def test_the_limits_leave_ten_seconds_for_every_notice():
    assert BEAT_INTERVAL_S + PROCESS_LIMIT_S < 10
    assert BEAT_INTERVAL_S + STEP_LIMIT_S + BEAT_INTERVAL_S < 10


async def test_an_engine_that_answers_is_well_and_one_that_is_silent_hangs(monkeypatch: pytest.MonkeyPatch):
    probe, core = probe_of(0.2, monkeypatch)
    core.may_answer.set()
    for _ in range(3):
        assert probe.look_at(core) is None
        await asyncio.sleep(0.01)
    core.may_answer.clear()
    assert probe.look_at(core) is None  # the last question was answered; this one will not be
    await asyncio.sleep(0.1)
    assert probe.look_at(core) is None
    await asyncio.sleep(0.15)
    assert "it hangs" in str(probe.look_at(core))


async def test_the_death_of_an_engine_in_a_living_process_is_its_answer(monkeypatch: pytest.MonkeyPatch):
    probe, core = probe_of(10.0, monkeypatch)
    core.error = EngineError("its core was ended by signal 9")
    core.may_answer.set()
    assert probe.look_at(core) is None
    await asyncio.sleep(0.01)
    assert "signal 9" in str(probe.look_at(core))


async def test_a_command_may_take_longer_than_any_answer(monkeypatch: pytest.MonkeyPatch):
    probe, core = probe_of(0.2, monkeypatch)
    assert probe.look_at(core) is None
    with probe.command():
        await asyncio.sleep(0.3)
        assert probe.look_at(core) is None
    assert probe.look_at(core) is None  # what was asked before may wait as long again
    await asyncio.sleep(0.3)
    assert probe.look_at(core) is not None


async def test_a_command_that_never_ends_is_noticed_however_many_follow_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(liveness, "COMMAND_LIMIT_S", 0.2)
    probe, core = probe_of(10.0, monkeypatch)
    with probe.command():
        for _ in range(3):
            with probe.command():
                await asyncio.sleep(0.05)
            assert probe.look_at(core) is None
        await asyncio.sleep(0.1)
        with probe.command():
            assert "one command" in str(probe.look_at(core))
    assert probe.look_at(core) is None


async def test_an_error_that_a_command_caused_is_no_death(monkeypatch: pytest.MonkeyPatch):
    probe, core = probe_of(10.0, monkeypatch)
    core.error = EngineError("asleep")
    assert probe.look_at(core) is None
    with probe.command():
        core.may_answer.set()
        await asyncio.sleep(0.01)
    assert probe.look_at(core) is None
    await asyncio.sleep(0.01)
    assert "asleep" in str(probe.look_at(core))


def test_no_short_limit_holds_on_a_cpu_or_before_the_first_sample():
    probe = Probe()
    assert probe.limit_s == liveness.LONG_STEP_LIMIT_S
    probe.has_sampled = True
    assert probe.limit_s == STEP_LIMIT_S
    probe.has_bounded_steps = False
    assert probe.limit_s == liveness.LONG_STEP_LIMIT_S


async def test_a_loop_that_was_held_up_itself_calls_nobody_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(liveness, "_TICK_S", 0.05)

    async def answer(after_s: float) -> None:
        await asyncio.sleep(after_s)

    late = asyncio.ensure_future(answer(10.0))
    started = time.monotonic()
    assert not await is_done_within(late, 0.2)
    assert 0.15 < time.monotonic() - started < 1.0
    late.cancel()
    prompt = asyncio.ensure_future(answer(0.1))
    asyncio.get_running_loop().call_soon(time.sleep, 0.5)
    assert await is_done_within(prompt, 0.2)
