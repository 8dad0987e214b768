"""What scripts/chaos.py finds in the files of a run; the kills themselves: tests/integration/test_chaos.py."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from scripts.chaos import Chaos

ROW = {
    "step": 1,
    "prompts_trained": 16.0,
    "rollout/groups_started": 22.0,
    "rollout/groups_trained": 16.0,
    "rollout/dropped/filtered": 2.0,
    "rollout/dropped/engine_error": 1.0,
    "rollout/groups_in_flight": 3.0,
}


def chaos_of(folder: Path) -> Chaos:
    """A run of one step."""
    state = folder / "checkpoints" / "step-000001" / "state.json"
    state.parent.mkdir(parents=True)
    state.touch()
    write_rows(folder / "metrics.jsonl", {"step": 0}, ROW)
    return Chaos(folder, 1, random.Random(0), [])


def write_rows(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_that_add_up_pass(tmp_path: Path):
    chaos_of(tmp_path)._check_rows()


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.set_aside.20260101-000000-1.jsonl"])
def test_a_row_that_does_not_add_up_is_found_also_where_it_was_set_aside(name: str, tmp_path: Path):
    chaos = chaos_of(tmp_path)
    write_rows(tmp_path / name, {"step": 0}, ROW | {"rollout/groups_in_flight": 2.0})
    with pytest.raises(AssertionError, match=r"'rollout/groups_in_flight': 2\.0"):
        chaos._check_rows()
