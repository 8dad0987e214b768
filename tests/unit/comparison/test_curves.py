"""Reading curves from run folders, tables and exports of W&B."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import pytest

from rl.comparison.curves import ELAPSED, Axis, read_csv, read_run
from rl.comparison.runs import Request, compare
from rl.config.compose import compose_run_config
from rl.config.load import save_run_yaml
from rl.config.published import ClaimConfig, PublishedConfig, Statistic
from rl.config.register import package_folder
from rl.config.schema import ConfigError, RunConfig

EXPORT = """\
"Step","quickstart/a - reward/mean","quickstart/a - reward/mean__MIN","quickstart/a - reward/mean__MAX"
"0","","",""
"1","0.25","0.25","0.25"
"2","NaN","NaN","NaN"
"3","0.75","0.5","1.0"
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@functools.cache
def quickstart() -> RunConfig:
    return compose_run_config(["experiment=quickstart"])


def write_run(folder: Path, accuracies: list[float], *, published: bool = False) -> Path:
    folder.mkdir()
    config = copy.deepcopy(quickstart())
    config.steps = len(accuracies) - 1
    if published:
        claim = ClaimConfig("eval/arithmetic/greedy", Statistic.max, last_step=config.steps, value=0.9, tolerance=0.05)
        config.published = PublishedConfig(claims={"peak": claim})
    save_run_yaml(config, folder / "run.yaml")
    rows = [
        {"step": step, "prompts_trained": 64.0 * step, "eval/arithmetic/greedy": value, "time/step_s": 2.0}
        for step, value in enumerate(accuracies)
    ]
    del rows[0]["time/step_s"]
    write(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return folder


def request(run: Path, against: object = "published", **options) -> Request:
    blank = {"versus": [], "metrics": [], "renamed": [], "run_name": None, "axis": Axis.PROMPTS}
    return Request(run=run, against=str(against), picture=run / "verdict.png", **{**blank, **options})


def test_a_run_is_read_along_prompts_and_with_its_time_added_up(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run", [0.2, 0.5, 0.9]))
    assert list(run.curve("eval/arithmetic/greedy", Axis.PROMPTS).x) == [0.0, 64.0, 128.0]
    assert list(run.curve(ELAPSED, Axis.STEP).values) == [2.0, 4.0]
    assert (run.total_steps, run.hardware) == (2, "cpu")


def test_an_export_of_wandb_is_read_without_its_bounds_and_empty_cells(tmp_path: Path):
    export = read_csv(write(tmp_path / "export.csv", "\ufeff" + EXPORT), renamed={})
    curve = export.curve("reward/mean", Axis.STEP)
    assert (list(curve.x), list(curve.values)) == ([1.0, 3.0], [0.25, 0.75])
    assert export.metrics() == ["reward/mean"]
    assert not export.has(Axis.PROMPTS)


def test_an_export_along_prompts_with_another_name_for_a_metric(tmp_path: Path):
    text = "prompts_trained,my - run - critic/rewards/mean\n512,0.5\n"
    export = read_csv(write(tmp_path / "export.csv", text), renamed={"critic/rewards/mean": "reward/mean"})
    assert export.name == "my - run"
    assert list(export.curve("reward/mean", Axis.PROMPTS).x) == [512.0]


def test_one_run_of_an_export_with_several_is_chosen_by_name(tmp_path: Path):
    path = write(tmp_path / "export.csv", "Step,a - reward/mean,b - reward/mean\n1,0.1,0.2\n")
    with pytest.raises(ConfigError, match=r"holds 2 runs: choose one by --run NAME, of a, b"):
        read_csv(path, renamed={})
    assert read_csv(path, renamed={}, run="b").rows == [{"step": 1.0, "reward/mean": 0.2}]
    with pytest.raises(ConfigError, match="no column 'RUN - METRIC' of run c"):
        read_csv(path, renamed={}, run="c")


def test_an_export_without_a_run_in_its_columns_is_told_which_columns_it_has(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no column that is named 'RUN - METRIC'.*columns are step, reward/mean"):
        read_csv(write(tmp_path / "export.csv", "step,reward/mean\n1,0.1\n"), renamed={})


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "Relative Time (Process),a - reward/mean\n1,0.1\n"])
def test_another_file_is_refused(text: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="neither tabled points"):
        read_csv(write(tmp_path / "file.csv", text), renamed={})


def test_a_table_without_a_value_is_refused(tmp_path: Path):
    path = write(tmp_path / "table.csv", "step,prompts,metric,value,read_from\n1,,reward/mean,high,figure\n")
    with pytest.raises(ConfigError, match=r"point 1 needs a step, a metric and a value"):
        read_csv(path, renamed={})


@pytest.mark.parametrize("path", sorted((package_folder("experiments") / "curves").glob("*.csv")), ids=lambda p: p.stem)
def test_every_curve_that_is_checked_in_has_its_source_and_says_how_it_was_read(path: Path):
    text = path.read_text(encoding="utf-8")
    assert "# source: " in text
    assert {line.rpartition(",")[2] for line in text.splitlines() if line[0].isdigit()} <= {"text", "table", "figure"}
    table = read_csv(path, renamed={})
    assert table.is_tabled and table.rows
    assert any(metric.startswith("time/") for metric in table.metrics()) == (table.hardware is not None)


def test_a_run_is_judged_by_its_claims_and_drawn(tmp_path: Path):
    run = write_run(tmp_path / "run", [0.2, 0.5, 0.92, 0.9], published=True)
    (finding,) = compare(request(run))
    assert (finding.name, finding.verdict, finding.ours, finding.theirs) == ("peak", "reproduced", 0.92, 0.9)
    assert (run / "verdict.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_is_judged_by_another_run_and_by_an_export_of_it(tmp_path: Path):
    run, other = write_run(tmp_path / "run", [0.2, 0.5, 0.9]), write_run(tmp_path / "other", [0.1, 0.4, 0.97])
    text = "Step,other - eval/arithmetic/greedy\n0,0.1\n1,0.4\n2,0.97\n"
    export = write(tmp_path / "export.csv", text)
    for against, axis in [(other, Axis.PROMPTS), (other, Axis.STEP), (export, Axis.STEP)]:
        (finding,) = compare(request(run, against, metrics=["eval/arithmetic/greedy=0.1"], axis=axis))
        assert (finding.verdict, finding.ours, finding.theirs) == ("reproduced", 0.9, 0.97)
    (finding,) = compare(request(run, other, metrics=["eval/arithmetic/greedy=0.03"]))
    assert finding.verdict == "failed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing is published of"),
        ({"against": "elsewhere"}, "there is no such folder or file"),
        ({"against": ".", "metrics": ["reward/mean"]}, "must have the form KEY=VALUE"),
        ({"against": ".", "metrics": ["reward/mean=much"]}, "the tolerance must be a number"),
        ({"against": ".", "metrics": ["reward/mean=-1"]}, "a tolerance is 0 or more"),
        ({"against": "."}, "nothing to judge"),
    ],
)
def test_what_cannot_be_judged_is_refused(options, message: str, tmp_path: Path):
    run = write_run(tmp_path / "run", [0.2, 0.5])
    against = run if options.get("against") == "." else options.get("against", "published")
    with pytest.raises(ConfigError, match=message):
        compare(request(run, against, **{key: value for key, value in options.items() if key != "against"}))


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no run"):
        read_run(tmp_path)
