"""Every kind of algorithm trains the quickstart's policy by the command, with the options that reach furthest."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.loggers.jsonl import read_metrics
from tests.command import rl, run_together

ALGORITHMS = ["cispo", "dapo", "gspo", "reinforce_pp", "rloo"]
"""One of each kind of loss, advantage or filter; others are variants, and GRPO trains in most other tests."""
SHORT = [
    *("steps=3", "algorithm.prompts_per_step=32", "algorithm.prompts_per_mini_batch=16"),
    *("evaluation.at_start=false", "evaluation.at_end=false", "evaluation.every=0"),
]


KL_IN_REWARD = "kl_in_reward"


@pytest.fixture(scope="module")
def runs(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each algorithm, and of RLOO with a KL in the reward."""
    folder = tmp_path_factory.mktemp("runs")
    words = {name: [f"algorithm={name}"] for name in ALGORITHMS}
    words[KL_IN_REWARD] = ["algorithm=rloo", "algorithm.kl_coef=0.05"]
    common = ["experiment=quickstart", "model=hf", f"model.path={warm_model}", *SHORT]
    lines = [[*common, *own, f"output_dir={folder / name}"] for name, own in words.items()]
    run_together(lines, cwd=folder, timeout_s=280)
    return folder


def rows_of(run: Path) -> list[dict]:
    return [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_kind_of_algorithm_trains_without_a_sentinel_that_trips(name, runs):
    rows = rows_of(runs / name)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["train/skipped_updates"] == 0 and row["sentinel/trips"] == 0 for row in rows)
    assert all(row["train/grad_norm"] > 0 and row["offpolicy/effective_sample_fraction"] > 0.99 for row in rows)
    if name == "dapo":
        assert rows[-1]["rollout/groups_started"] > rows[-1]["rollout/groups_trained"]
        assert all(row["reward/uniform_group_fraction"] == 0 for row in rows)


@pytest.mark.slow
def test_a_kl_in_the_reward_is_measured_against_the_initial_policy(runs):
    rows = rows_of(runs / KL_IN_REWARD)
    kl = [row["reward/kl_ref"] for row in rows]
    assert kl[0] == pytest.approx(0.0, abs=1e-5) and abs(kl[-1]) > 1e-4
    assert all(row["time/reference_s"] > 0 for row in rows)


@pytest.mark.slow
def test_a_sentinel_stops_the_run_after_its_row(warm_model, tmp_path):
    words = ["sentinels.entropy.limit=100", "sentinels.entropy.action=stop", f"output_dir={tmp_path / 'run'}"]
    done = rl("experiment=quickstart", "model=hf", f"model.path={warm_model}", *SHORT, *words, cwd=tmp_path)
    assert done.returncode != 0 and "sentinels.entropy.action=stop" in done.stdout + done.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")][-1] == 1
