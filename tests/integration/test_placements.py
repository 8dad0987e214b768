"""Placements are ways to run one and the same training: what differs is when, not what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rl.config.compose import compose_run_config
from rl.config.load import save_run_yaml
from rl.loggers.jsonl import read_metrics
from tests.command import environment, with_words
from tests.integration.test_faults import last_checkpoint
from tests.long_tailed_engine import LONG_S

COLOCATED = ("placement=colocated",)
ON_POLICY = ("placement=fully_async", "placement.max_staleness=0", "placement.publish_every=1")

CURVES = (
    "step",
    "reward/mean",
    "rollout/response_tokens_mean",
    "train/loss",
    "eval/arithmetic/greedy",
    "staleness/max",
    "policy_version",
    "prompts_trained",
    "tokens_trained",
    "rollout/groups_trained",
)
STEPS = 6
ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "steps=16",
    "algorithm.prompts_per_step=8",
    "algorithm.group_size=8",
    "evaluation.every=0",
    "task.eval_limit=8",
)
LONG_TAILED = (
    "backend.rollout._target_=tests.long_tailed_engine.LongTailedEngine",
    "algorithm.old_logprobs=rollout",
)


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
    """To the bit, with the local engine, whose samples depend on nothing but weights, prompt and seed.

    P125: a step is as many prompts, updates and publishes in each.
    """
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_where_few_answers_take_long_fully_async_takes_less_time_than_colocated(warm_model: Path, tmp_path: Path):
    """Injected waits: with real trainers and engines, one of them in its Ray actor. They are most of a step's time."""
    rows = {}
    for placement in ("colocated", "fully_async"):
        words = [*words_for(warm_model, tmp_path / placement), f"placement={placement}", *LONG_TAILED]
        if placement == "fully_async":
            words += ["placement.max_staleness=3", "placement.in_flight=continue_on_new_weights", "stream.window=24"]
        done = subprocess.run(
            [sys.executable, "-m", "rl", *with_words(words, *SMALL)],
            env=environment(PYTHONPATH=str(ROOT)),
            cwd=tmp_path,
            timeout=400,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        rows[placement] = read_metrics(tmp_path / placement / "metrics.jsonl")[1:]
    assert [[row["prompts_trained"] for row in each] for each in rows.values()] == [list(range(8, 129, 8))] * 2
    colocated, fully_async = (sum(row["time/step_s"] for row in each) for each in rows.values())
    print(f"{colocated:.1f} s colocated, {fully_async:.1f} s fully async")
    assert colocated > 5 * LONG_S, "the injected waits are in its steps"
    assert fully_async < 0.8 * colocated
    assert max(row["staleness/max"] for row in rows["fully_async"]) > 0
