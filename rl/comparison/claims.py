"""From a curve to the one number that a claim is about."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rl.comparison.curves import Axis, Curve, Curves, NotComparable
from rl.config.published import ClaimConfig, Statistic


@dataclass(frozen=True, slots=True)
class Window:
    """Part of an axis, of which the last point belongs to it and the first does not."""

    low: float
    """-inf where it begins with the run."""
    high: float

    def of(self, curve: Curve) -> Curve:
        inside = (curve.x > self.low) & (curve.x <= self.high)
        return Curve(curve.x[inside], curve.values[inside])

    @property
    def last_quarter(self) -> Window:
        """Of steps 1 to 100 it is 76 to 100. What comes before training has no length."""
        return Window(self.high - (self.high - max(self.low, 0.0)) / 4, self.high)


def window_of(claim: ClaimConfig, ours: Curves, axis: Axis) -> Window:
    """A claim's window counts steps of our run; along another axis it is what those steps held.

    Raises NotComparable if the run has not reached its end, unless only its beginning is asked for.
    """
    done = int(ours.end(Axis.STEP))
    if claim.statistic is not Statistic.start:
        wanted = claim.last_step or ours.total_steps
        if wanted is not None and done < wanted:
            raise NotComparable(f"the window ends at step {wanted:,} and the run is at {done:,}")
    is_from_start = claim.first_step is None or claim.first_step <= 0
    low = -math.inf if is_from_start else ours.at_step(claim.first_step - 1, axis)  # type: ignore[operator]
    high = ours.end(axis) if claim.last_step is None else ours.at_step(claim.last_step, axis)
    return Window(low, high)


def value_of(claim: ClaimConfig, curves: Curves, window: Window, axis: Axis, *, rows_per_step: int) -> float:
    """A ratio's own part is the median. Raises NotComparable where there is no value to take."""
    curve = curves.curve(claim.metric, axis, rows_per_step=rows_per_step)
    chosen = window.last_quarter if claim.statistic is Statistic.settles_at else window
    values = chosen.of(curve).values
    if len(values) == 0:
        raise NotComparable(f"{curves.name} has no value of {claim.metric} in the window")
    match claim.statistic:
        case Statistic.start:
            return float(values[0])
        case Statistic.max:
            return float(values.max())
        case Statistic.mean:
            return float(values.mean())
        case Statistic.settles_at | Statistic.median | Statistic.ratio:
            return float(np.median(values))
