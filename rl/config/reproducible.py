"""What a second run of the same command on the same machine shares with the first."""

from __future__ import annotations

from dataclasses import dataclass

from rl.config.replicas import replicas_of
from rl.config.schema import LocalRolloutConfig, RunConfig


@dataclass(frozen=True, slots=True)
class Promise:
    """Of every run: the order of prompts, weights that are made, and the draws of each answer follow from `seed`."""

    reasons: tuple[str, ...]
    """What can make two runs differ all the same. Empty: nothing, they are equal to the bit."""

    @property
    def level(self) -> str:
        return "seeded" if self.reasons else "bitwise"

    @property
    def line(self) -> str:
        if not self.reasons:
            return "the same command again, on this machine with as many threads: bitwise the same run"
        return f"the same command again: seeded, not bitwise, because {'; '.join(self.reasons)}"


def promise(config: RunConfig) -> Promise:
    """Bitwise is what tests have shown to be; whatever else may be so on some machine is not promised."""
    rollout, staleness = config.backend.rollout, config.staleness_bound
    reasons = {
        f"staleness up to {staleness} lets time decide which weights an answer is of": staleness > 0,
        "sums on a GPU have no fixed order": config.hardware.device != "cpu",
        f"{rollout._target_.rpartition('.')[2]} sums differently beside other requests": not isinstance(
            rollout, LocalRolloutConfig
        ),
        "an engine takes what comes when it is free": replicas_of(config).count > 1,
        "gradients are added up over ranks": config.placement.trainer_ranks > 1,
    }
    return Promise(tuple(reason for reason, applies in reasons.items() if applies))
