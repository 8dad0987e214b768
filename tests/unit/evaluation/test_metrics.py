from __future__ import annotations

import math

import pytest

from rl.evaluation.metrics import mean_accuracy, metric_name


def test_mean_and_standard_error_by_hand():
    # Problem means 1, 0.5, 0: mean 0.5, sample variance (0.25 + 0 + 0.25) / 2, error sqrt(0.25 / 3).
    mean, stderr = mean_accuracy([[True, True], [True, False], [False, False]])
    assert mean == 0.5 and stderr == pytest.approx(0.288675, abs=1e-6)


def test_with_one_sample_each_it_is_the_binomial_error_with_n_minus_one():
    # 3 of 4: sqrt(0.75 * 0.25 / 3).
    mean, stderr = mean_accuracy([[True], [True], [True], [False]])
    assert mean == 0.75 and stderr == pytest.approx(0.25)


def test_more_samples_of_the_same_outcome_do_not_shrink_the_error():
    once = mean_accuracy([[True], [False]])
    often = mean_accuracy([[True] * 8, [False] * 8])
    assert once == often == (0.5, pytest.approx(0.5))


def test_every_problem_weighs_the_same():
    assert mean_accuracy([[True], [False, False, False]])[0] == 0.5


def test_the_error_of_one_problem_is_unknown_and_of_equal_ones_zero():
    assert math.isnan(mean_accuracy([[True, False]])[1])
    assert mean_accuracy([[True], [True]]) == (1.0, 0.0)


def test_metric_names():
    assert metric_name(is_greedy=True, samples_per_problem=1) == "greedy"
    assert metric_name(is_greedy=False, samples_per_problem=32) == "avg@32"
