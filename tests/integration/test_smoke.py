"""The five published runs, small, as the command runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.config.algorithms import DAPOConfig
from rl.config.compose import compose_run_config
from rl.config.load import load_run_yaml
from rl.config.schema import FullyAsyncConfig
from rl.config.smoke import PUBLISHES
from rl.loggers.jsonl import read_metrics
from scripts.chaos import num_unaccounted
from tests.command import run_together

REPLACED = {
    "qwen3_8b_grpo": ["engine SGLangEngine replaced by LocalEngine"],
    "qwen2_5_math_7b_dapo_colocated": ["engine VLLMEngine replaced by LocalEngine"],
    "qwen2_5_math_7b_dapo_fully_async": ["engine VLLMEngine replaced by LocalEngine"],
    "qwen3_5_35b_a3b_grpo_colocated": ["trainer MegatronTrainer replaced by FSDPTrainer"],
    "qwen3_5_35b_a3b_grpo_fully_async": ["trainer MegatronTrainer replaced by FSDPTrainer"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A run folder for each, and what each command said."""
    folder = tmp_path_factory.mktemp("runs")
    lines = [[f"experiment={experiment}", "smoke=cpu", f"output_dir={experiment}"] for experiment in REPLACED]
    return folder, dict(zip(REPLACED, run_together(lines, cwd=folder, timeout_s=600), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(660)
@pytest.mark.parametrize("experiment", REPLACED)
def test_a_published_run_runs_small_on_a_cpu(experiment: str, runs: tuple[Path, dict[str, str]]):
    folder, said = runs
    for line in REPLACED[experiment]:
        assert f"smoke=cpu: {line}" in said[experiment]
    rows = read_metrics(folder / experiment / "metrics.jsonl")[1:]  # the first is of the start
    assert rows[-1]["policy_version"] == PUBLISHES
    assert rows[0]["canary/logprob_difference_max"] < 1e-3
    of_run = load_run_yaml(folder / experiment / "run.yaml")
    of_experiment = compose_run_config([f"experiment={experiment}"])
    is_async = isinstance(of_run.placement, FullyAsyncConfig)
    for row in rows:
        assert num_unaccounted(row) == 0
        assert 0 <= row["rollout/groups_in_flight"] <= (of_run.max_admitted if is_async else 0)
    assert rows[-1]["rollout/groups_trained"] == len(rows) * of_run.algorithm.prompts_per_step
    assert type(of_run.algorithm) is type(of_experiment.algorithm)
    assert type(of_run.placement) is type(of_experiment.placement)
    assert of_run.algorithm.old_logprobs is of_experiment.algorithm.old_logprobs
    if isinstance(of_run.placement, FullyAsyncConfig):
        assert of_run.placement.in_flight is of_experiment.placement.in_flight
        assert of_run.placement.max_staleness == of_experiment.placement.max_staleness
    if isinstance(of_run.algorithm, DAPOConfig):  # elsewhere every answer is as wrong as the other
        assert max(row["train/grad_norm"] for row in rows if row.get("train/grad_norm") is not None) > 0
