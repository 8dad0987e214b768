"""Accuracy at equal samples of the runs of one or more sweeps, mean +- standard deviation over seeds, as Markdown.

    python scripts/learning_table.py multirun/quickstart/TIME [MORE...] [--by algorithm algorithm.clip_high]

`--by` names the keys of run.yaml that make a row; runs that differ in `seed` alone are averaged. Samples are prompts
times answers that were trained on; an unfinished run is named and left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from rl.loggers.jsonl import read_metrics

METRIC = "eval/arithmetic/greedy"


def value_of(config: dict[str, Any], key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node


def row_name(config: dict[str, Any], keys: list[str]) -> str:
    """`algorithm` stands for the name of its class; another key for its value."""
    words = []
    for key in keys:
        value = value_of(config, key)
        words.append(
            value["_target_"].rpartition(".")[2] if isinstance(value, dict) else f"{key.split('.')[-1]}={value}"
        )
    return " ".join(words)


def accuracies(folder: Path, config: dict[str, Any]) -> dict[int, float]:
    """Samples trained on -> held-out accuracy."""
    group_size = config["algorithm"]["group_size"]
    rows = read_metrics(folder / "metrics.jsonl")
    return {
        int(row.get("prompts_trained") or 0) * group_size: row[METRIC] for row in rows if row.get(METRIC) is not None
    }


def collect(sweeps: list[Path], keys: list[str]) -> tuple[dict[str, list[dict[int, float]]], list[str]]:
    """(row -> one curve per run, folders of unfinished runs)"""
    curves: defaultdict[str, list[dict[int, float]]] = defaultdict(list)
    unfinished = []
    for path in sorted(file for sweep in sweeps for file in sweep.rglob("run.yaml")):
        folder, config = path.parent, yaml.safe_load(path.read_text(encoding="utf-8"))
        metrics = folder / "metrics.jsonl"
        steps = [row["step"] for row in read_metrics(metrics)] if metrics.exists() else []
        if not steps or max(steps) < config["steps"]:
            unfinished.append(str(folder))
        else:
            curves[row_name(config, keys)].append(accuracies(folder, config))
    return curves, unfinished


def cell(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def table(curves: dict[str, list[dict[int, float]]]) -> str:
    """A column per number of samples that every run was evaluated at."""
    common = set.intersection(*[set(curve) for runs in curves.values() for curve in runs])
    columns = sorted(common)
    lines = ["| run | seeds | " + " | ".join(f"{samples:,}" for samples in columns) + " |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for name, runs in curves.items():
        cells = [cell([curve[samples] for curve in runs]) for samples in columns]
        lines.append(f"| {name} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweeps", nargs="+", type=Path)
    parser.add_argument("--by", nargs="+", default=["algorithm"])
    arguments = parser.parse_args()
    curves, unfinished = collect(arguments.sweeps, arguments.by)
    for folder in unfinished:
        print(f"left out, not finished: {folder}", file=sys.stderr)
    if not curves:
        print("no finished run", file=sys.stderr)
        return 1
    print(table(curves))
    return 1 if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
