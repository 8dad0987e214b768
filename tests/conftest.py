from __future__ import annotations

import os
from pathlib import Path

# Tests start processes that share the cores; OpenMP threads that wait for each other were seen 30 times slower then.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.tiny_models import write_tiny_qwen3


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Qwen3. Read only: the session shares it."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny_qwen3")
