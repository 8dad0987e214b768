"""Whatever part of a real run fails, also while the loop waits for another: the run ends soon, and says which and how
(P119, P155). A tracker alone may fail: tests/unit/loggers/test_tracker.py.

Each failure is brought about in a run that goes well. Ranks that die or hang in a step: test_faults.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl.rollout.liveness import LONE_PROCESS_LIMIT_S
from tests.command import start
from tests.integration.test_faults import ended, phase_of, ranks_of
from tests.integration.test_resume import wait_for_step
from tests.processes import command_of, descendants

LIMIT_S = 30.0
"""From the failure to the end of the process."""

TASKS = """
import dataclasses
from pathlib import Path

from rl.config.tasks import ArithmeticConfig
from rl.tasks.arithmetic import Arithmetic
from rl.types import RewardError

BROKEN = Path({broken!r})

class Breakable(Arithmetic):
    config_class = ArithmeticConfig

    def score(self, prompt, rollout):
        if BROKEN.exists():
            raise ZeroDivisionError("the judge has no answers to divide by")
        return super().score(prompt, rollout)

class BreakableHeldOut(Arithmetic):
    config_class = ArithmeticConfig

    def eval_sets(self):
        return [dataclasses.replace(one, grader=self.judge(one.grader)) for one in super().eval_sets()]

    @staticmethod
    def judge(grader):
        async def grade(prompt, rollouts):
            if BROKEN.exists():
                raise RewardError("the judge of held-out problems is away")
            return await grader(prompt, rollouts)

        return grade
"""
WORDS = (
    "experiment=quickstart",
    "model=tiny",
    "placement=fully_async",
    "steps=100000",
    "algorithm.prompts_per_step=4",
    "algorithm.prompts_per_mini_batch=4",
    "evaluation.at_start=false",
    "task.eval_limit=8",
    "output_dir=run",
)


def engine_of(driver: int) -> int:
    (pid,) = [pid for pid in descendants(driver) if command_of(pid).startswith("ray::_EngineHost")]
    return pid


def kill_the_engine(driver: int, folder: Path) -> str:
    victim = engine_of(driver)
    os.kill(victim, signal.SIGKILL)
    return rf"EngineError: process {victim} of the engine died .*killed by a signal: no word and no exit code"


def stop_the_engine(driver: int, folder: Path) -> str:
    victim = engine_of(driver)
    os.kill(victim, signal.SIGSTOP)
    reason = rf"it has not answered for {LONE_PROCESS_LIMIT_S:.0f} s: it hangs"
    return rf"hanging process: EngineError: process {victim} of the engine was killed: {reason}"


def kill_a_rank_that_waits(driver: int, folder: Path) -> str:
    """For a batch, for as long as the engine is stopped."""
    engine, victim = engine_of(driver), ranks_of(driver)[-1]
    os.kill(engine, signal.SIGSTOP)
    since = time.monotonic()
    while time.monotonic() - since < 2.0:
        if not phase_of(victim).startswith("idle after"):
            since = time.monotonic()
        time.sleep(0.01)
    os.kill(victim, signal.SIGKILL)
    time.sleep(2.0)  # the driver learns of it while nothing else goes on
    os.kill(engine, signal.SIGCONT)
    return (
        rf"TrainerRankError: rank [01] \(pid {victim}\) of the trainer died while nothing was asked of it "
        r"\(phase: idle after \w+\): killed by a signal: no word and no exit code"
    )


def break_the_task(driver: int, folder: Path) -> str:
    (folder.parent / "broken").touch()
    return r"StreamError: .*the judge has no answers to divide by"


def break_the_held_out_task(driver: int, folder: Path) -> str:
    (folder.parent / "broken").touch()
    return r"RewardError: evaluation \S+ the grader failed on all 8 problems; the judge of held-out problems is away"


def put_a_file_where_weights_go(driver: int, folder: Path) -> str:
    """Between two publishes, when the folder is not there."""
    while True:
        try:
            os.close(os.open(folder / "weights", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return r"EngineError: a bucket of weights could not be written to \S+/run/weights: .*File exists"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("words", "cause"),
    [
        pytest.param(["evaluation.every=0"], kill_the_engine, id="rollout"),
        pytest.param(["evaluation.every=0"], stop_the_engine, id="rollout_hangs"),
        pytest.param(["evaluation.every=0", "placement.trainer_ranks=2"], kill_a_rank_that_waits, id="trainer_rank"),
        pytest.param(["evaluation.every=0", "task._target_=own.Breakable"], break_the_task, id="reward"),
        pytest.param(
            ["evaluation.every=1", "task._target_=own.BreakableHeldOut"], break_the_held_out_task, id="evaluation"
        ),
        pytest.param(
            ["evaluation.every=0", "placement.weight_transport=disk"], put_a_file_where_weights_go, id="publish"
        ),
    ],
)
def test_a_failure_in_any_part_ends_the_run_within_thirty_seconds_with_a_headline(
    words: list[str], cause: Callable[[int, Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own.py").write_text(TASKS.format(broken=str(tmp_path / "broken")))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    process = start(*WORDS, *words, cwd=tmp_path)
    try:
        wait_for_step(process, tmp_path / "run", 2)
        expected = cause(process.pid, tmp_path / "run")
        silence_s = LONE_PROCESS_LIMIT_S if cause is stop_the_engine else 0.0  # until then it may only be slow
        output, seconds = ended(process, limit_s=silence_s + LIMIT_S)
    finally:
        stop(process)
    print(f"{seconds:.1f} s\n{output}")
    headline = re.search(rf"^rl: the run failed \(in step \d+\): {expected}", output, re.MULTILINE)
    assert headline is not None, output
    assert headline.end() < output.index("stopped early at step"), "the headline comes before the table"
    assert "(raylet)" not in output
    assert output.rstrip().endswith(f"rl resume={tmp_path / 'run'}")


def stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
