from __future__ import annotations

import functools
import time

import pytest
import torch

from rl.trainer.device_memory import INTERVAL_S, DeviceMemory, used_bytes

pytestmark = pytest.mark.gpu


def test_what_is_allocated_is_seen_and_what_is_given_back_is_seen_too():
    memory = DeviceMemory(functools.partial(used_bytes, torch.device("cuda", 0)))
    torch.zeros(1, device="cuda")  # the context, before anything is compared
    time.sleep(4 * INTERVAL_S)
    before = memory.take()[-1].gib
    array = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    time.sleep(4 * INTERVAL_S)
    assert memory.take()[-1].gib == pytest.approx(before + 1.0, abs=0.1)
    del array
    torch.cuda.empty_cache()
    time.sleep(4 * INTERVAL_S)
    memory.close()
    assert memory.take()[-1].gib == pytest.approx(before, abs=0.1)
