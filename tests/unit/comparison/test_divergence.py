"""Where two runs part, by their digests, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.comparison.divergence import compare_digests
from rl.config.schema import ConfigError
from rl.digests import STAGES


def write(folder: Path, *, steps: range, changed: dict[tuple[int, str], str | None] | None = None) -> Path:
    """Every digest is `<step>-<stage>` but those `changed`."""
    folder.mkdir(exist_ok=True)
    rows = []
    for step in steps:
        stages = ("weights",) if step == 0 else STAGES
        row = {stage: (changed or {}).get((step, stage), f"{step}-{stage}") for stage in stages}
        rows.append({"step": step, **row})
    (folder / "digests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_equal_runs_do_not_part(tmp_path: Path):
    compared = compare_digests(write(tmp_path / "a", steps=range(4)), write(tmp_path / "b", steps=range(4)))
    assert (compared.divergence, compared.steps) == (None, (0, 1, 2, 3))


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_stage_of_the_first_step_counts(stage: str, tmp_path: Path):
    """What differs later, or further on in the same step, is a consequence."""
    later = {(2, name): "other" for name in STAGES[STAGES.index(stage) :]} | {(3, "data"): "other"}
    a, b = write(tmp_path / "a", steps=range(4)), write(tmp_path / "b", steps=range(4), changed=later)
    found = compare_digests(a, b).divergence
    assert found is not None
    assert (found.step, found.stage, found.digests) == (2, stage, (f"2-{stage}", "other"))
    assert found.equal_before == STAGES[: STAGES.index(stage)]


def test_other_weights_before_training_are_named_as_such(tmp_path: Path):
    a, b = write(tmp_path / "a", steps=range(2)), write(tmp_path / "b", steps=range(2), changed={(0, "weights"): "x"})
    found = compare_digests(a, b).divergence
    assert found is not None
    assert (found.step, found.stage, found.meaning) == (0, "weights", "the policy before training")


def test_only_steps_of_both_are_compared(tmp_path: Path):
    a, b = write(tmp_path / "a", steps=range(3)), write(tmp_path / "b", steps=range(2, 9))
    assert compare_digests(a, b).steps == (2,)
    with pytest.raises(ConfigError, match=r"no step in common \(.*a: steps 0 to 2; .*c: steps 3 to 4\)"):
        compare_digests(a, write(tmp_path / "c", steps=range(3, 5)))


def test_a_digest_that_was_not_taken_is_no_difference(tmp_path: Path):
    a = write(tmp_path / "a", steps=range(3), changed={(1, "weights"): None})
    assert compare_digests(a, write(tmp_path / "b", steps=range(3))).divergence is None


def test_a_run_without_digests_is_named(tmp_path: Path):
    (tmp_path / "old").mkdir()
    with pytest.raises(ConfigError, match=r"old has no digests\.jsonl"):
        compare_digests(write(tmp_path / "a", steps=range(2)), tmp_path / "old")
