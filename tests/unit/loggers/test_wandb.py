"""The real W&B client, without a network."""

import json
import os
import socket
import struct
import subprocess
import sys
import time

import pytest
from wandb.proto import wandb_internal_pb2

from rl.config.schema import ConfigError, WandbLoggerConfig
from rl.loggers.facts import RunFacts
from rl.loggers.wandb import WandbLogger
from tests.wandb_server import wait_until_sent

SECRET = "marker5ecret0123456789abcdef0123456789ab"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", SECRET)


FACTS = RunFacts("r", "g", ("t", "published"), {"algorithm": {"clip_low": 0.2}})
IN_A_SCRIPT = (
    "import pathlib\n"
    "from rl.config.schema import WandbLoggerConfig as Config\n"
    "from rl.loggers.facts import RunFacts\n"
    "from rl.loggers.wandb import WandbLogger\n"
    "facts = RunFacts('r', 'g', (), {})\n"
)


def logger(folder, mode="offline"):
    return WandbLogger(WandbLoggerConfig(mode=mode), run_folder=folder, facts=FACTS)


def records(folder):
    """All records of the newest offline run. The file is in the log format of LevelDB, after a header of 7 bytes:
    blocks of 32 KiB holding pieces (checksum u32, length u16, type u8: 1 whole, 2 first, 3 middle, 4 last)."""
    (path,) = folder.glob("wandb/latest-run/run-*.wandb")
    content = path.read_bytes()
    found, payload, place = [], b"", 7
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        payload += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            found.append(record)
            payload = b""
    return found


def history(found):
    rows = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_an_offline_run_holds_every_row_its_config_and_its_end_and_no_secret(tmp_path):
    tracker = logger(tmp_path)
    for step in range(12):
        tracker.log({"reward/mean": step / 4, "eval/a/greedy": 0.5 if step % 5 == 0 else None}, step=step)
    wait_until_sent(tracker)
    tracker.close(failed=False)

    found = records(tmp_path)
    rows = history(found)
    assert [row["step"] for row in rows] == list(range(12))
    assert [row["reward/mean"] for row in rows] == [step / 4 for step in range(12)]
    assert [row["step"] for row in rows if "eval/a/greedy" in row] == [0, 5, 10]
    (run,) = (record.run for record in found if record.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update if item.key}
    assert config["algorithm"] == {"clip_low": 0.2}
    assert (run.display_name, run.run_group, list(run.tags)) == ("r", "g", ["t", "published"])
    (end,) = (record.exit for record in found if record.WhichOneof("record_type") == "exit")
    assert end.exit_code == 0
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


def test_a_failed_run_ends_with_exit_code_1_and_a_resumed_one_keeps_its_id(tmp_path):
    ids = []
    for _ in range(2):
        tracker = logger(tmp_path)
        tracker.log({"reward/mean": 0.0}, step=0)
        wait_until_sent(tracker)
        tracker.close(failed=True)
        found = records(tmp_path)
        ids += [record.run.run_id for record in found if record.WhichOneof("record_type") == "run"]
        assert [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"] == [1]
    assert ids == [(tmp_path / "wandb_run_id").read_text()] * 2


def test_the_environment_mode_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = logger(tmp_path, mode="online")
    tracker.log({"reward/mean": 0.0}, step=0)
    wait_until_sent(tracker)
    tracker.close(failed=False)
    assert len(history(records(tmp_path))) == 1


def test_without_a_key_the_run_is_recorded_offline_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("WANDB_API_KEY")
    tracker = logger(tmp_path, mode="online")
    tracker.log({"reward/mean": 0.25}, step=0)
    wait_until_sent(tracker)
    tracker.close(failed=False)
    assert "recording offline" in caplog.text
    assert [row["reward/mean"] for row in history(records(tmp_path))] == [0.25]


def test_an_unknown_mode_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"logger\.mode=sometimes"):
        logger(tmp_path, mode="sometimes")


def test_a_killed_run_leaves_all_its_rows_and_a_failed_status(tmp_path):
    script = (
        f"{IN_A_SCRIPT}import os, signal, time\n"
        f"tracker = WandbLogger(Config(mode='offline'), run_folder=pathlib.Path({str(tmp_path)!r}), facts=facts)\n"
        "for step in range(5): tracker.log({'reward/mean': 0.0}, step=step)\n"
        "while tracker.num_waiting: time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    deadline = time.monotonic() + 20
    ends = []
    while not ends and time.monotonic() < deadline:
        time.sleep(0.2)
        found = records(tmp_path)
        ends = [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"]
    assert ends == [1]
    assert [row["step"] for row in history(found)] == list(range(5))


@pytest.mark.slow
def test_a_server_that_never_answers_does_not_hold_the_process(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = (
            f"{IN_A_SCRIPT}tracker = WandbLogger(Config(), run_folder=pathlib.Path({str(tmp_path)!r}), facts=facts)\n"
            "for step in range(100): tracker.log({'reward/mean': 0.0}, step=step)\n"
            "tracker.close(failed=False)\n"
        )
        start = time.monotonic()
        environment = os.environ | {"WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, timeout=60, check=True, capture_output=True, text=True
        )
        assert time.monotonic() - start < 15.0
    assert "did not finish within" in done.stderr
    assert SECRET not in done.stdout + done.stderr
