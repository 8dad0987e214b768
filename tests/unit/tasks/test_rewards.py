from __future__ import annotations

import time
from fractions import Fraction

import pytest

from rl.tasks.rewards.exact import is_exact
from rl.tasks.rewards.numbers import ends_with_number, parse_number
from rl.tasks.rewards.published import strict_answer
from rl.types import FinishReason
from tests.made_answers import answer


def test_exact_needs_the_whole_answer_and_an_end():
    assert is_exact(answer("640"), "640")
    assert not is_exact(answer("640 "), "640") and is_exact(answer(" 640\n"), "640", strip=True)
    assert not is_exact(answer("6400"), "640") and not is_exact(answer(""), "640")
    assert not is_exact(answer("640", finish=FinishReason.LENGTH), "640")
    assert not is_exact(answer("640", finish=FinishReason.ABORT), "640")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("-3", -3),
        ("+3", 3),
        ("\u22123", -3),
        ("80,000", 80_000),
        ("$80,000.00", 80_000),
        ("1,234,567", 1_234_567),
        (" 18. ", 18),
        ("50%", 50),
        (".5", Fraction(1, 2)),
        ("0.250", Fraction(1, 4)),
        ("1/2", Fraction(1, 2)),
        ("-4/6", Fraction(-2, 3)),
        ("1e3", 1000),
        ("2.5e-1", Fraction(1, 4)),
        ("007", 7),
    ],
)
def test_numbers_are_read_as_exact_fractions(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize("text", ["", "abc", "1,23", "12,34,567", "1 2", "3 apples", "1/0", "--3", "1.2.3", "9" * 301])
def test_what_is_not_one_number_is_none(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "expected", "correct"),
    [
        ("The answer is 12.", "12", True),
        ("12 eggs, then 7 left", "7", True),
        ("12 eggs, then 7 left", "12", False),
        ("#### 1,200", "1200", True),
        ("#### -5", "-5", True),
        ("8-5", "5", True),  # a minus, no sign
        ("8-5", "-5", False),
        ("3.0", "3", True),
        ("0.1 + 0.2 = 0.3", "0.3", True),
        ("$3.50", "3.5", True),
        ("it costs 50%", "50", True),
        ("1000", "100", False),
        ("x2", "2", True),
        ("no number at all", "2", False),
        ("2", "two", False),
    ],
)
def test_the_last_number_of_the_response_counts(text, expected, correct):
    assert ends_with_number(answer(text), expected) is correct


def test_a_number_cut_at_the_length_limit_does_not_count():
    assert not ends_with_number(answer("it is 12", finish=FinishReason.LENGTH), "12")
    assert ends_with_number(answer("it is 12 and", finish=FinishReason.LENGTH), "12")


@pytest.mark.parametrize("text", ["9" * 100_000, "1," * 50_000, "1,234" * 20_000, "-" * 100_000, "1/" * 50_000])
def test_hostile_text_takes_linear_time(text):
    started = time.perf_counter()
    ends_with_number(answer(text), "1")
    assert time.perf_counter() - started < 3.0  # quadratic time would be minutes


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so #### 42", "42"),
        ("#### 1 then #### 2", "2"),
        ("#### 80,000", "80000"),
        ("#### -7", "-7"),
        ("####42", None),  # verl's strict rule wants the blank
        ("#### $42", None),
        ("42", None),
        ("#### 42" + "x" * 300, None),
    ],
)
def test_the_strict_answer_follows_the_last_four_hashes(text, found):
    assert strict_answer(text) == found
