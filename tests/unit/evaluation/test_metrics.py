from __future__ import annotations

import math
from itertools import combinations

import pytest

from rl.evaluation.metrics import accuracy, majority, mean_and_error, metric_name, pass_at_k, powers_of_two


def test_mean_and_standard_error_by_hand():
    # Mean 0.5, sample variance (0.25 + 0 + 0.25) / 2, error sqrt(0.25 / 3).
    mean, stderr = mean_and_error([1.0, 0.5, 0.0])
    assert mean == 0.5 and stderr == pytest.approx(0.288675, abs=1e-6)


def test_with_one_sample_each_it_is_the_binomial_error_with_n_minus_one():
    # 3 of 4: sqrt(0.75 * 0.25 / 3).
    mean, stderr = mean_and_error([1.0, 1.0, 1.0, 0.0])
    assert mean == 0.75 and stderr == pytest.approx(0.25)


def test_more_samples_of_the_same_outcome_do_not_shrink_the_error():
    once = mean_and_error([accuracy([True]), accuracy([False])])
    often = mean_and_error([accuracy([True] * 8), accuracy([False] * 8)])
    assert once == often == (0.5, pytest.approx(0.5))


def test_every_problem_weighs_the_same():
    assert mean_and_error([accuracy([True]), accuracy([False, False, False])])[0] == 0.5


def test_the_error_of_one_problem_is_unknown_and_of_equal_ones_zero():
    assert math.isnan(mean_and_error([0.5])[1])
    assert mean_and_error([1.0, 1.0]) == (1.0, 0.0)


def test_metric_names():
    assert metric_name(is_greedy=True, samples_per_problem=1) == "greedy"
    assert metric_name(is_greedy=False, samples_per_problem=32) == "avg@32"


def test_pass_at_k_by_hand():
    # 2 right of 4, two drawn: both wrong in 1 of 6 pairs.
    assert pass_at_k([True, False, True, False], 2) == pytest.approx(5 / 6)
    assert pass_at_k([True, False, False, False], 1) == 0.25 == accuracy([True, False, False, False])
    assert pass_at_k([True, False, False, False], 4) == 1.0
    assert pass_at_k([False] * 4, 4) == 0.0
    assert pass_at_k([True, True, False], 2) == 1.0  # one wrong answer cannot fill two places


@pytest.mark.parametrize("num_right", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one(num_right: int, k: int):
    samples = [index < num_right for index in range(6)]
    choices = list(combinations(samples, k))
    assert pass_at_k(samples, k) == pytest.approx(sum(any(choice) for choice in choices) / len(choices))


def test_the_k_of_pass_at_k():
    assert powers_of_two(1) == []
    assert powers_of_two(2) == [2]
    assert powers_of_two(6) == [2, 4, 6]
    assert powers_of_two(32) == [2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["7", "7", "8"], "7", 1.0),
        (["7", "8", "8"], "7", 0.0),
        (["7", "8"], "7", 0.5),  # a tie of two
        (["7", "8", "9"], "9", 1 / 3),
        ([None, None, "7"], "7", 1.0),  # no answer, no vote
        ([None, None], "7", 0.0),
        (["8", "8", "9", "9", "7"], "7", 0.0),
        (["7"], "7", 1.0),
    ],
)
def test_the_majority_by_hand(answers, right, expected):
    assert majority([answer == right for answer in answers], answers) == pytest.approx(expected)


def test_right_answers_vote_together_however_they_are_written():
    assert majority([True, True, False, False], ["1/2", "0.5", "3", "4"]) == 1.0
