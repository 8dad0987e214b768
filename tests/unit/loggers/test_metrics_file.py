import json

import numpy as np
import pytest
import torch

from rl.config.schema import ConfigError
from rl.loggers.jsonl import MetricsFile, read_metrics, set_aside_after, to_number


def write_steps(path, steps):
    file = MetricsFile(path)
    for step in steps:
        file.write({"reward/mean": step / 10}, step=step)
    file.close()


@pytest.mark.parametrize(
    "value",
    [1, True, 1.0, np.int64(1), np.float32(1), np.bool_(True), np.array([1]), torch.tensor(1), torch.tensor([1.0])],
    ids=repr,
)
def test_every_kind_of_one_becomes_a_float(value):
    number = to_number(value)
    assert type(number) is float
    assert number == 1.0


@pytest.mark.parametrize(
    "value", [None, float("nan"), float("inf"), -float("inf"), np.float32("nan"), torch.tensor(torch.inf)]
)
def test_what_is_no_number_becomes_null(value):
    assert to_number(value) is None


def test_a_list_is_refused():
    with pytest.raises(TypeError):
        to_number([1.0, 2.0])


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"reward/mean": 0.5, "train/loss": None}, step=3)
    assert path.read_text() == '{"step": 3, "reward/mean": 0.5, "train/loss": null}\n'
    file.close()


def test_a_torn_last_line_is_left_out_when_reading(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(3))
    whole = path.read_bytes()
    for length in range(len(whole) - 1, whole[:-1].rindex(b"\n") + 1, -1):
        path.write_bytes(whole[:length])
        assert [row["step"] for row in read_metrics(path)] == [0, 1]


@pytest.mark.parametrize("damaged", [b"nonsense", b"\xff\xfe", b""])
def test_another_line_that_is_damaged_is_named(tmp_path, damaged):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1])
    path.write_bytes(path.read_bytes() + damaged + b'\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2 is no JSON .*the file is damaged"):
        read_metrics(path)


def test_no_file_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_appending_to_a_torn_line_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    with pytest.raises(AssertionError, match="torn"):
        MetricsFile(path)


def test_rows_past_the_checkpoint_are_moved_not_lost(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(6))
    with path.open("a") as file:
        file.write('{"step": 6, "rew')
    aside = set_aside_after(path, 3)
    assert aside is not None
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]
    lines = aside.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[:-1]] == [4, 5]
    assert lines[-1] == '{"step": 6, "rew'
    write_steps(path, [4])
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]


def test_nothing_is_set_aside_where_nothing_is_past_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(3))
    before = path.read_bytes()
    assert set_aside_after(path, 2) is None
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_setting_aside_twice_keeps_both_files(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        write_steps(path, [0, 1])
        set_aside_after(path, -1)
    assert len(list(tmp_path.glob("metrics.set_aside.*.jsonl"))) == 2
