"""Sums, counts and maxima of one step, reduced over ranks once at its end."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
import torch.distributed as dist


class StepMetrics:
    """A mean is a sum and a count, divided after both were summed over ranks: never a mean of means.

    Every rank must have seen the same keys, which it has if it ran the same code.
    """

    def __init__(self) -> None:
        self._sums: defaultdict[str, torch.Tensor | float] = defaultdict(float)
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._maxima: defaultdict[str, list[torch.Tensor | float]] = defaultdict(list)

    def add_mean(self, key: str, total: torch.Tensor | float, count: float) -> None:
        """`total` is a sum over `count` things of this rank."""
        self._sums[key] += total
        self._counts[key] += count

    def add_max(self, key: str, value: torch.Tensor | float) -> None:
        """`value` is -inf for a maximum over nothing."""
        self._maxima[key].append(value)

    def reduced(self) -> dict[str, float]:
        """Over ranks. NaN for a mean or maximum over nothing."""
        mean_keys, max_keys = sorted(self._sums), sorted(self._maxima)
        numbers = [float(values[key]) for values in (self._sums, self._counts) for key in mean_keys]
        sums = torch.tensor(numbers, dtype=torch.float64)
        maxima = torch.tensor([max(map(float, self._maxima[key])) for key in max_keys], dtype=torch.float64)
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        totals, counts = sums.reshape(2, -1).tolist()
        means = {
            key: total / count if count else math.nan
            for key, total, count in zip(mean_keys, totals, counts, strict=True)
        }
        tops = {key: math.nan if top == -math.inf else top for key, top in zip(max_keys, maxima.tolist(), strict=True)}
        return means | tops
