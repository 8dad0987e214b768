"""Processes of a run as the kernel lists them, for tests that kill one or look for what is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    """A zombie is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Living processes that descend from `pid`, itself not included; lowest number first."""
    parents = {int(path.name): parent_of(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found: list[int] = []
    wave = {pid}
    while wave:
        wave = {child for child, parent in parents.items() if parent in wave}
        found += wave
    return sorted(found)


def wait_until(is_so: Callable[[], bool], what: str, *, timeout_s: float = 120.0) -> float:
    """Seconds until `is_so()`."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < timeout_s, f"not so after {timeout_s:.0f} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - began
