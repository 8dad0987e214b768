"""What `mode=eval` says: rows for a file and a table for a person."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl.types import EvalResult, Sampling


def evaluation_rows(results: Sequence[EvalResult]) -> list[dict[str, Any]]:
    """JSON-able; a standard error that is unknown is null."""
    rows = [{"key": result.key, **asdict(result)} for result in results]
    return [row | {"stderr": None if math.isnan(row["stderr"]) else row["stderr"]} for row in rows]


def evaluation_table(results: Sequence[EvalResult]) -> Table:
    """One line a metric, with its standard error. Above it how the answers were sampled: greedy accuracy and sampled
    accuracy are two things."""
    title = Text("\n".join(_sampling_lines(results)))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("metric", overflow="fold")
    for column in ("value", "+/-", "problems", "truncated", "errors"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            Text(result.key),
            f"{result.value:.4f}",
            "unknown" if math.isnan(result.stderr) else f"{result.stderr:.4f}",
            f"{result.num_problems:,} x {result.samples_per_problem}",
            f"{result.truncated_fraction:.3f}",
            str(result.num_errors),
        )
    return table


def print_evaluation(results: Sequence[EvalResult]) -> None:
    Console().print(evaluation_table(results))


def _sampling_lines(results: Sequence[EvalResult]) -> list[str]:
    by_set = {result.benchmark: result for result in results}
    return [f"{name}: {_sampling_words(result.sampling)}" for name, result in by_set.items()]


def _sampling_words(sampling: Sampling) -> str:
    limit = f"at most {sampling.max_new_tokens:,} new tokens"
    if sampling.is_greedy:
        return f"greedy, {limit}"
    return (
        f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}, "
        f"seed {sampling.seed}, {limit}"
    )
