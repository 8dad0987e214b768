"""Whether a run reproduced what is claimed of it, claim by claim, or why that cannot be said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from rl.comparison.claims import Window, value_of, window_of
from rl.comparison.curves import Axis, Curves, NotComparable, reduction_of
from rl.config.comparable import keys_that_matter, named
from rl.config.published import ClaimConfig, ClaimOrigin, PublishedConfig, Statistic, claim_words, is_speed, origin_on
from rl.config.schema import ConfigError, RunConfig
from rl.loggers.names import Reduction

ROUNDING = 1e-9
"""Relative, of a difference: a value that is off by exactly the tolerance is within it."""


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    """Every difference is within the tolerance."""
    PARTIAL = "partial"
    """Neither: off by more than the tolerance and less than twice of it or, of several points, some within it."""
    FAILED = "failed"
    """No difference is below twice the tolerance."""
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one claim."""

    name: str
    metric: str
    what: str
    """The statistic and its window, or how many points."""
    verdict: Verdict
    ours: float | None = None
    theirs: float | None = None
    tolerance: float | None = None
    unit: str = ""
    is_derived: bool = False
    """Whether `theirs` is a published number that was not measured on the run's hardware, see `ClaimOrigin`."""
    why: str = ""
    """Of `NOT_COMPARABLE`."""
    window: Window | None = None
    """Along the axis that was compared by. None: of points, or unknown."""
    rows_per_step: int = 1
    """Of our curve, see `ClaimConfig`."""

    @property
    def difference(self) -> float | None:
        return None if self.ours is None or self.theirs is None else self.ours - self.theirs


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run and everything that its claims are judged by."""

    ours: Curves
    claims: Mapping[str, ClaimConfig]
    axis: Axis = Axis.PROMPTS
    changed: Sequence[str] = ()
    """Settings that are not those locked for the run's experiment."""
    published: PublishedConfig | None = None
    """Where the claims are from; it says for which hardware its speeds are."""
    against: Curves | None = None
    """Whose numbers stand in place of the claimed ones. None: the claimed ones."""
    versus: Mapping[str, Curves] = field(default_factory=dict)
    """Experiment -> the run that ratios to it divide by."""
    versus_changed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Experiment -> as `changed`, of that run."""


def judge(comparison: Comparison) -> list[Finding]:
    """One finding a claim, in order."""
    return [_judge(name, claim, comparison) for name, claim in comparison.claims.items()]


def _judge(name: str, claim: ClaimConfig, comparison: Comparison) -> Finding:
    blank = Finding(
        name,
        claim.metric,
        claim_words(claim),
        Verdict.NOT_COMPARABLE,
        tolerance=claim.tolerance,
        theirs=claim.value if comparison.against is None else None,
        unit=claim.unit,
        is_derived=_is_derived(claim, comparison),
        rows_per_step=claim.rows_per_step,
    )
    against = comparison.against
    try:
        _check_settings(claim, comparison)
        _check_hardware(claim, comparison)
        if against is not None and against.is_tabled:
            return _judge_points(blank, comparison.ours, against, comparison.axis)
        window = window_of(claim, comparison.ours, comparison.axis)
        blank = replace(blank, window=window)
        ours = value_of(claim, comparison.ours, window, comparison.axis, rows_per_step=claim.rows_per_step)
        if claim.statistic is Statistic.ratio:
            ours /= _nonzero(_value_of_other(claim, comparison, comparison.versus[claim.versus or ""], window))
        theirs = claim.value if against is None else _value_of_other(claim, comparison, against, window)
    except NotComparable as reason:
        return replace(blank, why=str(reason))
    return replace(blank, ours=ours, theirs=theirs, verdict=verdict_of([ours - theirs], claim.tolerance))


def _is_derived(claim: ClaimConfig, comparison: Comparison) -> bool:
    if comparison.against is not None or comparison.published is None:
        return False
    return origin_on(comparison.published, claim, comparison.ours.hardware or "") is ClaimOrigin.derived


def verdict_of(differences: Sequence[float], tolerance: float) -> Verdict:
    sizes = np.abs(differences)
    limit = tolerance * (1 + ROUNDING)
    if (sizes <= limit).all():
        return Verdict.REPRODUCED
    if (sizes >= 2 * tolerance * (1 - ROUNDING)).all():
        return Verdict.FAILED
    return Verdict.PARTIAL


def _check_settings(claim: ClaimConfig, comparison: Comparison) -> None:
    """Another run is compared with whatever the settings are; a published claim is not."""
    if comparison.against is None and (keys := keys_that_matter(claim, comparison.changed)):
        raise NotComparable(f"the run is modified: {named(keys)}")
    if claim.statistic is not Statistic.ratio:
        return
    if comparison.against is not None:
        raise NotComparable("a ratio of two runs is compared with the published one alone")
    if claim.versus not in comparison.versus:
        raise NotComparable(f"a run of {claim.versus} is needed: --versus RUN")
    if keys := keys_that_matter(claim, comparison.versus_changed.get(claim.versus or "", ())):
        raise NotComparable(f"the run of {claim.versus} is modified: {named(keys)}")


def _check_hardware(claim: ClaimConfig, comparison: Comparison) -> None:
    """A speed is of the hardware that it was measured on."""
    if not is_speed(claim):
        return
    own, against, published = comparison.ours.hardware, comparison.against, comparison.published
    others = [] if against is None else [against.hardware]
    if claim.statistic is Statistic.ratio:
        others.append(comparison.versus[claim.versus or ""].hardware)
    if against is None and (published is None or origin_on(published, claim, own or "") is None):
        others.append(published.measured_on if published else None)
    for other in others:
        if other is None or other != own:
            raise NotComparable(f"a speed on {other or 'unknown hardware'}, and the run was on {own}")


def _value_of_other(claim: ClaimConfig, comparison: Comparison, other: Curves, window: Window) -> float:
    """Of the same window of another run, of whose rows as many are joined as hold the data of one step of the claim.

    What is added up over a step is scaled by what no whole number of rows makes equal.
    """
    axis, ours = comparison.axis, comparison.ours
    if axis is Axis.STEP:
        _check_equal_steps(ours.config, other.config)
    if other.has(axis) and other.end(axis) < window.high and claim.statistic is not Statistic.start:
        raise NotComparable(f"{other.name} ends at {other.end(axis):,.0f} {axis.value} of {window.high:,.0f}")
    if axis is Axis.STEP:
        return value_of(claim, other, window, axis, rows_per_step=claim.rows_per_step)
    is_sum = reduction_of(claim.metric) is Reduction.SUM
    own, others = ours.per_row(axis), other.per_row(axis)
    if not own or not others:
        if is_sum or claim.rows_per_step > 1:
            raise NotComparable(f"how many {axis.value} a step holds is unknown")
        return value_of(claim, other, window, axis, rows_per_step=1)
    rows = claim.rows_per_step * own / others
    joined = max(1, round(rows))
    value = value_of(claim, other, window, axis, rows_per_step=joined)
    return value * rows / joined if is_sum else value


def _check_equal_steps(ours: RunConfig | None, other: RunConfig | None) -> None:
    """What is not said (an export's steps) was left to whoever chose to compare by steps."""
    if ours is None or other is None:
        return
    held = [(config.algorithm.prompts_per_step, config.algorithm.group_size) for config in (ours, other)]
    if held[0] != held[1]:
        texts = [f"{prompts:,} prompts x {answers} answers" for prompts, answers in held]
        raise NotComparable(f"a step holds {texts[0]} here and {texts[1]} there: compare by --x prompts")


def _judge_points(blank: Finding, ours: Curves, tabled: Curves, axis: Axis) -> Finding:
    """Each point of the table against our curve there, between our points by a straight line."""
    theirs, own = tabled.curve(blank.metric, axis), ours.curve(blank.metric, axis)
    if theirs.x[-1] > ours.end(axis) or theirs.x[-1] > own.x[-1]:
        raise NotComparable(
            f"the last point is at {theirs.x[-1]:,.0f} {axis.value}, and the run's last value at {own.x[-1]:,.0f}"
        )
    if theirs.x[0] < own.x[0]:
        raise NotComparable(f"the first point, at {theirs.x[0]:,.0f} {axis.value}, is before the run's first value")
    values = np.interp(theirs.x, own.x, own.values)
    assert blank.tolerance is not None
    worst = int(np.abs(values - theirs.values).argmax())
    return replace(
        blank,
        what=f"{len(theirs.x)} points, the worst",
        ours=float(values[worst]),
        theirs=float(theirs.values[worst]),
        verdict=verdict_of(list(values - theirs.values), blank.tolerance),
    )


def _nonzero(value: float) -> float:
    if value == 0:
        raise NotComparable("the other run's value is 0, which nothing can be divided by")
    return value


def claims_of_metrics(tolerances: Mapping[str, float]) -> dict[str, ClaimConfig]:
    """For metrics that nothing is claimed of: where the whole curve settles, within a tolerance that a person gives."""
    for metric, tolerance in tolerances.items():
        if tolerance < 0:
            raise ConfigError(f"--metric {metric}={tolerance}: a tolerance is 0 or more.")
    return {
        metric: ClaimConfig(metric=metric, statistic=Statistic.settles_at, tolerance=tolerance)
        for metric, tolerance in tolerances.items()
    }


def claims_of_points(claims: Mapping[str, ClaimConfig], tabled: Curves) -> dict[str, ClaimConfig]:
    """One for each metric of the table that has a tolerance: the smallest among the claims about it."""
    found: dict[str, ClaimConfig] = {}
    for metric in tabled.metrics():
        tolerances = [claim.tolerance for claim in claims.values() if claim.metric == metric]
        if tolerances:
            found[f"{tabled.name}: {metric}"] = ClaimConfig(metric=metric, tolerance=min(tolerances))
    return found


def exit_code(findings: Sequence[Finding]) -> int:
    """0: all reproduced. 1: one failed. 3: none failed, but one is partial or not comparable."""
    verdicts = {finding.verdict for finding in findings}
    if verdicts == {Verdict.REPRODUCED}:
        return 0
    return 1 if Verdict.FAILED in verdicts else 3
