"""Signs that a run trains on something other than it should: a few numbers of each step against their limits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rl.config.schema import Dtype
from rl.config.sentinels import SentinelAction, SentinelConfig, SentinelsConfig

log = logging.getLogger(__name__)

DTYPE_LIMITS = {Dtype.float32: 1e-5, Dtype.bfloat16: 0.02}
"""For `limit=null`, in nats. On a CPU equal passes of the same weights differed by exactly 0 in both dtypes, one with a
gradient and one without (tests/unit/trainer/test_sentinel_metrics.py); the rest is room for kernels that choose another
order of summation. A wrong temperature or dropout makes tenths of a nat."""


class SentinelError(RuntimeError):
    """A value passed its limit, and the run is to stop then."""


@dataclass(frozen=True, slots=True)
class _Watch:
    sentinel: str
    """Field of `SentinelsConfig`."""
    keys: tuple[str, ...]
    """Metrics that are compared, taken together by `combine`."""
    is_floor: bool
    """The limit is the smallest healthy value, not the largest."""
    meaning: str
    combine: Callable[[Iterable[float]], float] = sum


WATCHES = (
    _Watch(
        "old_logprobs",
        ("train/old_logprob_difference_max",),
        False,
        "two passes over the same tokens with the same weights disagree: dropout, a temperature that only one of them "
        "knows, or kernels that are not deterministic. Ratios are then off 1 before any update.",
    ),
    _Watch(
        "padding",
        ("sentinel/padding_leak",),
        False,
        "log-probs of a sequence change with its neighbors in the pack, or the loss with values that are masked. Try "
        "backend.trainer.packing=one_sequence.",
    ),
    _Watch(
        "mismatch",
        ("mismatch/kl_k3", "canary/kl_k3"),
        False,
        "engine and trainer give the same tokens different log-probs on equal weights. Set algorithm.correction, or "
        "make their dtypes equal.",
        max,  # two measurements of the same
    ),
    _Watch(
        "nonfinite",
        ("rollout/nonfinite_logprobs", "train/nonfinite_logprobs"),
        False,
        "so many loss tokens have no finite log-prob. They were left out of the loss and its denominators, or, where "
        "the policy itself gives none, the update was skipped.",
    ),
    _Watch(
        "effective_samples",
        ("offpolicy/effective_sample_fraction",),
        True,
        "few tokens carry most of the importance weight: the answers are from a policy far from the trainer's. Lower "
        "placement.max_staleness, or look at the mismatch.",
    ),
    _Watch(
        "uniform_groups",
        ("reward/uniform_group_fraction",),
        False,
        "almost no group teaches anything: prompts are too hard or too easy, or the grader gives one grade.",
    ),
    _Watch("entropy", ("train/entropy",), True, "the policy hardly samples any more: it has settled on one answer."),
)


@dataclass(frozen=True, slots=True)
class Trip:
    sentinel: str
    action: SentinelAction
    message: str


class Sentinels:
    """Call `find` with the metrics of a step, log the row, then `act`."""

    def __init__(self, config: SentinelsConfig, *, compute_dtype: Dtype):
        self._config = config
        self._dtype_limit = DTYPE_LIMITS[compute_dtype]
        self._warned: set[str] = set()

    def find(self, metrics: Mapping[str, float]) -> list[Trip]:
        """Values past their limit; one that is missing or not a number is not judged."""
        trips = []
        for watch in WATCHES:
            known = {key: metrics[key] for key in watch.keys if not math.isnan(metrics.get(key, math.nan))}
            if not known:
                continue
            settings: SentinelConfig = getattr(self._config, watch.sentinel)
            limit = self._dtype_limit if settings.limit is None else settings.limit
            value = watch.combine(known.values())
            if value < limit if watch.is_floor else value > limit:
                named = [key for key in known if known[key] == value] or list(known)
                relation = "below" if watch.is_floor else "above"
                message = (
                    f"{' + '.join(named)} is {value:.3g}, {relation} sentinels.{watch.sentinel}.limit={limit:g}: "
                    f"{watch.meaning}"
                )
                trips.append(Trip(watch.sentinel, settings.action, message))
        return trips

    def act(self, trips: list[Trip], *, step: int) -> None:
        """Warns of what was inside at the last call. Raises SentinelError for the first one that is to stop the run."""
        for trip in trips:
            if trip.action is SentinelAction.stop:
                raise SentinelError(f"step {step}: {trip.message} (sentinels.{trip.sentinel}.action=stop)")
            if trip.sentinel not in self._warned:
                log.warning("step %d: %s", step, trip.message)
        self._warned = {trip.sentinel for trip in trips}
