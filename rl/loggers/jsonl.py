"""metrics.jsonl, the source of truth of a run, and digests.jsonl: one JSON object a line, with `step`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.config.schema import ConfigError, JsonlLoggerConfig

if TYPE_CHECKING:
    from rl.loggers.samples import Sample

Row = dict[str, Any]
"""`step` (int) and metrics: float, or None where the value does not exist; in digests.jsonl a digest by stage."""


def to_number(value: Any) -> float | None:
    """A float from a number, bool, numpy scalar or one-element tensor; None for None, NaN and infinity."""
    if value is None:
        return None
    number = float(value.item() if hasattr(value, "item") else value)
    return number if math.isfinite(number) else None


class MetricsFile:
    """Appends rows. Each is one write call, so that a kill leaves at most one torn line, the last."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        assert _ends_with_newline(path), f"{path} ends in a torn line: call set_aside_after() before appending"

    def write(self, values: Mapping[str, float | str | None], *, step: int) -> None:
        row = {"step": step, **values}
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_metrics(path: Path) -> list[Row]:
    """All complete rows, in order; none if there is no file. A torn last line is left out.

    Raises ConfigError where another line is damaged.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is empty or torn
    return [parse_json(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def parse_json(text: bytes, where: str) -> Any:
    """Of a run's own files. Raises ConfigError where a disk or a person has damaged one; `where` says which."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error}): the file is damaged. Restore or remove it.") from error


def points(rows: Sequence[Row], key: str, *, x: str = "step") -> list[tuple[float, float]]:
    """(`x`, `key`) of the rows that have a value for both, in their order."""
    return [(row[x], row[key]) for row in rows if row.get(x) is not None and row.get(key) is not None]


def set_aside_after(path: Path, step: int) -> Path | None:
    """Moves rows past `step`, and a torn last line, to `<name>.set_aside.<time>.jsonl`. Returns that file, if any.

    Killed half-way, it leaves the file as it was or as it should be.
    """
    if not path.exists():
        return None
    *lines, torn = path.read_bytes().split(b"\n")
    kept, aside = [], []
    for line in lines:
        (kept if json.loads(line)["step"] <= step else aside).append(line + b"\n")
    if torn:
        aside.append(torn + b"\n")
    if not aside:
        return None
    aside_path = path.with_name(
        f"{path.stem}.set_aside.{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6}.jsonl"
    )
    aside_path.write_bytes(b"".join(aside))
    replacement = path.with_name(path.name + ".new")
    with replacement.open("wb") as file:
        file.write(b"".join(kept))
        os.fsync(file.fileno())
    replacement.replace(path)
    return aside_path


def num_logged(run_folder: Path) -> int:
    """Rows that the run ever wrote, those that were set aside included."""
    paths = [run_folder / "metrics.jsonl", *run_folder.glob("metrics.set_aside.*.jsonl")]
    return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())


class NoTracker:
    """`logger=jsonl`: metrics.jsonl is enough."""

    location: str | None = None

    def __init__(self, config: JsonlLoggerConfig, **_run: Any) -> None:
        del config

    def log(self, metrics: Mapping[str, float | None], *, step: int, samples: Sequence[Sample] = ()) -> None:
        pass

    def close(self, *, failed: bool) -> None:
        pass
