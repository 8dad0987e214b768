"""The published step times that the time model predicts, and that its constants come from the colocated rows alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from rl.plan.time import ALL_WITHIN, FITTED, HALF_WITHIN
from scripts import predict_published
from scripts.predict_published import Row, misses, rows

ROOT = Path(__file__).resolve().parents[3]
MEASUREMENTS = "experiments/measurements/predicted_times.md"


@pytest.fixture(scope="module")
def found() -> list[Row]:
    return rows(predict_published.calibrate(), simulate=False)


def test_the_constants_of_the_plan_are_what_the_fit_gives():
    assert asdict(FITTED) == pytest.approx(asdict(predict_published.calibrate()), rel=2e-3)


def test_the_fit_knows_no_asynchronous_row(monkeypatch):
    before = predict_published.calibrate()
    monkeypatch.setattr(predict_published, "ASYNC", ())
    monkeypatch.setattr(predict_published, "REQUIRE_BATCHES", ())
    assert predict_published.calibrate() == before


def test_the_uncertainty_that_a_plan_states_is_what_the_rows_show(found):
    half, worst = misses(found)
    assert (round(half, 1), round(worst, 1)) == (HALF_WITHIN, ALL_WITHIN)


def test_every_published_row_is_predicted_and_both_tables_have_each(found):
    assert len(found) == 3 + 6 + 3 + 3 + 2
    measurements, readme = ((ROOT / name).read_text() for name in (MEASUREMENTS, "README.md"))
    for row in found:
        name = f"{row.name} (fitted)" if row.is_fitted else row.name
        assert f"| {name} | {row.unit} | {row.published:.1f} | {row.plan:.1f} |" in measurements
        off = 100 * (row.plan / row.published - 1)
        assert f"| {name} | {row.published:.1f} {row.unit} | {row.plan:.1f} | {off:+.0f} % |" in readme


def test_a_miss_is_the_same_factor_whichever_side_it_is_on():
    assert Row("a", "s", 10.0, 20.0).factor == pytest.approx(2.0)
    assert Row("a", "s", 20.0, 10.0).factor == pytest.approx(2.0)
