from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rl.config.schema import ConfigError
from rl.protocols import Trainer
from rl.run_folder import Checkpoints, locked


class FileTrainer:
    """Saves one file: the part of a trainer that a checkpoint needs."""

    def __init__(self, content: bytes = b"weights", *, fails: bool = False) -> None:
        self.content, self.fails = content, fails

    async def save(self, folder: Path) -> None:
        (folder / "weights.bin").write_bytes(self.content)
        if self.fails:
            raise OSError("No space left on device")


def trainer(**options: Any) -> Trainer:
    return cast(Trainer, FileTrainer(**options))


async def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        await checkpoints.save(step=step, state={"progress": step}, trainer=trainer())


def names(run_folder: Path) -> list[str]:
    return sorted(path.name for path in (run_folder / "checkpoints").iterdir())


def damage(run_folder: Path, step: int) -> None:
    (run_folder / "checkpoints" / f"step-{step:06d}" / "trainer" / "weights.bin").write_bytes(b"weightz")


async def test_the_newest_is_found_with_its_state_and_older_ones_go(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    assert checkpoints.newest() is None
    await save(checkpoints, 3, 6, 9)
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.step, newest.state) == (9, {"progress": 9})
    assert (newest.trainer_folder / "weights.bin").read_bytes() == b"weights"
    assert names(tmp_path) == ["step-000006", "step-000009"]


async def test_a_save_that_fails_leaves_the_older_checkpoint_and_nothing_that_looks_complete(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    await save(checkpoints, 3)
    with pytest.raises(OSError, match="No space left"):
        await checkpoints.save(step=6, state={}, trainer=trainer(fails=True))
    assert names(tmp_path) == ["step-000003", "writing-000006"]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 3
    await save(checkpoints, 6)
    assert names(tmp_path) == ["step-000006"]


async def test_damaged_checkpoints_are_set_aside_so_that_none_of_them_counts_as_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    await save(checkpoints, 1, 6, 9)
    damage(tmp_path, 9)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 6
    assert "step-000009 is damaged (trainer/weights.bin has other contents" in capsys.readouterr().out
    await save(checkpoints, 7)
    kept = [name for name in names(tmp_path) if name.startswith("step-")]
    assert kept == ["step-000006", "step-000007"]


async def test_a_folder_in_which_no_checkpoint_is_whole_is_refused_every_time(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    await save(checkpoints, 3)
    damage(tmp_path, 3)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"no checkpoint in .* is whole"):
            checkpoints.newest()


@pytest.mark.parametrize("victim", ["manifest.json", "state.json", "trainer/weights.bin"])
async def test_a_missing_file_is_damage(victim: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    await save(checkpoints, 3, 6)
    (tmp_path / "checkpoints" / "step-000006" / victim).unlink()
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 3
    assert f"{victim} is missing" in capsys.readouterr().out


def test_a_folder_is_locked_once(tmp_path: Path):
    with locked(tmp_path), pytest.raises(ConfigError, match="is in use"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
