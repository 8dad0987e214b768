"""A reward that hangs, in a whole run: the run goes on without its groups or says why not, and the process ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from rl.loggers.jsonl import read_metrics
from tests.command import environment
from tests.processes import command_of

TASKS = """
import asyncio, time
from rl.config.tasks import ArithmeticConfig
from rl.tasks.arithmetic import Arithmetic

class Hanging(Arithmetic):
    config_class = ArithmeticConfig

    def score(self, prompt, rollout):
        while True:
            pass

class HangingOnce(Arithmetic):
    config_class = ArithmeticConfig

    def score(self, prompt, rollout):
        if prompt.prompt_id == self.unlucky:
            time.sleep(100_000)
        return super().score(prompt, rollout)

    def start_grading(self):
        self.unlucky = self.prompt(0, 5).prompt_id
        super().start_grading()

class HangingInAThread(Arithmetic):
    config_class = ArithmeticConfig

    async def grade_truly(self, prompt, rollouts):
        if prompt.prompt_id == self.prompt(0, 5).prompt_id:
            await asyncio.to_thread(time.sleep, 100_000)
        return [self.score(prompt, rollout) for rollout in rollouts]
"""
WORDS = (
    "experiment=quickstart",
    "model=tiny",
    "steps=2",
    "algorithm.prompts_per_step=4",
    "algorithm.prompts_per_mini_batch=4",
    "task.eval_limit=8",
    "stream.reward_timeout_s=6",
    "output_dir=run",
)


def run(task: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Ends also where something that it left behind holds its output open: as an error."""
    (cwd / "own.py").write_text(TASKS)
    command = ["python", "-m", "rl", *WORDS, f"task._target_=own.{task}", *words]
    changes = {"PYTHONPATH": f"{cwd}:{Path.cwd()}"}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert not [pid for pid in map(str, os.listdir("/proc")) if pid.isdigit() and str(cwd) in environ_of(pid)]
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def environ_of(pid: str) -> str:
    """Of a scoring process; empty for all others."""
    if "scoring_host" not in command_of(int(pid)):
        return ""
    try:
        return Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", [True, False])
def test_a_run_whose_every_reward_hangs_ends_with_a_headline_and_leaves_nothing_behind(tmp_path, evaluates):
    done = run("Hanging", f"evaluation.at_start={str(evaluates).lower()}", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    headline = next(line for line in done.stderr.splitlines() if line.startswith("rl: the run failed"))
    assert "took over 6 s (stream.reward_timeout_s)" in headline
    if evaluates:
        assert "the grader failed on all 8 problems" in headline
    else:
        assert re.search(r"(\d) of the last \1 groups failed \(reward_timeout \1\)", headline), headline
        assert "not wrong answers" in headline
    assert "rl resume=" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("task", ["HangingOnce", "HangingInAThread"])
def test_a_reward_that_hangs_once_costs_its_group_and_neither_the_run_nor_its_end(tmp_path, task):
    done = run(task, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["rollout/dropped/reward_timeout"] == 1.0
    assert rows[-1]["rollout/groups_started"] >= 9.0 and rows[-1]["rollout/groups_trained"] == 8.0
