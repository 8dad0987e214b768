r"""Formulas that `expressions.py` does not read, such as sums, integrals and number sets: decided by math-verify.

Its `verify` alone is too generous, so both formulas must hold the same numbers, letters and commands; what is left to
decide is their order. Only its LaTeX reader is used, which builds objects from a parse tree.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

_ATOM = re.compile(r"\\[A-Za-z]+|\d+(?:\.\d+)?|\.\d+|[A-Za-z]|[<>=!|]")
_WORTHWHILE = re.compile(
    r"\\(?:int|sum|prod|lim|max|min|gcd|lcm|lfloor|lceil|cap|setminus|mathbb|mathbf|arcsinh|arccosh|overline|vec|hat)(?![A-Za-z])"
)
_MISREAD = re.compile(r"'|\^\{?T|\\text|_\{?\d|\\prime")
"""Forms that the grammar reads as something else, or leaves out."""

_AS_IT_IS = LatexExtractionConfig(
    boxed_match_priority=-1,
    normalization_config=NormalizationConfig(
        basic_latex=False, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
    ),
)


def equal(given: str, right: str) -> bool:
    if not _WORTHWHILE.search(right) or _MISREAD.search(given) or _MISREAD.search(right):
        return False
    if Counter(_ATOM.findall(given)) != Counter(_ATOM.findall(right)):
        return False
    read_given, read_right = _read(given), _read(right)
    return bool(read_given and read_right and verify(read_right, read_given, timeout_seconds=0, raise_on_error=True))


def _read(text: str) -> list[Any]:
    return parse(f"${text}$", [_AS_IT_IS], fallback_mode="no_fallback", parsing_timeout=0)
