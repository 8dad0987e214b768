"""The public truth table: every case as thought through, and no wrong answer that is called right."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rl.tasks.rewards.checker import Checker
from rl.tasks.rewards.verdict import Case, Reason

TABLE = Path(__file__).parents[3] / "truth_table.jsonl"
KINDS = {
    *("numbers", "leading zeros", "thousands separators", "degrees", "currency", "percent", "units", "words", "x="),
    *("tuples", "sets", "intervals", "choices", "bases", "equations", "expressions", "matrices", "unicode", "boxes"),
    *("statements", "hostile"),
}


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


def test_the_checker_agrees_with_the_truth_table(checker: Checker):
    cases = rows()
    verdicts = checker.check([Case(row["response"], row["answer"]) for row in cases])
    wrong = [
        (row["kind"], row["response"], row["answer"], verdict)
        for row, verdict in zip(cases, verdicts, strict=True)
        if verdict.correct != row["correct"] or verdict.reason != row.get("reason", verdict.reason)
    ]
    assert [case for case in wrong if case[-1].correct] == [], "false positives"
    assert wrong == []
    assert not {Reason.ERROR, Reason.TIMEOUT} & {verdict.reason for verdict in verdicts}


def test_the_truth_table_has_right_and_wrong_answers_of_every_kind():
    counts = Counter((row["kind"], row["correct"]) for row in rows())
    assert sum(counts.values()) >= 300
    assert {kind for kind, _ in counts} == KINDS
    for kind in KINDS - {"hostile"}:
        assert counts[kind, True] >= 2, kind
        assert counts[kind, False] >= 2, kind


def test_equality_does_not_depend_on_the_side(checker: Checker):
    """Among finished boxes: what a right answer ignores in the response, it ignores in the answer."""
    start, end = "So the final answer is $\\boxed{", "}$."
    cases = [
        row for row in rows() if row["response"].startswith(start) and row["kind"] not in ("x=", "words", "choices")
    ]
    turned = [Case(f"{start}{row['answer']}{end}", row["response"][len(start) : -len(end)]) for row in cases]
    verdicts = checker.check(turned)
    differing = [
        (case.answer, row["answer"], row["correct"])
        for case, row, verdict in zip(turned, cases, verdicts, strict=True)
        if verdict.correct != row["correct"]
    ]
    assert differing == []
