r"""The outermost structure of an answer in the one notation: lists, brackets, unions, relations, matrices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_LIST_SEPARATOR = re.compile(r"(?:[,;]\s*)?\\text\{\s*(?:and|or)\s*\}|[,;]")
_ITEM_SEPARATOR = re.compile(r"[,;]")
_UNION_SEPARATOR = re.compile(r"\\cup(?![A-Za-z])")
_RELATION_SIGN = re.compile(
    r"\\(?:le|ge|ne|in|approx|equiv)(?![A-Za-z])|=|<|>|\\text\{\s*(?:is|in|equals|(?:is )?equal to)\s*\}"
)
_WORDED_EQUAL = re.compile(r"\\text\{\s*is\s*\}\s*\\text\{\s*equal\s*\}\s*\\text\{\s*to\s*\}")


def depth(text: str) -> int:
    """Most brackets of any kind open at once."""
    deepest = current = 0
    for character in text:
        current += (character in "([{") - (character in ")]}")
        deepest = max(deepest, current)
    return deepest


def _top_level(text: str) -> Iterator[tuple[int, int]]:
    """(place, level) of every character that opens or closes nothing; what is in `\\text{}` is at no depth."""
    level, place = 0, 0
    while place < len(text):
        if text.startswith("\\text{", place):
            end = text.find("}", place)
            yield place, level
            place = end + 1 if end > 0 else len(text)
            continue
        if text.startswith(("\\{", "\\}"), place):
            level += 1 if text[place + 1] == "{" else -1
            place += 2
            continue
        character = text[place]
        if character in "([{":
            level += 1
        elif character in ")]}":
            level -= 1
        else:
            yield place, level
        place += 1


def _split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Parts between the separators that stand outside all brackets, and these separators."""
    parts, separators, start = [], [], 0
    for place, level in _top_level(text):
        match = separator.match(text, place) if level == 0 and place >= start else None
        if match:
            parts.append(text[start:place].strip())
            separators.append(match[0].strip())
            start = match.end()
    parts.append(text[start:].strip())
    return parts, separators


def split_list(text: str) -> list[str]:
    r"""Items of a list without brackets; `a \pm b` is two of them."""
    items = [item for item in _split(text, _LIST_SEPARATOR)[0] if item]
    return [one for item in items for one in _both_signs(item)]


def _both_signs(item: str) -> list[str]:
    if len(re.findall(r"\\(?:pm|mp)(?![A-Za-z])", item)) != 1:
        return [item]
    return [re.sub(r"\\(?:pm|mp)(?![A-Za-z])", sign, item) for sign in "+-"]


def split_union(text: str) -> list[str]:
    return _split(text, _UNION_SEPARATOR)[0]


def bracketed(text: str) -> tuple[str, list[str]] | None:
    """Kind of the brackets around all of `text` (`()`, `[]`, `[)`, `(]`, `{}` for a set) and what they hold."""
    text = text.strip()
    if text.startswith("{") and text.endswith("}") and _ITEM_SEPARATOR.search(text):
        text = f"\\{text[:-1]}\\}}"  # a set, in plain text
    opening = next((one for one in ("\\{", "(", "[") if text.startswith(one)), None)
    closing = next((one for one in ("\\}", ")", "]") if text.endswith(one)), None)
    if opening is None or closing is None or (opening == "\\{") != (closing == "\\}"):
        return None
    inside = text[len(opening) : -len(closing)]
    level = 0
    for character in inside:
        level += (character in "([{") - (character in ")]}")
        if level < 0:
            return None
    if level != 0:
        return None
    items = _split(inside, _ITEM_SEPARATOR)[0]
    if not all(items):
        return ("{}", []) if opening == "\\{" and not inside.strip() else None
    return (opening + closing).replace("\\", ""), items


def unwrapped(text: str) -> str:
    """Without round brackets or braces around one thing, which say nothing."""
    while True:
        brackets = bracketed(text)
        if brackets is not None and brackets[0] == "()" and len(brackets[1]) == 1:
            text = brackets[1][0]
        elif text.startswith("{") and text.endswith("}") and text.count("{") == 1:
            text = text[1:-1].strip()
        else:
            return text


_MATRIX = re.compile(r"\\begin\{([pbB]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)


def matrix(text: str) -> list[list[str]] | None:
    match = _MATRIX.fullmatch(text.strip())
    if match is None or "\\begin" in match[2]:
        return None
    rows = [row for row in match[2].split("\\cr") if row.strip()]
    return [[cell.strip() for cell in row.split("&")] for row in rows]


_VARIABLE = r"(?:[A-Za-z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|rho|sigma|tau))(?:_\{[^{}]*\})?'*"
_LABEL = re.compile(
    rf"(?:|{_VARIABLE}|{_VARIABLE}(?:\^\{{-1\}})?\(\s*{_VARIABLE}(?:\s*,\s*{_VARIABLE})*\s*\)"
    rf"|{_VARIABLE}\(\s*-?\d+\s*\)|\(\s*{_VARIABLE}(?:\s*,\s*{_VARIABLE})+\s*\)|(?:\\text\{{[^{{}}]*\}}:?\s*)+(?:{_VARIABLE})?|[A-Z]{{2,3}})"
)
_SET_BUILDER = re.compile(rf"\\\{{\s*({_VARIABLE})\s*(?:\\in\s*\\mathbb\{{R\}}\s*)?[|:]\s*(.+)\\\}}")
_CHANGING = re.compile(r"\b(?:not|no|never|cannot)\b", re.IGNORECASE)
_SUBSCRIPT = re.compile(r"_\{[^{}]*\}")


@dataclass(frozen=True, slots=True)
class Relation:
    r"""`sides[0] signs[0] sides[1] ...`; signs are `=`, `<`, `\le`, `\ne`, `\in`, `\approx` and `\equiv`."""

    sides: tuple[str, ...]
    signs: tuple[str, ...]

    @property
    def is_labelled(self) -> bool:
        """It only gives the value of something with a name: `x = 5`, `f(x) = 2x`, `Area = 12`."""
        return (
            set(self.signs) == {"="}
            and _LABEL.fullmatch(self.sides[0]) is not None
            and not _CHANGING.search(self.sides[0])
        )

    @property
    def is_membership(self) -> bool:
        return self.signs == ("\\in",) and _LABEL.fullmatch(self.sides[0]) is not None

    @property
    def names(self) -> list[str]:
        """Of `(x,y) = (1,2)` both variables; of anything else none."""
        pairs = [bracketed(side) for side in self.sides]
        is_of_tuples = self.is_labelled and len(pairs) == 2 and all(pair and pair[0] == "()" for pair in pairs)
        names, values = (pair[1] if pair else [] for pair in pairs) if is_of_tuples else ([], [])
        return names if len(names) == len(values) > 1 else []

    @property
    def values(self) -> list[str]:
        """What belongs to `names`."""
        brackets = bracketed(self.sides[-1])
        return brackets[1] if brackets else []

    @property
    def variable(self) -> str | None:
        """The one side that is a variable."""
        found = [side for side in self.sides if re.fullmatch(_VARIABLE, side)]
        return found[0] if len(found) == 1 else None

    def shortened(self) -> Relation:
        """`x = 6/2 = 3` as `x = 3`."""
        return Relation((self.sides[0], self.sides[-1]), ("=",)) if self.is_labelled else self

    def value(self, *, is_right: bool, agree: Callable[[str, str], bool]) -> str | None:
        """What the relation gives as a value alone; None: it is an equation or inequality in its own right.

        In the right answer only a name on the left is ignored, so that an equation is not taken for its right side.
        """
        if "\\approx" in self.signs:
            return self._exact_value(is_right=is_right, agree=agree)
        if self.signs == ("\\in",):
            return self.sides[1] if self.is_membership else None
        if self.is_labelled:
            return self.sides[-1]
        if is_right or set(self.signs) != {"="} or _CHANGING.search(self.sides[0]):
            return None
        is_named = not re.search(r"\d", _SUBSCRIPT.sub("", self.sides[0])) and self.sides[-1] != "0"
        is_sum = all(agree(side, self.sides[-1]) for side in self.sides)
        return self.sides[-1] if is_named or is_sum else None

    def _exact_value(self, *, is_right: bool, agree: Callable[[str, str], bool]) -> str | None:
        """Of `x = 1/3 \\approx 0.33` a third, but of `x \\approx 0.33` what is there."""
        exact = self.signs.index("\\approx")
        if exact == 0:
            return self.sides[1] if _LABEL.fullmatch(self.sides[0]) else self.sides[0]
        shorter = Relation(self.sides[: exact + 1], self.signs[:exact])
        return shorter.value(is_right=is_right, agree=agree)

    def interval(self) -> str | None:
        r"""`0 \le x < 1` as `[0,1)`, `x < 3` as `(-\infty,3)`; None: it says no such thing of one variable."""
        if self.is_membership:
            return self.sides[1] if self.variable == self.sides[0] else None
        is_variable = [re.fullmatch(_VARIABLE, side) is not None for side in self.sides]
        ends = {(True, False): ("-\\infty", 1), (False, True): (0, "\\infty"), (False, True, False): (0, 2)}.get(
            tuple(is_variable)
        )
        if ends is None or not set(self.signs) <= {"<", "\\le"}:
            return None
        below, above = (self.sides[end] if isinstance(end, int) else end for end in ends)
        opening = "[" if self.signs[0] == "\\le" and ends[0] == 0 else "("
        closing = "]" if self.signs[-1] == "\\le" and ends[1] != "\\infty" else ")"
        return f"{opening}{below},{above}{closing}"


def _sign_of(text: str) -> str:
    if not text.startswith("\\text"):
        return text
    return "\\in" if re.search(r"\bin\b", text) else "="


def set_condition(text: str) -> tuple[str, str] | None:
    r"""Of `\{x | x > 1\}` the variable and the condition. None: it is no such set."""
    match = _SET_BUILDER.fullmatch(text)
    return (match[1], match[2].strip()) if match else None


def relation(text: str) -> Relation | None:
    r"""The relations outside all brackets; `>` and `\ge` are turned round. None: there is none."""
    sides, signs = _split(_WORDED_EQUAL.sub("=", text), _RELATION_SIGN)
    signs = [_sign_of(sign) for sign in signs]
    if not signs or not all(sides[1:]) or (not sides[0] and signs[0] != "="):
        return None
    if set(signs) <= {">", "\\ge"}:
        turned = {">": "<", "\\ge": "\\le"}
        return Relation(tuple(reversed(sides)), tuple(turned[sign] for sign in reversed(signs)))
    return Relation(tuple(sides), tuple(signs))
