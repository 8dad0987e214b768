r"""The final answer that a response states, as text: its last box or, without one, the last statement of an answer.

Time is linear in the length of the response. Nothing here decides whether an answer is right.
"""

from __future__ import annotations

import re

TAIL_CHARACTERS = 4000
"""Without a box, an answer is looked for in this much of the end."""
MAX_STATEMENT = 400
"""Characters of a statement that can be an answer."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_UNBRACED = re.compile(r"[ \t]*([^\s${}\\]+)")
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_ANCHOR = re.compile(
    r"\b(?:answers?|(?:correct|right)\s+(?:option|choice)|option\s+is|choice\s+is)\b"
    r"(?:[ \t]+[\w'()$-]{1,20}){0,8}?[ \t]*(?:\bis\b|\bare\b|:|=)[ \t:]*",
    re.IGNORECASE,
)
_OPTION = re.compile(r"\b(?:option|choice)\s+(?=\(?[A-J]\b)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_CLAUSE = re.compile(
    r",?\s+(?:because|since|which|where|when|whereas|given|so|after|while|as|by|rather than|instead of)\b"
    r"|,\s+(?:and\s+|but\s+)?not\b",
    re.IGNORECASE,
)
_DENIED = re.compile(r"\b(?:false|wrong|incorrect|untrue|not\s+true|unlikely|doubtful)\s+that\b[^.\n]*$", re.IGNORECASE)
_MATH = re.compile(
    r"\$\$(.{1,400}?)\$\$|\\\[(.{1,400}?)\\\]|\\\((.{1,400}?)\\\)"
    r"|(?<![\\$\w])\$(?=\S)((?:\\.|[^$\\\n]|\n(?!\s*\n)){1,400})(?<=\S)\$(?!\d)"  # `$5 and $6` are prices
    r"|(?<![\\$\w])\$(?![^$\n]*?(?<![\\A-Za-z])[A-Za-z]{2})([^$\n]{1,400})\$(?!\d)",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?[$\u20ac\u00a3]?[ ]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?[ ]?(?:%|percent)?"
)
_RESULT = re.compile(rf"=\s*((?>{_NUMBER.pattern}))(?!\s*[-+*/=\u00d7])")
_NEGATION = re.compile(
    r"\b(?:not|never|no|neither|nor|cannot|without|except|unless|fewer|less|more|greater|least|most|either|or|whether|false|wrong|incorrect)\b"
    r"|n't\b",
    re.IGNORECASE,
)
_SPECIAL = re.compile(r"(?:<\|[^<|>\s]{1,40}\|>|</?(?:s|eos|pad|answer)>)")
"""Tokens that close a turn, and tags around an answer."""
_SEVERAL = re.compile(
    r"\b(?:solutions|roots|zeros|values|numbers|factors)\b(?:[ \t]+[\w'()$-]{1,20}){0,8}?[ \t]+are\b[ \t:]*",
    re.IGNORECASE,
)
NEAR_CHARACTERS = 25
"""A negation so far before a number, or half as far after it, is about that number."""
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "pi", "frac", "text"}


def final_answer(response: str, *, is_truncated: bool = False) -> str | None:
    r"""The text of the final answer. None: there is none, or the last box is empty or unfinished.

    In order: the last `\boxed{}`; a last line `#### ...`; what follows the last `answer is` or `Answer:`; a response of
    one short line itself; in the last sentence the last formula or else the last number. A response cut at the length
    limit has an answer only in a box or in a line that is complete.
    """
    boxes = list(_BOX.finditer(response))
    if boxes:
        return _boxed(response, boxes[-1].end(), is_truncated=is_truncated)
    text = _SPECIAL.sub("", response[-TAIL_CHARACTERS:]).replace("**", "").replace("__", "")
    if is_truncated:
        text = text[: text.rfind("\n") + 1]
    found = _after_hashes(text) or _anchored(text)
    if found or is_truncated:
        return found
    return _unmarked(text)


def _boxed(text: str, start: int, *, is_truncated: bool) -> str | None:
    place = start + len(text[start:]) - len(text[start:].lstrip())
    if text[place : place + 1] != "{":
        match = _UNBRACED.match(text, start)
        is_cut = match is not None and is_truncated and match.end() == len(text)
        return match[1] if match and not is_cut else None
    depth, content = 0, place + 1
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 1  # `\{` and `\}` are braces of a set
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[content:place].strip() or None
        place += 1
    return None


def _after_hashes(text: str) -> str | None:
    """`#### 18` at the end, or anywhere if a number follows. A heading `#### Step 2` is neither."""
    matches = list(_HASHES.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    if text[last.end() :].strip() and not _NUMBER.match(last[1]):
        return None
    return last[1].strip()


def _anchored(text: str) -> str | None:
    """What follows the last `answer is`, up to the end of the sentence or a clause that explains it."""
    anchors = sorted((*_ANCHOR.finditer(text), *_OPTION.finditer(text)), key=lambda match: match.end())
    if not anchors or _DENIED.search(text, max(0, anchors[-1].start() - MAX_STATEMENT), anchors[-1].start()):
        return None
    rest = text[anchors[-1].end() :].lstrip(" \t:*\n")
    formulas = [match.span() for match in _MATH.finditer(rest[: 2 * MAX_STATEMENT])]

    def first_outside(pattern: re.Pattern[str], end: int) -> int:
        matches = (match.start() for match in pattern.finditer(rest, 0, end))
        return next((place for place in matches if not any(a < place < b for a, b in formulas)), end)

    statement = rest[: first_outside(_CLAUSE, first_outside(_SENTENCE_END, len(rest)))]
    statement = statement.strip().strip("`'\"").rstrip(".,;:")
    return statement if 0 < len(statement) <= MAX_STATEMENT else None


def _unmarked(text: str) -> str | None:
    """A response that never says which part of it is the answer."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    if not lines:
        return None
    if len(lines) == 1 and len(lines[0]) <= MAX_STATEMENT and not _has_words(lines[0]):
        return lines[0].rstrip(".")
    if lines[-1].endswith("?"):
        return None
    sentence = _last_sentence(lines[-1])
    several = _SEVERAL.search(sentence)
    if several and not _NEGATION.search(_MATH.sub(" ", sentence)):
        return sentence[several.end() :].strip() or None
    formulas = list(_MATH.finditer(sentence))
    if formulas:
        return _inside(formulas[-1]) if not _NEGATION.search(_MATH.sub(" ", sentence)) else None
    return _last_number(sentence) if _has_words(sentence) else sentence


def _last_number(sentence: str) -> str | None:
    """The right side of the last equation or, without one, the last number that no word takes back."""
    results = list(_RESULT.finditer(sentence))
    numbers = list(_NUMBER.finditer(sentence))
    if results:
        found = results[-1][1]
    elif numbers and not _is_negated(sentence, numbers[-1]):
        found = numbers[-1][0]
    else:
        return None
    return found.strip().rstrip(",")


def _is_negated(sentence: str, number: re.Match[str]) -> bool:
    before = sentence[max(0, number.start() - NEAR_CHARACTERS) : number.start()]
    after = sentence[number.end() : number.end() + NEAR_CHARACTERS // 2]
    return _NEGATION.search(before) is not None or _NEGATION.search(after) is not None


def _last_sentence(line: str) -> str:
    ends = [match.end() for match in _SENTENCE_END.finditer(line.rstrip(".!?"))]
    return line[ends[-1] :].strip().rstrip(".!?") if ends else line.rstrip(".!?")


def _inside(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _has_words(text: str) -> bool:
    return any(word not in _FUNCTIONS for word in _WORD.findall(text))
