"""Numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.sweeps.compare import (
    RunCurve,
    Setting,
    band,
    comparison,
    default_metric,
    draw,
    mean_and_std,
    read_run,
    settings_by_keys,
)

METRIC = "eval/arithmetic/greedy"


def curve(*accuracies: float) -> RunCurve:
    """Evaluated at every step, of two prompts and four answers each."""
    rows: list[dict[str, Any]] = [{"step": 0, METRIC: accuracies[0], "prompts_trained": 0.0}]
    for step, accuracy in enumerate(accuracies[1:], start=1):
        rows.append({"step": step, METRIC: accuracy, "reward/mean": accuracy / 2, "prompts_trained": 2.0 * step})
    return RunCurve(rows, group_size=4)


def test_seeds_are_averaged_at_equal_samples_and_the_best_end_is_marked():
    settings = [
        Setting("clip=0.2", [curve(0.2, 0.5, 0.8), curve(0.2, 0.5, 1.0)]),
        Setting("clip=0.28", [curve(0.2, 0.4, 0.6)], unfinished=1),
        Setting("clip=9", [], unfinished=2),
    ]
    assert default_metric(settings) == METRIC
    assert comparison(settings, METRIC).splitlines() == [
        f"| {METRIC} | seeds | 0 | 8 | end |",
        "|---|---|---|---|---|",
        "| clip=0.2 | 2 | 0.200 +/- 0.000 | 0.500 +/- 0.000 | 0.900 +/- 0.141 (best) |",
        "| clip=0.28 | 1 of 2 | 0.200 | 0.400 | 0.600 |",
        "| clip=9 | 0 of 2 | - | - | - |",
    ]


def test_one_seed_has_no_spread_and_the_table_says_so():
    text = comparison([Setting("a", [curve(0.1, 0.5)]), Setting("b", [curve(0.1, 0.5)])], METRIC)
    assert text.count("(best)") == 2, "a tie is no winner"
    assert "+/-" not in text
    assert text.endswith("one seed each: how far seeds spread is not known")


def test_one_setting_alone_is_not_the_best_of_anything():
    assert "best" not in comparison([Setting("all", [curve(0.1, 0.5), curve(0.1, 0.7)])], METRIC)


def test_mean_and_std_by_hand():
    assert mean_and_std([1.0, 2.0, 3.0]) == "2.000 +/- 1.000"
    assert (mean_and_std([0.5]), mean_and_std([])) == ("0.500", "-")


def test_the_band_is_where_every_seed_has_a_value():
    curves = [{0: 1.0, 8: 2.0, 16: 5.0}, {0: 3.0, 8: 2.0}]
    samples, means, stds = band(curves)
    assert (samples, means) == ([0, 8], [2.0, 2.0])
    assert stds == [pytest.approx(2**0.5), 0.0]
    assert band([{0: 1.0}]) == ([0], [1.0], [0.0])
    assert band([]) == ([], [], [])


def test_many_evaluations_make_a_few_columns():
    header = comparison([Setting("a", [curve(*[0.5] * 30)])], METRIC).splitlines()[0]
    assert header == f"| {METRIC} | seeds | 0 | 56 | 112 | 168 | 224 | end |"  # 29 steps of 8, the last is the end


def test_runs_that_share_no_number_of_samples_are_compared_at_their_ends():
    other = RunCurve(curve(0.3, 0.6).rows[1:], group_size=3)
    text = comparison([Setting("a", [curve(0.2, 0.5)]), Setting("b", [other])], METRIC)
    assert text.splitlines()[0] == f"| {METRIC} | seeds | end |"


def write_run(folder: Path, run: RunCurve, *, steps: int, **algorithm: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump({"steps": steps, "algorithm": {"group_size": 4} | algorithm}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.rows))


def test_runs_of_several_sweeps_make_one_table_by_keys(tmp_path: Path):
    grpo, rloo = {"_target_": "rl.algorithms.grpo.GRPO"}, {"_target_": "rl.algorithms.rloo.RLOO"}
    write_run(tmp_path / "a" / "000", curve(0.2, 0.5), steps=1, clip_high=0.2, **grpo)
    write_run(tmp_path / "a" / "001", curve(0.2, 0.7), steps=1, clip_high=0.2, **grpo)
    write_run(tmp_path / "b" / "000", curve(0.2, 0.6), steps=1, **rloo)
    write_run(tmp_path / "b" / "001", curve(0.2, 0.6), steps=2, **rloo)  # ended early
    settings = settings_by_keys([tmp_path / "a", tmp_path / "b"], ["algorithm", "algorithm.clip_high"])
    assert [(one.name, len(one.runs), one.unfinished) for one in settings] == [
        ("algorithm=grpo algorithm.clip_high=0.2", 2, 0),
        ("algorithm=rloo algorithm.clip_high=None", 1, 1),
    ]
    assert read_run(tmp_path / "b" / "000").of(METRIC) == {0: 0.2, 8: 0.6}


def test_the_picture_is_whole_or_not_there(tmp_path: Path):
    path = tmp_path / "sweep.png"
    draw([Setting("a", [curve(0.2, 0.5), curve(0.2, 0.9)])], path, metric=METRIC, title="sweep")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert [file.name for file in tmp_path.iterdir()] == ["sweep.png"]
