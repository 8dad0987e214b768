"""A policy learns whatever a publish does with the requests that run then, and nothing is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.config.schema import InFlight
from rl.loggers.jsonl import read_metrics
from tests.command import run_ok

STEPS = 40


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("in_flight", [InFlight.abort, InFlight.continue_on_new_weights])  # finish: test_learning.py
def test_accuracy_rises_within_40_steps(in_flight: InFlight, warm_model: Path, tmp_path: Path):
    folder = tmp_path / "run"
    run_ok(
        "experiment=quickstart",
        "placement=fully_async",
        f"placement.in_flight={in_flight.value}",
        "algorithm.old_logprobs=rollout",
        "backend.rollout.max_num_seqs=16",  # slower than the trainer, so that a publish finds requests running
        "model=hf",
        f"model.path={warm_model}",
        f"steps={STEPS}",
        "evaluation.every=0",
        f"output_dir={folder}",
        cwd=tmp_path,
        timeout_s=580,
    )
    rows = read_metrics(folder / "metrics.jsonl")
    before, after = rows[0]["eval/arithmetic/greedy"], rows[-1]["eval/arithmetic/greedy"]
    assert before <= 0.35
    assert after >= before + 0.06  # of 1,000 problems: three standard errors of a difference

    trained = rows[1:]
    assert max(row["staleness/max"] for row in trained) == 1
    mismatches = [row["mismatch/kl_k3"] for row in trained if row["mismatch/kl_k3"] is not None]
    assert mismatches
    assert max(mismatches) < 1e-6
    mixed = sum(row["rollout/mixed_version_fraction"] for row in trained)
    assert (mixed > 0) == (in_flight is InFlight.continue_on_new_weights)
    restarted = sum(row["rollout/restarted_fraction"] for row in trained)
    assert (restarted > 0) == (in_flight is InFlight.abort)

    (checkpoint,) = (folder / "checkpoints").glob(f"step-*{STEPS}")
    stream = json.loads((checkpoint / "state.json").read_text())["stream"]
    assert rows[-1]["rollout/groups_trained"] == stream["trained"] == STEPS * 64
    assert stream["trained"] + len(stream["in_flight"]) == stream["next_index"]  # nothing is dropped here
