"""No secret of the environment is left behind by a run, whether it finishes or crashes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rl.loggers.jsonl import read_metrics
from tests.command import environment

LEAKY_TASK = """
import logging, os
from rl.config.tasks import ArithmeticConfig
from rl.tasks.arithmetic import Arithmetic

class Leaky(Arithmetic):
    config_class = ArithmeticConfig

    async def grade(self, prompt, rollouts):
        token = os.environ["HF_TOKEN"]
        logging.getLogger("hub").warning("GET https://host/model?token=%s", token)
        if os.environ["CRASHES"] == "1":
            raise ConnectionError(f"401 for https://host/model?token={token}, proxy {os.environ['HTTPS_PROXY']}")
        return await super().grade(prompt, rollouts)
"""
SECRETS = {
    "WANDB_API_KEY": "marker0a" * 5,
    "HF_TOKEN": "hf_marker1/+b" * 3,
    "AWS_SECRET_ACCESS_KEY": "marker2c" * 4,
    "DB_PASSWORD": "marker3",
    "HTTPS_PROXY": "http://me:marker4pass@127.0.0.1:9",
}
WORDS = (
    "experiment=quickstart",
    "model=tiny",
    "task._target_=leaky.Leaky",
    "steps=2",
    "algorithm.prompts_per_step=4",
    "algorithm.prompts_per_mini_batch=4",
    "task.eval_limit=8",
    "logger=wandb",
    "logger.mode=offline",
    "logger.sample_every=1",
)


def run(*words: str, cwd: Path, crashes: bool) -> subprocess.CompletedProcess[bytes]:
    changes = SECRETS | {"CRASHES": str(int(crashes)), "HOME": str(cwd), "PYTHONPATH": f"{cwd}:{Path.cwd()}"}
    command = [sys.executable, "-m", "rl", *WORDS, *words]
    return subprocess.run(command, cwd=cwd, env=environment(**changes), capture_output=True, timeout=240, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("crashes", [False, True], ids=["finishes", "crashes"])
def test_no_byte_of_a_secret_is_in_the_run_folder_in_wandb_files_or_in_the_output(tmp_path, crashes):
    (tmp_path / "leaky.py").write_text(LEAKY_TASK)
    done = run("output_dir=run", cwd=tmp_path, crashes=crashes)
    output = done.stdout + done.stderr
    assert done.returncode == int(crashes), output.decode()
    folder = tmp_path / "run"
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == ([0] if crashes else [0, 1, 2])
    assert b"GET https://host/model?token=***" in (folder / "run.log").read_bytes()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    if crashes:
        (crash,) = folder.glob("crash-*.log")
        assert b"401 for https://host/model?token=***, proxy http://me:***@127.0.0.1:9" in crash.read_bytes()
    for text in (output, *(path.read_bytes() for path in files)):
        assert b"marker" not in text


def test_a_secret_on_the_command_line_is_refused_and_not_said(tmp_path):
    (tmp_path / "leaky.py").write_text(LEAKY_TASK)
    word = f"+hardware.trainer_env.HF_TOKEN='{SECRETS['HF_TOKEN']}'"
    done = run(word, "output_dir=run", cwd=tmp_path, crashes=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"rl: hardware.trainer_env.HF_TOKEN holds a secret")
    assert b"marker" not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()
