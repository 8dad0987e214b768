from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rl import exit_codes
from rl.config.schema import ConfigError
from rl.sweeps import ledger
from rl.sweeps.ledger import Record, State, begin, end, open_sweep, read_ledger, read_record, write_record
from rl.sweeps.points import Point, expand

WORDS = ["experiment=quickstart", "seed=1,2"]


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return expand(WORDS)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_sweep_writes_its_words_and_every_point_s_settings_before_one_starts(tmp_path: Path, points: list[Point]):
    open_sweep(tmp_path, WORDS, points)
    entries = read_ledger(tmp_path)
    assert [(entry.folder.name, entry.label, entry.record.state) for entry in entries] == [
        ("000", "seed=1", State.pending),
        ("001", "seed=2", State.pending),
    ]
    assert [yaml.safe_load((entry.folder / "run.yaml").read_text())["seed"] for entry in entries] == [1, 2]


def test_the_same_words_again_write_nothing_over(tmp_path: Path, points: list[Point]):
    open_sweep(tmp_path, WORDS, points)
    before = files(tmp_path)
    open_sweep(tmp_path, WORDS, points)
    open_sweep(tmp_path, WORDS[::-1], points)
    assert files(tmp_path) == before


def test_other_words_are_refused_with_the_difference(tmp_path: Path, points: list[Point]):
    open_sweep(tmp_path, WORDS, points)
    with pytest.raises(ConfigError, match=r"Only in that one: seed=1,2; only in this command: seed=1,3 steps=9\. "):
        open_sweep(tmp_path, ["experiment=quickstart", "seed=1,3", "steps=9"], points)


def test_words_that_mean_something_else_by_now_are_refused_key_by_key(tmp_path: Path):
    open_sweep(tmp_path, WORDS, expand(WORDS))
    later = expand(WORDS)
    later[1].config.algorithm.group_size = 3  # as if the experiment's file had been edited
    with pytest.raises(ConfigError, match=r"001 was made.*algorithm\.group_size was 16, is 3"):
        open_sweep(tmp_path, WORDS, later)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, points: list[Point]):
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(ConfigError, match="not empty and holds no sweep"):
        open_sweep(tmp_path, WORDS, points)
    assert files(tmp_path) == {"thesis.txt": b"years"}
    with pytest.raises(ConfigError, match="holds no sweep"):
        read_ledger(tmp_path)


def test_a_point_is_pending_running_done(tmp_path: Path):
    assert read_record(tmp_path) == Record()
    record = begin(tmp_path)
    assert (record.attempts, record.pid, record.host) == (1, os.getpid(), socket.gethostname())
    done = end(tmp_path, exit_codes.DONE)
    assert (done.state, done.exit_code, done.why) == (State.done, 0, "")
    assert read_record(tmp_path) == done
    assert [path.name for path in tmp_path.iterdir()] == ["point.json"]


def test_the_time_of_several_attempts_adds_up(tmp_path: Path):
    write_record(
        tmp_path, Record(State.interrupted, exit_code=130, attempts=1, started=time.time() - 500, seconds=100.0)
    )
    begin(tmp_path)
    done = end(tmp_path, 0)
    assert done.attempts == 2
    assert 100.0 <= done.seconds < 101.0


@pytest.mark.parametrize(
    ("exit_code", "state", "why"),
    [
        (exit_codes.INTERRUPTED, State.interrupted, ""),
        (-15, State.interrupted, ""),
        (-2, State.interrupted, ""),
        (-9, State.failed, "its process was ended by signal 9 (SIGKILL)"),
        (1, State.failed, "ValueError: the disk is full"),
    ],
)
def test_how_a_process_ended_says_what_became_of_the_point(tmp_path: Path, exit_code: int, state: State, why: str):
    (tmp_path / "crash-20260101-000000.log").write_text(
        "Traceback\n  File x\nValueError: the disk is full\nin step 3\n"
    )
    begin(tmp_path)
    record = end(tmp_path, exit_code)
    assert (record.state, record.why) == (state, why)


def test_a_point_whose_process_is_gone_is_interrupted_and_one_that_lives_runs(tmp_path: Path):
    code = "print('up', flush=True); input()"
    command = [sys.executable, "-S", "-c", code, str(tmp_path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    record = Record(State.running, attempts=1, started=time.time(), host=socket.gethostname(), pid=child.pid)
    write_record(tmp_path, record)
    assert read_record(tmp_path).state is State.running
    child.kill()
    child.wait()
    assert read_record(tmp_path).state is State.interrupted
    # A number that another program has by now.
    write_json = json.loads((tmp_path / "point.json").read_text()) | {"pid": os.getpid()}
    ledger.write_json(tmp_path / "point.json", write_json)
    assert read_record(tmp_path).state is State.interrupted
