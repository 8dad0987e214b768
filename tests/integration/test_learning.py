"""The slice: every engine in every placement learns, on the version that it says it has.

The local engine colocated is the quickstart itself, which CI runs to its bar. Fully async it has the same bar here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.loggers.jsonl import read_metrics
from tests.command import run_ok

STEPS = 40
QUICKSTART_STEPS, QUICKSTART_BAR = 250, 0.90


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "placement"),
    [
        pytest.param("vllm", "colocated", marks=pytest.mark.vllm),
        pytest.param("vllm", "fully_async", marks=pytest.mark.vllm),
        pytest.param("sglang", "colocated", marks=pytest.mark.sglang),
    ],
)
def test_accuracy_rises_within_40_steps(engine: str, placement: str, warm_model: Path, tmp_path: Path):
    before, after = learned(engine, placement, STEPS, warm_model, tmp_path, timeout_s=580)
    assert after >= before + 0.06  # of 1,000 problems: three standard errors of a difference


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quickstart_reaches_its_bar_fully_async_too(warm_model: Path, tmp_path: Path):
    _, after = learned("local", "fully_async", QUICKSTART_STEPS, warm_model, tmp_path, timeout_s=1780)
    assert after >= QUICKSTART_BAR


def learned(
    engine: str, placement: str, steps: int, warm_model: Path, tmp_path: Path, *, timeout_s: float
) -> tuple[float, float]:
    """Greedy accuracy before and after a run, whose rows are looked at."""
    run_ok(
        "experiment=quickstart",
        f"placement={placement}",
        f"backend/rollout={engine}",
        "backend.rollout.max_num_seqs=1024",  # a batch in one wave, as by default with the local engine
        "model=hf",
        f"model.path={warm_model}",
        f"steps={steps}",
        "evaluation.every=0",
        f"output_dir={tmp_path / 'run'}",
        cwd=tmp_path,
        timeout_s=timeout_s,
    )
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(steps + 1))
    before, after = rows[0]["eval/arithmetic/greedy"], rows[-1]["eval/arithmetic/greedy"]
    assert before <= 0.35

    trained = rows[1:]
    assert all(row["engine/policy_version"] == row["policy_version"] == row["step"] for row in trained)
    mismatches = [row["mismatch/kl_k3"] for row in trained if row["mismatch/kl_k3"] is not None]
    assert mismatches
    assert max(mismatches) < 1e-6
    if placement == "colocated":
        assert len(mismatches) == steps
        assert max(row["staleness/max"] for row in trained) == 0
    else:
        assert max(row["staleness/max"] for row in trained) == 1
        wall = sum(row["time/step_s"] for row in trained)
        both_busy = sum(row["time/overlap_fraction"] * row["time/step_s"] for row in trained)
        assert both_busy >= 0.2 * wall  # 0.25 to 0.8 were seen, with and without other work on two cores
    return before, after
