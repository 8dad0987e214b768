r"""Formulas that `expressions.py` does not read, such as sums, integrals and number sets: decided by math-verify.

Its `verify` alone is too generous, so both formulas must hold the same numbers, letters and commands; what is left to
decide is their order. Only its LaTeX reader is used, which builds objects from a parse tree. Even that one hands each
number to `sympy.Number`, which ends in Python's `eval` (sympy 1.14): while it reads, sympy's reader of text is replaced
by one for numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy.parsing import sympy_parser

_ATOM = re.compile(r"\\[A-Za-z]+|\d+(?:\.\d+)?|\.\d+|[A-Za-z]|[<>=!|]")
_WORTHWHILE = re.compile(
    r"\\(?:int|sum|prod|lim|max|min|lfloor|lceil|cap|setminus|mathbb|overline|vec|hat)(?![A-Za-z])"
)
_MISREAD = re.compile(r"'|\^\{?T|\\text|_\{?\d|\\prime")
"""Forms that the grammar reads as something else, or leaves out."""
_NUMBER = re.compile(r"\d{1,300}(?:\.\d{1,300})?|\.\d{1,300}")

_AS_IT_IS = LatexExtractionConfig(
    boxed_match_priority=-1,
    normalization_config=NormalizationConfig(
        basic_latex=False, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
    ),
)


def equal(given: str, right: str) -> bool:
    if not _WORTHWHILE.search(right) or _MISREAD.search(given) or _MISREAD.search(right):
        return False
    atoms = Counter(_ATOM.findall(right))
    if Counter(_ATOM.findall(given)) != atoms or len(atoms) > len({atom.lower() for atom in atoms}):
        return False  # its grammar does not tell `X` from `x`
    with _numbers_only():
        read_given, read_right = _read(given), _read(right)
        return bool(read_given and read_right) and verify(read_right, read_given, timeout_seconds=0)


def _read(text: str) -> list[Any]:
    return parse(f"${text}$", [_AS_IT_IS], fallback_mode="no_fallback", parsing_timeout=0)


@contextmanager
def _numbers_only() -> Iterator[None]:
    """Inside, sympy turns text into a number or into nothing."""
    original = sympy_parser.parse_expr
    sympy_parser.parse_expr = _number
    try:
        yield
    finally:
        sympy_parser.parse_expr = original


def _number(text: Any, *_: Any, **__: Any) -> Any:
    if not isinstance(text, str) or not _NUMBER.fullmatch(text):
        raise ValueError("only numbers are read from text")
    value = Fraction(text)
    return sympy.Rational(value.numerator, value.denominator)
