from __future__ import annotations

from pathlib import Path

import pytest

from rl.config.schema import TinyModelConfig
from rl.model.tiny import TinyModel


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model without a warm start. Read only: the session shares it."""
    return TinyModel(TinyModelConfig(name="tiny")).prepare(tmp_path_factory.mktemp("tiny") / "model", seed=0)
