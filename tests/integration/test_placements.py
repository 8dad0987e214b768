"""Placements are ways to run one and the same training: what differs is when, not what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rl.config.compose import compose_run_config
from rl.config.load import save_run_yaml
from rl.loggers.jsonl import read_metrics
from tests.command import environment
from tests.integration.test_faults import last_checkpoint

COLOCATED = ("placement=colocated",)
ON_POLICY = ("placement=fully_async", "placement.max_staleness=0", "placement.publish_every=1")

CURVES = (
    "step",
    "reward/mean",
    "rollout/response_tokens_mean",
    "train/loss",
    "eval/arithmetic/greedy",
    "staleness/max",
)
STEPS = 6


def words_for(model: Path, folder: Path) -> list[str]:
    return [
        "experiment=quickstart",
        "model=hf",
        f"model.path={model}",
        f"steps={STEPS}",
        "algorithm.prompts_per_step=16",
        "algorithm.prompts_per_mini_batch=8",
        "evaluation.every=3",
        "task.eval_limit=50",
        f"output_dir={folder}",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_at_staleness_0_every_placement_gives_the_same_weights_over_sampled_or_not(warm_model: Path, tmp_path: Path):
    """To the bit, with the local engine, whose samples depend on nothing but weights, prompt and seed."""
    curves, digests = [], []
    over_sampled = "stream.oversample=2.5"  # which the command refuses: without a filter it is only work
    for number, words in enumerate((COLOCATED, ON_POLICY, (*COLOCATED, over_sampled), (*ON_POLICY, over_sampled))):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_run_yaml(compose_run_config([*words_for(warm_model, folder), *words]), folder / "run.yaml")
        driver = [sys.executable, "-m", "rl.driver", str(folder)]
        subprocess.run(driver, env=environment(), cwd=tmp_path, timeout=240, check=True)
        rows = read_metrics(folder / "metrics.jsonl")
        curves.append([{key: row.get(key) for key in CURVES} for row in rows])
        digests.append({k: v for k, v in last_checkpoint(folder, step=STEPS).items() if k.startswith("trainer/")})
        surplus = [row["rollout/surplus_groups"] for row in rows[1:] if "rollout/surplus_groups" in row]
        assert surplus == ([24.0] * STEPS if over_sampled in words else [])
    for number in range(1, 4):
        assert curves[number] == curves[0]
        assert digests[number] == digests[0]
