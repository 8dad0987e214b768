"""What `mode=eval` says: rows for a file and a table for a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from rl.types import EvalResult


def evaluation_rows(results: Sequence[EvalResult]) -> list[dict[str, Any]]:
    return [{"key": result.key, **asdict(result)} for result in results]


def evaluation_table(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("metric", "value", "std. error", "problems", "truncated", "errors", title="evaluation")
    for row in rows:
        table.add_row(
            row["key"],
            f"{row['value']:.4f}",
            f"{row['stderr']:.4f}",
            f"{row['num_problems']:,}",
            f"{row['truncated_fraction']:.3f}",
            str(row["num_errors"]),
        )
    Console().print(table)
