r"""Mathematical equality of final answers, wherever and however they are written.

An answer is taken apart by its outermost structure (union, brackets, list, relation, words), and only single formulas
are compared by value. So order and brackets count where they mean something, and an equation is never one number.

What this cannot read is left to math-verify, but only if both answers hold the same numbers and letters: on its own
its `verify` (0.9) says yes to different equations without a solution, to 1/2^99 and 1/2^98, and to 0.3333333 and 1/3.
Of its readers only that of LaTeX is used; that of plain text ends in Python's `eval`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import chain

import sympy

from rl.tasks.rewards import remainder
from rl.tasks.rewards.expressions import UnreadableError, expression, number_at, points, rational, same_value
from rl.tasks.rewards.extract import final_answer
from rl.tasks.rewards.notation import written
from rl.tasks.rewards.numerals import in_digits
from rl.tasks.rewards.quantities import Quantity, quantity, units_agree, without_leading_words
from rl.tasks.rewards.structure import (
    Relation,
    bracketed,
    depth,
    matrix,
    relation,
    set_condition,
    split_list,
    split_union,
    unwrapped,
)
from rl.tasks.rewards.verdict import Verdict, decided

MAX_CHARACTERS = 1000
MAX_DEPTH = 30
"""An answer longer, or of more brackets within brackets, is compared as text."""


def equivalence(response: str, answer: str, *, is_truncated: bool = False) -> Verdict:
    """1.0 if the final answer that `response` states equals `answer`, else 0.0."""
    found = final_answer(response, is_truncated=is_truncated)
    return decided(found, correct=found is not None and equivalent(found, answer))


@lru_cache(maxsize=4096)  # the answers of a group are often the same
def equivalent(given: str, right: str) -> bool:
    """True if the answer `given` equals the answer `right`. Units and words may be missing on either side."""
    if given.strip() == right.strip():
        return True
    if any(len(text) > MAX_CHARACTERS or depth(text) > MAX_DEPTH for text in (given, right)):
        return False
    one, other = written(_unboxed(given)), written(_unboxed(right))
    if not one or not other:
        return False
    options = _option(one), _option(other)
    if None not in options and (options[0] != options[1] or min(len(one), len(other)) <= len("(C)")):
        return options[0] == options[1]
    one, other = _without_option(one), _without_option(other)
    if "\\text" in one + other and _words_of(one) == _words_of(other):
        return True
    bare, other_bare = without_leading_words(one), without_leading_words(other)
    if (bare == one) != (other_bare == other):  # words on one side only
        one, other = bare, other_bare
    return _equal(one, other)


_OPTION_REST = r"(?!\\text\{\s*(?:and|or|not|nor|but)\b|.*\(?\b[A-J]\))[^\s+*/^=<>_,;&-].*"
_OPTION = re.compile(
    rf"(?:\\text\{{\s*(?i:option|choice|answer)\s*\}}\s*)?"
    rf"(?:\(?([A-J])[).:](?:\s+{_OPTION_REST})?|([A-J])|\(([A-J])\)(?:\s*{_OPTION_REST})?)"
)
_LABELLED = re.compile(r"(?:\([A-J]\)|[A-J][).:])\s+(?=\S)")


def _option(text: str) -> str | None:
    """The letter of a multiple-choice answer: `(C)`, `C`, `C.` or `(C) 12`."""
    match = _OPTION.fullmatch(text)
    return next(filter(None, match.groups())) if match else None


def _without_option(text: str) -> str:
    return _LABELLED.sub("", text, count=1) if _LABELLED.match(text) else text


def _unboxed(answer: str) -> str:
    match = re.fullmatch(r"\s*\$*\s*\\boxed\s*\{(.*)\}\s*\$*\s*", answer, re.DOTALL)
    return match[1] if match else answer


def _equal(one: str, other: str, *, is_item: bool = False) -> bool:
    """Equality of two answers in the one notation. An item of a list is no list itself, unless in brackets."""
    one, other = unwrapped(one), unwrapped(other)
    if _squeezed(one) == _squeezed(other):
        return True
    one, other = _as_range(one), _as_range(other)
    for as_structure in _ITEM_STRUCTURES if is_item else (_as_lists, *_ITEM_STRUCTURES):
        are_equal = as_structure(one, other)
        if are_equal is not None:
            return are_equal
    return _equal_quantities(one, other)


def _item_equal(one: str, other: str) -> bool:
    return _equal(one, other, is_item=True)


def _squeezed(text: str) -> str:
    return re.sub(r"(?<![A-Za-z\d]) +| +(?![A-Za-z\d])", "", text)


_ALTERNATIVE = re.compile(r"\\text\{\s*or\s*\}")
_REALS = re.compile(r"\\mathbb\s*\{\s*R\s*\}|\\R")


def _as_range(text: str) -> str:
    r"""`\{x | 0 \le x < 1\}` and `x < 0 or x > 1` as intervals, the real numbers as one, and all else as it is."""
    if _REALS.fullmatch(text):
        return "(-\\infty,\\infty)"
    builder = set_condition(text)
    alternatives = _ALTERNATIVE.split(builder[1] if builder else text)
    if builder is None and len(alternatives) == 1:
        return text
    relations = [relation(part) for part in alternatives]
    intervals = [found.interval() for found in relations if found]
    if None in intervals or len(intervals) < len(alternatives):
        return text
    variables = {found.variable for found in relations if found} | ({builder[0]} if builder else set())
    return "\\cup ".join(filter(None, intervals)) if len(variables) == 1 else text


def _as_lists(one: str, other: str) -> bool | None:
    """Lists without brackets are in no order, like sets, but repetitions count. A set in braces may be one of them."""
    if len(split_list(one)) == len(split_list(other)) == 1:
        return None
    items, other_items = _listed(one, beside=other), _listed(other, beside=one)
    if len(items) != len(other_items):
        return False
    named = [sum(relation(item) is not None for item in side) for side in (items, other_items)]
    if 0 in named and max(named) > 1:  # `x=1, y=2` beside `1, 2`: now the order says which is which
        return all(map(_item_equal, items, other_items))
    return _matched(items, other_items)


def _listed(text: str, *, beside: str) -> list[str]:
    items = split_list(text)
    if len(items) > 1:
        return _with_shared_labels(items)
    found = relation(text)
    if found and found.names and all(relation(item) for item in split_list(beside)):
        return [f"{name}={value}" for name, value in zip(found.names, found.values, strict=True)]
    brackets = bracketed(found.sides[-1] if found and (found.is_labelled or found.is_membership) else text)
    return brackets[1] if brackets and brackets[0] == "{}" else items


def _with_shared_labels(items: list[str]) -> list[str]:
    """`x=1, x=2` lists values of x: the label says nothing. `x=1, y=2` is another matter."""
    relations = [relation(item) for item in items]
    labels = {found.sides[0] for found in relations if found and found.is_labelled}
    if len(labels) == 1 and all(found is None or found.is_labelled for found in relations):
        return [found.sides[-1] if found else item for item, found in zip(items, relations, strict=True)]
    return items


def _matched(ones: Sequence[str], others: Sequence[str]) -> bool:
    """True if the items can be paired, equal with equal. Equality is transitive, so the first match will do."""
    left = list(others)
    for one in ones:
        place = next((number for number, other in enumerate(left) if _item_equal(one, other)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _equal_sets(ones: Sequence[str], others: Sequence[str]) -> bool:
    def within(some: Sequence[str], many: Sequence[str]) -> bool:
        return all(any(_item_equal(one, other) for other in many) for one in some)

    return within(ones, others) and within(others, ones)


def _as_unions(one: str, other: str) -> bool | None:
    parts, other_parts = split_union(one), split_union(other)
    return None if len(parts) == len(other_parts) == 1 else _equal_sets(parts, other_parts)


def _as_brackets(one: str, other: str) -> bool | None:
    brackets, other_brackets = bracketed(one), bracketed(other)
    if brackets is None or other_brackets is None:
        return None  # one may have a unit, or be a product
    (kind, items), (other_kind, other_items) = brackets, other_brackets
    if kind == other_kind == "{}":
        return _equal_sets(items, other_items)
    return kind == other_kind and len(items) == len(other_items) and all(map(_item_equal, items, other_items))


def _as_matrices(one: str, other: str) -> bool | None:
    rows, other_rows = matrix(one), matrix(other)
    if rows is None and other_rows is None:
        return None
    if rows is None or other_rows is None or list(map(len, rows)) != list(map(len, other_rows)):
        return False
    return all(map(_item_equal, chain.from_iterable(rows), chain.from_iterable(other_rows)))


def _equal_quantities(one: str, other: str) -> bool:
    if _is_as_written(one) or _is_as_written(other):
        return _digits_and_base(one) == _digits_and_base(other)
    if ("\\text" in one or "\\text" in other) and _words_of(one) == _words_of(other):
        return True
    given, right = quantity(in_digits(one)), quantity(in_digits(other))
    if given is None or right is None or not given.core or not right.core:
        return False  # words that change what is said, or words beside a formula
    return units_agree(given, right) and _equal_cores(given, right)


_WORD = re.compile(r"\\?[a-z]+|\d+(?:\.\d+)?|[^\sa-z\d{}]")


def _words_of(text: str) -> list[str]:
    """Words, numbers and signs, whichever of them stand in `\\text{}`; a leading article says nothing."""
    words = _WORD.findall(text.replace("\\text", " ").lower())
    return words[1:] if words[:1] == ["the"] else words


def _equal_cores(given: Quantity, right: Quantity) -> bool:
    value, right_value = _scaled(given), _scaled(right)
    if value is not None and right_value is not None:
        return value == right_value or _as_fraction(value, given) == _as_fraction(right_value, right)
    if given.scale != 1 or right.scale != 1 or given.is_percent != right.is_percent:
        return False
    if given.core == right.core:
        return True
    are_equal = _as_brackets(given.core, right.core)
    if are_equal is not None:
        return are_equal
    return _equal_formulas(given.core, right.core)


def _as_fraction(value: Fraction, quantity: Quantity) -> Fraction:
    """`50%` is 1/2; beside `50` its sign is ignored as a unit is."""
    return value / 100 if quantity.is_percent else value


def _scaled(quantity: Quantity) -> Fraction | None:
    value = rational(quantity.core)
    return None if value is None else value * quantity.scale


_BASED = re.compile(
    r"\(?(-?(?=[A-Z.]*\d)[0-9A-Z.]+)\)?\s*(?:_\s*\{\s*\(?\s*(?:\\text\{\s*(?:base\b)?\s*\}?)?\s*(\w+)\s*\}?\s*\)?\s*\}"
    r"|\(?\s*\\text\{\s*(?:in\s+)?base\b\s*\}?\s*(\w+)\s*\}?\s*\)?)"
)
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}


def _is_as_written(core: str) -> bool:
    return _BASED.fullmatch(core) is not None


def _digits_and_base(core: str) -> tuple[str, str] | None:
    """A number in a base is its digits and its base; nobody asked for another one."""
    match = _BASED.fullmatch(core)
    base = match and (match[2] or match[3])
    return (match[1].lstrip("0"), _BASES.get(base, base)) if match and base else None


def _equal_formulas(one: str, other: str) -> bool:
    if re.fullmatch(r"[A-Z]{2,}|[a-z]{3,}", one) and re.fullmatch(r"[A-Z]{2,}|[a-z]{3,}", other):
        return False  # two words, or segments such as AB, and not the same
    infinities = _infinity(one), _infinity(other)
    if infinities[0] or infinities[1]:
        return infinities[0] == infinities[1]
    try:
        return same_value(expression(one), expression(other))
    except UnreadableError:
        return remainder.equal(one, other)


def _infinity(text: str) -> str | None:
    match = re.fullmatch(r"([-+]?)\s*\\infty", text)
    return (match[1] or "+") if match else None


def _as_relations(one: str, other: str) -> bool | None:
    found, other_found = relation(one), relation(other)
    if found and other_found:
        return _equal_relations(found.shortened(), other_found.shortened())
    if found:
        return _equal_despite(found, other, is_right=False)
    return _equal_despite(other_found, one, is_right=True) if other_found else None


def _equal_relations(one: Relation, other: Relation) -> bool:
    """By form, up to moving terms from side to side, a factor, and turning an equation round."""
    if one.signs != other.signs:
        ranges = one.interval(), other.interval()
        return None not in ranges and one.variable == other.variable and _equal(ranges[0] or "", ranges[1] or "")
    if _letters(one) != _letters(other):
        return False  # an identity is equal on both sides whatever it is about
    sides, turned = list(zip(one.sides, other.sides, strict=True)), list(zip(one.sides, other.sides[::-1], strict=True))
    for pairs in (sides, turned) if one.signs in (("=",), ("\\ne",)) else (sides,):
        if all(_item_equal(*pair) for pair in pairs):
            return True
    if one.signs not in (("=",), ("<",), ("\\le",), ("\\ne",)):
        return False
    try:
        differences = [expression(found.sides[0]) - expression(found.sides[1]) for found in (one, other)]
    except UnreadableError:
        return False
    return _are_proportional(differences[0], differences[1], is_order=one.signs in (("<",), ("\\le",)))


_LETTER = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z]")


def _letters(found: Relation) -> set[str]:
    return {letter for side in found.sides for letter in _LETTER.findall(side) if len(letter) == 1}


def _are_proportional(one: sympy.Expr, other: sympy.Expr, *, is_order: bool) -> bool:
    """True if `one` is a constant times `other` and both vary; the constant is positive where an order is at stake."""
    variables = sorted(one.free_symbols | other.free_symbols, key=str)
    if not variables or one.free_symbols != other.free_symbols:
        return False
    ratios = []
    for point in points(variables):
        first, second = number_at(one, point), number_at(other, point)
        if first is None or second is None or first == 0 or second == 0:
            return False
        ratios.append(first / second)
    is_constant = all(abs(ratio - ratios[0]) < abs(ratios[0]) * sympy.Float("1e-40") for ratio in ratios)
    return bool(is_constant and (not is_order or ratios[0].as_real_imag()[0] > 0))


def _equal_despite(found: Relation, value: str, *, is_right: bool) -> bool:
    """One side is `x = 5` or `x \\in [0, 1]` or `0 \\le x \\le 1`, the other its value alone."""
    stated = found.interval() or found.value(is_right=is_right, agree=_item_equal)
    return stated is not None and _equal(stated, value)


_ITEM_STRUCTURES: tuple[Callable[[str, str], bool | None], ...] = (
    _as_relations,
    _as_unions,
    _as_brackets,
    _as_matrices,
)
"""Each says whether two answers are equal as such structures; None: they are none."""
