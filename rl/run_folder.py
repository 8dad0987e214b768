"""A run's folder: who may write to it, and its checkpoints.

    run.yaml  provenance.json  metrics.jsonl  curves.png  samples.txt  samples.jsonl  answers.jsonl  model/
    checkpoints/step-000100/

A checkpoint is written under another name, listed with sizes and digests, flushed, and only then renamed: a folder
named `step-*` is complete, whenever the process was killed.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError, RunConfig
from rl.protocols import Trainer

log = logging.getLogger(__name__)

CHECKPOINT = re.compile(r"step-(\d{6,})")
MANIFEST = "manifest.json"
STATE = "state.json"
TRAINER = "trainer"
BYTES_PER_PARAM = 12
"""Of a checkpoint: fp32 weights and AdamW's two moments."""
WRITING = "writing-"
DELETING = "deleting-"


def create_run_folder(config: RunConfig) -> Path:
    """An empty folder for a new run. Raises ConfigError if `output_dir` is taken and `clean` does not say otherwise."""
    if config.output_dir is None:
        return _new_default_folder(config.experiment or "default")
    folder = Path(config.output_dir).expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir={config.output_dir} is a file. Name a folder.")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / "run.yaml").is_file():
            raise ConfigError(
                f"output_dir={config.output_dir} is not empty and holds no run. Choose another folder: this one is "
                "left alone."
            )
        if not config.clean:
            raise ConfigError(
                f"output_dir={config.output_dir} holds another run. Continue it: rl resume={config.output_dir}; "
                "delete it and start anew: clean=true; or choose another output_dir."
            )
        with locked(folder):
            shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _new_default_folder(name: str) -> Path:
    parent = Path("outputs", name).resolve()
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1000):
        folder = parent / (stamp if number == 0 else f"{stamp}_{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"{parent} holds a thousand runs of this second. Set output_dir.")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder for this process; the lock ends with it, however it ends."""
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{folder} is in use by a running process. Wait for it, or stop it first.") from error
        yield


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    step: int
    state: dict[str, Any]

    @property
    def trainer_folder(self) -> Path:
        return self.folder / TRAINER

    @property
    def run_folder(self) -> Path:
        return self.folder.parent.parent


def open_checkpoint(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run folder, or the checkpoint that `folder` is, and whose run is left as it is.

    Raises ConfigError if there is none, or it is damaged.
    """
    chosen = folder
    if not CHECKPOINT.fullmatch(folder.name):
        found = sorted((path for path in folder.glob("checkpoints/*") if CHECKPOINT.fullmatch(path.name)), key=_step_of)
        if not found:
            raise ConfigError(
                f"{folder} holds no checkpoint. Give a run folder that has one, or RUN/checkpoints/step-N."
            )
        chosen = found[-1]
    damage = _damage(chosen)
    if damage is not None:
        raise ConfigError(f"the checkpoint {chosen} is damaged ({damage}). Give another one.")
    return _read(chosen)


def _read(folder: Path) -> Checkpoint:
    return Checkpoint(folder, _step_of(folder), json.loads((folder / STATE).read_text(encoding="utf-8")))


class Checkpoints:
    """The checkpoints of one run. Older ones go only after a newer one is complete.

    `scores`, by step, says which one is the best and stays besides the `keep_last` newest; of equals it is the newest.
    `first_bytes` is what the first is expected to take; later ones take what the newest does.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        keep_last: int,
        scores: Callable[[], Mapping[int, float]] = dict,
        first_bytes: int = 0,
    ) -> None:
        self._folder = run_folder / "checkpoints"
        self._keep_last = keep_last
        self._scores = scores
        self._first_bytes = first_bytes

    async def save(self, *, step: int, state: Mapping[str, Any], trainer: Trainer) -> None:
        """Raises OSError(ENOSPC), before it writes where that can be foreseen, and leaves older ones whole."""
        self._folder.mkdir(exist_ok=True)
        self._clean_up()
        self._check_room(step)
        temporary = self._folder / f"{WRITING}{step:06d}"
        try:
            (temporary / TRAINER).mkdir(parents=True)
            await trainer.save(temporary / TRAINER)
            (temporary / STATE).write_text(json.dumps(dict(state)), encoding="utf-8")
            await asyncio.to_thread(_write_manifest, temporary)  # reads every byte: the loop must go on meanwhile
            temporary.rename(self._folder / f"step-{step:06d}")
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _flush(self._folder)
        for old in self._superfluous():
            try:
                old.rename(old.with_name(f"{DELETING}{old.name}"))  # so that one deleted in part is not taken for whole
            except OSError as error:
                log.warning("the old checkpoint %s could not be deleted: %s", old, error)
        self._clean_up()

    def _clean_up(self) -> None:
        """What cannot be deleted is tried again at the next save."""
        for leftover in [*self._folder.glob(f"{WRITING}*"), *self._folder.glob(f"{DELETING}*")]:
            try:
                shutil.rmtree(leftover)
            except OSError as error:
                log.warning("%s could not be deleted: %s", leftover, error)

    def _check_room(self, step: int) -> None:
        folders = self._in_order()
        needed = _bytes_of(folders[-1]) if folders else self._first_bytes
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            kept = f"That of {folders[-1].name} is whole." if folders else "There is none yet."
            raise OSError(
                errno.ENOSPC,
                f"No space left on device: the checkpoint of step {step} takes about {needed / 2**30:.3f} GiB and "
                f"{free / 2**30:.3f} GiB are free. {kept} Make room, or lower checkpoint.keep_last",
                str(self._folder),
            )

    def _superfluous(self) -> list[Path]:
        folders = self._in_order()
        scores = self._scores()
        scored = [folder for folder in folders if _step_of(folder) in scores]
        best = max(scored, key=lambda folder: (scores[_step_of(folder)], _step_of(folder)), default=None)
        return [folder for folder in folders[: -self._keep_last] if folder != best]

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint. A damaged one is named and renamed, so that it is in nobody's way.

        None where no checkpoint was ever completed. Raises ConfigError if there are some and none is whole.
        """
        folders = self._in_order()
        for folder in reversed(folders):
            damage = _damage(folder)
            if damage is None:
                return _read(folder)
            aside = folder.with_name(f"damaged-{folder.name}-{time.time_ns()}")
            folder.rename(aside)
            print(f"checkpoint {folder} is damaged ({damage}): passed over and kept as {aside.name}", flush=True)
        if folders or any(self._folder.glob("damaged-*")):
            raise ConfigError(
                f"no checkpoint in {self._folder} is whole. Restore one from a copy, or start a new run: the same "
                "command with clean=true or another output_dir."
            )
        return None

    def _in_order(self) -> list[Path]:
        """Oldest first."""
        if not self._folder.is_dir():
            return []
        found = [path for path in self._folder.iterdir() if CHECKPOINT.fullmatch(path.name)]
        return sorted(found, key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write_manifest(folder: Path) -> None:
    """Lists every file with size and digest, and flushes all of them to the disk."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[str(path.relative_to(folder))] = {"size": path.stat().st_size, "blake2b": _digest(path)}
        _flush(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(files, indent=1), encoding="utf-8")
    for path in (manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        _flush(path)


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if every file is what was written."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"{MANIFEST} is missing"
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))
    except ValueError:
        return f"{MANIFEST} is not valid JSON"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['size']}"
        if _digest(path) != expected["blake2b"]:
            return f"{name} has other contents than were written"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
