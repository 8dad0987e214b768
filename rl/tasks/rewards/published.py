r"""The scoring rules of published runs, as pure functions of text, mistakes included.

A curve can be compared with a publication only under the publication's own rule, so these forgive and refuse exactly
what verl's do (verl/utils/reward_score at 7b19203c52, the revision of the ROCm image): `gsm8k.py` strict, `math.py`
(the string rules of Hendrycks et al., arXiv:2103.03874), and `math_dapo.py` (those of Minerva, arXiv:2206.14858, as
DAPO uses them, without the later fallback to `\boxed{}`). geometry3k's is in `geometry.py`. Whether an answer is
right is another question: see `equivalence.py`.
"""

from __future__ import annotations

import re

from rl.tasks.rewards.verdict import Verdict, decided

SCORED_CHARACTERS = 300
"""`gsm8k` and `dapo` look at the end of a response only."""

_STRICT = re.compile(r"#### (-?[0-9.,]+)")


def gsm8k(response: str, answer: str) -> Verdict:
    """1.0 if the last `#### <number>` of the last 300 characters, commas aside, is the text of `answer`, else 0.0.

    Texts are compared: `80000.` and `80000.00` are not `80000`, and after `#### ` a currency sign is no match.
    """
    found = strict_answer(response)
    return decided(found, correct=found == answer)


def strict_answer(text: str) -> str | None:
    found = _STRICT.findall(text[-SCORED_CHARACTERS:])
    return found[-1].replace(",", "") if found else None


def math(response: str, answer: str) -> Verdict:
    r"""1.0 if the last `\boxed{}` of the response equals `answer` after Hendrycks' normalization, else 0.0."""
    found = last_boxed(response)
    return decided(found, correct=found is not None and equal_as_hendrycks(found, answer))


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` or, where there is none, nothing.

    `\boxed 7$`, if it occurs anywhere, goes before. An unfinished last box is no answer. An `\fbox` is found and then
    refused, as in the original.
    """
    if "\\boxed " in text:
        return text.rsplit("\\boxed ", 1)[1].split("$", 1)[0]
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    depth = 0
    for place in range(start, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                boxed = text[start : place + 1]
                return boxed[len("\\boxed{") : -1] if boxed.startswith("\\boxed{") else None
    return None


def equal_as_hendrycks(one: str, other: str) -> bool:
    """The original compares the raw texts where its normalization trips over either."""
    try:
        return normalized_as_hendrycks(one) == normalized_as_hendrycks(other)
    except ValueError:
        return one == other


def normalized_as_hendrycks(text: str) -> str:
    """Raises ValueError where the original raises: two units, or a `\\frac` or `\\sqrt` at the very end."""
    for before, after in _HENDRYCKS_REPLACED:
        text = text.replace(before, after)
    if "\\text{ " in text:  # a unit on the right
        parts = text.split("\\text{ ")
        if len(parts) != 2:
            raise ValueError("more than one unit")
        text = parts[0]
    for before, after in (("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0.")):
        text = text.replace(before, after)
    if not text:
        return text
    if text.startswith("."):
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:  # `k = 3`, where blanks count: `k=` goes and so does `k =`
        text = sides[1]
    text = _with_braced_fractions(_with_braced_roots(text).replace(" ", ""))
    if text == "0.5":
        text = "\\frac{1}{2}"
    match = _PLAIN_FRACTION.fullmatch(text)
    return f"\\frac{{{match[1]}}}{{{match[2]}}}" if match else text


_HENDRYCKS_REPLACED = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)
_PLAIN_FRACTION = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")


def _with_braced_roots(text: str) -> str:
    """`\\sqrt3` becomes `\\sqrt{3}`."""
    first, *rest = text.split("\\sqrt")
    if any(not part for part in rest):
        raise ValueError("nothing after \\sqrt")
    return first + "".join("\\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}") for part in rest)


def _with_braced_fractions(text: str) -> str:
    """`\\frac12` becomes `\\frac{1}{2}`, and `\\frac1{72}` becomes `\\frac{1}{72}`."""
    first, *rest = text.split("\\frac")
    done = first
    for part in rest:
        if not part:
            raise ValueError("nothing after \\frac")
        if part[0] == "{":
            done += "\\frac" + part
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            done += f"\\frac{{{part[0]}}}{part[1:]}"
        else:
            done += f"\\frac{{{part[0]}}}{{{part[1]}}}{part[2:]}"
    return done


_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")


def dapo(response: str, answer: str) -> Verdict:
    """1.0 if the last `Answer: ...` of the last 300 characters is `answer` after Minerva's normalization, else -1.0."""
    found = _ANSWER_LINE.findall(response[-SCORED_CHARACTERS:])
    if not found:
        return decided(None, correct=False, wrong=-1.0)
    stated = normalized_as_minerva(found[-1])
    return decided(stated, correct=stated == normalized_as_minerva(answer), wrong=-1.0)


def normalized_as_minerva(text: str) -> str:
    """What follows the last `=`, without units, blanks and text commands, and with short fractions braced."""
    text = text.rsplit("=", 1)[-1]
    for before, after in _MINERVA_REPLACED:
        text = text.replace(before, after)
    for removed in _MINERVA_REMOVED:
        text = text.replace(removed, "")
    text = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", text)
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"(\\{command}\{{)(.*?)(\}})", r"\2", text)
    text = re.sub(r"(\\boxed\{)(.*)(\})", r"\2", text)
    text = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", text)
    text = re.sub(r"(sqrt)([^{])", r"sqrt{\2}", text)
    text = text.replace("$", "")
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()


_MINERVA_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_MINERVA_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
