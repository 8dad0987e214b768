"""Random kills of a whole run, see scripts/chaos.py: one of each role."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.chaos import ROLES, chaos


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_whose_driver_rank_engine_and_reward_worker_are_killed_loses_nothing_and_leaves_nothing(tmp_path: Path):
    """`chaos` raises where an account does not add up or a process is left."""
    run = chaos(tmp_path / "run", kills=len(ROLES), seed=0)
    assert sorted(run.killed) == sorted(ROLES)
