"""Two small real runs that differ in one setting part in the stage that the setting belongs to, and equal ones never
(P166). What is promised of a second run: tests/config/test_reproducible.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl.comparison.divergence import compare_digests
from rl.digests import STAGES
from rl.loggers.jsonl import read_metrics
from tests.command import environment, run_ok, run_together

ROOT = Path(__file__).parents[2]
WORDS = [
    "experiment=quickstart",
    "steps=2",
    "algorithm.prompts_per_step=8",
    "algorithm.prompts_per_mini_batch=4",
    "algorithm.group_size=8",
    "backend.trainer.optimizer.lr_warmup_updates=0",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "canary.every=0",
    "checkpoint.every=1",
]
CHANGES = {
    "equal": ([], None),
    "data": (["seed=1"], (1, "data")),
    "tokens": (["task.sampling.temperature=0.5"], (1, "tokens")),
    "reward": (["task.reward=shuffled"], (1, "reward")),
    "advantage": (["algorithm=dr_grpo"], (1, "advantage")),
    "loss": (["algorithm.entropy_coef=0.01"], (1, "loss")),
    "weights": (["backend.trainer.optimizer.lr=1.0e-4"], (1, "weights")),
    "initial_weights": (["model=tiny", "seed=1"], (0, "weights")),
}
"""Changed words -> step and stage at which the run parts from the first one."""


@pytest.fixture(scope="module")
def runs(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run for each change, and `first`."""
    folder = tmp_path_factory.mktemp("runs")
    model = ["model=hf", f"model.path={warm_model}"]
    lines = [[*WORDS, *model, f"output_dir={folder / 'first'}"]]
    for name, (changes, _) in CHANGES.items():
        lines.append([*WORDS, *([] if "model=tiny" in changes else model), *changes, f"output_dir={folder / name}"])
    run_together(lines, cwd=folder, timeout_s=240)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_located_at_its_own_stage(name: str, runs: Path):
    expected = CHANGES[name][1]
    compared = compare_digests(runs / "first", runs / name)
    assert compared.steps == (0, 1, 2)
    found = compared.divergence
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.step, found.stage) == expected
        assert found.equal_before == (STAGES[: STAGES.index(found.stage)] if found.step else ())


@pytest.mark.slow
def test_the_script_names_the_setting_and_the_stage(runs: Path):
    done = subprocess.run(
        [sys.executable, "scripts/diff_runs.py", str(runs / "first"), str(runs / "weights")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "settings: 1 differ" in done.stdout
    assert "command line, backend.trainer.optimizer.lr=1.0e-4" in done.stdout
    assert "the runs part at step 1, in weights: the gradient or the optimizer, in this step" in done.stdout
    assert "equal in this step: data, tokens, reward, advantage, loss" in done.stdout


@pytest.mark.slow
def test_every_step_has_a_digest_of_every_stage(runs: Path):
    rows = read_metrics(runs / "first" / "digests.jsonl")
    assert [set(row) - {"step"} for row in rows] == [{"weights"}, set(STAGES), set(STAGES)]
    assert all(len(value) == 16 for row in rows for key, value in row.items() if key != "step")
    assert len({row["weights"] for row in rows}) == 3


@pytest.mark.slow
def test_a_resumed_run_has_the_digests_of_one_that_was_never_stopped(runs: Path, tmp_path: Path):
    """As killed between the checkpoints of steps 1 and 2: the row of step 2 is set aside and made again.

    P138: prompts and sampled tokens are the same, as everything after them.
    """
    resumed = tmp_path / "resumed"
    shutil.copytree(runs / "first", resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-000002")
    run_ok(f"resume={resumed}", cwd=tmp_path)
    (aside,) = resumed.glob("digests.set_aside.*.jsonl")
    assert [row["step"] for row in read_metrics(aside)] == [2]
    assert read_metrics(resumed / "digests.jsonl") == read_metrics(runs / "first" / "digests.jsonl")
