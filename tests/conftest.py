from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_qwen3


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Qwen3. Read only: the session shares it."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny_qwen3")
