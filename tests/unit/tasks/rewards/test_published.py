"""The published rules, mistakes included. Expected values follow verl's code by hand (7b19203c52)."""

from __future__ import annotations

import pytest

from rl.tasks.rewards import published
from rl.tasks.rewards.checker import Checker
from rl.tasks.rewards.rules import published_rules
from rl.tasks.rewards.verdict import Case, Reason


@pytest.mark.parametrize(
    ("response", "answer", "score", "extracted"),
    [
        ("so #### 42", "42", 1.0, "42"),
        ("#### 1 then #### 2", "2", 1.0, "2"),
        ("#### 1 then #### 2", "1", 0.0, "2"),
        ("#### 80,000", "80000", 1.0, "80000"),
        ("#### -7", "-7", 1.0, "-7"),
        ("#### 42.", "42", 0.0, "42."),  # texts are compared
        ("#### 42.00", "42", 0.0, "42.00"),
        ("#### 42%", "42", 1.0, "42"),
        ("####42", "42", 0.0, None),  # the blank is part of the pattern
        ("#### $42", "42", 0.0, None),
        ("#### **42**", "42", 0.0, None),
        ("\\boxed{42}", "42", 0.0, None),
        ("#### 42" + "x" * 293, "42", 1.0, "42"),  # 300 characters from the end
        ("#### 42" + "x" * 294, "42", 0.0, None),
    ],
)
def test_gsm8k_reads_hashes_at_the_end(response, answer, score, extracted):
    verdict = published.gsm8k(response, answer)
    assert (verdict.score, verdict.extracted, verdict.correct) == (score, extracted, score == 1.0)
    assert verdict.reason is (Reason.OK if verdict.correct else Reason.NO_ANSWER if extracted is None else Reason.WRONG)


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"so $\boxed{\frac{1}{2}}$", r"\frac{1}{2}", 1.0),
        (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{.5}", "0.5", 1.0),
        (r"\boxed{\sqrt3}", r"\sqrt{3}", 1.0),
        (r"\boxed{x=5}", "5", 1.0),
        (r"\boxed{xyz=5}", "5", 0.0),  # only names of up to two characters are dropped
        (r"\boxed{90^\circ}", "90", 1.0),
        (r"\boxed{5\text{ cm}}", "5", 1.0),
        (r"\boxed{5\text{cm}}", "5", 0.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{50%}", "50", 0.0),
        (r"\boxed{\$5}", "5", 1.0),
        (r"\boxed{1,000}", "1000", 0.0),
        (r"\boxed{0.25}", r"\frac{1}{4}", 0.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{x+1}", "1+x", 0.0),
        (r"\boxed{1} and \boxed{2}", "2", 1.0),
        (r"\boxed{1} and \boxed{2}", "1", 0.0),
        (r"\boxed{2", "2", 0.0),
        (r"\boxed 7$", "7", 1.0),
        (r"\fbox{7}", "7", 0.0),  # found, and then refused
        ("7", "7", 0.0),
        (r"\boxed{\frac}", r"\frac", 1.0),  # normalization trips: the raw texts are compared
        (r"\boxed{5\text{ m}\text{ s}}", "5", 0.0),
    ],
)
def test_math_compares_the_last_box_as_text(response, answer, score):
    assert published.math(response, answer).score == score


@pytest.mark.parametrize(
    ("response", "answer", "score", "extracted"),
    [
        ("Answer: 34", "34", 1.0, "34"),
        ("... \nanswer : 34\nmore", "34", 1.0, "34"),
        ("Answer: 33\nAnswer: 34", "34", 1.0, "34"),
        ("Answer: $34$", "34", 1.0, "34"),
        ("Answer: x = 34", "34", 1.0, "34"),
        ("Answer: 1,234", "1234", 1.0, "1234"),
        ("Answer: 34 degrees", "34", 1.0, "34"),
        ("Answer: \\boxed{34}", "34", 1.0, "34"),
        ("Answer: \\frac12", "\\frac{1}{2}", 1.0, "\\frac{1}{2}"),
        ("Answer: 34.0", "34", -1.0, "34.0"),
        ("Answer: 34.", "34", -1.0, "34."),
        ("Answer: 35", "34", -1.0, "35"),
        ("The answer is 34", "34", -1.0, None),
        ("\\boxed{34}", "34", -1.0, None),  # the fallback to a box came later
        ("Answer: 34" + "x\n" * 145, "34", -1.0, "34x"),
        ("Answer: 34\n" + "x" * 289, "34", 1.0, "34"),  # 300 characters from the end
        ("Answer: 34\n" + "x" * 290, "34", -1.0, None),
    ],
)
def test_dapo_reads_the_answer_line_and_scores_plus_or_minus_one(response, answer, score, extracted):
    verdict = published.dapo(response, answer)
    assert (verdict.score, verdict.extracted, verdict.correct) == (score, extracted, score == 1.0)


@pytest.mark.parametrize(
    ("response", "answer", "score", "correct"),
    [
        (r"<think>a</think> so \boxed{7}", "7", 1.0, True),
        (r"so \boxed{7}", "7", 0.9, True),
        (r"<think>a</think> so \boxed{8}", "7", 0.1, False),
        (r"so \boxed{8}", "7", 0.0, False),
        (r"a <think>b</think> \boxed{7}", "7", 0.9, True),  # the whole response must have the form
        (r"<think>a</think> 7", "7", 0.0, False),
        (r"\boxed{7.0}", "7", 0.9, True),
        (r"\boxed{\sqrt{49}}", "7", 0.0, False),  # a whole number is written as one
        (r"\boxed{2/4}", "1/2", 0.0, False),  # a fraction is reduced
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 0.9, True),
        (r"\boxed{2 \sqrt { 221 }}", r"2\sqrt{221}", 0.9, True),
        (r"\boxed{30^\circ}", "30", 0.9, True),
    ],
)
def test_geometry3k_weighs_accuracy_and_format(checker: Checker, response, answer, score, correct):
    (verdict,) = checker.check([Case(response, answer, "geometry3k")])
    assert verdict.score == pytest.approx(score)
    assert verdict.correct is correct


def test_a_row_has_the_rule_of_its_source_or_all_of_its_task():
    assert published_rules("gsm8k_math", "openai/gsm8k") == ("gsm8k",)
    assert published_rules("gsm8k_math", "math") == ("math",)
    assert published_rules("gsm8k_math", None) == ("gsm8k", "math")
    assert published_rules("dapo_math", None) == ("dapo",)
    with pytest.raises(ValueError, match="source 'mine' has no published rule"):
        published_rules("gsm8k_math", "mine")
    with pytest.raises(ValueError, match="task 'jsonl' has no published rule"):
        published_rules("jsonl", None)
