"""What `scripts/compare_curves.py --record` keeps of a run, and what it refuses to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rl.comparison import results
from rl.comparison.curves import Axis
from rl.comparison.results import ClaimResult, read_results, record, results_file
from rl.comparison.runs import Request, compare
from rl.config.load import save_run_yaml, to_plain
from rl.config.lock import config_digest
from rl.config.schema import ConfigError, RunConfig
from rl.config.smoke import smoke_run_config
from scripts import compare_curves
from tests.composed import config_of

NAME = "qwen3_8b_grpo"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "package_folder", lambda name: tmp_path / name)


def write_run(folder: Path, config: RunConfig, *, started: str = "2026-12-01T00:00:00Z") -> Path:
    """Four steps of 900 s, GSM8K from 0.80 to 0.95."""
    folder.mkdir()
    config = replace(config, steps=4)
    save_run_yaml(config, folder / "run.yaml")
    facts = {"time": started, "code": {"commit": "0123abc", "dirty": False}}
    (folder / "provenance.json").write_text(json.dumps(facts))
    rows = [{"step": 0, "eval/gsm8k/published/greedy": 0.80}]
    for step in range(1, 5):
        row = {"step": step, "prompts_trained": 1024 * step, "tokens_trained": 10 * step, "time/step_s": 900.0}
        rows.append(row | {"eval/gsm8k/published/greedy": 0.75 + 0.05 * step})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def recorded(run: Path) -> Path:
    request = Request(run, "published", [], [], [], None, Axis.PROMPTS, run / "verdict.png")
    return record(run, compare(request))


def test_a_run_is_recorded_with_what_could_be_compared_and_what_it_cost(tmp_path: Path):
    """Eight GPUs for four times a quarter of an hour. MATH was not evaluated, and four steps tell no peak."""
    config = config_of(f"experiment={NAME}")
    path = recorded(write_run(tmp_path / "run", config))
    assert path == results_file(NAME)
    assert config.published is not None
    (result,) = read_results(path, config.published)
    assert (result.gpu_hours, result.num_gpus, result.hardware) == (8.0, 8, "mi350xx8")
    assert (result.commit, result.is_dirty, result.seed, result.steps) == ("0123abc", False, 0, 4)
    assert result.claims == {"gsm8k_start": ClaimResult(0.8, "reproduced")}


def test_a_run_of_other_settings_has_another_digest(tmp_path: Path):
    """The number of steps is one: four are not the experiment."""
    config = config_of(f"experiment={NAME}")
    assert config.published is not None
    (result,) = read_results(recorded(write_run(tmp_path / "run", config)), config.published)
    assert result.config_digest == config_digest(to_plain(replace(config, steps=4))) != config_digest(to_plain(config))


def test_the_same_run_takes_the_place_of_its_entry_and_another_is_added(tmp_path: Path):
    config = config_of(f"experiment={NAME}")
    run = write_run(tmp_path / "run", config)
    for _ in range(2):
        path = recorded(run)
    recorded(write_run(tmp_path / "again", config, started="2026-12-02T00:00:00Z"))
    recorded(write_run(tmp_path / "seed", replace(config, seed=1)))
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert [(entry["started"][:10], entry["seed"]) for entry in entries] == [
        ("2026-12-01", 0),
        ("2026-12-02", 0),
        ("2026-12-01", 1),
    ]


def test_a_smoke_run_leaves_no_result(tmp_path: Path):
    config, _ = smoke_run_config([f"experiment={NAME}"])
    run = write_run(tmp_path / "run", config)
    with pytest.raises(ConfigError, match="nothing is published of"):
        recorded(run)
    assert not results_file(NAME).exists()


def test_what_is_not_about_published_claims_is_not_recorded(tmp_path: Path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", config_of("experiment=quickstart"))
    with pytest.raises(ConfigError, match="nothing is published of"):
        record(run, [])
    monkeypatch.setattr("sys.argv", ["compare_curves.py", str(run), "--record", "--against", str(run)])
    with pytest.raises(SystemExit, match="2"):
        compare_curves.main()
    assert "leave out --against and --metric" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_no_failed_claim(tmp_path: Path, monkeypatch, capsys):
    """A traceback would end with 1, which says that a claim failed."""
    run = write_run(tmp_path / "run", config_of(f"experiment={NAME}"))
    monkeypatch.setattr("sys.argv", ["compare_curves.py", str(run), "--picture", str(tmp_path / "gone" / "a.png")])
    assert compare_curves.main() == 2
    said = capsys.readouterr().err
    assert "gone/a.png (No such file or directory). Choose another place by --picture" in said


@pytest.mark.parametrize("tolerance", ["nan", "inf", "-inf"])
def test_a_tolerance_is_finite(tmp_path: Path, monkeypatch, capsys, tolerance: str):
    run = write_run(tmp_path / "run", config_of(f"experiment={NAME}"))
    words = ["--against", str(run), "--metric", f"time/step_s={tolerance}"]
    monkeypatch.setattr("sys.argv", ["compare_curves.py", str(run), *words])
    assert compare_curves.main() == 2
    assert f"--metric time/step_s={tolerance}: the tolerance must be a finite number" in capsys.readouterr().err


def test_two_runs_of_one_experiment_cannot_both_be_what_a_ratio_divides_by(tmp_path: Path, monkeypatch, capsys):
    config = config_of(f"experiment={NAME}")
    run, again = write_run(tmp_path / "run", config), write_run(tmp_path / "again", config)
    monkeypatch.setattr("sys.argv", ["compare_curves.py", str(run), "--versus", str(run), str(again)])
    assert compare_curves.main() == 2
    assert f"is a run of {NAME}, too" in capsys.readouterr().err
