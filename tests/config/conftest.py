from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rl.config import compose, register


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ and experiments/ that a test may break; the suite reads it instead of the real one."""
    for name in ("conf", "experiments"):
        shutil.copytree(register.package_folder(name), tmp_path / name)
    for module in (compose, register):
        monkeypatch.setattr(module, "package_folder", lambda name: tmp_path / name)
    return tmp_path
