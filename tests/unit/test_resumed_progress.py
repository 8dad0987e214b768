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
    assert _restored_progress(saved, {"task_fingerprint": "before"}, 1) == Progress(step=3)
    with pytest.raises(ConfigError, match=r"training data is not what .*step-000003 was trained on.*Restore the data"):
        _restored_progress(saved, {"task_fingerprint": "after"}, 1)


@pytest.mark.parametrize(("step", "unpublished"), [(6, 2), (4, 0), (6, 0)])
def test_publishes_stay_due_at_the_steps_at_which_they_were(step: int, unpublished: int):
    """Every 4 steps: at 8, whether 6 was interrupted, or was the end of a run that `steps` now makes longer."""
    saved = checkpoint("same", step=step, policy_version=1, unpublished_steps=unpublished)
    version = 2 if unpublished else 1  # what was trained and not published is a version of its own
    expected = Progress(step=step, policy_version=version, unpublished_steps=step % 4)
    assert _restored_progress(saved, {"task_fingerprint": "same"}, 4) == expected
