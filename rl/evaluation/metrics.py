"""Accuracies over problems, each with its standard error.

Every metric is a mean over problems of one number for each, and every problem weighs the same. Samples of one problem
are not independent, so the error is that of the problems' numbers: their sample standard deviation over
sqrt(number of problems). With a single problem it is unknown: nan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """(mean, standard error) of one number for each problem."""
    num = len(values)
    mean = math.fsum(values) / num
    if num == 1:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
    return mean, math.sqrt(variance / num)


def accuracy(correct: Sequence[bool]) -> float:
    """Of the samples of one problem."""
    return sum(correct) / len(correct)


def pass_at_k(correct: Sequence[bool], k: int) -> float:
    """Probability that of k samples at least one is right, estimated without bias from n >= k samples of one problem.

    1 - C(n - c, k) / C(n, k) with c right ones (HumanEval, arXiv:2107.03374, equation 1).
    """
    num, num_right = len(correct), sum(correct)
    assert 1 <= k <= num
    return 1.0 - math.comb(num - num_right, k) / math.comb(num, k)


def majority(correct: Sequence[bool], answers: Sequence[str | None]) -> float:
    """Probability that the answer most samples of one problem gave is right (self-consistency, arXiv:2203.11171).

    A sample without an answer has no vote; of answers with equally many votes one is drawn. Samples vote alike if
    their answers are the same text or both are right. Without any vote it is 0.
    """
    votes: Counter[str | None] = Counter()
    for is_right, answer in zip(correct, answers, strict=True):
        if is_right:
            votes[None] += 1  # whatever the writing
        elif answer is not None:
            votes[answer] += 1
    if not votes:
        return 0.0
    most = max(votes.values())
    return float(votes[None] == most) / sum(count == most for count in votes.values())


def powers_of_two(num: int) -> list[int]:
    """2, 4, 8, ... below `num`, and `num` itself; nothing for one."""
    powers = [2**exponent for exponent in range(1, num.bit_length()) if 2**exponent < num]
    return [*powers, num] if num > 1 else []


def metric_name(*, is_greedy: bool, samples_per_problem: int) -> str:
    return "greedy" if is_greedy else f"avg@{samples_per_problem}"
