r"""Scores responses: one JSON object a line in, one a line out, in order.

    python scripts/score.py --task gsm8k_math < cases.jsonl > scores.jsonl

In:  `response` and `answer`, and if wanted `mode` (`equivalence`, the default, or `published`) and `source`, the data
     source whose published rule counts. Without it a published score is the best by the rules of the task's sources.
Out: `score`, `correct`, `extracted` (what was taken for the final answer, or null) and `reason`: `ok`, `wrong`,
     `no_answer`, `timeout` or `error`. A malformed line gives `error`; standard error says what is wrong with it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rl.config.tasks import CheckerConfig
from rl.tasks.rewards.checker import Checker
from rl.tasks.rewards.rules import EQUIVALENCE, TASK_SOURCES, published_rules
from rl.tasks.rewards.verdict import Case, Reason, Verdict

LINES_AT_ONCE = 1024
TASKS = (*TASK_SOURCES, "reasoning_gym", "arithmetic", "jsonl")
MODES = ("equivalence", "published")


def cases_of(line: bytes, task: str) -> list[Case]:
    """One case for each rule by which the line may be right. Raises ValueError that says what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not a JSON object")
    response, answer, mode, source = (row.get(key) for key in ("response", "answer", "mode", "source"))
    if not isinstance(response, str):
        raise ValueError("'response' must be a text")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError("'answer' must be a text or a number, and not empty")
    if source is not None and not isinstance(source, str):
        raise ValueError("'source' must be a text")
    if mode not in (None, *MODES):
        raise ValueError(f"'mode' must be one of {', '.join(MODES)}, not {mode!r}")
    rules = published_rules(task, source) if mode == "published" else (EQUIVALENCE,)
    return [Case(response, answer, rule) for rule in rules]


def scored(lines: Sequence[bytes], task: str, checker: Checker, *, first_number: int) -> Iterator[dict[str, Any]]:
    """A result for each line, in order. Says on standard error what is wrong with a line that cannot be scored."""
    cases: list[list[Case]] = []
    for number, line in enumerate(lines, first_number):
        try:
            cases.append(cases_of(line, task))
        except ValueError as error:
            print(f"line {number}: {error}", file=sys.stderr)
            cases.append([])
    verdicts = iter(checker.check([case for some in cases for case in some]))
    for number, some in enumerate(cases, first_number):
        found = [next(verdicts) for _ in some] or [Verdict(0.0, False, None, Reason.ERROR)]
        best = min(found, key=lambda verdict: tuple(Reason).index(verdict.reason))
        if best.detail:
            print(f"line {number}: {best.reason}: {best.detail}", file=sys.stderr)
        yield {
            "score": best.score,
            "correct": best.correct,
            "extracted": best.extracted,
            "reason": best.reason.value,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=TASKS, help="task whose published rule counts")
    parser.add_argument("--workers", type=int, help="processes; as many as cores, at most 8, if not given")
    parser.add_argument("--timeout-s", type=float, default=CheckerConfig.timeout_s, help="limit of one line")
    options = parser.parse_args()
    checker = Checker(CheckerConfig(workers=options.workers, timeout_s=options.timeout_s))
    first_number = 1
    try:
        while lines := list(itertools.islice(sys.stdin.buffer, LINES_AT_ONCE)):
            for result in scored(lines, options.task, checker, first_number=first_number):
                print(json.dumps(result))
            sys.stdout.flush()
            first_number += len(lines)
    finally:
        checker.close()


if __name__ == "__main__":
    main()
