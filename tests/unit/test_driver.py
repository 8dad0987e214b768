"""What the driver says and does when a run fails or continues."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rl import driver
from rl.config.schema import ConfigError
from rl.driver import _Crash, _end_with_failure, _resume_line
from rl.run_folder import Checkpoint


async def failure(after_s: float | None) -> BaseException:
    """None: never."""
    await asyncio.sleep(3600 if after_s is None else after_s)
    return RuntimeError("all engines died")


async def test_a_part_that_fails_ends_the_run_in_the_middle_of_a_long_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver, "STEP_GRACE_S", 0.1)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="all engines died"):
        await _end_with_failure(asyncio.sleep(3600), failure(0.05))
    assert time.monotonic() - began < 5


async def test_an_error_of_the_loop_itself_comes_first_and_a_run_that_ends_is_left_alone():
    async def fails() -> None:
        await asyncio.sleep(0.05)
        raise ValueError("of the loop")

    async def ends() -> None:
        await asyncio.sleep(0.05)

    with pytest.raises(ValueError, match="of the loop"):
        await _end_with_failure(fails(), failure(0.01))
    await _end_with_failure(ends(), failure(None))


STATE = {
    "next_index": 10,
    "in_flight": [9, 4],
    "trained": 6,
    "dropped": {"filtered": 1, "reward_error": 1},
    "settled_below": 4,
    "settled_beyond": [5, 6, 7, 8],
}


def checkpoint(prompts_trained: int = 6, **changes: Any) -> Checkpoint:
    state = {"stream": {**STATE, **changes}, "progress": {"prompts_trained": prompts_trained}}
    return Checkpoint(Path("/run/checkpoints/step-000003"), 3, state)


def test_a_resumed_run_prints_that_nothing_is_lost_or_done_twice():
    assert _resume_line(checkpoint()) == (
        "continuing from step 3: trained 6 + dropped 2 (filtered 1, reward_error 1) + in flight 2, which start again = "
        "the first 10 prompts of the epoch order, compared one by one: none twice, none skipped"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"next_index": 11}, "these are not 11, the prompts that were started"),
        ({"dropped": {"filtered": 1}}, "these are not 10"),
        ({"in_flight": [4, 10]}, "but skipped: position 9; not among the first 10: position 10"),
        # From here on the counts are right.
        ({"in_flight": [4, 4]}, "but skipped: position 9; twice: position 4"),
        ({"in_flight": [9, 2]}, "but skipped: position 4; twice: position 2"),
        ({"settled_beyond": [5, 6, 7, 9]}, "but skipped: position 8; twice: position 9"),
        ({"settled_below": 3}, "but trained and dropped are 8, but of 7 positions; skipped: position 3"),
        ({"prompts_trained": 8}, "the optimizer has seen 8 prompts"),
    ],
)
def test_a_checkpoint_that_has_a_prompt_twice_or_not_at_all_is_refused(changes: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        _resume_line(checkpoint(**changes))


def test_a_checkpoint_that_does_not_say_which_prompts_are_done_is_refused():
    """As rl 0.1.0 wrote them at first: the counts alone prove nothing."""
    counts = {key: value for key, value in STATE.items() if not key.startswith("settled")}
    old = Checkpoint(Path("/run/checkpoints/step-000003"), 3, {"stream": counts, "progress": {"prompts_trained": 6}})
    with pytest.raises(ConfigError, match=r"step-000003 says how many prompts.*and not which.*or start a new run"):
        _resume_line(old)


def test_a_crash_is_headed_by_its_class_and_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    error = OSError(28, "No space left on device", "/run/checkpoints")
    error.add_note("in step 7")
    assert _Crash(tmp_path).conclude(error) == 1
    message = capsys.readouterr().err
    assert message.startswith(
        "\nrl: the run failed (in step 7): no space left on the disk: OSError: [Errno 28] No space left on device: "
        "'/run/checkpoints'\n    traceback: "
    )
    assert f"rl resume={tmp_path}" in message
    assert "No space left" in next(tmp_path.glob("crash-*.log")).read_text()


def test_a_headline_is_said_once_and_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    crash, error = _Crash(tmp_path), RuntimeError("all engines died")
    crash.announce(error)
    assert capsys.readouterr().err == "\nrl: the run failed: RuntimeError: all engines died\n"
    crash.conclude(error)
    assert capsys.readouterr().err.startswith("    traceback: ")


@pytest.mark.parametrize("error", [ConfigError("seed=x"), KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_refusal_and_an_interrupt_have_no_headline(
    error: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _Crash(tmp_path).announce(error)
    assert capsys.readouterr().err == ""


def test_a_crash_report_that_cannot_be_written_goes_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert _Crash(tmp_path / "absent").conclude(OSError(28, "No space left on device")) == 1
    message = capsys.readouterr().err
    assert "could not be written" in message and "OSError: [Errno 28]" in message
