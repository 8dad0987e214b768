from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from rl.config.schema import ConfigError
from rl.protocols import Trainer
from rl.run_folder import Checkpoints, locked, open_checkpoint


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
    assert names(tmp_path) == ["step-000003"]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 3
    await save(checkpoints, 6)
    assert names(tmp_path) == ["step-000006"]


async def test_a_disk_that_fills_at_any_write_leaves_the_old_checkpoint_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """P134. Every call that takes room or changes a name fails once, in turn; the last round fails nowhere."""
    calls = {"made": 0, "fails_at": -1}

    def failing(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls["made"] += 1
            if calls["made"] == calls["fails_at"]:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*arguments, **options)

        return call

    for owner, name in ((Path, "write_text"), (Path, "write_bytes"), (Path, "mkdir"), (Path, "rename"), (os, "fsync")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    num_failed = 0
    for number in range(1, 100):
        folder = tmp_path / str(number)
        os.makedirs(folder)
        checkpoints = Checkpoints(folder, keep_last=1)
        calls["fails_at"] = -1
        await save(checkpoints, 3)
        calls.update(made=0, fails_at=number)
        try:
            await save(checkpoints, 6)
        except OSError:
            num_failed += 1
        has_failed = calls["made"] >= number
        calls["fails_at"] = -1
        newest = Checkpoints(folder, keep_last=1).newest()
        assert newest is not None and (newest.trainer_folder / "weights.bin").read_bytes() == b"weights"
        if not has_failed:
            break
        await save(checkpoints, 9)
        assert names(folder) == ["step-000009"]
    assert num_failed >= 8 and not has_failed and newest.step == 6


async def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoints = Checkpoints(tmp_path, keep_last=1, first_bytes=1)
    await save(checkpoints, 3)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size - 1))
    with pytest.raises(OSError, match=r"No space left on device.*checkpoint of step 6.*step-000003 is whole") as caught:
        await save(checkpoints, 6)
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == ["step-000003"]
    (tmp_path / "new").mkdir()
    with pytest.raises(OSError, match="There is none yet"):
        await save(Checkpoints(tmp_path / "new", keep_last=1, first_bytes=size), 6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
    await save(checkpoints, 6)


async def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """P141"""

    def refuse(path: Path, **_: Any) -> None:
        raise OSError(errno.EBUSY, "in use", str(path))

    checkpoints = Checkpoints(tmp_path, keep_last=1)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        await save(checkpoints, 3, 6)
    assert names(tmp_path) == ["deleting-step-000003", "step-000006"]
    assert "deleting-step-000003 could not be deleted" in caplog.text
    await save(checkpoints, 9)
    assert names(tmp_path) == ["step-000009"]


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ({}, [4, 5]),
        ({1: 0.9, 3: 0.5}, [1, 4, 5]),
        ({1: 0.9, 2: 0.9, 3: 0.5}, [2, 4, 5]),
        ({1: 0.2, 5: 0.2}, [4, 5]),
        ({3: 0.1, 7: 0.9}, [3, 4, 5]),
    ],
)
async def test_the_best_stays_besides_the_last_and_of_equals_the_newest(scores, kept, tmp_path: Path):
    known: dict[int, float] = {}
    checkpoints = Checkpoints(tmp_path, keep_last=2, scores=lambda: known)
    for step in range(1, 6):
        if step in scores:
            known[step] = scores[step]
        await save(checkpoints, step)
    assert names(tmp_path) == [f"step-{step:06d}" for step in kept]


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


async def test_of_a_complete_a_cut_and_an_empty_folder_the_complete_one_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """P135"""
    checkpoints = Checkpoints(tmp_path, keep_last=9)
    await save(checkpoints, 10, 20)
    weights = tmp_path / "checkpoints" / "step-000020" / "trainer" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:3])
    (tmp_path / "checkpoints" / "step-000030").mkdir()
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 10
    said = capsys.readouterr().out
    assert "step-000030 is damaged (manifest.json is missing): passed over" in said
    assert "step-000020 is damaged (trainer/weights.bin has 3 bytes instead of 7): passed over" in said


@pytest.mark.parametrize("victim", ["manifest.json", "state.json", "trainer/weights.bin"])
async def test_a_missing_file_is_damage(victim: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """P137: no state is left out in silence."""
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


async def test_a_run_folder_or_one_of_its_checkpoints_can_be_opened_to_read(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"holds no checkpoint\. Give a run folder"):
        open_checkpoint(tmp_path)
    await save(Checkpoints(tmp_path, keep_last=2), 3, 6)
    newest, older = open_checkpoint(tmp_path), open_checkpoint(tmp_path / "checkpoints" / "step-000003")
    assert (newest.step, older.step, older.state) == (6, 3, {"progress": 3})
    assert newest.run_folder == older.run_folder == tmp_path
    damage(tmp_path, 6)
    with pytest.raises(ConfigError, match=r"step-000006 is damaged \(.*\)\. Give another one"):
        open_checkpoint(tmp_path)
    assert names(tmp_path) == ["step-000003", "step-000006"]
