from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from rl.assemble import prepare_policy
from rl.config.compose import compose_run_config


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that the quickstart starts reinforcement learning from. Read only: a run of tests shares it."""
    in_workers = "PYTEST_XDIST_WORKER" in os.environ
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if in_workers else root) / "warm"
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "made"
        if not made.exists():
            made.write_text(str(prepare_policy(compose_run_config(["experiment=quickstart"]), folder).folder))
        return Path(made.read_text())
