from __future__ import annotations

from rl.tasks.base import Problem
from rl.tasks.leaks import Leak, find_leaks, leak_words


def problem(prompt_id: str, text: str, *, asked: str = "{} Put the answer in a box.") -> Problem:
    return Problem(prompt_id, ({"role": "user", "content": asked.format(text)},), "1", source="s", text=text)


def test_the_same_problem_is_found_however_it_is_asked_and_named_with_the_first_training_row():
    training = [
        problem("train:0", "What is $7 + 5$?"),
        problem("train:1", "What is 7 - 5?"),
        problem("train:2", "what is 7+5?"),
    ]
    held_out = [problem("test:0", "What is\n7 + 5?", asked="Answer: {}"), problem("test:1", "What is 7 * 5?")]
    assert find_leaks(training, held_out) == [Leak("test:0", "train:0")]


def test_two_held_out_rows_of_one_problem_are_both_named():
    leaks = find_leaks([problem("train:4", "A")], [problem("a:0", "A"), problem("b:7", "a"), problem("b:8", "c")])
    assert leaks == [Leak("a:0", "train:4"), Leak("b:7", "train:4")]


def test_the_words_name_the_first_five():
    assert leak_words([]) == "held-out problems also trained on: 0"
    assert leak_words([Leak("a:0", "t:1")]) == "held-out problems also trained on: 1 (a:0 = t:1)"
    many = leak_words([Leak(f"a:{i}", f"t:{i}") for i in range(1200)])
    assert many.startswith("held-out problems also trained on: 1,200 (a:0 = t:0, a:1 = t:1, ")
    assert many.endswith("a:4 = t:4, ...)")
