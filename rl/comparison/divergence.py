"""Where two runs part: the first step and stage whose digests differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl.config.schema import ConfigError
from rl.digests import STAGES
from rl.loggers.jsonl import Row, read_metrics

MEANINGS = {
    "data": "which prompts, or their order: the task's data, seed, filters, or what finished in the window",
    "tokens": "what was sampled: the engine, its seeds, its settings, or its weights",
    "reward": "the grader or the shaping of rewards",
    "advantage": "how advantages are computed from equal rewards",
    "loss": "the trainer's forward pass on equal data, or the loss, before any weight of the step changed",
    "weights": "the gradient or the optimizer, in this step",
}
INITIAL = "the policy before training"


@dataclass(frozen=True, slots=True)
class Divergence:
    step: int
    stage: str
    digests: tuple[str, str]
    equal_before: tuple[str, ...]
    """Stages of the same step that agree."""

    @property
    def meaning(self) -> str:
        return INITIAL if self.step == 0 else MEANINGS[self.stage]


@dataclass(frozen=True, slots=True)
class Compared:
    """How far two runs were compared, and what was found."""

    steps: tuple[int, ...]
    """Logged by both, in order."""
    divergence: Divergence | None
    """None: all digests of these steps agree."""


def compare_digests(ours: Path, theirs: Path) -> Compared:
    """Of two run folders. Raises ConfigError if one has no digests, or the two no common step."""
    rows = [_by_step(folder) for folder in (ours, theirs)]
    steps = tuple(sorted(rows[0].keys() & rows[1].keys()))
    if not steps:
        ranges = [f"{folder}: steps {min(of)} to {max(of)}" for folder, of in zip((ours, theirs), rows, strict=True)]
        raise ConfigError(f"the runs have no step in common ({'; '.join(ranges)}).")
    for step in steps:
        agreeing: list[str] = []
        for stage in STAGES:
            own, other = rows[0][step].get(stage), rows[1][step].get(stage)
            if own is None or other is None:
                continue
            if own != other:
                return Compared(steps, Divergence(step, stage, (own, other), tuple(agreeing)))
            agreeing.append(stage)
    return Compared(steps, None)


def _by_step(folder: Path) -> dict[int, Row]:
    rows = read_metrics(folder / "digests.jsonl")
    if not rows:
        raise ConfigError(f"{folder} has no digests.jsonl, so it cannot be said where it parts from another run.")
    return {row["step"]: row for row in rows}
