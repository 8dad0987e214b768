r"""Values of formulas: exact rationals directly, everything else as sympy expressions compared by their numbers.

The reader is a strict grammar of its own: what it does not know it refuses, and what is ambiguous (`1/2x`) too. It
builds sympy objects from tokens and never hands text to sympy, whose `sympify` and `parse_expr` end in Python's `eval`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from fractions import Fraction

import sympy

MAX_CHARACTERS = 400
MAX_DEPTH = 30
MAX_DIGITS = 300
"""A longer number is no number: Python refuses to convert the longest, and no answer is that long."""

_DECIMAL = r"\d+(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"([-+]*)\s*({_DECIMAL})")
_SCIENTIFIC = re.compile(rf"([-+]?)({_DECIMAL})(?:[eE]|\s*\\cdot\s*10\^)(?:\{{([-+]?\d{{1,3}})\}}|([-+]?\d{{1,3}}))")
_FRACTION = re.compile(
    rf"([-+]?)\s*(?:(\d+)\s*)?\\frac\s*\{{\s*([-+]?)\s*({_DECIMAL})\s*\}}\s*\{{\s*([-+]?)\s*({_DECIMAL})\s*\}}"
)
_SLASHED = re.compile(rf"([-+]?)\s*(?:(\d+) )?\s*({_DECIMAL})\s*(?:/|\\div)\s*([-+]?)\s*({_DECIMAL})")
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}")


@functools.lru_cache(maxsize=4096)
def rational(text: str) -> Fraction | None:
    r"""The value of a number as it is commonly written: `-3.50`, `\frac{1}{2}`, `7/2`, `3 1/2`, `1.2\cdot 10^{3}`.

    None: it is no such number. Decimals are exact: `0.33` is 33/100.
    """
    text = text.strip()
    while text.startswith("{") and text.endswith("}") and text.count("{") == 1:
        text = text[1:-1].strip()
    if not text or len(text) > MAX_DIGITS:
        return None
    for pattern, value_of in _FORMS:
        match = pattern.fullmatch(text)
        if match:
            return value_of(*match.groups())
    return None


def _plain(sign: str, digits: str) -> Fraction:
    return _signed(sign, Fraction(digits))


def _scientific(sign: str, digits: str, braced: str | None, bare: str | None) -> Fraction:
    return _signed(sign, Fraction(digits) * Fraction(10) ** int(braced or bare or "0"))


def _fraction(
    sign: str, whole: str | None, sign_above: str, above: str, sign_below: str, below: str
) -> Fraction | None:
    is_mixed = whole is not None
    if Fraction(below) == 0 or (is_mixed and (sign_above or sign_below or "." in above + below)):
        return None
    return _signed(sign + sign_above + sign_below, Fraction(whole or 0) + Fraction(above) / Fraction(below))


def _slashed(sign: str, whole: str | None, above: str, sign_below: str, below: str) -> Fraction | None:
    return _fraction(sign, whole, "", above, sign_below, below)


def _repeating(sign: str, whole: str, once: str, period: str) -> Fraction:
    shift = 10 ** len(once)
    return _signed(
        sign, Fraction(int(whole + once or "0"), shift) + Fraction(int(period), shift * (10 ** len(period) - 1))
    )


_FORMS = (
    (_NUMBER, _plain),
    (_SCIENTIFIC, _scientific),
    (_FRACTION, _fraction),
    (_SLASHED, _slashed),
    (_REPEATING, _repeating),
)


def _signed(signs: str, value: Fraction) -> Fraction:
    return -value if signs.count("-") % 2 else value


class UnreadableError(ValueError):
    """The text is no formula of the kind that is read here."""


_TOKEN = re.compile(
    rf"\s*(?:(?P<number>{_DECIMAL})|(?P<command>\\[A-Za-z]+)|(?P<letter>[A-Za-z])|(?P<sign>[-+*/(){{}}\[\]^_!|]))"
)
_FUNCTIONS = {
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "cot": sympy.cot,
    "sec": sympy.sec,
    "csc": sympy.csc,
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    "sinh": sympy.sinh,
    "cosh": sympy.cosh,
    "tanh": sympy.tanh,
    "ln": sympy.log,
    "exp": sympy.exp,
}
_ROUNDED = {"lfloor": (sympy.floor, "\\rfloor"), "lceil": (sympy.ceiling, "\\rceil")}
_OF_ANGLES = ("sin", "cos", "tan", "cot", "sec", "csc")
_DEGREES = ["^", "{", "\\circ", "}"]
_INVERSES = {"sin": sympy.asin, "cos": sympy.acos, "tan": sympy.atan}
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi varphi chi "
    "psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega"
)
_LETTERS = frozenset(_GREEK.split())
_CLOSING = (")", "}", "]", "\\rfloor", "\\rceil")
_TIMES = ("\\cdot", "*")
_OVER = ("/", "\\div")


@functools.lru_cache(maxsize=2048)
def expression(text: str) -> sympy.Expr:
    r"""The value of a formula. Raises UnreadableError.

    Letters are one-letter variables and keep their case and subscript; `e`, `i` and `\pi` are the constants, `\log` is
    to base 10. It may take for ever, for example on `9^{9^{9}}`.
    """
    reader = _Reader(_tokens(text))
    value = reader.sum()
    if reader.next is not None:
        raise UnreadableError(f"{reader.next!r} was not expected")
    return value


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_CHARACTERS:
        raise UnreadableError("too long")
    tokens, place, text = [], 0, text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise UnreadableError(f"{text[place]!r} is not read")
        if match["number"] and len(match["number"]) > MAX_DIGITS:
            raise UnreadableError("too many digits")
        tokens.append(match[0].strip())
        place = match.end()
    return tokens


class _Reader:
    """Recursive descent over tokens, one method for each rule of the grammar."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0
        self._is_in_bars = False
        self._is_of_angle = False

    @property
    def next(self) -> str | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _take(self, wanted: str | None = None) -> str:
        token = self.next
        if token is None or (wanted is not None and token != wanted):
            raise UnreadableError(f"{wanted or 'more'} was expected")
        self._place += 1
        return token

    def _takes(self, *tokens: str) -> bool:
        if self.next in tokens:
            self._place += 1
            return True
        return False

    def sum(self) -> sympy.Expr:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnreadableError("too deep")
        terms = [self._signed_product()]
        while self.next in ("+", "-"):
            terms.append(self._signed_product())
        self._depth -= 1
        return sympy.Add(*terms)

    def _signed_product(self) -> sympy.Expr:
        sign = 1
        while self.next in ("+", "-"):
            sign = -sign if self._take() == "-" else sign
        return sign * self._product()

    def _product(self) -> sympy.Expr:
        value, is_quotient, is_integer = self._factor(), False, self._is_after_integer()
        while True:
            if self._takes(*_TIMES):
                value *= self._signed_factor()
                is_quotient = is_integer = False
            elif self._takes(*_OVER):
                divisor = self._signed_factor()
                if divisor == 0:
                    raise UnreadableError("a division by zero")
                value /= divisor
                is_quotient, is_integer = True, False
            elif self._begins_factor():
                if is_quotient or self._begins_bare_number() or (is_integer and self._begins_plain_fraction()):
                    raise UnreadableError("an ambiguous product")
                value *= self._factor()
                is_integer = False
            else:
                return value

    def _signed_factor(self) -> sympy.Expr:
        return -self._factor() if self._takes("-") else self._factor()

    def _is_after_integer(self) -> bool:
        return self._tokens[self._place - 1].isdigit()

    def _begins_plain_fraction(self) -> bool:
        """`3\\frac{1}{2}` may be a mixed number."""
        tokens = self._tokens[self._place : self._place + 7]
        return tokens[:1] == ["\\frac"] and [token.isdigit() for token in tokens[2::3]] == [True, True]

    def _begins_bare_number(self) -> bool:
        """After a letter, `x2` may be a power or an index, but `n2^{n}` is a product."""
        return self._is_number(self.next) and self._tokens[self._place + 1 : self._place + 2] != ["^"]

    @staticmethod
    def _is_number(token: str | None) -> bool:
        return token is not None and (token[0].isdigit() or token[0] == ".")

    def _begins_factor(self) -> bool:
        token = self.next
        if token is None or token in (*_CLOSING, "+", "-", "[", "^", "_", "!", *_TIMES, *_OVER):
            return False
        return token != "|" or not self._is_in_bars

    def _factor(self) -> sympy.Expr:
        value = self._atom()
        if self._takes("!"):
            value = sympy.factorial(value)
        if self._is_of_angle and self._tokens[self._place : self._place + 4] == _DEGREES:
            self._place += 4
            return value * sympy.pi / 180
        if self._takes("^"):
            value = value ** self._group()
        if self.next in ("^", "!"):
            raise UnreadableError("a double exponent or factorial")
        return value

    def _atom(self) -> sympy.Expr:
        token = self._take()
        if self._is_number(token):
            return sympy.Rational(Fraction(token).numerator, Fraction(token).denominator)
        if token in ("(", "{"):
            value = self.sum()
            self._take(")" if token == "(" else "}")
            return value
        if token == "|":
            return self._absolute()
        if token.isalpha():
            return self._letter(token)
        if token.startswith("\\"):
            return self._command(token[1:])
        raise UnreadableError(f"{token!r} was not expected")

    def _absolute(self) -> sympy.Expr:
        if self._is_in_bars:
            raise UnreadableError("bars within bars")
        self._is_in_bars = True
        value = self.sum()
        self._take("|")
        self._is_in_bars = False
        return sympy.Abs(value)

    def _letter(self, name: str) -> sympy.Expr:
        if self._takes("_"):
            name = f"{name}_{self._subscript()}"
        elif name == "e":
            return sympy.E
        elif name == "i":
            return sympy.I
        if self.next == "(" and (name[0].isupper() or name[0] in "fgh"):
            raise UnreadableError("a function of unknown name")
        return sympy.Symbol(name)

    def _subscript(self) -> str:
        if not self._takes("{"):
            return self._take()
        parts = []
        while not self._takes("}"):
            parts.append(self._take())
        return "".join(parts)

    def _command(self, name: str) -> sympy.Expr:
        if name == "pi":
            return sympy.pi
        if name in _LETTERS:
            return self._letter(name)
        if name in _FUNCTIONS:
            was_of_angle, self._is_of_angle = self._is_of_angle, name in _OF_ANGLES
            value = self._applied(_FUNCTIONS[name], inverse=_INVERSES.get(name))
            self._is_of_angle = was_of_angle
            return value
        if name in _ROUNDED:
            return self._rounded(*_ROUNDED[name])
        rules = {"frac": self._fraction, "binom": self._binomial, "sqrt": self._root, "log": self._logarithm}
        if name not in rules:
            raise UnreadableError(f"\\{name} is not read")
        return rules[name]()

    def _fraction(self) -> sympy.Expr:
        above, below = self._group(), self._group()
        if below == 0:
            raise UnreadableError("a division by zero")
        return above / below

    def _rounded(self, function: Callable[[sympy.Expr], sympy.Expr], closing: str) -> sympy.Expr:
        """Of numbers only: with variables, different steps may agree at every point where they are compared."""
        value = self.sum()
        self._take(closing)
        if value.free_symbols:
            raise UnreadableError("rounding of a variable")
        return function(value)

    def _binomial(self) -> sympy.Expr:
        return sympy.binomial(self._group(), self._group())

    def _logarithm(self) -> sympy.Expr:
        base = self._group() if self._takes("_") else sympy.Integer(10)
        return self._applied(lambda value: sympy.log(value, base))

    def _root(self) -> sympy.Expr:
        if not self._takes("["):
            return sympy.sqrt(self._group())
        index = self.sum()
        self._take("]")
        if not (index.is_Integer and index > 1):
            raise UnreadableError("a root of that index")
        value = self._group()
        if index % 2 and value.is_negative:  # the real root, as people write it
            return -sympy.Pow(-value, 1 / index)
        return sympy.Pow(value, 1 / index)

    def _group(self) -> sympy.Expr:
        self._take("{")
        value = self.sum()
        self._take("}")
        return value

    def _applied(
        self, function: Callable[[sympy.Expr], sympy.Expr], *, inverse: Callable[[sympy.Expr], sympy.Expr] | None = None
    ) -> sympy.Expr:
        """A function of what is in brackets, or else of the product that follows: `\\sin 2x` but `\\sin x \\cos x`."""
        power = self._group() if self._takes("^") else sympy.Integer(1)
        if power == -1:
            if inverse is None:
                raise UnreadableError("an inverse of that function")
            function, power = inverse, sympy.Integer(1)
        if self.next in ("(", "{", "|"):
            return function(self._atom()) ** power
        argument = self._factor()
        while (
            self._begins_factor() and self.next not in ("(", "|") and (self.next or "")[1:] not in (*_FUNCTIONS, "log")
        ):
            argument *= self._factor()
        return function(argument) ** power


Point = dict[sympy.Basic, sympy.Basic | float]


def same_value(one: sympy.Expr, other: sympy.Expr) -> bool:
    """True if two expressions agree wherever they are evaluated.

    The points of variables have both signs, so that sqrt(x^2) and x differ.
    """
    if one == other:
        return True
    difference = one - other
    if difference.is_Rational:
        return difference == 0
    variables = sorted(one.free_symbols | other.free_symbols, key=str)
    return all(_vanishes(difference, one, point) for point in points(variables))


def points(variables: list[sympy.Basic]) -> list[Point]:
    """Four assignments of small rationals; one empty one where there are no variables."""
    if not variables:
        return [{}]
    signs = ((1, 1), (-1, 1), (1, -1), (-1, -1))
    return [
        {
            variable: sympy.Rational(sign[number % 2] * (17 + 6 * number + 2 * shift), 13)
            for number, variable in enumerate(variables)
        }
        for shift, sign in enumerate(signs)
    ]


def _vanishes(difference: sympy.Expr, term: sympy.Expr, point: Point) -> bool:
    """True if `difference` is nothing beside `term`, one of the two that it is of, and beside 1.

    Beside `term` alone 2^5000 + 1 would be 2^5000, and beside 1 alone e^-200 would be e^-201.
    """
    exact = difference.xreplace(point) if point else difference
    if exact.is_Rational:
        return exact == 0
    rest, size = number_at(difference, point), number_at(term, point)
    if rest is None or size is None:
        return False
    if abs(size) < NOTHING:  # a small number, or a zero: more digits tell
        rest, size = number_at(difference, point, digits=MORE_DIGITS), number_at(term, point, digits=MORE_DIGITS)
        if rest is None or size is None:
            return False
        if max(abs(rest), abs(size)) < NOTHING ** (MORE_DIGITS // DIGITS):
            return True
    return bool(abs(rest) < NOTHING * min(abs(size), sympy.Integer(1)))


DIGITS = 60
MORE_DIGITS = 480
NOTHING = sympy.Float("1e-40")
"""Less may be a zero that evaluation to 60 digits did not recognize."""


def number_at(value: sympy.Expr, point: Point, *, digits: int = DIGITS) -> sympy.Expr | None:
    """A complex number to so many digits; None where the value is not defined there."""
    number = value.evalf(digits, subs=point or None, maxn=2 * digits)
    return number if number.is_number and number.is_finite else None
