"""A run that is killed or stopped continues as if nothing had been."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rl.loggers.jsonl import read_metrics
from rl.run_folder import Checkpoints
from tests.command import press_ctrl_c, rl, run_ok, start, with_words

STEPS = 36
NUM_KILLS = 10


def words_for(model: Path, folder: Path) -> list[str]:
    """Small steps with a checkpoint after each third, so that kills hit every phase."""
    return [
        "experiment=quickstart",
        "model=hf",
        f"model.path={model}",
        f"steps={STEPS}",
        "algorithm.prompts_per_step=16",
        "algorithm.prompts_per_mini_batch=8",
        "evaluation.every=10",
        "checkpoint.every=3",
        "task.eval_limit=50",
        f"output_dir={folder}",
    ]


def weights_digest(run_folder: Path, tmp_path: Path) -> str:
    destination = tmp_path / f"export-{run_folder.name}"
    run_ok("export", str(run_folder), str(destination), cwd=tmp_path)
    digest = hashlib.sha256((destination / "model.safetensors").read_bytes()).hexdigest()
    shutil.rmtree(destination)
    return digest


def curve(run_folder: Path) -> list[tuple[int, float | None, float | None]]:
    rows = read_metrics(run_folder / "metrics.jsonl")
    return [(row["step"], row.get("reward/mean"), row.get("eval/arithmetic/greedy")) for row in rows]


def last_step(run_folder: Path) -> int:
    rows = read_metrics(run_folder / "metrics.jsonl")
    return rows[-1]["step"] if rows else -1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_kills_leave_weights_and_curve_bitwise_as_they_would_be(warm_model: Path, tmp_path: Path):
    """Some as the run starts, most in or between steps, with a checkpoint after every third step."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_ok(*words_for(warm_model, whole), cwd=tmp_path)
    rng = random.Random(20261201)
    words = words_for(warm_model, killed)
    resumed_at: list[int] = []
    num_killed = 0
    while num_killed < NUM_KILLS:
        process = start(*words, cwd=tmp_path)
        if num_killed == 0:
            wait_for_step(process, killed, 1)  # before the first checkpoint: the run starts again
        elif num_killed % 4 == 3:
            time.sleep(rng.uniform(0.5, 8.0))
        else:
            beyond = max(last_step(killed), 2) + rng.randint(1, 3)
            wait_for_step(process, killed, min(beyond, STEPS - 1))
            time.sleep(rng.uniform(0.0, 0.2))
        process.kill()
        output, _ = process.communicate()
        resumed_at += [int(step) for step in re.findall(r"continuing from step (\d+)", output)]
        assert process.returncode == -signal.SIGKILL, output
        num_killed += 1
        words = [f"resume={killed}"]
    output = run_ok(f"resume={killed}", cwd=tmp_path)
    resumed_at += [int(step) for step in re.findall(r"continuing from step (\d+)", output)]
    print(f"{num_killed} kills; continued from steps {resumed_at}")
    assert num_killed == NUM_KILLS
    assert len(resumed_at) >= 0.5 * NUM_KILLS
    assert curve(killed) == curve(whole)
    assert weights_digest(killed, tmp_path) == weights_digest(whole, tmp_path)


def wait_for_step(process: subprocess.Popen[str], run_folder: Path, step: int, *, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not any(row["step"] >= step for row in read_metrics(run_folder / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.05)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("placement", ["colocated", pytest.param("fully_async", marks=pytest.mark.slow)])
def test_ctrl_c_saves_a_checkpoint_that_resume_continues_from(placement: str, warm_model: Path, tmp_path: Path):
    folder = tmp_path / "run"
    words = with_words(words_for(warm_model, folder), "checkpoint.every=0", "steps=12", f"placement={placement}")
    process = start(*words, cwd=tmp_path)
    wait_for_step(process, folder, 4)
    press_ctrl_c(process)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert f"rl resume={folder}" in output
    checkpoint = Checkpoints(folder, keep_last=2).newest()
    assert checkpoint is not None
    assert checkpoint.step == read_metrics(folder / "metrics.jsonl")[-1]["step"] >= 4
    assert f"continuing from step {checkpoint.step}" in run_ok(f"resume={folder}", cwd=tmp_path)
    assert [step for step, _, _ in curve(folder)] == list(range(13))


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(warm_model: Path, tmp_path: Path):
    folder = tmp_path / "run"
    process = start(
        *with_words(words_for(warm_model, folder), "algorithm.prompts_per_step=256", "steps=200"), cwd=tmp_path
    )
    wait_for_step(process, folder, 1)
    press_ctrl_c(process)
    time.sleep(0.05)
    began = time.monotonic()
    press_ctrl_c(process)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - began < 3


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(warm_model: Path, tmp_path: Path):
    folder = tmp_path / "run"
    run_ok(*with_words(words_for(warm_model, folder), "steps=6"), cwd=tmp_path)
    victim = folder / "checkpoints" / "step-000006"
    weights = next((victim / "trainer" / "weights").glob("*.distcp"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    output = run_ok(f"resume={folder}", "steps=6", cwd=tmp_path)
    assert f"checkpoint {victim} is damaged (trainer/weights/{weights.name} has other contents" in output
    assert "continuing from step 3" in output
    assert [step for step, _, _ in curve(folder)] == list(range(7))
    assert list(folder.glob("metrics.set_aside.*.jsonl"))


def test_a_run_killed_before_its_first_checkpoint_starts_again_with_a_clean_curve(warm_model: Path, tmp_path: Path):
    folder = tmp_path / "run"
    process = start(*with_words(words_for(warm_model, folder), "checkpoint.every=0", "steps=6"), cwd=tmp_path)
    wait_for_step(process, folder, 2)
    process.kill()
    process.communicate()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/me')  # a line torn by the kill
    run_ok(f"resume={folder}", cwd=tmp_path)
    assert [step for step, _, _ in curve(folder)] == list(range(7))


@pytest.mark.slow
def test_resume_changes_steps_and_logger_and_nothing_else(warm_model: Path, tmp_path: Path):
    folder = tmp_path / "run"
    run_ok(*with_words(words_for(warm_model, folder), "steps=3"), cwd=tmp_path)
    refused = rl(f"resume={folder}", "seed=4", cwd=tmp_path)
    assert refused.returncode == 2
    assert "seed cannot change within a run" in refused.stderr
    assert "all 3 steps are done" in run_ok(f"resume={folder}", cwd=tmp_path)
    run_ok(f"resume={folder}", "steps=4", "logger=wandb", "logger.mode=offline", cwd=tmp_path)
    assert [step for step, _, _ in curve(folder)] == [0, 1, 2, 3, 4]
    assert list(folder.glob("wandb/offline-run-*"))


@pytest.mark.slow
def test_a_folder_in_use_is_refused(warm_model: Path, tmp_path: Path):
    folder = tmp_path / "run"
    process = start(*with_words(words_for(warm_model, folder), "steps=500"), cwd=tmp_path)
    wait_for_step(process, folder, 1)
    other = rl(f"resume={folder}", cwd=tmp_path)
    process.kill()
    process.communicate()
    assert other.returncode == 2
    assert "is in use" in other.stderr


@pytest.mark.slow
def test_kept_checkpoints_are_the_last_ones_and_each_lists_its_files(warm_model: Path, tmp_path: Path):
    folder = tmp_path / "run"
    run_ok(*with_words(words_for(warm_model, folder), "steps=9", "checkpoint.keep_last=2"), cwd=tmp_path)
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["step-000006", "step-000009"]
    manifest = json.loads((folder / "checkpoints" / "step-000009" / "manifest.json").read_text())
    assert {"state.json", "trainer/schedule.json"} <= set(manifest)
