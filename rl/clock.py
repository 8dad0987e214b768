"""Wall time, and the most memory in use, of each phase of a row."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rl.resident import take_peak_gib
from rl.types import DeviceUse


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Of a phase without one inside it. Seconds of `time.time`, which other processes have too."""

    phase: str
    began: float
    ended: float


class Clock:
    """Phases of one row, from the end of the row before. One inside another is counted once, in the inner one."""

    def __init__(self) -> None:
        self._row_began = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._stretches: list[_Stretch] = []
        self._stretch_began = time.time()
        self._open: list[_Phase] = []

    def phase(self, name: str) -> _Phase:
        return _Phase(self, name)

    def end_row(self, *, device_uses: Sequence[Sequence[DeviceUse]] = ()) -> tuple[float, dict[str, float]]:
        """(seconds of the row that ends now, times and peaks of its phases).

        `device_uses` are those of each trainer rank's GPU.
        """
        self._end_stretch()
        now = time.monotonic()
        seconds = now - self._row_began
        metrics = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        metrics |= {f"memory/{name}_gib": peak for name, peak in self._peaks.items()}
        metrics |= {
            f"memory/gpu_{name}_gib": peak for name, peak in _device_peaks(self._stretches, device_uses).items()
        }
        self._row_began = now
        self._seconds, self._peaks, self._stretches = {}, {}, []
        return seconds, metrics

    def enter(self, phase: _Phase) -> None:
        self._end_stretch()
        self._open.append(phase)

    def _end_stretch(self) -> None:
        """Of the innermost phase, since the last time that one began or ended."""
        peak, now = take_peak_gib(), time.time()
        if self._open:
            name = self._open[-1].name
            self._stretches.append(_Stretch(name, self._stretch_began, now))
            if peak is not None:
                self._peaks[name] = max(peak, self._peaks.get(name, 0.0))
        self._stretch_began = now

    def leave(self, phase: _Phase, seconds: float) -> None:
        self._end_stretch()
        assert self._open.pop() is phase
        self._seconds[phase.name] = self._seconds.get(phase.name, 0.0) + seconds
        if self._open:
            outer = self._open[-1].name
            self._seconds[outer] = self._seconds.get(outer, 0.0) - seconds


@dataclass(slots=True, eq=False)
class _Phase:
    clock: Clock
    name: str
    began: float = 0.0

    def __enter__(self) -> None:
        self.began = time.monotonic()
        self.clock.enter(self)

    def __exit__(self, *_: object) -> None:
        self.clock.leave(self, time.monotonic() - self.began)


def _device_peaks(stretches: Sequence[_Stretch], device_uses: Sequence[Sequence[DeviceUse]]) -> dict[str, float]:
    """Phase -> GiB of the fullest device. A use holds until the next one."""
    peaks: dict[str, float] = {}
    for uses in device_uses:
        times = [use.time for use in uses]
        for stretch in stretches:
            first = max(0, bisect.bisect_right(times, stretch.began) - 1)
            during = uses[first : bisect.bisect_right(times, stretch.ended)]
            if during:
                peaks[stretch.phase] = max(peaks.get(stretch.phase, 0.0), *(use.gib for use in during))
    return peaks
