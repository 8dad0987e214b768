r"""Numbers with words around them: units, currencies, percent, and the words that change a meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rl.tasks.rewards.numerals import NUMERALS

CHANGING_WORDS = frozenset(
    [
        *("not", "no", "never", "none", "nor", "neither", "cannot", "without", "except", "unless", "less", "fewer"),
        *("more", "greater", "least", "most", "over", "under", "between", "minus", "negative", "plus", "times"),
        *("twice", "double", "triple", "thrice", "squared", "cubed", "root", "if", "below", "above", "up", "than"),
        *("than", "either", "or", "and", "undefined", "impossible", "to", "wrong", "incorrect", "false"),
        *("but", "until", "far", "whether", "divisible", "divided", "multiplied", "factorial", "choose", "mod"),
    ]
)
"""An answer with one of these is not the number beside it."""
_ORDINALS = ["third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
SCALES = {
    "half": Fraction(1, 2),
    "halve": Fraction(1, 2),
    **{word: Fraction(1, number) for number, word in enumerate(_ORDINALS, 3)},
    "quarter": Fraction(1, 4),
    "hundredth": Fraction(1, 100),
    "thousandth": Fraction(1, 1000),
    "millionth": Fraction(1, 10**6),
    "billionth": Fraction(1, 10**9),
    "dozen": Fraction(12),
    "hundred": Fraction(100),
    "thousand": Fraction(1000),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
}
_UNIT_NAMES = {
    "meter": "m metre",
    "centimeter": "cm centimetre",
    "millimeter": "mm millimetre",
    "kilometer": "km kilometre",
    "gram": "g",
    "kilogram": "kg",
    "milligram": "mg",
    "pound": "lb lbs",
    "ounce": "oz",
    "second": "s sec",
    "minute": "min",
    "hour": "h hr",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "foot": "ft feet",
    "inch": "in",
    "yard": "yd",
    "mile": "mi",
    "liter": "l litre",
    "milliliter": "ml millilitre",
    "gallon": "gal",
    "dollar": "usd",
    "rupee": "inr",
    "yen": "jpy",
    "cent": "",
    "euro": "eur",
    "pound sterling": "gbp",
    "degree": "deg",
    "radian": "rad",
    "am": "",
    "pm": "",
    "square": "sq",
    "cubic": "",
    "newton": "n",
    "joule": "j",
    "watt": "w",
    "volt": "v",
}
UNITS = {name: unit for unit, names in _UNIT_NAMES.items() for name in (unit, *names.split())}
"""Name of a unit, singular and in lower case -> the unit."""
CURRENCIES = ("usd", "eur", "gbp", "jpy", "inr")
_IGNORED = frozenset(
    (
        "the",
        "a",
        "an",
        "of",
        "in",
        "is",
        "are",
        "was",
        "be",
        "about",
        "approximately",
        "exactly",
        "total",
        "there",
        "unit",
    )
)

_TRAILING = re.compile(
    r"(?:\s*(?:\\text\{[^{}]*\}|\((?:\s*\\text\{[^{}]*\})+\s*\)|\\(?:usd|eur|gbp|jpy|inr)|%"
    r"|\^\{\\circ\}(?:\s*[CF](?![A-Za-z]))?|(?<=\})\^\{[23]\}|(?<=\})/(?=\\text)|(?<=\})/\s*[hs](?![A-Za-z])"
    r"|(?<=\s)(?:[msghL](?![A-Za-z(^])|m\^\{[23]\})))+$"
)
_DEGREES_OF_A_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z]).*\^\{\\circ\}$")
_LEADING = re.compile(r"^(?:\s*(?:\\text\{[^{}]*\}(?!\()[:,]?|\\(?:usd|eur|gbp|jpy|inr)|:))+")
_ANOTHER_BEFORE = re.compile(
    r"\b(?:half|third|quarter|(?:four|fif|six|seven|eigh|nin|ten)th|percent|square|cube|factor|divisor|digit|part"
    rf"|opposite|reciprocal|inverse|multiple|logarithm|log|power|fraction)\s+of$|\b(?:half|quarter|{'|'.join(NUMERALS)})$"
)
"""Before a number these make another one of it."""
_LEADING_WORDS = re.compile(r"(?:\\text\{[^{}]*\}(?!\()[:,]?\s*)+(?=\S)(?=[^=<>]*\Z)(?!\\text|[,;])")
_MARK = re.compile(r"\\text\{([^{}]*)\}|\\(usd|eur|gbp|jpy|inr)|(%)|(\^\{\\circ\})|\^\{([23])\}|([A-Za-z])|(/)")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*|[23]")


@dataclass(frozen=True, slots=True)
class Quantity:
    core: str
    """The formula or number itself; empty for an answer in words."""
    units: frozenset[str]
    """Units known by name that follow it, or a currency."""
    words: frozenset[str]
    """Other words that follow it, singular."""
    words_before: frozenset[str]
    """Words that stand before it."""
    is_percent: bool
    scale: Fraction


def quantity(text: str) -> Quantity | None:
    r"""An answer, in the one notation, taken apart. None: its words change what it says, or stand within it."""
    trailing = None if _DEGREES_OF_A_FUNCTION.search(text) else _TRAILING.search(text)
    core = text[: trailing.start()] if trailing else text
    leading = _LEADING.search(core)
    if leading:
        core = core[leading.end() :]
    core = core.strip().rstrip(",:;")
    if "\\text" in core:
        return None
    before = _words(leading[0]) if leading else []
    after = _words(trailing[0]) if trailing else []
    if _change_what_follows(before) or CHANGING_WORDS.intersection(after):
        return None
    scale, units, words = Fraction(1), set(), set()
    for word in after:
        if word in SCALES:
            scale *= SCALES[word]
        elif word in UNITS:
            units.add(UNITS[word])
        elif word not in _IGNORED and word != "percent":
            words.add(word)
    units |= {UNITS[word] for word in before if word in CURRENCIES}
    words_before = frozenset(before) - _IGNORED - UNITS.keys()
    return Quantity(core, frozenset(units), frozenset(words), words_before, "percent" in after, scale)


def without_leading_words(text: str) -> str:
    """`\\text{The interval is}[0,1]` as `[0,1]`, unless the words change what is said."""
    match = _LEADING_WORDS.match(text)
    return text[match.end() :] if match and not _change_what_follows(_words(match[0])) else text


def _change_what_follows(words: list[str]) -> bool:
    """True if the number after these words is not what is said."""
    return bool(CHANGING_WORDS.intersection(words)) or _ANOTHER_BEFORE.search(" ".join(words)) is not None


def _words(text: str) -> list[str]:
    words: list[str] = []
    for match in _MARK.finditer(text):
        content, currency, percent, degree, power, letter, per = match.groups()
        if percent:
            words.append("percent")
        elif degree:
            words.append("degree")
        elif content is not None:
            words += [_singular(word) for word in _WORD.findall(content)]
        elif currency or letter:
            words.append(currency or letter.lower())
        elif power:
            words.append("square" if power == "2" else "cubic")
        elif per:
            words.append("per")
    return ["square" if word == "2" else "cubic" if word == "3" else word for word in words]


def _singular(word: str) -> str:
    word = word.lower()
    if word in UNITS or word in CHANGING_WORDS:
        return word
    if word in ("percentage", "pct", "percents"):
        return "percent"
    if word == "inches":
        return "inch"
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def units_agree(one: Quantity, other: Quantity) -> bool:
    """Units and words are ignored where one side has none; where both have some they must not contradict."""
    if one.units != other.units and (one.units or one.words) and (other.units or other.words):
        return False
    for percentage, amount in ((one, other), (other, one)):
        if percentage.is_percent and not amount.is_percent and (amount.units or amount.words):
            return False
    return _do_not_contradict(one.words, other.words) and _do_not_contradict(one.words_before, other.words_before)


def _do_not_contradict(some: frozenset[str], others: frozenset[str]) -> bool:
    return not some or not others or some <= others or others <= some
