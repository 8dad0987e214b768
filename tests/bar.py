"""Fails unless a run's greedy accuracy rose: `python tests/bar.py RUN --start-at-most A --end-at-least B`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rl.loggers.jsonl import read_metrics

KEY = "eval/arithmetic/greedy"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--start-at-most", type=float, required=True)
    parser.add_argument("--end-at-least", type=float, required=True)
    arguments = parser.parse_args()
    accuracies = [row[KEY] for row in read_metrics(arguments.run / "metrics.jsonl") if KEY in row]
    start, end = accuracies[0], accuracies[-1]
    print(f"{arguments.run}: {KEY} {start:.3f} -> {end:.3f}")
    return 0 if start <= arguments.start_at_most and end >= arguments.end_at_least else 1


if __name__ == "__main__":
    sys.exit(main())
