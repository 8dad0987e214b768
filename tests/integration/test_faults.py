"""A process of the run dies or hangs: the run ends soon, says which and why, and continues bitwise."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl.loggers.jsonl import read_metrics
from tests.command import run_ok, start
from tests.integration.test_resume import curve, wait_for_step
from tests.processes import command_of, descendants, wait_until

STEPS = 8


def words_for(model: Path, folder: Path) -> list[str]:
    """Two ranks; a step takes half a second on one core, most of it forward and backward."""
    return [
        "experiment=quickstart",
        "model=hf",
        f"model.path={model}",
        f"steps={STEPS}",
        "placement.trainer_ranks=2",
        "algorithm.prompts_per_step=32",
        "algorithm.prompts_per_mini_batch=16",
        "evaluation.every=4",
        "checkpoint.every=2",
        "task.eval_limit=50",
        f"output_dir={folder}",
    ]


def last_checkpoint(run_folder: Path, *, step: int = STEPS) -> dict[str, str]:
    """Digest of every file: weights, optimizer, random numbers, position in the data. The index names its folder."""
    manifest = json.loads((run_folder / "checkpoints" / f"step-{step:06d}" / "manifest.json").read_text())
    return {name: file["blake2b"] for name, file in manifest.items() if not name.endswith(".metadata")}


def ranks_of(driver: int) -> list[int]:
    return [pid for pid in descendants(driver) if command_of(pid).startswith("ray::_RankHost")]


def phase_of(rank: int) -> str:
    log = Path(os.readlink(f"/proc/{rank}/fd/2"))
    return log.with_suffix(".phase").read_text().strip()


@contextmanager
def run_in_step(words: list[str], folder: Path, tmp_path: Path, *, step: int) -> Iterator[tuple[subprocess.Popen, int]]:
    """A run beyond `step` and the pid of one of its ranks, which has just begun to compute gradients."""
    process = start(*words, cwd=tmp_path)
    try:
        wait_for_step(process, folder, step)
        victim = ranks_of(process.pid)[-1]
        wait_until(lambda: phase_of(victim) == "forward_backward", "the rank computes gradients")
        yield process, victim
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def ended(process: subprocess.Popen, limit_s: float) -> tuple[str, float]:
    """Output and seconds of a run that must fail and leave no process."""
    family = descendants(process.pid)
    began = time.monotonic()
    output, _ = process.communicate(timeout=limit_s + 60)
    seconds = time.monotonic() - began
    assert process.returncode == 1, output
    assert seconds < limit_s, f"{seconds:.1f} s\n{output}"
    wait_until(lambda: not any(command_of(pid) for pid in family), "no process is left", timeout_s=15)
    return output, seconds


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_killed_in_the_middle_of_a_step_is_named_and_resume_continues_bitwise(warm_model: Path, tmp_path: Path):
    """P123, P137, P155: no step is asked for twice; a resume does what is missing, and the weights take each once."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_ok(*words_for(warm_model, whole), cwd=tmp_path)
    with run_in_step(words_for(warm_model, killed), killed, tmp_path, step=3) as (process, victim):
        os.kill(victim, signal.SIGKILL)
        output, seconds = ended(process, limit_s=30)
    print(f"{seconds:.1f} s\n{output}")
    assert re.search(
        rf"rl: the run failed \(in step \d\): TrainerRankError: rank [01] \(pid {victim}\) of the trainer failed in "
        r"step \(phase: forward_backward\): killed by a signal: no word and no exit code, as SIGKILL leaves it",
        output,
    ), output
    assert "last lines of " in output
    assert "continuing from step 2" in run_ok(f"resume={killed}", cwd=tmp_path)
    assert curve(killed) == curve(whole)
    assert last_checkpoint(killed) == last_checkpoint(whole)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_hangs_is_named_after_the_collective_timeout(warm_model: Path, tmp_path: Path):
    folder = tmp_path / "run"
    words = [*words_for(warm_model, folder), "backend.trainer.collective_timeout_s=10"]
    with run_in_step(words, folder, tmp_path, step=1) as (process, victim):
        os.kill(victim, signal.SIGSTOP)
        output, seconds = ended(process, limit_s=10 + 30)
    print(f"{seconds:.1f} s\n{output}")
    assert re.search(
        rf"TrainerRankError: rank [01] \(pid {victim}\) \(phase: forward_backward\) of the trainer hangs in step: "
        r"collective timeout, backend\.trainer\.collective_timeout_s=10",
        output,
    ), output
    assert re.search(r"failed in step \(phase: \w+\): collective timeout: .*Timed out waiting 10000ms", output), output
    assert seconds > 9
    assert read_metrics(folder / "metrics.jsonl")[-1]["step"] >= 1
