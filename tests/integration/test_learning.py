"""The slice: every engine in every placement learns, on the version that it says it has.

The local engine colocated is the quickstart itself, which CI runs to its bar.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.loggers.jsonl import read_metrics
from tests.command import run_ok

STEPS = 40


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "placement"),
    [
        pytest.param("local", "fully_async", marks=pytest.mark.slow),
        pytest.param("vllm", "colocated", marks=pytest.mark.vllm),
        pytest.param("vllm", "fully_async", marks=pytest.mark.vllm),
        pytest.param("sglang", "colocated", marks=pytest.mark.sglang),
    ],
)
def test_accuracy_rises_within_40_steps(engine: str, placement: str, warm_model: Path, tmp_path: Path):
    run_ok(
        "experiment=quickstart",
        f"placement={placement}",
        f"backend/rollout={engine}",
        "backend.rollout.max_num_seqs=1024",  # a batch in one wave, as by default with the local engine
        "model=hf",
        f"model.path={warm_model}",
        f"steps={STEPS}",
        "evaluation.every=0",
        f"output_dir={tmp_path / 'run'}",
        cwd=tmp_path,
        timeout_s=580,
    )
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    before, after = rows[0]["eval/arithmetic/greedy"], rows[-1]["eval/arithmetic/greedy"]
    assert before <= 0.35
    assert after >= before + 0.06  # of 1,000 problems: three standard errors of a difference

    trained = rows[1:]
    assert all(row["engine/policy_version"] == row["policy_version"] == row["step"] for row in trained)
    mismatches = [row["mismatch/kl_k3"] for row in trained if row["mismatch/kl_k3"] is not None]
    assert mismatches
    assert max(mismatches) < 1e-6
    if placement == "colocated":
        assert len(mismatches) == STEPS
        assert max(row["staleness/max"] for row in trained) == 0
    else:
        assert max(row["staleness/max"] for row in trained) == 1
        wall = sum(row["time/step_s"] for row in trained)
        both_busy = sum(row["time/overlap_fraction"] * row["time/step_s"] for row in trained)
        assert both_busy >= 0.2 * wall  # 0.25 to 0.8 were seen, with and without other work on two cores
