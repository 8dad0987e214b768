r"""Mathematical equality of final answers, wherever and however they are written.

An answer is taken apart by its outermost structure (union, brackets, list, relation, words), and only single formulas
are compared by value. So order and brackets count where they mean something, and an equation is never one number.

What this cannot read is left to math-verify, but only if both answers hold the same numbers and letters: on its own
its `verify` (0.9) says yes to different equations without a solution, to 1/2^99 and 1/2^98, and to 0.3333333 and 1/3.
Of its readers only that of LaTeX is used; that of plain text ends in Python's `eval`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

import sympy

from rl.tasks.rewards import remainder
from rl.tasks.rewards.expressions import UnreadableError, expression, number_at, points, rational, same_value
from rl.tasks.rewards.extract import final_answer
from rl.tasks.rewards.notation import written
from rl.tasks.rewards.quantities import Quantity, quantity, units_agree
from rl.tasks.rewards.structure import Relation, bracketed, matrix, relation, split_list, split_union, unwrapped
from rl.tasks.rewards.verdict import Verdict, decided

MAX_CHARACTERS = 1000
"""A longer answer is compared as text."""


def equivalence(response: str, answer: str, *, is_truncated: bool = False) -> Verdict:
    """1.0 if the final answer that `response` states equals `answer`, else 0.0. Raises ValueError on an empty answer."""
    if not answer.strip():
        raise ValueError("the right answer is empty")
    found = final_answer(response, is_truncated=is_truncated)
    return decided(found, correct=found is not None and equivalent(found, answer))


def equivalent(given: str, right: str) -> bool:
    """True if the answer `given` equals the answer `right`. Units and words may be missing on either side."""
    if given.strip() == right.strip():
        return True
    if len(given) > MAX_CHARACTERS or len(right) > MAX_CHARACTERS:
        return False
    one, other = written(_unboxed(given)), written(_unboxed(right))
    if not one or not other:
        return False
    option = _option(other)
    if option and len(other) <= 3:
        return _option(one) == option or _equal(one, other)
    return _equal(_without_option(one), _without_option(other))


_OPTION = re.compile(r"\(?([A-J])[).:](?:\s+.*)?|([A-J])|\(([A-J])\).*")
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
    """Equality of two answers in the one notation, by their outermost structure."""
    one, other = unwrapped(one), unwrapped(other)
    if _squeezed(one) == _squeezed(other):
        return True
    if not is_item:
        lists = split_list(one), split_list(other)
        if len(lists[0]) > 1 or len(lists[1]) > 1:
            return _equal_lists(lists, (one, other))
    relations = relation(one), relation(other)
    if relations[0] and relations[1]:
        return _equal_relations(relations[0], relations[1])
    if relations[0] or relations[1]:
        return _equal_despite_relation(relations, (one, other))
    unions = split_union(one), split_union(other)
    if len(unions[0]) > 1 or len(unions[1]) > 1:
        return _equal_sets(unions[0], unions[1])
    brackets = bracketed(one), bracketed(other)
    if brackets[0] and brackets[1]:
        return _equal_bracketed(brackets[0], brackets[1])
    matrices = matrix(one), matrix(other)
    if matrices[0] or matrices[1]:
        return matrices[0] is not None and matrices[1] is not None and _equal_rows(matrices[0], matrices[1])
    return _equal_quantities(one, other)


def _squeezed(text: str) -> str:
    return re.sub(r"(?<![A-Za-z\d]) +| +(?![A-Za-z\d])", "", text)


def _equal_lists(lists: tuple[list[str], list[str]], texts: tuple[str, str]) -> bool:
    """Lists without brackets are in no order, like sets, but repetitions count. A set in braces may be one of them."""
    sides = []
    for items, text in zip(lists, texts, strict=True):
        found = relation(text)
        brackets = bracketed(found.sides[-1] if found and found.is_labelled else text)
        sides.append(
            brackets[1] if len(items) == 1 and brackets and brackets[0] == "{}" else _with_shared_labels(items)
        )
    if len(sides[0]) != len(sides[1]):
        return False
    named = [sum(relation(item) is not None for item in side) for side in sides]
    if 0 in named and max(named) > 1:  # `x=1, y=2` beside `1, 2`: now the order says which is which
        return all(_equal(one, other, is_item=True) for one, other in zip(*sides, strict=True))
    return _matched(sides[0], sides[1])


def _with_shared_labels(items: list[str]) -> list[str]:
    """`x=1, x=2` lists values of x: the label says nothing. `x=1, y=2` is another matter."""
    relations = [relation(item) for item in items]
    labels = {found.sides[0] for found in relations if found and found.is_labelled}
    if len(labels) == 1 and all(found is None or found.is_labelled for found in relations):
        return [found.sides[-1] if found else item for item, found in zip(items, relations, strict=True)]
    return items


def _matched(ones: Sequence[str], others: Sequence[str]) -> bool:
    """True if the items can be paired so that each pair is equal; equality is transitive, so the first match will do."""
    left = list(others)
    for one in ones:
        place = next((number for number, other in enumerate(left) if _equal(one, other, is_item=True)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _equal_sets(ones: Sequence[str], others: Sequence[str]) -> bool:
    def within(some: Sequence[str], many: Sequence[str]) -> bool:
        return all(any(_equal(one, other, is_item=True) for other in many) for one in some)

    return within(ones, others) and within(others, ones)


def _equal_bracketed(one: tuple[str, list[str]], other: tuple[str, list[str]]) -> bool:
    (kind, items), (other_kind, other_items) = one, other
    if kind == other_kind == "{}":
        return _equal_sets(items, other_items)
    if len(items) != len(other_items):
        return False
    if kind != other_kind:
        return False
    return all(_equal(a, b, is_item=True) for a, b in zip(items, other_items, strict=True))


def _equal_rows(one: list[list[str]], other: list[list[str]]) -> bool:
    return [len(row) for row in one] == [len(row) for row in other] and all(
        _equal(a, b, is_item=True)
        for row, other_row in zip(one, other, strict=True)
        for a, b in zip(row, other_row, strict=True)
    )


def _equal_quantities(one: str, other: str) -> bool:
    if _is_as_written(one) or _is_as_written(other):
        return _digits_and_base(one) == _digits_and_base(other)
    if ("\\text" in one or "\\text" in other) and _words_of(one) == _words_of(other):
        return True
    given, right = quantity(one), quantity(other)
    if given is None or right is None or not given.core or not right.core:
        return False  # words that change what is said, or words beside a formula
    return units_agree(given, right) and _equal_cores(given, right)


_WORD = re.compile(r"\\?[a-z]+|\d+(?:\.\d+)?|[^\sa-z\d{}]")


def _words_of(text: str) -> list[str]:
    """Words, numbers and signs, whichever of them stand in `\\text{}`; a leading article says nothing."""
    words = _WORD.findall(text.replace("\\text", " ").lower())
    return words[1:] if words[:1] == ["the"] else words


def _equal_cores(given: Quantity, right: Quantity) -> bool:
    values = _scaled(given), _scaled(right)
    if values[0] is not None and values[1] is not None:
        as_fraction = [
            value / 100 if side.is_percent else value for side, value in zip((given, right), values, strict=True)
        ]
        return values[0] == values[1] or as_fraction[0] == as_fraction[1]
    if given.scale != 1 or right.scale != 1 or given.is_percent != right.is_percent:
        return False
    if given.core == right.core:
        return True
    brackets = bracketed(given.core), bracketed(right.core)
    if brackets[0] or brackets[1]:
        return bool(brackets[0] and brackets[1]) and _equal_bracketed(brackets[0], brackets[1])
    return _equal_formulas(given.core, right.core)


def _scaled(quantity: Quantity) -> Fraction | None:
    value = rational(quantity.core)
    return None if value is None else value * quantity.scale


_BASED = re.compile(r"(-?(?=[A-Z.]*\d)[0-9A-Z.]+)\s*_\s*\{\s*(?:\\text\{)?\s*(\w+)\s*\}?\s*\}")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}


def _is_as_written(core: str) -> bool:
    return _BASED.fullmatch(core) is not None


def _digits_and_base(core: str) -> tuple[str, str] | None:
    """A number in a base is its digits and its base; nobody asked for another one."""
    match = _BASED.fullmatch(core)
    return (match[1].lstrip("0"), _BASES.get(match[2], match[2])) if match else None


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


def _equal_relations(one: Relation, other: Relation) -> bool:
    """By form, up to moving terms from side to side, a factor, and turning the relation round."""
    one, other = one.shortened(), other.shortened()
    if one.signs != other.signs:
        return False
    if all(_equal(a, b, is_item=True) for a, b in zip(one.sides, other.sides, strict=True)):
        return True
    if len(one.signs) != 1:
        return False
    if one.signs == ("=",) and _equal(one.sides[0], other.sides[1]) and _equal(one.sides[1], other.sides[0]):
        return True
    if one.signs[0] not in ("=", "<", "\\le", "\\ne"):
        return False
    try:
        differences = [expression(found.sides[0]) - expression(found.sides[1]) for found in (one, other)]
    except UnreadableError:
        return False
    return _are_proportional(differences[0], differences[1], is_order=one.signs[0] in ("<", "\\le"))


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


def _equal_despite_relation(relations: tuple[Relation | None, Relation | None], texts: tuple[str, str]) -> bool:
    """One side is `x = 5` or `x \\in [0, 1]` or `0 \\le x \\le 1`, the other its value alone."""
    found, value = (relations[0], texts[1]) if relations[0] else (relations[1], texts[0])
    assert found is not None
    interval = found.interval()
    if interval is not None:
        return _equal(interval, value)
    stated = found.value(is_right=relations[0] is None, agree=_agreeing)
    return stated is not None and _equal(stated, value)


def _agreeing(one: str, other: str) -> bool:
    return _equal(one, other, is_item=True)
