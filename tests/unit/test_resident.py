"""What the kernel counts, of arrays of a known size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rl.clock import Clock
from rl.resident import resident_gib, take_peak_gib

QUARTER = 2**28 // 8


def test_memory_that_was_given_back_is_in_the_peak_once():
    if take_peak_gib() is None:
        pytest.skip("this kernel does not set the high-water mark back")
    before = resident_gib()
    array = np.ones(QUARTER)
    assert resident_gib() == pytest.approx(before + 0.25, abs=0.02)
    del array
    assert take_peak_gib() == pytest.approx(before + 0.25, abs=0.02)
    assert take_peak_gib() == pytest.approx(before, abs=0.02)


def test_a_phase_has_the_memory_that_was_resident_in_it_and_not_in_one_inside_it():
    if take_peak_gib() is None:
        pytest.skip("this kernel does not set the high-water mark back")
    clock, before = Clock(), resident_gib()
    with clock.phase("outer"), clock.phase("inner"):
        array = np.ones(QUARTER)
        del array
    _, row = clock.end_row()
    assert row["memory/inner_gib"] == pytest.approx(before + 0.25, abs=0.02)
    assert row["memory/outer_gib"] == pytest.approx(before, abs=0.02)


def test_a_kernel_that_does_not_tell_gives_none(monkeypatch: pytest.MonkeyPatch):
    def refuse(_path: Path, _text: str) -> int:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    assert take_peak_gib() is None
