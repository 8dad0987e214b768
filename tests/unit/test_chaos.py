"""What scripts/chaos.py finds in the files of a run; the kills themselves: tests/integration/test_chaos.py."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from scripts.chaos import Chaos

# One step of 16 prompts. By hand: 0 to 3, 5 to 16 and 18 are settled, which are 17; 4 and 17 are in flight.
STREAM = {
    "next_index": 19,
    "in_flight": [17, 4],
    "trained": 16,
    "dropped": {"filtered": 1},
    "settled_below": 4,
    "settled_beyond": [*range(5, 17), 18],
}
ROW = {
    "step": 1,
    "prompts_trained": 16.0,
    "rollout/groups_started": 22.0,
    "rollout/groups_trained": 16.0,
    "rollout/dropped/filtered": 2.0,
    "rollout/dropped/engine_error": 1.0,
    "rollout/groups_in_flight": 3.0,
}


def chaos_of(folder: Path, **changes: Any) -> Chaos:
    """A run of one step, and what is changed in its checkpoint."""
    state = folder / "checkpoints" / "step-000001" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"stream": {**STREAM, **changes}}))
    write_rows(folder / "metrics.jsonl", {"step": 0}, ROW)
    return Chaos(folder, 1, random.Random(0), [])


def write_rows(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_checkpoint_and_rows_that_account_for_every_prompt_pass(tmp_path: Path):
    chaos = chaos_of(tmp_path)
    chaos._check_accounts()
    chaos._check_rows()


@pytest.mark.parametrize(
    "changes",
    [
        {"in_flight": [17, 3]},  # 3 twice, 4 not at all
        {"in_flight": [17, 17]},
        {"in_flight": [19, 4]},  # never started
        {"settled_beyond": [*range(5, 16), 17, 18]},  # 17 twice, 16 not at all
        {"settled_below": 3},  # one was counted twice, and 3 was not
        {"dropped": {"filtered": 2}},
        {"trained": 17},
    ],
)
def test_a_checkpoint_that_has_a_prompt_twice_or_not_at_all_is_found(changes: dict[str, Any], tmp_path: Path):
    with pytest.raises(AssertionError):
        chaos_of(tmp_path, **changes)._check_accounts()


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.set_aside.20260101-000000-1.jsonl"])
def test_a_row_that_does_not_add_up_is_found_also_where_it_was_set_aside(name: str, tmp_path: Path):
    chaos = chaos_of(tmp_path)
    write_rows(tmp_path / name, {"step": 0}, ROW | {"rollout/groups_in_flight": 2.0})
    with pytest.raises(AssertionError, match=r"'rollout/groups_in_flight': 2\.0"):
        chaos._check_rows()


def test_a_run_need_not_go_on_without_a_driver_a_rank_an_engine_that_starts_or_a_second_engine(tmp_path: Path):
    chaos = chaos_of(tmp_path)
    assert chaos._need_not_go_on_without("driver")
    assert chaos._need_not_go_on_without("trainer rank")
    assert not chaos._need_not_go_on_without("reward worker")
    chaos.step_before, chaos.engines_killed = 1, 1  # step 1 was there as this life began
    assert chaos._need_not_go_on_without("engine")
    chaos.step_before = 0
    assert not chaos._need_not_go_on_without("engine")
    chaos.engines_killed = 2
    assert chaos._need_not_go_on_without("engine")
