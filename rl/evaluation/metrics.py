"""Accuracy over problems, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean_accuracy(correct: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """(mean, standard error) of accuracy, given [problem][sample]; every problem weighs the same.

    Samples of one problem are not independent, so the error is that of the problem means: their sample standard
    deviation over sqrt(number of problems). With a single problem it is unknown: nan.
    """
    assert correct and all(correct), "a problem without graded samples is left out before"
    means = [sum(samples) / len(samples) for samples in correct]
    num = len(means)
    mean = math.fsum(means) / num
    if num == 1:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in means) / (num - 1)
    return mean, math.sqrt(variance / num)


def metric_name(*, is_greedy: bool, samples_per_problem: int) -> str:
    return "greedy" if is_greedy else f"avg@{samples_per_problem}"
