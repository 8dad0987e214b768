"""What is asked of the checker about one response, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Why a response has its score. Only `OK` is right; `ERROR` says nothing about the response."""

    OK = "ok"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    """Nothing in the response states a final answer in the way that the rule reads one."""
    TIMEOUT = "timeout"
    """Deciding went over the limit of time or memory of one sample. Scored as a wrong answer."""
    ERROR = "error"
    """The checker itself failed, or was asked something malformed. Never the same as wrong."""


@dataclass(frozen=True, slots=True)
class Case:
    """One response to check."""

    response: str
    answer: str
    """The right answer."""
    rule: str = "equivalence"
    """A name in `rl.tasks.rewards.rules.RULES`."""
    is_truncated: bool = False
    """The response was cut at the length limit: what stands at its very end may be half an answer."""


@dataclass(frozen=True, slots=True)
class Verdict:
    score: float
    """On the scale of the rule: 0 or 1, -1 or 1 (`dapo`), or 0, 0.1, 0.9 and 1 (`geometry3k`). 0 on an error."""
    correct: bool
    extracted: str | None
    """What the rule took for the final answer. None: nothing."""
    reason: Reason
    detail: str = ""
    """What failed, where `reason` is `ERROR` or `TIMEOUT`."""
    parts: dict[str, float] = field(default_factory=dict)
    """What `score` is made of, where the rule adds several things up."""


def decided(extracted: str | None, *, correct: bool, right: float = 1.0, wrong: float = 0.0) -> Verdict:
    """The verdict of a rule with two scores; no `extracted` answer is never correct."""
    if extracted is None:
        return Verdict(wrong, False, None, Reason.NO_ANSWER)
    return Verdict(right if correct else wrong, correct, extracted, Reason.OK if correct else Reason.WRONG)
