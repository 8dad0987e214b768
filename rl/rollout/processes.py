"""An engine's own processes: kept from Ctrl-C, tied to their parent's life, and explained when they end."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from multiprocessing import resource_tracker

_PR_SET_PDEATHSIG = 1


def block_interrupts() -> None:
    """Blocks SIGINT in the calling thread and in the processes that it starts.

    Ctrl-C reaches every process of the terminal's group, and an engine that ends at once is gone before the run's
    checkpoint. The resource tracker is started first because its start unblocks SIGINT.
    """
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def end_with_parent() -> None:
    """Has the kernel kill this process, which multiprocessing started, when the thread that started it ends.

    A parent that is gone already sends no signal any more: importing what a process is to do takes it seconds.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def describe_exit(exit_code: int | None) -> str:
    if exit_code is None:
        return "has not ended"
    if exit_code < 0:
        return f"was ended by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"ended with exit code {exit_code}"
