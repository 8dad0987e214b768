"""From what a person asked to compare to findings and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.comparison.curves import Axis, Curves, read_csv, read_run
from rl.comparison.picture import draw_verdict
from rl.comparison.settings import locked_changes
from rl.comparison.verdict import Comparison, Finding, claims_of_metrics, claims_of_points, judge
from rl.config.published import ClaimConfig
from rl.config.register import package_folder
from rl.config.schema import ConfigError

PUBLISHED = "published"


@dataclass(frozen=True, slots=True)
class Request:
    run: Path
    against: str
    """`published`, a run folder, or a CSV file."""
    versus: Sequence[Path]
    metrics: Sequence[str]
    """`KEY=TOLERANCE` each."""
    renamed: Sequence[str]
    """`THEIRS=OURS` each."""
    run_name: str | None
    axis: Axis
    picture: Path


def compare(request: Request) -> list[Finding]:
    """Raises ConfigError where there is nothing to judge."""
    ours = read_run(request.run)
    assert ours.config is not None
    tolerances = {key: _tolerance(key, value) for key, value in map(_pair, request.metrics)}
    published = ours.config.published
    claims = claims_of_metrics(tolerances) or dict(published.claims if published else {})
    versus = _versus(request.versus)
    comparison = Comparison(
        ours=ours,
        claims=claims,
        axis=request.axis,
        changed=locked_changes(ours.config),
        published=published,
        versus=versus,
        versus_changed={name: locked_changes(curves.config) for name, curves in versus.items() if curves.config},
    )
    tables = []
    if request.against == PUBLISHED:
        if not published or tolerances:
            remedy = "Give --against OTHER_RUN or a CSV file, and --metric KEY=TOLERANCE for what has no claim."
            reason = "--metric names no published number" if published else f"nothing is published of {request.run}"
            raise ConfigError(f"{reason}. {remedy}")
        findings = judge(comparison)
        path = package_folder("experiments") / "curves" / f"{ours.config.experiment}.csv"
        tables = [read_csv(path, renamed={})] if path.is_file() else []
    else:
        other = _other(request)
        tables = [other]
        findings = [] if other.is_tabled else judge(_with(comparison, claims, other))
    for table in tables:
        if table.is_tabled:
            findings += judge(_with(comparison, claims_of_points(claims, table), table))
    if not findings:
        raise ConfigError(
            f"nothing to judge: {request.run} has no claim about what {request.against} holds. Name metrics by "
            "--metric KEY=TOLERANCE."
        )
    try:
        draw_verdict(
            request.picture,
            findings,
            ours=ours,
            others=[*tables, *versus.values()],
            axis=request.axis,
            title=f"{request.run.resolve().name} against {Path(request.against).name}",
        )
    except OSError as error:
        raise ConfigError(
            f"the picture cannot be written to {request.picture} ({error.strerror}). Choose another place by "
            "--picture FILE.png."
        ) from error
    return findings


def _with(comparison: Comparison, claims: dict[str, ClaimConfig], other: Curves) -> Comparison:
    return Comparison(
        ours=comparison.ours,
        claims=claims,
        axis=comparison.axis,
        against=other,
        versus=comparison.versus,
        versus_changed=comparison.versus_changed,
    )


def _other(request: Request) -> Curves:
    path = Path(request.against)
    if path.is_dir():
        return read_run(path)
    if not path.is_file():
        raise ConfigError(f"--against {request.against}: there is no such folder or file. `published` is the default.")
    return read_csv(path, renamed=dict(map(_pair, request.renamed)), run=request.run_name)


def _versus(folders: Sequence[Path]) -> dict[str, Curves]:
    """By the experiment that each is a run of."""
    found: dict[str, Curves] = {}
    for folder in folders:
        curves = read_run(folder)
        name = curves.config.experiment if curves.config else None
        if name is None:
            raise ConfigError(f"--versus {folder}: this run is of no experiment, so no claim names it.")
        if name in found:
            raise ConfigError(f"--versus {folder}: {found[name].name} is a run of {name}, too. Give one of the two.")
        found[name] = curves
    return found


def _pair(text: str) -> tuple[str, str]:
    key, found, value = text.rpartition("=")
    if not found or not key or not value:
        raise ConfigError(f"'{text}' must have the form KEY=VALUE.")
    return key, value


def _tolerance(key: str, text: str) -> float:
    try:
        tolerance = float(text)
    except ValueError as error:
        raise ConfigError(f"--metric {key}={text}: the tolerance must be a number.") from error
    if not math.isfinite(tolerance):
        raise ConfigError(f"--metric {key}={text}: the tolerance must be a finite number.")
    return tolerance
