from __future__ import annotations

from collections.abc import Iterator

import pytest

from rl.config.tasks import CheckerConfig
from rl.tasks.rewards.checker import Checker
from rl.tasks.rewards.verdict import Case

TIMEOUT_S = 1.5


@pytest.fixture(scope="session")
def checker() -> Iterator[Checker]:
    """Two workers, already started."""
    checker = Checker(CheckerConfig(workers=2, timeout_s=TIMEOUT_S))
    checker.check([Case("1", "1")])
    yield checker
    checker.close()
