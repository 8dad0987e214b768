"""What every run logger must do, whatever tracker is behind it."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from rich.console import Console

from rl.config.build import build
from rl.config.schema import JsonlLoggerConfig, WandbLoggerConfig
from rl.loggers.facts import RunFacts
from rl.loggers.fanout import RunLog
from rl.loggers.jsonl import read_metrics
from rl.loggers.samples import read_samples
from rl.loggers.tracker import BackgroundTracker
from rl.types import FinishReason, Prompt, Rollout, RolloutGroup


class Raises(BackgroundTracker):
    def open(self):
        raise ConnectionError("refused")

    def send(self, metrics, *, step, samples):
        raise ValueError("bad row")

    def finish(self, *, failed):
        raise OSError("gone")


class Hangs(Raises):
    def open(self):
        time.sleep(3600)


CONFIGS = {"jsonl": JsonlLoggerConfig(), "wandb": WandbLoggerConfig(mode="offline")}
TRACKERS = [*CONFIGS, "raises", "hangs"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.fixture(autouse=True)
def opened():
    """Trackers of runs that a test leaves open, as a killed run does."""
    trackers = []
    yield trackers
    for tracker in trackers:
        tracker.close(failed=True)


def open_log(folder, tracker_name, opened, *, resume_step=None, console=None):
    config = CONFIGS.get(tracker_name, CONFIGS["jsonl"])
    if tracker_name in CONFIGS:
        tracker = build(config, run_folder=folder, facts=RunFacts("r", "g", ("t",), {"seed": 0}))
    elif tracker_name == "raises":
        tracker = Raises("raises", retry_s=0.01)
    else:
        tracker = Hangs("hangs", close_limit_s=0.2)
    opened.append(tracker)
    return RunLog(
        config,
        run_folder=folder,
        name="r",
        total_steps=6,
        tracker=tracker,
        resume_step=resume_step,
        console=console or Console(file=io.StringIO(), width=120),
    )


def make_group(text="4"):
    prompt = Prompt("sums:0", ({"role": "user", "content": "2+2="},), np.zeros(1, np.int32), "4", "sums")
    arrays = (np.zeros(2, np.int32), np.array([False, True]), np.zeros(2, np.float32))
    versions = np.array([-1, 0], np.int32)
    rollouts = [
        Rollout(0, index, *arrays, 1.0, versions, FinishReason.STOP, text=text, reward=float(index))
        for index in range(2)
    ]
    return RolloutGroup(0, prompt, rollouts)


@pytest.mark.parametrize("tracker", TRACKERS)
def test_every_step_is_on_disk_before_close_and_logging_is_quick(tmp_path, tracker, opened):
    run_log = open_log(tmp_path, tracker, opened)
    start = time.monotonic()
    for step in range(100):
        run_log.log({"reward/mean": np.float32(step), "train/loss": float("nan")}, step=step)
    assert time.monotonic() - start < 1.0
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows == [{"step": step, "reward/mean": float(step), "train/loss": None} for step in range(100)]


@pytest.mark.parametrize("tracker", TRACKERS)
def test_closing_after_a_failure_is_quick_draws_the_curves_and_can_be_repeated(tmp_path, tracker, opened):
    console = Console(file=io.StringIO(), width=120)
    run_log = open_log(tmp_path, tracker, opened, console=console)
    run_log.log({"eval/sums/greedy": 0.25}, step=0)
    run_log.log({"reward/mean": 0.5}, step=1)
    start = time.monotonic()
    run_log.close(failed=True)
    run_log.close(failed=False)
    assert time.monotonic() - start < 15.0
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    text = console.file.getvalue()
    assert "stopped early at step 1 of 6" in text
    assert "metrics.jsonl, curves.png" in text
    assert text.count("stopped early") == 1


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_resumed_run_sets_rows_past_its_checkpoint_aside(tmp_path, tracker, opened):
    run_log = open_log(tmp_path, tracker, opened)
    for step in range(5):
        run_log.log({"reward/mean": 0.0}, step=step)
    resumed = open_log(tmp_path, tracker, opened, resume_step=2)
    for step in (3, 4, 5):
        resumed.log({"reward/mean": 1.0}, step=step)
    assert [row["reward/mean"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    (aside,) = tmp_path.glob("metrics.set_aside.*.jsonl")
    assert [row["step"] for row in read_metrics(aside)] == [3, 4]


def test_a_crash_in_step_5_leaves_steps_0_to_5(tmp_path):
    script = (
        "import pathlib, sys\n"
        "from rl.config.schema import JsonlLoggerConfig as Config\n"
        "from rl.loggers.fanout import RunLog\n"
        "from rl.loggers.jsonl import NoTracker\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "log = RunLog(Config(), run_folder=folder, name='r', total_steps=9, tracker=NoTracker(Config()))\n"
        "for step in range(9):\n"
        "    log.log({'reward/mean': 0.0}, step=step)\n"
        "    if step == 5: raise RuntimeError('step 5')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "RuntimeError: step 5" in done.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(6))


def test_an_unlisted_key_is_refused_before_anything_is_written(tmp_path, opened):
    run_log = open_log(tmp_path, "jsonl", opened)
    with pytest.raises(AssertionError, match="reward/meen"):
        run_log.log({"reward/meen": 1.0}, step=0)
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("step", [1, 0])
def test_a_step_is_logged_once_and_in_order(tmp_path, step, opened):
    run_log = open_log(tmp_path, "jsonl", opened)
    run_log.log({}, step=1)
    with pytest.raises(AssertionError, match="one row per step"):
        run_log.log({}, step=step)


def test_samples_come_with_the_first_step_and_every_tenth(tmp_path, opened):
    run_log = open_log(tmp_path, "jsonl", opened)
    for step in range(1, 25):
        run_log.log_rollouts([make_group()], step=step)
    lines = (tmp_path / "samples.txt").read_text().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1", "1", "10", "10", "20", "20"]


def test_nothing_that_a_model_wrote_reaches_the_terminal(tmp_path, opened):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    run_log = open_log(tmp_path, "jsonl", opened, console=console)
    run_log.log_rollouts([make_group("\x1b]0;owned\x07")], step=1)
    run_log.log({"reward/mean": 1.0, "reward/part/[red]a\x1b": 1.0}, step=1)
    run_log.close(failed=False)
    assert "owned" not in console.file.getvalue()
    assert "\x1b]" not in console.file.getvalue() + (tmp_path / "samples.txt").read_text()


def test_the_tracker_gets_the_same_rows_and_samples_as_the_files(tmp_path):
    rows, responses = [], []

    class Recorder(BackgroundTracker):
        def open(self):
            pass

        def send(self, metrics, *, step, samples):
            rows.append({"step": step, **metrics})
            responses.extend((sample.step, sample.response) for sample in samples)

        def finish(self, *, failed):
            rows.append(failed)

    run_log = RunLog(
        JsonlLoggerConfig(),
        run_folder=tmp_path,
        name="r",
        total_steps=3,
        tracker=Recorder("recorder"),
        console=Console(file=io.StringIO()),
    )
    for step in range(4):
        if step > 0:
            run_log.log_rollouts([make_group(f"answer {step}")], step=step)
        run_log.log({"reward/mean": step / 2, "reward/part/a b": True}, step=step)
    run_log.close(failed=False)
    assert responses == [(1, "answer 1")] * 2
    assert [(sample.step, sample.response) for sample in read_samples(tmp_path)] == responses
    assert rows == [*read_metrics(tmp_path / "metrics.jsonl"), False]


def test_ctrl_c_in_a_terminal_ends_the_live_line_and_prints_the_table(tmp_path):
    script = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it\n"
        "from rl.config.schema import WandbLoggerConfig as Config\n"
        "from rl.loggers.facts import RunFacts\n"
        "from rl.loggers.fanout import RunLog\n"
        "from rl.loggers.wandb import WandbLogger\n"
        "folder, facts = pathlib.Path(sys.argv[1]), RunFacts('r', 'g', (), {})\n"
        "tracker = WandbLogger(Config(mode='offline'), run_folder=folder, facts=facts)\n"
        "log = RunLog(Config(), run_folder=folder, name='r', total_steps=900, tracker=tracker)\n"
        "try:\n"
        "    for step in range(900):\n"
        "        log.log({'reward/mean': 0.5}, step=step)\n"
        "        while tracker.location is None: time.sleep(0.05)\n"
        "        time.sleep(0.1)\n"
        "except KeyboardInterrupt:\n"
        "    log.close(failed=True)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", script, str(tmp_path)])
    output = b""
    while not re.search(rb"step [1-9]\d*/900", output):  # after W&B has started
        output += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an input/output error
        while chunk := os.read(terminal, 4096):
            output += chunk
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    text = output.decode()
    assert "stopped early at step" in text
    assert "upload with 'wandb sync'" in text.replace("\r\n", "")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert (tmp_path / "curves.png").exists()
