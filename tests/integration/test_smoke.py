"""The five published runs, small, as the command runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl.config.algorithms import DAPOConfig
from rl.config.compose import compose_run_config
from rl.config.load import load_run_yaml
from rl.config.schema import FullyAsyncConfig
from rl.config.smoke import PUBLISHES
from tests.command import environment

REPLACED = {
    "qwen3_8b_grpo": ["engine SGLangEngine replaced by LocalEngine"],
    "qwen2_5_math_7b_dapo_colocated": ["engine VLLMEngine replaced by LocalEngine"],
    "qwen2_5_math_7b_dapo_fully_async": ["engine VLLMEngine replaced by LocalEngine"],
    "qwen3_5_35b_a3b_grpo_colocated": ["trainer MegatronTrainer replaced by FSDPTrainer"],
    "qwen3_5_35b_a3b_grpo_fully_async": ["trainer MegatronTrainer replaced by FSDPTrainer"],
}
PROGRAM = """
import sys
from contextlib import redirect_stderr, redirect_stdout
from rl.__main__ import main
for experiment in sys.argv[1:]:
    with open(f"{experiment}.txt", "w") as said, redirect_stdout(said), redirect_stderr(said):
        code = main([f"experiment={experiment}", "smoke=cpu", f"output_dir={experiment}"])
        print("exit code", code)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder for each, and beside it what the command said; all in one process, which loads libraries once."""
    folder = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *REPLACED],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("experiment", REPLACED)
def test_a_published_run_runs_small_on_a_cpu(experiment: str, runs: Path):
    text = (runs / f"{experiment}.txt").read_text(encoding="utf-8")
    assert text.endswith("exit code 0\n"), text
    for line in REPLACED[experiment]:
        assert f"smoke=cpu: {line}" in text
    rows = [json.loads(line) for line in (runs / experiment / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["policy_version"] == PUBLISHES
    assert rows[0]["canary/logprob_difference_max"] < 1e-3
    of_run = load_run_yaml(runs / experiment / "run.yaml")
    of_experiment = compose_run_config([f"experiment={experiment}"])
    dropped = 0.0
    for row in rows:
        dropped += sum(value for key, value in row.items() if key.startswith("rollout/dropped/"))
        in_flight = row["rollout/groups_started"] - row["rollout/groups_trained"] - dropped
        is_async = isinstance(of_run.placement, FullyAsyncConfig)
        assert 0 <= in_flight <= (of_run.max_admitted if is_async else 0)
    assert rows[-1]["rollout/groups_trained"] == len(rows) * of_run.algorithm.prompts_per_step
    assert type(of_run.algorithm) is type(of_experiment.algorithm)
    assert type(of_run.placement) is type(of_experiment.placement)
    assert of_run.algorithm.old_logprobs is of_experiment.algorithm.old_logprobs
    if isinstance(of_run.placement, FullyAsyncConfig):
        assert of_run.placement.in_flight is of_experiment.placement.in_flight
        assert of_run.placement.max_staleness == of_experiment.placement.max_staleness
    if isinstance(of_run.algorithm, DAPOConfig):  # elsewhere every answer is as wrong as the other
        assert max(row["train/grad_norm"] for row in rows if row.get("train/grad_norm") is not None) > 0
