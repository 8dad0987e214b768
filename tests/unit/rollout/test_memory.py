"""What a sleep freed, by the device's own count."""

from __future__ import annotations

import pytest

from rl.protocols import EngineError
from rl.rollout.memory import check_freed

GIB = 2**30


def test_a_sleep_that_frees_nothing_of_the_device_is_an_error_with_the_numbers():
    """P161: on some ROCm versions sleep returns and the memory stays taken. Expected: a tenth of 0.6 x 100 GiB."""
    with pytest.raises(EngineError, match=r"worker 1 .*freed 1\.0 GiB .*at least 6\.0 expected.*Use something else"):
        check_freed(
            "vLLM",
            [(10 * GIB, 65 * GIB, 100 * GIB), (10 * GIB, 11 * GIB, 100 * GIB)],
            memory_fraction=0.6,
            remedy="Use something else.",
        )


def test_a_sleep_that_frees_its_memory_passes():
    check_freed("vLLM", [(10 * GIB, 16 * GIB, 100 * GIB)], memory_fraction=0.6, remedy="")
