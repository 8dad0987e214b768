"""What a run took is written down beside its plan, and the next plan of the same settings quotes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.config.compose import compose_run_config
from rl.loggers.names import find
from rl.plan.forecast import planned_metrics
from rl.plan.measured import FILE, conclude, last_like, measured, measured_lines, table

RATES = ["hardware.bf16_tflops=0.1", "hardware.memory_bandwidth_tb_s=0.02"]
WORDS = ["experiment=quickstart", *RATES]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_rows(folder: Path, *rows: dict[str, float | None]) -> None:
    folder.mkdir()
    text = "".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows))
    (folder / "metrics.jsonl").write_text(text)


def step_of(seconds: float, rss_gib: float = 1.0) -> dict[str, float | None]:
    return {"time/step_s": seconds, "time/train_s": seconds / 2, "memory/rss_gib": rss_gib, "time/eval_s": None}


def test_times_are_medians_without_the_first_step_and_memory_is_a_maximum():
    rows = [{"step": 1, **step_of(100.0, 3.0)}, *({"step": n, **step_of(float(n))} for n in (2, 3, 10))]
    assert measured(rows) == {"time/step_s": 3.0, "time/train_s": 1.5, "memory/rss_gib": 3.0}
    assert measured(rows[:1])["time/step_s"] == 100.0


def test_a_run_leaves_planned_and_measured_in_its_folder_and_for_the_next_plan(tmp_path):
    config = compose_run_config([*WORDS, "steps=3"])
    assert measured_lines(config)[0].startswith("nothing yet")
    write_rows(tmp_path / "run", {}, step_of(9.0), step_of(2.0), step_of(4.0))
    lines = conclude(config, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "plan.json").read_text())
    planned = record["planned"]["time/step_s"]
    assert record["measured"]["time/step_s"] == 3.0
    assert f"{100 * (planned / 3.0 - 1):+.0f} %" in next(line for line in lines if line.startswith("time/step_s"))
    # Other steps and another seed take the same time a step; another batch, or hardware, does not.
    assert last_like(compose_run_config([*WORDS, "steps=250", "seed=7"])) == record
    assert last_like(compose_run_config([*WORDS, "algorithm.group_size=8"])) is None
    assert last_like(compose_run_config([*WORDS, "hardware.name=another"])) is None
    quoted = measured_lines(compose_run_config(WORDS))
    assert "3 step(s)" in quoted[0] and quoted[1:] == lines


def test_of_several_the_last_counts_and_a_torn_line_is_passed_over(tmp_path):
    config = compose_run_config(WORDS)
    for name, seconds in (("a", 5.0), ("b", 6.0)):
        write_rows(tmp_path / name, {}, step_of(seconds))
        conclude(config, tmp_path / name)
    torn = FILE.read_bytes().splitlines()[0][:-40]
    with FILE.open("ab") as file:
        file.write(b"\xff\xfe\n" + torn)
    record = last_like(config)
    assert record is not None and record["measured"]["time/step_s"] == 6.0


def test_a_run_that_ended_before_its_first_step_leaves_nothing(tmp_path):
    write_rows(tmp_path / "run", {})
    assert conclude(compose_run_config(WORDS), tmp_path / "run") == []
    assert not FILE.exists()


def test_where_nothing_was_predicted_the_measured_value_stands_alone():
    record = {"planned": {}, "measured": {"time/step_s": 2.5}}
    assert table(record)[1].split() == ["time/step_s", "-", "2.5"]


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["experiment=quickstart"], {"plan/memory/rss_gib"}),
        (
            WORDS,
            {"plan/memory/rss_gib", "plan/time/step_s", "plan/time/train_s", "plan/time/publish_s"}
            | {"plan/time/wait_for_batch_s"},
        ),
        (
            ["experiment=qwen2_5_math_7b_dapo_fully_async"],
            {"plan/memory/gpu_peak_gib", "plan/memory/gpu_train_gib"}
            | {"plan/time/step_s", "plan/time/train_s", "plan/time/publish_s"},
        ),
        (
            ["experiment=qwen3_8b_grpo"],
            {f"plan/memory/gpu_{phase}_gib" for phase in ("peak", "train", "publish", "wake", "wait_for_batch")}
            | {f"plan/time/{phase}_s" for phase in ("step", "train", "publish", "wait_for_batch")},
        ),
    ],
)
def test_what_a_run_logs_of_its_plan_is_named_after_what_is_measured(words, keys):
    planned = planned_metrics(compose_run_config(words))
    assert planned.keys() == keys
    for key in planned:
        assert find(key) is not None and find(key.removeprefix("plan/")) is not None
