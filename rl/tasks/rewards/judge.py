"""Applies a rule to a case. Imports sympy: only worker processes of the checker do this."""

from __future__ import annotations

from collections.abc import Callable

from rl.tasks.rewards import published
from rl.tasks.rewards.equivalence import equivalence
from rl.tasks.rewards.geometry import geometry3k
from rl.tasks.rewards.verdict import Case, Verdict

_PUBLISHED: dict[str, Callable[[str, str], Verdict]] = {
    "gsm8k": published.gsm8k,
    "math": published.math,
    "dapo": published.dapo,
    "geometry3k": geometry3k,
}


def judge(case: Case) -> Verdict:
    """The verdict of the rule that the case names. It may take for ever."""
    if case.rule == "equivalence":
        return equivalence(case.response, case.answer, is_truncated=case.is_truncated)
    return _PUBLISHED[case.rule](case.response, case.answer)


_WARM_UP = (
    (r"\sqrt{8}+\sin 2x", r"2\sqrt{2}+2\sin x\cos x"),
    (r"\binom{n}{2}+n!+\ln 3+e^{x}+|x|", r"\frac{n(n-1)}{2}+n!+\ln 3+e^{x}+|x|+\arctan x"),
    (r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}", "0"),
    (r"\lfloor x\rfloor+\sum_{k=1}^{n} k", r"\sum_{k=1}^{n} k+\lfloor x\rfloor"),
    (r"\int_0^1 x^2 dx", r"\int_0^1 x^2 dx + 0"),
    (r"\mathbb{R}\setminus\{0,1\}", r"\mathbb{R}\setminus \{1,0\}"),
)


def warm_up() -> None:
    """Makes sympy and math-verify import what they import late, before that is refused and before a clock runs."""
    for given, right in _WARM_UP:
        equivalence(f"\\boxed{{{given}}}", right)
