"""A sweep that is killed, twice, and started again."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from rl.loggers.jsonl import read_metrics
from rl.sweeps.ledger import State, read_ledger
from tests.command import rl, run_ok, start
from tests.processes import command_of, descendants, is_alive, wait_until

WORDS = (
    *("-m", "experiment=quickstart", "model=tiny", "steps=3", "algorithm.prompts_per_step=4", "task.eval_limit=10"),
    *("algorithm.prompts_per_mini_batch=4", "checkpoint.every=1", "evaluation.at_start=false"),
)
GRID = ("seed=range(1,4)", "algorithm.clip_high=0.2,0.28")


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() + str(path.stat().st_mtime_ns) for path in files}


def states(folder: Path) -> list[State]:
    return [entry.record.state for entry in read_ledger(folder)] if (folder / "sweep.json").exists() else []


def wait_for_point(folder: Path, number: int, process: subprocess.Popen[str]) -> None:
    """Until the point has a checkpoint, so that there is something to go on from."""
    checkpoints = folder / f"{number:03d}" / "checkpoints"

    def has_one() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return any(checkpoints.glob("step-*"))

    wait_until(has_one, f"point {number} has a checkpoint", timeout_s=600)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_sweep_runs_what_is_missing_and_touches_nothing_else(tmp_path: Path):
    folder = tmp_path / "sweep"
    command = (*WORDS, *GRID, f"output_dir={folder}")

    sweep = start(*command, cwd=tmp_path)
    wait_for_point(folder, 2, sweep)
    children = descendants(sweep.pid)
    os.killpg(sweep.pid, signal.SIGKILL)
    sweep.wait(timeout=30)
    wait_until(lambda: not any(is_alive(child) for child in children), "no child is left", timeout_s=60)
    assert states(folder)[:2] == [State.done] * 2
    assert states(folder)[3:] == [State.pending] * 3
    done = {number: hashes(folder / f"{number:03d}") for number in (0, 1)}

    sweep = start(*command, cwd=tmp_path)
    wait_for_point(folder, 3, sweep)
    shown = run_ok("sweep", "show", str(folder), cwd=tmp_path)
    assert "003" in shown and "running" in shown and "2 of" not in shown.splitlines()[0]
    os.killpg(sweep.pid, signal.SIGINT)
    output, _ = sweep.communicate(timeout=120)
    assert sweep.returncode == 130, output
    assert "rl -m" in output.splitlines()[-1]
    assert not [pid for pid in descendants(os.getpid()) if str(folder) in command_of(pid)]
    done[2] = hashes(folder / "002")

    other = rl(*WORDS, "seed=range(1,5)", GRID[1], f"output_dir={folder}", cwd=tmp_path)
    assert other.returncode == 2
    assert "only in this command: seed=range(1,5)" in other.stderr

    output = run_ok(*command, cwd=tmp_path, timeout_s=600)
    assert states(folder) == [State.done] * 6
    assert {number: hashes(folder / f"{number:03d}") for number in (0, 1, 2)} == done
    for entry in read_ledger(folder):
        assert [row["step"] for row in read_metrics(entry.folder / "metrics.jsonl")][-3:] == [1, 2, 3]
    assert re.search(r"[23] to run, 1 at a time; about", output), "point 3 may have ended before the interrupt came"
    assert "| algorithm.clip_high=0.2 | 3 |" in output and "(best)" in output
    assert (folder / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    before = hashes(folder)
    assert "all points are done" in run_ok(*command, cwd=tmp_path)
    changed = {path for path in before if hashes(folder)[path] != before[path]}
    assert {Path(path).name for path in changed} <= {"sweep.png"}


@pytest.mark.slow
def test_a_failed_point_says_why_and_the_others_run(tmp_path: Path):
    folder = tmp_path / "sweep"
    done = rl(*WORDS, "task.max_prompt_tokens=5,16", f"output_dir={folder}", cwd=tmp_path, timeout_s=600)
    assert done.returncode == 1
    assert [state.value for state in states(folder)] == ["failed", "done"]
    (failed, _) = read_ledger(folder)
    assert "task.max_prompt_tokens=5" in failed.record.why
    assert failed.record.why[:60] in done.stdout
    assert "| task.max_prompt_tokens=5 | 0 of 1 |" in done.stdout
    assert "Traceback" not in done.stdout


def test_every_bad_point_is_refused_before_any_starts(tmp_path: Path):
    done = rl(*WORDS, "algorithm.clip_high=0.2,-1,-2", f"output_dir={tmp_path / 'sweep'}", cwd=tmp_path)
    assert done.returncode == 2
    assert "2 of 3 points cannot run, so none is started" in done.stderr
    for value in ("-1.0", "-2.0"):
        assert f"algorithm.clip_high={value} is out of range" in done.stderr
    assert not (tmp_path / "sweep").exists()


def test_the_plan_of_a_sweep_starts_nothing(tmp_path: Path):
    output = run_ok(*WORDS, "seed=1,2", "mode=plan", cwd=tmp_path)
    assert output.count("plan of quickstart") == 2
    assert "plan of a sweep: 2 points\n" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_points_as_submitit_s_jobs(tmp_path: Path):
    """By its executor of this machine, which takes the same way as the one for Slurm."""
    pytest.importorskip("submitit")
    folder = tmp_path / "sweep"
    launcher = ("sweep.launcher=submitit_local", "sweep.slurm.timeout_min=10")
    command = (*WORDS, "seed=1,2", f"output_dir={folder}", *launcher)
    output = run_ok(*command, cwd=tmp_path)
    assert "2 job(s) submitted" in output
    wait_until(lambda: states(folder) == [State.done] * 2, "both are done", timeout_s=600)
    assert "all points are done" in run_ok(*command, cwd=tmp_path)
    wrong = rl(*WORDS, "seed=3", f"output_dir={tmp_path / 'b'}", *launcher, "sweep.slurm.no_such=1", cwd=tmp_path)
    assert wrong.returncode == 2 and "sweep.slurm" in wrong.stderr and "no_such" in wrong.stderr
