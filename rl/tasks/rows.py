"""Reading and checking rows of data files. No torch: a bad file is reported before a model loads."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl.config.schema import HUB_ID, ConfigError
from rl.config.tasks import MADE

Row = dict[str, Any]

_EXAMPLE_CHARACTERS = 200


def is_hub_id(path: str) -> bool:
    """True if `path` is no file or folder here and has the form `name` or `owner/name`; `made` is none."""
    return path != MADE and not Path(path).expanduser().exists() and HUB_ID.fullmatch(path) is not None


def read_rows(path: Path, *, key: str) -> Iterator[Row]:
    """Rows of a .jsonl or .parquet file, one by one. `key` is the setting that names it, for errors."""
    if not path.is_file():
        raise ConfigError(f"{key}={path}: there is no such file. Give a .jsonl or .parquet file that exists.")
    rows = _parquet_rows(path, key=key) if path.suffix == ".parquet" else _json_rows(path, key=key)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{key}={path} holds no rows. Give a file with at least one.")
    yield first
    yield from rows


def _json_rows(path: Path, *, key: str) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
                raise ConfigError(
                    f"{key}={path}, line {number}: not valid JSON ({error}). The file has one JSON object a line."
                ) from error
            if not isinstance(row, dict):
                raise ConfigError(
                    f"{key}={path}, line {number}: a {type(row).__name__}, not a JSON object. "
                    "The file has one JSON object a line."
                )
            yield row


def _parquet_rows(path: Path, *, key: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{key}={path}: not a readable parquet file ({error}).") from error


def require_columns(row: Row, number: int, example: Mapping[str, Any], *, source: str) -> None:
    """Raises ConfigError if row `number` lacks a column of `example`, a right row, or has null there."""
    for column in example:
        value = row.get(column)
        is_null = value is None or (isinstance(value, float) and math.isnan(value))
        if column not in row or is_null:
            wrong = "is null" if column in row else "is missing"
            raise ConfigError(
                f"{source}, row {number}: column '{column}' {wrong}. "
                f"The row has: {', '.join(map(str, row)) or 'nothing'}. A row looks like {as_example(example)}"
            )


def as_example(row: Mapping[str, Any]) -> str:
    return json.dumps(row, default=repr)[:_EXAMPLE_CHARACTERS]


def split_rows(
    path: str, split: str, *, key: str, file: str | None = None, config_name: str | None = None, revision: str | None
) -> Iterator[Row]:
    """Rows of one split of a data set: a local folder in the published layout, or a hub id.

    `file` is the published file where that is not named after the split. `key` is the setting, for errors.
    """
    if is_hub_id(path):
        yield from _hub_rows(path, split, key=key, config_name=config_name, revision=revision)
        return
    for part in split_files(path, split, key=key, file=file):
        yield from read_rows(part, key=key)


def split_files(path: str, split: str, *, key: str, file: str | None = None) -> list[Path]:
    """Files of a split in a local folder: SPLIT.jsonl, SPLIT.parquet, the published file, or numbered shards."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"{key}={path}: there is no such folder. Give a folder that exists, or a hub id (owner/name)."
        )
    names = [f"{split}.jsonl", f"{split}.parquet", *([file] if file else [])]
    for name in names:
        for place in (folder, folder / "data"):
            if (place / name).is_file():
                return [place / name]
    shards = sorted(folder.glob(f"**/{split}-*-of-*.parquet"))
    if not shards:
        raise ConfigError(
            f"{key}={path}: the folder has no {', '.join(names)} or {split}-*-of-*.parquet. "
            "Give a folder in the published layout."
        )
    return shards


def _hub_rows(path: str, split: str, *, key: str, config_name: str | None, revision: str | None) -> Iterator[Row]:
    import datasets

    try:
        data = datasets.load_dataset(path, config_name, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        offline = " HF_HUB_OFFLINE=1 is set." if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise ConfigError(
            f"{key}={path} is no folder here, and the hub did not give its split '{split}' ({error}).{offline} "
            f"Check the name and the network, or give a local folder with {split}.jsonl."
        ) from error
    for row in data:
        yield dict(row)  # type: ignore[arg-type]
