"""Small numbers that are written in words."""

from __future__ import annotations

import re

_TEENS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_ONES = f"zero one two three four five six seven eight nine ten eleven twelve {_TEENS}".split()
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
NUMERALS = {
    **{word: number for number, word in enumerate(_ONES)},
    **{word: 10 * number for number, word in enumerate(_TENS, 2)},
}
"""Word -> number; those from 21 to 99 are two words."""
_NEGATIVE = ("minus", "negative")
_WORDS = re.compile(r"(?:\\text\{[^{}]*\}\s*)+")


def in_digits(text: str) -> str:
    r"""`\text{forty-two apples}` as `42 \text{apples}` and `\text{negative }7` as `-7`, in the one notation."""
    match = _WORDS.match(text)
    if match is None:
        return text
    words = re.findall(r"[^\s-]+", re.sub(r"\\text|[{}]", " ", match[0]))
    rest = text[match.end() :]
    sign = "-" if words and words[0].lower() in _NEGATIVE else ""
    words = words[len(sign) :]
    if sign and not words and re.match(r"[\d.\\]", rest):
        return sign + rest
    if [word.lower() for word in words] == ["infinity"] and not rest:
        return f"{sign}\\infty"
    number, count = _leading_number([word.lower() for word in words])
    if count == 0:
        return text
    words_after = f" \\text{{{' '.join(words[count:])}}}" if words[count:] else ""
    return f"{sign}{number}{words_after} {rest}".strip()


def _leading_number(words: list[str]) -> tuple[int, int]:
    """The number that the words begin with, and how many of them it takes."""
    if not words or words[0] not in NUMERALS:
        return 0, 0
    number = NUMERALS[words[0]]
    ones = NUMERALS.get(words[1], 0) if len(words) > 1 else 0
    return (number + ones, 2) if words[0] in _TENS and 0 < ones < 10 else (number, 1)
