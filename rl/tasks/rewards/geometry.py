r"""The scoring rule of the published geometry3k runs (verl/utils/reward_score/geo3k.py at 7b19203c52)."""

from __future__ import annotations

import re
from dataclasses import replace

from rl.tasks.rewards.equivalence import equivalent
from rl.tasks.rewards.published import equal_as_hendrycks
from rl.tasks.rewards.verdict import Verdict, decided

FORMAT_WEIGHT = 0.1
_THOUGHT_AND_BOX = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
_WHOLE = re.compile(r"-?[0-9]+(?:,[0-9]{3})*(?:\.0*)?")
_BARE_FRACTION = re.compile(r"-?[0-9]+/0*[1-9][0-9]*")


def geometry3k(response: str, answer: str) -> Verdict:
    r"""0.9 for the right content of the last `\boxed{}`, and 0.1 for `<think>...</think>` before a box.

    The original grades with mathruler 0.1.0: equal after Hendrycks' normalization, or else equal by value, where a
    whole number must be written as one and a fraction reduced. It finds values by evaluating text as Python; here they
    are those of `equivalence`, which is the one known difference. It may take for ever.
    """
    found = _geometry_box(response)
    is_right = found is not None and _equal_as_mathruler(found, answer)
    is_formatted = _THOUGHT_AND_BOX.fullmatch(response) is not None
    score = (1.0 - FORMAT_WEIGHT) * is_right + FORMAT_WEIGHT * is_formatted
    parts = {"accuracy": float(is_right), "format": float(is_formatted)}
    return replace(decided(found, correct=is_right), score=score, parts=parts)


def _geometry_box(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start, depth = start + len("\\boxed{"), 1
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start:place].strip()
    return None


def _equal_as_mathruler(given: str, right: str) -> bool:
    if equal_as_hendrycks(_bare(given), _bare(right)):
        return True
    plain = [_bare(text).replace("%", "").replace("\\", "").replace(" ", "") for text in (given, right)]
    if (_WHOLE.fullmatch(plain[0]) is None) != (_WHOLE.fullmatch(plain[1]) is None):
        return False
    if _BARE_FRACTION.fullmatch(plain[0]) and _BARE_FRACTION.fullmatch(plain[1]):
        return False  # the same text would have been equal above
    return equivalent(given, right)


def _bare(text: str) -> str:
    match = re.fullmatch(r"\s*\\text\{(.+?)\}\s*", text)
    return (match[1] if match else text).strip().replace("\\%", "").replace("%", "")
