r"""One notation for many: an answer as LaTeX without decoration, so that equal forms become equal strings.

The result has `\frac{}{}`, `\sqrt{}`, `^{}`, `_{}`, `\cdot`, `\le`, `\{ \}`, and `\text{}` around words; no dollar
signs of mathematics, no spacing commands, no fonts. It changes how an answer is written, never its value.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable

_CHARACTERS = {
    **dict.fromkeys("\u2212\u2013\u2014\u2010\u2011\u2012\ufe63\uff0d", "-"),
    **dict.fromkeys("\u00d7\u2715\u2a09", "\\times "),
    **dict.fromkeys("\u00b7\u22c5\u2219\u2022", "\\cdot "),
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("\u00b0\u00ba\u02da", "^{\\circ}"),
    **dict.fromkeys("\u2009\u202f\u00a0\u2007\u200a\u2002\u2003", "\\,"),
    **dict.fromkeys("\u200b\u200c\u200d\ufeff\u2061\u2062", ""),
    **dict.fromkeys('\u201c\u201d\u201e"', ""),
    **dict.fromkeys("\u2018\u2019\u2032", "'"),
    "\u20ac": "\\eur ",
    "\u00a3": "\\gbp ",
    "\u00a5": "\\jpy ",
    "\u20b9": "\\inr ",
    "\u00f7": "\\div ",
    "\u2264": "\\le ",
    "\u2265": "\\ge ",
    "\u2260": "\\ne ",
    "\u2248": "\\approx ",
    "\u221e": "\\infty ",
    "\u222a": "\\cup ",
    "\u2229": "\\cap ",
    "\u2208": "\\in ",
    "\u00b1": "\\pm ",
    "\u2205": "\\emptyset ",
    "\u221a": "\\sqrt ",
    "\u221b": "\\sqrt[3] ",
    "\u2026": "\\ldots ",
    "\u211d": "\\mathbb{R}",
    "\u03c0": "\\pi ",
    "\u03b1": "\\alpha ",
    "\u03b2": "\\beta ",
    "\u03b3": "\\gamma ",
    "\u03b8": "\\theta ",
    "\u03bb": "\\lambda ",
    "\u03bc": "\\mu ",
    "\u03c6": "\\phi ",
    "\u03c9": "\\omega ",
}
_SUPERSCRIPTS = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
_SUBSCRIPTS = str.maketrans("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089", "0123456789")
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_LOWERED = re.compile("[\u2080-\u2089]+")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
"""Fractions that are one character."""

_DROPPED = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|left(?![a-z])|right(?![a-z])|[bB]igg?[lrm]?(?![a-z])|quad|qquad"
    r"|hspace\{[^{}]*\}|mathstrut|phantom\{[^{}]*\}|(?:text)?color\{[^{}]*\}|[;:!> ])|~"
)
_RENAMED = (
    (re.compile(r"\\[dtc](frac|binom)(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\(?:\{|lbrace)\s*\\(?:\}|rbrace)"), r"\\emptyset "),
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)"), r"\\cdot "),
    (re.compile(r"\\(?:leq|leqslant|leqq)(?![A-Za-z])|<=|=<"), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant|geqq)(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])|!=|/="), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:lbrace|lbrack)(?![A-Za-z])"), lambda match: "\\{" if "brace" in match[0] else "["),
    (re.compile(r"\\(?:rbrace|rbrack)(?![A-Za-z])"), lambda match: "\\}" if "brace" in match[0] else "]"),
    (re.compile(r"\\(?:varnothing|O|empty)(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])"), "|"),
    (re.compile(r"\\(?:ldots|cdots|dots)(?![A-Za-z])|\.\.\."), r"\\ldots "),
    (re.compile(r"\\(?:simeq|approxeq)(?![A-Za-z])"), r"\\approx "),
    (re.compile(r"(?<![A-Za-z])([ap])\.\s?m\b\.?"), r"\\text{\1m}"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\(?:ast|times)(?![A-Za-z])|\*"), r"\\cdot "),
    (re.compile(r"\\(?:infin|infinity)(?![A-Za-z])|(?<![\\A-Za-z])(?:infinity|oo)(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"\\degrees?(?![A-Za-z])|\^\s*\\circ(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}"), "^{\\\\circ}"),
    (re.compile(r"(?<=\d)\s*\^\s*(?:o(?![A-Za-z])|\{\s*o\s*\})"), "^{\\\\circ}"),
    (re.compile(r"(?<![A-Za-z])(?:US|CA|AU)\s*(?=\\usd)"), ""),
    (re.compile(r"(?<![\\A-Za-z])Rs\b\.?"), r"\\inr "),
    (re.compile(r"\b([Ss]q|cu|ft|in|yd|mi|lbs?|oz|hrs?|mins?|secs?)\.(?=\s|$)"), r"\1 "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"(?<![\\A-Za-z])(arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt)(?![a-z])"), r"\\\1"),
)
_FONT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|textsf|texttt|mathrm|mathbf|mathit|mathsf|mathtt|operatorname|mbox|hbox"
    r"|emph|bm|boldsymbol|rm|bf|underline)\s*\{([^{}]*)\}"
)
_COUNTED = re.compile(r"(-?\d+(?:\.\d+)?)\s+([A-Za-z ]+)|(?i:option|choice)\s+(\(?[A-J]\)?)")
"""Words in a font with the number or the choice that they are about."""
_LISTED = re.compile(r"(?:\(?[A-J]\)?|-?\d+)(?:(?:,\s*|,?\s+(?:and|or)\s+)(?:\(?[A-J]\)?|-?\d+))+")
_DELIMITERS = re.compile(r"\$|\\[\[\]()]")
_DOLLARS = re.compile(r"\$(?=\s?[\d.])")
_GROUP_SPACE = re.compile(r"(?<=\d)(?:,\\!\s*|\{,\})(?=\s*\d{3}(?!\d))")
"""What LaTeX has for a separator of thousands; unlike a bare comma it is one between brackets, too."""
_GROUPED = re.compile(r"(?<![\d.])(?<!\d,)\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_SPACED = re.compile(r"(?<![\d.])\d{1,3}(?:(?: |\\,)\d{3})+(?!\d)")
_RUN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?:['-][A-Za-z]{2,})*")
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_ARTICLE = re.compile(r"(?<![\w\\{])[aA] (?=\\text\{(?!(?:and|or)\}))")
_SHORT = (
    "cm mm km kg mg ml mL ft in mi yd lb lbs oz mph kph min mins hr hrs sec secs deg rad sq no or of is to pm am at by "
    "all any act ant art best boy box city cost most not now how low lot ago egg for per and the"
)
SHORT_WORDS = frozenset(_SHORT.split())
"""Words of two to four letters that could be products of variables, but are not."""
_UNITS = "cm mm km kg mg ml mL ft in mi yd lb lbs oz mph kph min hr hrs sec deg rad pm am"
UNITS_AFTER_DIGITS = frozenset(_UNITS.split())
_SCRIPT = re.compile(r"([\^_])\s*(-?\d+|[A-Za-z]|\\[A-Za-z]+|-[A-Za-z])")
_PLAIN_GROUP = re.compile(r"(\^|\\sqrt)\s*\(([^()]*)\)")
_BLANKS = re.compile(r"\s+")


@functools.lru_cache(maxsize=4096)
def written(text: str) -> str:
    """`text` in the one notation."""
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{match[0].translate(_SUBSCRIPTS)}}}", text)
    text = _VULGAR.sub(_braced_fraction, _DEGREE_IN_TEXT.sub("\u00b0", text))
    text = "".join(_CHARACTERS.get(character, character) for character in text)
    text = unicodedata.normalize("NFKC", text).replace("\\$", "\\usd ").replace("per cent", "percent")
    text = _GROUP_SPACE.sub("", text).replace("{,}", ",").replace(",\\!", ",")
    text = _ARRAY.sub(r"\\begin{pmatrix}\2\\end{pmatrix}", _with_single_backslashes(text))
    text = _without_delimiters(text)
    text = _DROPPED.sub(" ", text)
    text = _with_plain_fonts(text)
    text = _outside_text(text, _renamed)
    text = _without_group_separators(text).replace("\\,", " ")
    text = _ARTICLE.sub("", _outside_text(text, _with_words_marked))
    text = _with_braces(text)
    text = _BLANKS.sub(" ", text).strip().rstrip(".,;:").strip()
    return _SIGNED_CURRENCY.sub(r"\2 \1", _CONCLUDING.sub("", text))


_CONCLUDING = re.compile(r"^(?:\\(?:approx|therefore|implies|to|(?:[Ll]ong)?[Rr]ightarrow)(?![A-Za-z])\s*)+")
_SIGNED_CURRENCY = re.compile(r"^([-+])\s*(\\(?:usd|eur|gbp|jpy|inr)(?![a-z]))")


_DEGREE_IN_TEXT = re.compile(
    r"\^\s*\{?\s*\\(?:text|mathrm)\s*\{\s*[o\u00b0]\s*\}\s*\}?|\\(?:text|mathrm)\s*\{\s*\u00b0\s*\}"
)
_ARRAY = re.compile(
    r"(?:\\left\s*)?[(\[]\s*\\begin\{(array|matrix|smallmatrix)\}(?:\{[^{}]*\})?(.*?)\\end\{\1\}"
    r"\s*(?:\\right\s*)?[)\]]",
    re.DOTALL,
)


def _braced_fraction(match: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return f"\\frac{{{above}}}{{{below}}}"


def _with_single_backslashes(text: str) -> str:
    """Two backslashes end a row of a matrix; elsewhere they come from text that was escaped twice."""
    if "\\begin{" in text:
        return text.replace("\\\\", "\\cr ")
    return re.sub(r"\\\\(?=[A-Za-z()\[\]{}$%])", r"\\", text)


def _without_delimiters(text: str) -> str:
    """Dollar signs of mathematics go; one without a partner, before a number, is a currency sign."""
    if text.count("$") % 2:
        text = _DOLLARS.sub(r"\\usd ", text, count=1)
    return _DELIMITERS.sub(" ", text)


def _renamed(text: str) -> str:
    for pattern, replacement in _RENAMED:
        text = pattern.sub(replacement, text)
    return text


def _with_words_marked(text: str) -> str:
    return _RUN.sub(lambda match: f"\\text{{{match[0]}}}" if _is_word(match) else match[0], text)


def _is_word(match: re.Match[str]) -> bool:
    """Rather a word than a product of variables: `apples` and `Yes`, but not `abc`, `2mgh` or `xy`."""
    run, before = match[0], match.string[: match.start()]
    if before.endswith("{") and before.endswith(("begin{", "end{", "_{")):
        return False
    if before and (before[-1].isdigit() or before[-1] in "}_^"):
        return run in UNITS_AFTER_DIGITS or len(run) > 4
    if run in SHORT_WORDS or run.lower() == "no" or len(run) > 4:
        return True
    letters = run.lower()
    looks_like_a_product = letters in ALPHABET or (len(run) == 3 and list(letters) == sorted(letters))
    return len(run) > 2 and not looks_like_a_product


def _with_plain_fonts(text: str) -> str:
    """Words stay in `\\text{}`; a letter, a number or a formula in a font does not."""

    def plain(match: re.Match[str]) -> str:
        content = match[1].strip()
        counted = _COUNTED.fullmatch(content)
        if counted:
            return f" {counted[1] or counted[3]} " + (f"\\text{{{counted[2]}}} " if counted[2] else "")
        if _LISTED.fullmatch(content):
            return re.sub(r"\b(and|or)\b", r"\\text{\1}", content)
        before = match.string[: match.start()].rstrip().removesuffix("\\,").rstrip()
        is_unit = (
            bool(before) and (before[-1].isdigit() or before[-1] in "})") and re.fullmatch(r"[A-Za-z/ ]+", content)
        )
        if is_unit or re.search(r"[A-Za-z]{2,}", content):
            comma = ", " if content.startswith(",") else ""
            after = " " if match[1][-1].isspace() else ""
            return (
                f" {content} " if re.search(r"[\\^_$]", content) else f"{comma}\\text{{{content.strip(' ,')}}}{after}"
            )
        return f" {content} "

    for _ in range(3):  # fonts may be nested
        before, text = text, _FONT.sub(plain, text)
        if text == before:
            break
    return text


def _without_group_separators(text: str) -> str:
    """`1,234` is a number, but between brackets `(1,234)` is a pair. Blanks may group digits, too."""
    done, depth, place = [], 0, 0
    while place < len(text):
        match = (depth == 0 and _GROUPED.match(text, place)) or _SPACED.match(text, place)
        if match:
            done.append(re.sub(r"[, ]|\\,", "", match[0]))
            place = match.end()
            continue
        character = text[place]
        depth += (character in "([") - (character in ")]")
        if text.startswith("\\{", place) or text.startswith("\\}", place):
            depth += 1 if text[place + 1] == "{" else -1
            done.append(text[place : place + 2])
            place += 2
            continue
        done.append(character)
        place += 1
    return "".join(done)


def _outside_text(text: str, change: Callable[[str], str]) -> str:
    """`change` applied to what is outside `\\text{...}`."""
    parts = re.split(r"(\\text\{[^{}]*\})", text)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def _with_braces(text: str) -> str:
    """`\\frac12`, `\\sqrt2`, `x^2`, `x^(n+1)` and `sqrt(2)` with the braces that LaTeX lets people leave out."""
    for _ in range(2):
        text = _PLAIN_GROUP.sub(r"\1{\2}", text)
    text = _SCRIPT.sub(r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\[\d+\])?\s*(\d+|[A-Za-z]|\\[A-Za-z]+)", r"\\sqrt\1{\2}", text)
    text = re.sub(r"\\sqrt\s+(?=[\[{])", r"\\sqrt", text)
    for command in ("\\frac", "\\binom"):
        text = _with_braced_arguments(text, command)
    return text


_ONE_ARGUMENT = re.compile(r"\s*(\d|[A-Za-z]|\\[A-Za-z]+)")


def _with_braced_arguments(text: str, command: str) -> str:
    """`\\frac12` and `\\frac\\pi2` with braces around both arguments."""
    first, *rest = text.split(command)
    return first + "".join(command + _braced_pair(part) for part in rest)


def _braced_pair(text: str) -> str:
    done = ""
    for _ in range(2):
        text = text.lstrip()
        group = _braced_group(text)
        match = _ONE_ARGUMENT.match(text)
        if group:
            done, text = done + group, text[len(group) :]
        elif match:
            done, text = f"{done}{{{match[1]}}}", text[match.end() :]
        else:
            break
    return done + text


def _braced_group(text: str) -> str | None:
    """The braces that `text` begins with and what they hold."""
    if not text.startswith("{"):
        return None
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[: place + 1]
    return None
