"""Numbers in the text of a model: found by a regular expression, compared as exact fractions, never evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

from rl.types import Rollout

_NUMBER = re.compile(
    r"""
    (?:(?<![\w.)\]}])(?P<sign>[-+\u2212]))?         # after a digit or a bracket it is an operator, not a sign
    [$\u20ac\u00a3\u00a5]?                          # one currency sign
    (?P<whole>[0-9]{1,3}(?:,[0-9]{3}){1,30}(?!,?[0-9])  # commas only between digit groups; bounded: linear time
      |[0-9]+|(?=\.[0-9]))
    (?P<decimals>\.[0-9]+)?
    (?P<exponent>[eE][-+]?[0-9]{1,3}(?!\w))?
    (?:/(?P<denominator>[0-9]+)(?![\w/]))?
    """,
    re.VERBOSE,
)

MAX_CHARACTERS = 300
"""A longer run of digits is no number: Python refuses to convert the longest, and no answer is that long."""


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is one number: `$80,000` and `80,000.00` are 80000, `18.` is 18, `1/2` is a half."""
    stripped = text.strip()
    match = _NUMBER.match(stripped)
    if match is None or stripped[match.end() :] not in ("", ".", "%"):
        return None
    return _value(match)


def ends_with_number(rollout: Rollout, answer: str) -> bool:
    """True if the last number of the response equals the number `answer`.

    In a response cut at the length limit a number at its very end may be the start of a longer one: it does not count.
    """
    wanted = parse_number(answer)
    match = _last_match(rollout.text)
    if wanted is None or match is None:
        return False
    if rollout.is_truncated and match.end() == len(rollout.text):
        return False
    return _value(match) == wanted


def _last_match(text: str) -> re.Match[str] | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return last


def _value(match: re.Match[str]) -> Fraction | None:
    if match.end() - match.start() > MAX_CHARACTERS:
        return None
    whole = match["whole"].replace(",", "") or "0"
    value = Fraction(whole + (match["decimals"] or "") + (match["exponent"] or ""))
    if match["denominator"] is not None:
        denominator = int(match["denominator"])
        if denominator == 0:
            return None
        value /= denominator
    return -value if match["sign"] in ("-", "\u2212") else value
