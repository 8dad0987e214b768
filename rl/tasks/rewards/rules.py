"""The rules by name."""

from __future__ import annotations

from rl.tasks.rewards import published
from rl.tasks.rewards.equivalence import equivalence
from rl.tasks.rewards.verdict import Case, Verdict

PUBLISHED = {"gsm8k": published.gsm8k, "math": published.math, "dapo": published.dapo}
"""Rule -> the pure function of response and answer that is the published run's."""

RULES = ("equivalence", *PUBLISHED)


def judge(case: Case) -> Verdict:
    """Applies the rule that the case names. It may take for ever: only a worker process of the checker calls it."""
    if case.rule == "equivalence":
        return equivalence(case.response, case.answer, is_truncated=case.is_truncated)
    return PUBLISHED[case.rule](case.response, case.answer)
