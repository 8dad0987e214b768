import json
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from rl.loggers.curves import CurvesProcess, draw_curves, draw_published, series
from rl.loggers.facts import ReferenceLine

FULL = {
    "reward/mean": 0.5,
    "eval/sums/greedy": 0.6,
    "eval/sums/greedy/stderr": 0.02,
    "rollout/response_tokens_mean": 4.0,
    "train/entropy": 1.0,
    "mismatch/kl_k3": 0.0,
    "staleness/mean": 0.0,
    "staleness/max": 0.0,
    "time/step_s": 1.0,
    "time/train_s": 0.8,
}


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0}],
        [{"step": 0, "eval/sums/greedy": 0.5}],
        [{"step": 3, **FULL}],
        [{"step": step, **FULL} for step in range(400)],
        [{"step": 1, **dict.fromkeys(FULL)}, {"step": 2, **FULL}],
    ],
    ids=["no rows", "empty row", "evaluation only", "one row", "many rows", "nulls"],
)
def test_any_set_of_rows_can_be_drawn(tmp_path, rows):
    draw_curves(rows, tmp_path / "curves.png", title="r")
    pixels = imread(tmp_path / "curves.png")
    assert pixels.shape[:2] == (770, 1760)
    assert pixels.std() > 0.01
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_the_picture_depends_on_the_values(tmp_path):
    for name, value in (("a.png", 0.1), ("b.png", 0.9)):
        draw_curves([{"step": 0, "eval/sums/greedy": value}], tmp_path / name, title="r")
    assert (imread(tmp_path / "a.png") != imread(tmp_path / "b.png")).any()


def test_a_published_value_is_a_line_in_the_panel_of_its_metric_and_in_no_other(tmp_path):
    rows = [{"step": step, **FULL} for step in range(3)]
    line = ReferenceLine("peak", "eval/sums/greedy", 0.9, None, None)
    draw_curves(rows, tmp_path / "without.png", title="r")
    draw_curves(rows, tmp_path / "with.png", title="r", published=[line])
    changed = (imread(tmp_path / "with.png") != imread(tmp_path / "without.png")).any(axis=2)
    rows_of_panel, columns_of_panel = np.nonzero(changed)
    assert rows_of_panel.size > 0
    assert rows_of_panel.max() < 385, "the accuracy is in the upper row"
    assert 440 < columns_of_panel.min() < columns_of_panel.max() < 900, "and the second of its four panels"


def test_a_claim_is_drawn_over_its_window_as_far_as_the_run_is():
    windows = [(None, None), (None, 50), (50, 300), (0, 0), (200, 300)]
    lines = [ReferenceLine(str(window), "reward/mean", 0.5, *window) for window in windows]
    axes = Figure().subplots()
    draw_published(axes, lines, last_step=100)
    assert [tuple(line.get_xdata()) for line in axes.lines] == [(0, 100), (0, 50), (50, 100), (0, 0)]
    assert {tuple(line.get_ydata()) for line in axes.lines} == {(0.5, 0.5)}


def test_a_claim_outside_the_limits_of_a_panel_widens_them():
    axes = Figure().subplots()
    axes.set_ylim(1.0, 2.0)
    draw_published(axes, [ReferenceLine("a", "x", 4.0, None, None)], last_step=9)
    assert axes.get_ylim() == (1.0, 4.4)


def test_rows_without_a_value_are_left_out_of_its_series():
    steps, values = series([{"step": 0, "a": 1.0}, {"step": 1}, {"step": 2, "a": None}, {"step": 3, "a": 4.0}], "a")
    np.testing.assert_array_equal(steps, [0, 3])
    np.testing.assert_array_equal(values, [1.0, 4.0])


def test_a_child_process_draws_the_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **FULL}) + "\n")
    process = CurvesProcess(tmp_path, title="r")
    process.start()
    process.start_last()
    assert process.finish()
    assert imread(tmp_path / "curves.png").shape[:2] == (770, 1760)


def test_a_failed_drawing_is_a_warning(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text("not json\n")
    process = CurvesProcess(tmp_path, title="r")
    process.start_last()
    assert not process.finish()
    assert "curves.png was not drawn" in caplog.text


def test_importing_the_module_loads_no_matplotlib_and_no_torch():
    code = "import sys, rl.loggers.curves; sys.exit(any(name in sys.modules for name in ('matplotlib', 'torch')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
