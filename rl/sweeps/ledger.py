"""What a sweep is and how far each of its points is. All of it stands in the sweep's folder:

    sweep.json        words and points, written once
    000/run.yaml      the settings of a point, written before any point starts
    000/point.json    how far it is, written by the process that runs it
    000/console.log   what it said; the rest of 000/ is a run folder like any other

Every file is written under another name and renamed, so that it is whole or not there. A point whose process was killed
still says that it is running: whether the process of its number still has the point's folder among its arguments tells
an interrupted one from one that runs.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from rl import exit_codes
from rl.config.flat import differing, flat
from rl.config.load import load_run_yaml, save_run_yaml, to_plain
from rl.config.schema import ConfigError, RunConfig
from rl.rollout.processes import describe_exit
from rl.sweeps.points import Point

SWEEP_FILE, POINT_FILE, CONSOLE_FILE = "sweep.json", "point.json", "console.log"
MAX_SHOWN = 8
"""Differences named in one error."""


class State(Enum):
    pending = "pending"
    submitted = "submitted"
    """To Slurm, and not started yet."""
    running = "running"
    interrupted = "interrupted"
    """Stopped or killed; it goes on from its last checkpoint."""
    failed = "failed"
    done = "done"


@dataclass(frozen=True, slots=True)
class Record:
    """point.json."""

    state: State = State.pending
    why: str = ""
    """Of a failure."""
    exit_code: int | None = None
    """None: it has not ended, or could not say so."""
    attempts: int = 0
    started: float = 0.0
    """Unix time of the last start."""
    seconds: float = 0.0
    """Of all attempts that came to an end."""
    host: str = ""
    pid: int = 0
    job_id: str | None = None
    """Of Slurm."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A point as the ledger knows it."""

    folder: Path
    words: list[str]
    swept: list[str]
    record: Record

    @property
    def label(self) -> str:
        return " ".join(self.swept) or "(one point)"


def write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_record(folder: Path) -> Record:
    """`running` only while its process lives, as far as this machine can see."""
    path = folder / POINT_FILE
    if not path.exists():
        return Record()
    values = json.loads(path.read_text(encoding="utf-8"))
    record = Record(**values | {"state": State(values["state"])})
    if record.state is State.running and not is_alive(record, folder):
        return replace(record, state=State.interrupted)
    return record


def write_record(folder: Path, record: Record) -> None:
    write_json(folder / POINT_FILE, asdict(record) | {"state": record.state.value})


def is_alive(record: Record, folder: Path) -> bool:
    """Of a process on another machine nothing is known, so it counts as alive."""
    if record.host != socket.gethostname():
        return True
    try:
        arguments = Path(f"/proc/{record.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return str(folder).encode() in arguments


def begin(folder: Path) -> Record:
    """A point starts, or goes on."""
    before = read_record(folder)
    record = replace(
        before,
        state=State.running,
        why="",
        exit_code=None,
        attempts=before.attempts + 1,
        started=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    write_record(folder, record)
    return record


def end(folder: Path, exit_code: int, why: str = "") -> Record:
    """A point's process came to its end. `why` of a failure is looked up where it is not given."""
    before = read_record(folder)
    state = {exit_codes.DONE: State.done, exit_codes.INTERRUPTED: State.interrupted}.get(exit_code, State.failed)
    if exit_code < 0 and state is State.failed:
        state = State.interrupted if -exit_code in (2, 15) else State.failed
    if state is State.failed and not why:
        why = _failure(folder, exit_code)
    is_open = before.started and before.exit_code is None  # else it ended before it began
    seconds = before.seconds + (time.time() - before.started if is_open else 0.0)
    record = replace(before, state=state, why=why, exit_code=exit_code, seconds=seconds)
    write_record(folder, record)
    return record


def _failure(folder: Path, exit_code: int) -> str:
    """The last line of the newest crash log says which error it was."""
    crashes = sorted(folder.glob("crash-*.log"), key=lambda path: path.stat().st_mtime)
    if exit_code > 0 and crashes:
        lines = [line for line in crashes[-1].read_text(encoding="utf-8").splitlines() if line.strip()]
        errors = [line for line in lines if line[:1].strip() and ":" in line and not line.startswith("Traceback")]
        return (errors or lines or [""])[-1]
    return f"its process {describe_exit(exit_code)}"


def read_ledger(folder: Path) -> list[Entry]:
    """Raises ConfigError if the folder is no sweep's."""
    path = folder / SWEEP_FILE
    if not path.is_file():
        raise ConfigError(f"{folder} holds no sweep: there is no {SWEEP_FILE} in it.")
    points = json.loads(path.read_text(encoding="utf-8"))["points"]
    return [
        Entry(folder / point["folder"], point["words"], point["swept"], read_record(folder / point["folder"]))
        for point in points
    ]


def open_sweep(folder: Path, words: Sequence[str], points: Sequence[Point]) -> None:
    """Writes what the sweep is, or makes sure that the folder holds this one. Nothing that is there is written over.

    Raises ConfigError, with the difference, if the folder holds another sweep, or if the words mean other settings now.
    """
    if (folder / SWEEP_FILE).is_file():
        _refuse_other_words(folder, words)
    elif folder.exists() and any(path.name != ".lock" for path in folder.iterdir()):
        raise ConfigError(f"output_dir={folder} is not empty and holds no sweep. Choose another folder.")
    else:
        listed = [
            {"folder": f"{index:03d}", "words": point.words, "swept": point.swept} for index, point in enumerate(points)
        ]
        write_json(folder / SWEEP_FILE, {"words": list(words), "points": listed})
    by_words = {tuple(point.words): point.config for point in points}
    for entry in read_ledger(folder):
        config = by_words[tuple(entry.words)] if tuple(entry.words) in by_words else _same(by_words, entry.words)
        _open_point(entry, config)


def _same(by_words: dict[tuple[str, ...], RunConfig], words: Sequence[str]) -> RunConfig:
    """The same words in another order."""
    return next(config for key, config in by_words.items() if sorted(key) == sorted(words))


def _refuse_other_words(folder: Path, words: Sequence[str]) -> None:
    before = json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8"))["words"]
    if sorted(before) == sorted(words):
        return
    gone = [word for word in before if word not in words]
    new = [word for word in words if word not in before]
    raise ConfigError(
        f"output_dir={folder} holds another sweep. Only in that one: {' '.join(gone) or '-'}; only in this command: "
        f"{' '.join(new) or '-'}. Give the same words to go on with it, or another output_dir."
    )


def _open_point(entry: Entry, config: RunConfig) -> None:
    config.output_dir = str(entry.folder)
    path = entry.folder / "run.yaml"
    if not path.is_file():
        entry.folder.mkdir(exist_ok=True)
        save_run_yaml(config, path)
        return
    pairs = differing(flat(to_plain(load_run_yaml(path))), flat(to_plain(config)))
    changed = [f"{key} was {before}, is {now}" for key, (before, now) in pairs.items() if key != "output_dir"]
    if changed:
        more = f", and {len(changed) - MAX_SHOWN} more" if len(changed) > MAX_SHOWN else ""
        raise ConfigError(
            f"the same words mean other settings than when {entry.folder} was made, so its points could not be "
            f"compared: {'; '.join(changed[:MAX_SHOWN])}{more}. Put the experiment or option back, or choose another "
            "output_dir."
        )
