"""The canary as a person meets it: in the rows of a run, and as the end of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.loggers.jsonl import read_metrics
from tests.command import rl, run_ok

WORDS = (
    *("experiment=quickstart", "model.warm_start=null", "evaluation.at_start=false", "evaluation.at_end=false"),
    *("algorithm.prompts_per_step=8", "algorithm.prompts_per_mini_batch=8"),
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("placement", ["colocated", pytest.param("fully_async", marks=pytest.mark.slow)])
def test_its_findings_are_in_the_rows_of_a_run(placement: str, tmp_path: Path):
    folder = tmp_path / "run"
    words = (*WORDS, f"placement={placement}", "steps=5", "canary.every=2", f"output_dir={folder}")
    run_ok(*words, cwd=tmp_path)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "canary/trips" in row]
    assert [row["step"] for row in rows] == [1, 3, 5]  # of versions 0, 2 and 4
    assert all(row["canary/trips"] == row["canary/skipped_rollouts"] == 0.0 for row in rows)
    assert all(0.0 < row["canary/logprob_difference_mean"] < 1e-5 for row in rows)


def test_a_run_that_is_to_stop_ends_with_a_headline_and_a_code(tmp_path: Path):
    """No engine is equal to the last bit, so a bound near zero trips on the first version."""
    folder = tmp_path / "run"
    words = (*WORDS, "canary.action=stop", "canary.max_logprob_difference=1e-12", f"output_dir={folder}")
    done = rl(*words, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "rl: the run failed (in step 1): CanaryError: engine and trainer disagree on version 0: mean |" in done.stderr
    )
    assert "(bound 1e-12)" in done.stderr
    assert "raise canary.max_logprob_difference" in done.stderr
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [0]
