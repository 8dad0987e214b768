"""What the real W&B client brings to a server: live, by `wandb sync`, and from metrics.jsonl after the fact.

The server is ours (tests/wandb_server.py); the reader of the offline files is W&B's own, inside `wandb sync`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl.config.compose import compose_run_config
from rl.config.load import save_run_yaml
from rl.config.schema import JsonlLoggerConfig, WandbLoggerConfig
from rl.loggers.facts import RunFacts
from rl.loggers.fanout import RunLog
from rl.loggers.jsonl import NoTracker, read_metrics
from rl.loggers.samples import read_samples
from rl.loggers.wandb import WandbLogger
from tests.contract.test_logger_contract import make_group
from tests.wandb_server import WandbServer, wait_until_sent

ROOT = Path(__file__).resolve().parents[3]
CLAIMS = {
    "peak": {"metric": "eval/sums/greedy", "statistic": "max", "value": 0.9, "first_step": None, "last_step": None},
    "late": {"metric": "reward/mean", "statistic": "mean", "value": 0.5, "first_step": 5, "last_step": 6},
    "faster": {"metric": "time/step_s", "statistic": "ratio", "value": 1.8, "first_step": None, "last_step": None},
}
FACTS = RunFacts("quickstart/000", "a sweep", ("quickstart", "published"), {"published": {"claims": CLAIMS}})


@pytest.fixture
def server(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    with WandbServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        yield server


def row(step):
    return {
        "reward/mean": np.float32(step / 8),
        "eval/sums/greedy": 1 / (1 + abs(step - 2)) if step % 2 == 0 else None,
        "rollout/tokens_per_s": 1000.0 + step,
        "prompts_trained": 32 * step,
        "tokens_trained": 1000 * step,
    }


def log_steps(folder, steps, *, mode, resume_step=None):
    if mode == "none":
        tracker = NoTracker(JsonlLoggerConfig())
    else:
        tracker = WandbLogger(WandbLoggerConfig(mode=mode), run_folder=folder, facts=FACTS)
    log = RunLog(
        WandbLoggerConfig(sample_every=4),
        run_folder=folder,
        name="r",
        total_steps=9,
        tracker=tracker,
        resume_step=resume_step,
    )
    for step in steps:
        if step:
            log.log_rollouts([make_group(f"answer of step {step}")], step=step)
        log.log(row(step), step=step)
    if isinstance(tracker, WandbLogger):
        wait_until_sent(tracker)
    log.close(failed=False)


def sync(folder):
    offline = sorted(map(str, folder.glob("wandb/offline-run-*")))
    command = [sys.executable, "-m", "wandb", "sync", *offline]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def upload(folder, *overrides):
    command = [sys.executable, str(ROOT / "scripts" / "upload_wandb.py"), str(folder), *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def numbers(stored):
    """What the server's rows say under the keys of metrics.jsonl, nothing of W&B's own."""
    extra = ("published/", "samples", "_")
    return [{key: value for key, value in row.items() if not key.startswith(extra)} for row in stored]


def logged(path):
    return [{key: value for key, value in row.items() if value is not None} for row in read_metrics(path)]


def only_run(server):
    (run,) = server.runs.values()
    return run


def samples_of(run):
    """Tables of samples in the order of their rows, as (step, response)."""
    found = []
    for stored in run.rows:
        if "samples" in stored:
            table = json.loads(run.files[stored["samples"]["path"]])
            places = [table["columns"].index(name) for name in ("step", "response")]
            found += [tuple(line[place] for place in places) for line in table["data"]]
    return found


def axes(run):
    """The last define_metric of each name: name -> axis. W&B sends an axis by its place in the list, from 1."""
    metrics = run.config["_wandb"]["m"]
    names = [metric.get("1") or metric.get("2") for metric in metrics]
    return {
        name: names[metric["5"] - 1] if "5" in metric else None for name, metric in zip(names, metrics, strict=True)
    }


@pytest.mark.slow
def test_a_run_that_was_recorded_offline_and_resumed_arrives_whole_in_one_run(tmp_path, server):
    log_steps(tmp_path, range(7), mode="offline")
    log_steps(tmp_path, range(5, 9), mode="offline", resume_step=4)
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2
    sync(tmp_path)

    run = only_run(server)
    (aside,) = tmp_path.glob("metrics.set_aside.*.jsonl")
    kept = logged(tmp_path / "metrics.jsonl")
    assert numbers(run.rows) == [*kept[:5], *logged(aside), *kept[5:]]
    assert [stored["_step"] for stored in run.rows] == list(range(11))
    assert run.exit_code == 0
    assert (run.name, run.project) == ((tmp_path / "wandb_run_id").read_text(), "rl")
    assert run.fields["displayName"] == "quickstart/000"
    assert run.fields["groupName"] == "a sweep"
    assert run.fields["tags"] == ["quickstart", "published"]
    assert samples_of(run) == [(step, f"answer of step {step}") for step in (1, 1, 4, 4, 8, 8)]

    summary = json.loads(run.summary)
    assert summary["best/eval/sums/greedy"] == 1.0, "of step 2, before the resume"
    assert (summary["best/reward/mean"], summary["reward/mean"], summary["step"]) == (1.0, 1.0, 8)
    assert {stored["published/peak"] for stored in run.rows} == {0.9}
    assert [stored["step"] for stored in run.rows if "published/late" in stored] == [5, 6, 5, 6]
    assert not [key for stored in run.rows for key in stored if key == "published/faster"]


@pytest.mark.slow
def test_what_was_not_sent_live_is_uploaded_later_and_a_second_upload_adds_nothing(tmp_path, server):
    log_steps(tmp_path, range(3), mode="online")
    found = axes(only_run(server))
    assert found["reward/mean"] == found["eval/*"] == found["published/peak"] == "prompts_trained"
    assert found["time/*"] == found["rollout/tokens_per_s"] == found["prompts_trained"] == "step"
    before = only_run(server).rows
    assert numbers(before) == logged(tmp_path / "metrics.jsonl")

    log_steps(tmp_path, range(3, 7), mode="none", resume_step=2)
    save_run_yaml(compose_run_config(["experiment=quickstart"]), tmp_path / "run.yaml")
    first = upload(tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.startswith("uploaded 4 rows, 3 were there already: http://127.0.0.1")
    run = only_run(server)
    assert run.rows[:3] == before
    assert numbers(run.rows) == logged(tmp_path / "metrics.jsonl")
    assert [stored["_step"] for stored in run.rows] == list(range(7))
    assert len(samples_of(run)) == len(read_samples(tmp_path)) == 4
    assert json.loads(run.summary)["best/eval/sums/greedy"] == 1.0
    assert run.fields["tags"] == ["quickstart"]
    assert run.config["algorithm"]["group_size"] == compose_run_config(["experiment=quickstart"]).algorithm.group_size

    second = upload(tmp_path)
    assert second.stdout.startswith("uploaded 0 rows, 7 were there already")
    assert len(only_run(server).rows) == 7


def test_an_upload_of_nothing_or_with_another_key_is_refused(tmp_path):
    assert "holds no row" in upload(tmp_path).stderr
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    save_run_yaml(compose_run_config(["experiment=quickstart"]), tmp_path / "run.yaml")
    done = upload(tmp_path, "seed=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "seed cannot be set here" in done.stderr
