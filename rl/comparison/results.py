"""What runs of a published experiment reached: experiments/results/<name>.yaml, a list with one entry for each run.

`scripts/compare_curves.py RUN --record` writes them, and experiments/README.md tells them beside the claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl.comparison.curves import read_run
from rl.comparison.settings import read_provenance
from rl.comparison.verdict import Finding, Verdict
from rl.config.load import to_plain
from rl.config.lock import config_digest
from rl.config.published import PublishedConfig
from rl.config.register import package_folder
from rl.config.schema import ConfigError

HEAD = "# Written by scripts/compare_curves.py --record: one entry for each run, claims that could be compared alone.\n"


@dataclass(frozen=True, slots=True)
class ClaimResult:
    ours: float
    verdict: str
    """reproduced, partial or failed."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one run reached."""

    started: str
    """UTC. With the seed it tells runs apart: the same run, recorded again, takes the place of its entry."""
    seed: int
    steps: int
    """That it did."""
    commit: str | None
    """Of this suite. None: not run from a checkout."""
    is_dirty: bool | None
    """Whether the code differed from that commit."""
    config_digest: str
    """Other than the lock's: the run was modified."""
    hardware: str
    """Option of conf/hardware."""
    num_gpus: int
    """0: on a CPU."""
    gpu_hours: float
    """GPUs x hours of all steps, evaluations and checkpoints among them; without the start."""
    claims: dict[str, ClaimResult] = field(default_factory=dict)
    """By the claims' names."""


def results_file(experiment: str) -> Path:
    return package_folder("experiments") / "results" / f"{experiment}.yaml"


def read_results(path: Path, published: PublishedConfig) -> list[Result]:
    """In the order that they were recorded; none without a file. Raises ConfigError on an entry that cannot be one."""
    if not path.is_file():
        return []
    try:
        results = [_result(entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]
    except (KeyError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not what scripts/compare_curves.py --record writes: {error}") from error
    unknown = {key for result in results for key in result.claims} - set(published.claims)
    if unknown:
        raise ConfigError(f"{path}: {', '.join(sorted(unknown))}: the experiment makes no such claim.")
    return results


def _result(entry: dict[str, Any]) -> Result:
    claims = {key: ClaimResult(**claim) for key, claim in entry["claims"].items()}
    return Result(**{**entry, "claims": claims})


def record(run_folder: Path, findings: Sequence[Finding]) -> Path:
    """Adds what `findings` say of a run to its experiment's file of results, and returns that.

    A claim that is not comparable has no result; a run without one that is (a smoke run: its model is another, so none
    is) has nothing to record, which raises ConfigError.
    """
    run = read_run(run_folder)
    config = run.config
    assert config is not None
    if config.published is None or config.experiment is None:
        raise ConfigError(f"--record: nothing is published of {run_folder}.")
    judged = [finding for finding in findings if finding.name in config.published.claims]
    comparable = [finding for finding in judged if finding.verdict is not Verdict.NOT_COMPARABLE]
    if not comparable:
        why = f", {judged[0].name} because {judged[0].why}" if judged else ""
        raise ConfigError(f"--record: no claim of {config.experiment} is comparable with this run{why}.")
    facts = read_provenance(run_folder)
    code = facts.get("code", {})
    rows = [row for row in run.rows if row["step"] > 0]
    result = Result(
        started=facts.get("time", ""),
        seed=config.seed,
        steps=len(rows),
        commit=code.get("commit"),
        is_dirty=code.get("dirty"),
        config_digest=config_digest(to_plain(config)),
        hardware=config.hardware.name,
        num_gpus=config.num_gpus_used,
        gpu_hours=round(config.num_gpus_used * sum(row["time/step_s"] for row in rows) / 3600, 2),
        claims={one.name: ClaimResult(_number(one), one.verdict.value) for one in comparable},
    )
    path = results_file(config.experiment)
    others = [one for one in read_results(path, config.published) if _run_of(one) != _run_of(result)]
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [asdict(one) for one in [*others, result]]
    path.write_text(HEAD + yaml.safe_dump(entries, sort_keys=False), encoding="utf-8")
    return path


def _run_of(result: Result) -> tuple[str, int]:
    return result.started, result.seed


def _number(finding: Finding) -> float:
    assert finding.ours is not None
    return float(f"{finding.ours:.6g}")
