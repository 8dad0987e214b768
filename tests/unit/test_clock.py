"""Wall time and device memory of the phases of a row, by hand. Host memory: test_resident.py."""

from __future__ import annotations

import pytest

from rl import clock as module
from rl.clock import Clock
from rl.types import DeviceUse


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """[0] is the time, on both clocks."""
    times = [100.0]
    monkeypatch.setattr(module.time, "time", lambda: times[0])
    monkeypatch.setattr(module.time, "monotonic", lambda: times[0])
    return times


def row_of(clock: Clock, *device_uses: list[DeviceUse]) -> dict[str, float]:
    return clock.end_row(device_uses=device_uses)[1]


def one_row(clock: Clock, now: list[float]) -> None:
    """wait 100 to 110, residency 110 to 140 with train 115 to 130 in it."""
    with clock.phase("wait"):
        now[0] = 110.0
    with clock.phase("residency"):
        now[0] = 115.0
        with clock.phase("train"):
            now[0] = 130.0
        now[0] = 140.0


def test_a_phase_inside_another_is_counted_once(now):
    clock = Clock()
    one_row(clock, now)
    now[0] = 142.0  # of no phase
    seconds, row = clock.end_row()
    assert (row["time/wait_s"], row["time/residency_s"], row["time/train_s"]) == (10.0, 15.0, 15.0)
    assert seconds == 42.0


def test_each_phase_has_the_most_that_the_fullest_device_held_in_it(now):
    clock = Clock()
    one_row(clock, now)
    first = [DeviceUse(99.0, 60.0), DeviceUse(111.0, 5.0), DeviceUse(120.0, 40.0), DeviceUse(135.0, 70.0)]
    second = [DeviceUse(105.0, 61.0), DeviceUse(112.0, 4.0), DeviceUse(116.0, 44.0), DeviceUse(129.0, 3.0)]
    row = row_of(clock, first, second)
    assert row["memory/gpu_wait_gib"] == 61.0  # of the second device; the first holds its 60 from before the row
    assert row["memory/gpu_train_gib"] == 44.0
    assert row["memory/gpu_residency_gib"] == 70.0  # what still held at 110, or came at 135; not the 44 of `train`


def test_what_held_at_the_end_of_a_row_holds_in_the_next(now):
    clock = Clock()
    one_row(clock, now)
    row_of(clock, [DeviceUse(99.0, 60.0)])
    with clock.phase("wait"):
        now[0] = 150.0
    assert row_of(clock, [DeviceUse(99.0, 60.0)])["memory/gpu_wait_gib"] == 60.0


def test_where_no_device_tells_no_peak_is_logged(now):
    clock = Clock()
    one_row(clock, now)
    assert not [key for key in row_of(clock, []) if key.startswith("memory/gpu_")]
