"""Where a resumed run goes on, and when it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl.assemble import _restored_progress
from rl.config.schema import ConfigError
from rl.loop import Progress
from rl.run_folder import Checkpoint

FOLDER = Path("run/checkpoints/step-000003")


def checkpoint(fingerprint: str, **progress: Any) -> Checkpoint:
    return Checkpoint(FOLDER, 3, {"task_fingerprint": fingerprint, "progress": progress})


def test_other_training_data_refuses_the_resume():
    """P139: the position in the old data would skip prompts of the new, or take some twice. That a changed row changes
    the fingerprint: tests/unit/tasks."""
    saved = checkpoint("before", step=3)
    assert _restored_progress(saved, {"task_fingerprint": "before"}) == Progress(step=3)
    with pytest.raises(ConfigError, match=r"training data is not what .*step-000003 was trained on.*Restore the data"):
        _restored_progress(saved, {"task_fingerprint": "after"})


@pytest.mark.parametrize("unpublished", [2, 0])
def test_weights_that_were_trained_and_not_published_become_a_version_of_their_own(unpublished: int):
    """At which steps publishes are due then: tests/unit/test_simulated_placements.py, by the real loop."""
    saved = checkpoint("same", step=6, policy_version=1, unpublished_steps=unpublished)
    version = 2 if unpublished else 1
    assert _restored_progress(saved, {"task_fingerprint": "same"}) == Progress(step=6, policy_version=version)
