from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

SCRIPT = Path(__file__).parents[2] / "scripts" / "learning_table.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learning_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_run(folder: Path, *, accuracies: list[float], steps: int = 2, **algorithm: Any) -> None:
    """Evaluated at every step, of two prompts and four answers each."""
    folder.mkdir(parents=True)
    config = {"steps": steps, "algorithm": {"group_size": 4} | algorithm}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    rows = [
        {"step": step, "eval/arithmetic/greedy": value} | ({"prompts_trained": 2.0 * step} if step else {})
        for step, value in enumerate(accuracies)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_seeds_are_averaged_at_equal_samples(script, tmp_path):
    for seed, last in enumerate((0.8, 1.0)):
        write_run(tmp_path / f"{seed}", accuracies=[0.2, 0.5, last], _target_="rl.algorithms.grpo.GRPO")
    write_run(tmp_path / "2", accuracies=[0.2, 0.4, 0.6], _target_="rl.algorithms.rloo.RLOO")
    curves, unfinished = script.collect([tmp_path], ["algorithm"])
    assert unfinished == []
    assert script.table(curves).splitlines() == [
        "| run | seeds | 0 | 8 | 16 |",
        "|---|---|---|---|---|",
        "| GRPO | 2 | 0.200 +- 0.000 | 0.500 +- 0.000 | 0.900 +- 0.141 |",
        "| RLOO | 1 | 0.200 | 0.400 | 0.600 |",
    ]


def test_runs_are_told_apart_by_the_keys_that_are_asked_for(script, tmp_path):
    for index, clip in enumerate((0.2, 0.28)):
        write_run(tmp_path / f"{index}", accuracies=[0.2, 0.3, 0.4], _target_="rl.algorithms.grpo.GRPO", clip_high=clip)
    curves, _ = script.collect([tmp_path], ["algorithm", "algorithm.clip_high", "algorithm.dynamic_sampling"])
    assert list(curves) == [f"GRPO clip_high={clip} dynamic_sampling=None" for clip in (0.2, 0.28)]


def test_an_unfinished_run_is_named_and_left_out(script, tmp_path):
    write_run(tmp_path / "0", accuracies=[0.2, 0.5], _target_="rl.algorithms.grpo.GRPO")
    assert script.collect([tmp_path], ["algorithm"]) == ({}, [str(tmp_path / "0")])
