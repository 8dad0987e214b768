"""Mathematical equality of final answers, wherever and however they are written."""

from __future__ import annotations

from rl.tasks.rewards.numbers import parse_number
from rl.tasks.rewards.published import last_boxed
from rl.tasks.rewards.verdict import Verdict, decided


def equivalence(response: str, answer: str, *, is_truncated: bool = False) -> Verdict:
    """1.0 if the final answer that `response` states equals `answer`, else 0.0."""
    del is_truncated
    found = last_boxed(response)
    if found is None:
        return decided(None, correct=False)
    value = parse_number(found)
    correct = found.strip() == answer.strip() or (value is not None and value == parse_number(answer))
    return decided(found, correct=correct)
