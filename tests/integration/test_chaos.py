"""Random kills of random processes; `python -m scripts.chaos --kills 20` does more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.chaos import chaos


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_random_kills_lose_no_prompt_and_leave_no_process(warm_model: Path, tmp_path: Path):
    run = chaos(tmp_path / "run", kills=2, seed=20261201, words=["model=hf", f"model.path={warm_model}"])
    print("\n".join(run.events))
    assert run.events
