"""How much of a GPU is in use over the time of a run, by whatever process.

An allocator's peak knows its own process alone; a colocated GPU holds the engine too, and is handed over between them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from rl.types import DeviceUse

log = logging.getLogger(__name__)

INTERVAL_S = 0.05
"""Allocators keep what they have taken for the rest of a phase, so that its peak is seen although it is short."""


class DeviceMemory:
    """Looks at a device from a thread of its own, for as long as this process lives or until it is closed."""

    def __init__(self, used_bytes: Callable[[], int], *, interval_s: float = INTERVAL_S) -> None:
        self._used_bytes, self._interval_s = used_bytes, interval_s
        self._uses: list[DeviceUse] = []
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="device memory", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.is_set():
            try:
                use = DeviceUse(time.time(), self._used_bytes() / 2**30)
            except RuntimeError:  # of the device, whose error the trainer meets, too
                log.exception("the memory in use on the GPU cannot be told any more")
                with self._lock:
                    self._uses = []  # nothing rather than what held last
                return
            with self._lock:
                if not self._uses or self._uses[-1].gib != use.gib:
                    self._uses.append(use)
            self._is_over.wait(self._interval_s)

    def take(self) -> list[DeviceUse]:
        """Changes since the last call, and before them what held then."""
        with self._lock:
            taken, self._uses = self._uses, self._uses[-1:]
        return taken

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


def used_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free
