"""The thread that looks how much of a device is in use. On a real one: tests/gpu."""

from __future__ import annotations

import threading

import pytest

from rl.trainer.device_memory import DeviceMemory

GIB = 2**30


class Device:
    """Tells one value after the other, and the last one from then on."""

    def __init__(self, *gib: float) -> None:
        self._left = list(gib)
        self.has_told_all = threading.Event()

    def __call__(self) -> int:
        if len(self._left) == 1:
            self.has_told_all.set()
            return int(self._left[0] * GIB)
        return int(self._left.pop(0) * GIB)


def test_changes_are_kept_with_their_times_and_equal_values_once():
    device = Device(1.0, 1.0, 3.0, 3.0, 2.0)
    memory = DeviceMemory(device, interval_s=0.001)
    assert device.has_told_all.wait(10)
    memory.close()
    uses = memory.take()
    assert [use.gib for use in uses] == [1.0, 3.0, 2.0]
    assert sorted(use.time for use in uses) == [use.time for use in uses]
    assert memory.take() == uses[-1:]  # what still holds


def test_a_closed_one_looks_no_more():
    device = Device(1.0)
    memory = DeviceMemory(device, interval_s=0.001)
    memory.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "device memory"]


def test_a_device_that_tells_no_more_leaves_no_value_that_would_go_on_holding(caplog: pytest.LogCaptureFixture):
    answers = iter([GIB, 2 * GIB])

    def used_bytes() -> int:
        if (answer := next(answers, None)) is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return answer

    memory = DeviceMemory(used_bytes, interval_s=0.001)
    memory._thread.join(10)
    assert memory.take() == []
    assert "cannot be told any more" in caplog.text
