"""What a published run claims, as data: facts of its source, never a setting of ours. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Statistic(Enum):
    """How a run's curve becomes the one number that a claim is about."""

    start = "start"
    """The first value in the window."""
    max = "max"
    """The largest value in the window."""
    settles_at = "settles_at"
    """The median over the last quarter of the window's values."""
    median = "median"
    mean = "mean"
    ratio = "ratio"
    """This run's median over the window, over that of the run of experiment `versus` where it had trained on the same
    number of prompts (`prompts_trained`): steps of two placements may hold different data."""


class ClaimOrigin(Enum):
    """Whether the vendor measured it, or it follows from what the vendor measured."""

    vendor_measured = "vendor_measured"
    """The source says that it was measured on the experiment's hardware."""
    derived = "derived"
    """Carried over or computed from another measurement, by the source or by us; the claim's note says how."""


class ReadFrom(Enum):
    """Where in the source a number stands."""

    text = "text"
    table = "table"
    figure = "figure"
    """Read off a picture, so with an error of its own."""


SPEED_METRICS = ("time/", "throughput/", "memory/")
"""Beginnings of the keys whose values depend on the hardware."""


@dataclass
class SourceConfig:
    title: str = ""
    url: str | None = None
    """None: not found."""
    date: str | None = None
    commit: str | None = None
    """Of the code behind the run. None: the source states none."""


@dataclass
class ClaimConfig:
    """One published number."""

    metric: str = ""
    """Key of metrics.jsonl that is compared with it."""
    statistic: Statistic = Statistic.max
    first_step: int | None = None
    """Of the window, in our steps, included. None: the run's first."""
    last_step: int | None = None
    """Of the window, included. None: the run's last."""
    rows_per_step: int = 1
    """Rows of metrics.jsonl that hold what one step of the source holds; joined, before the statistic is taken, as the
    metric's reduction says (rl/loggers/names.py): times are added, shares averaged, rates taken over all the time."""
    value: float = 0.0
    unit: str = ""
    versus: str | None = None
    """Experiment whose run a ratio divides by; None for every other statistic."""
    tolerance: float = 0.0
    """Largest absolute difference that counts as reproduced. It is ours: no source gives one."""
    origin: ClaimOrigin = ClaimOrigin.vendor_measured
    read_from: ReadFrom = ReadFrom.text
    note: str = ""
    """What a reader must know to compare: what one step holds, which denominator, what the source leaves open."""


@dataclass
class EvidenceConfig:
    """Why each setting that differs from a default has its value: dotted key -> where it stands, or why. One entry a
    setting (rl/config/evidence.py says which settings; a test compares)."""

    source: dict[str, str] = field(default_factory=dict)
    """The source of the published numbers says so."""
    assumed: dict[str, str] = field(default_factory=dict)
    """It is silent; the value is that of the nearest public script or default, or a guess. The entry says which."""
    deviation: dict[str, str] = field(default_factory=dict)
    """Ours differs on purpose."""


@dataclass
class PublishedConfig:
    source: SourceConfig = field(default_factory=SourceConfig)
    hardware: str = ""
    """What the source ran on, in its words."""
    measured_on: str = ""
    """The option of conf/hardware that stands for it."""
    carried_over: dict[str, str] = field(default_factory=dict)
    """Options of conf/hardware for which the source claims the same figures without a measurement -> its argument.
    There every claim's origin is `derived`."""
    claims: dict[str, ClaimConfig] = field(default_factory=dict)
    """By a short name, such as `gsm8k_peak`."""
    evidence: EvidenceConfig = field(default_factory=EvidenceConfig)
    not_offered: dict[str, str] = field(default_factory=dict)
    """Settings of the published run, by its name for them, that have no counterpart here or another value -> what
    happens instead. Each is a deviation."""


def window_words(claim: ClaimConfig) -> str:
    """`, from step 401, 4 of our steps as one`; empty for all of a run, step by step."""
    words = "" if claim.first_step is None else f", from step {claim.first_step}"
    words += "" if claim.last_step is None else f", up to step {claim.last_step}"
    return words + ("" if claim.rows_per_step == 1 else f", {claim.rows_per_step} of our steps as one")


def claim_words(claim: ClaimConfig) -> str:
    """`max, up to step 30`, `ratio over qwen2_5_math_7b_dapo_colocated's, 4 of our steps as one`."""
    versus = f" over {claim.versus}'s" if claim.versus else ""
    return claim.statistic.value.replace("_", " ") + versus + window_words(claim)


def is_speed(claim: ClaimConfig) -> bool:
    return claim.metric.startswith(SPEED_METRICS)


def is_of_source(published: PublishedConfig, hardware: str) -> bool:
    """Whether the source speaks of the hardware option of that name: it measured there, or argues that it would."""
    return hardware == published.measured_on or hardware in published.carried_over


def origin_on(published: PublishedConfig, claim: ClaimConfig, hardware: str) -> ClaimOrigin | None:
    """What a claim is on the hardware option of that name. None: a speed, of which the source says nothing there."""
    if hardware == published.measured_on or not is_speed(claim):
        return ClaimOrigin.derived if hardware in published.carried_over else claim.origin
    return ClaimOrigin.derived if hardware in published.carried_over else None
