from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.made_answers import char_renderer


@pytest.fixture(scope="session")
def make_renderer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return lambda **options: char_renderer(folder, **options)


@pytest.fixture
def renderer(make_renderer: Callable[..., Any]) -> Any:
    return make_renderer()
