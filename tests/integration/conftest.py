from __future__ import annotations

from pathlib import Path

import pytest

from rl.assemble import prepare_policy
from rl.config.compose import compose_run_config


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that the quickstart starts reinforcement learning from. Read only: the session shares it."""
    folder = tmp_path_factory.mktemp("warm")
    return prepare_policy(compose_run_config(["experiment=quickstart"]), folder).folder
