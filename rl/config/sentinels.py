"""Limits of what is watched at every step, and what happens past them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import partial


class SentinelAction(Enum):
    """What happens past the limit."""

    warn = "warn"
    """A warning when a limit is passed, and no other until the value was inside again."""
    stop = "stop"
    """The run ends; `rl resume=FOLDER` continues from its last checkpoint."""


@dataclass
class SentinelConfig:
    limit: float | None = None
    """None: by the dtype that the trainer computes in."""
    action: SentinelAction = SentinelAction.warn


@dataclass
class SentinelsConfig:
    """One sentinel a field; rl/sentinels.py says which metric each reads."""

    old_logprobs: SentinelConfig = field(default_factory=SentinelConfig)
    """Largest difference, in nats, between the pass for old log-probs and the training pass on equal weights."""
    padding: SentinelConfig = field(default_factory=SentinelConfig)
    """Largest change, in nats, of a log-prob when other sequences and masked values change; found at the first step."""
    mismatch: SentinelConfig = field(default_factory=partial(SentinelConfig, 0.01))
    """Largest k3 between engine and trainer of equal weights, in nats: of the step's fresh answers, and of the canary's
    where no answer is fresh. In bypass mode it is in every policy ratio."""
    nonfinite: SentinelConfig = field(default_factory=partial(SentinelConfig, 0.0))
    """Most loss tokens of a step without a finite log-prob."""
    effective_samples: SentinelConfig = field(default_factory=partial(SentinelConfig, 0.3))
    """Smallest effective sample size of the importance weights, as a fraction of the tokens."""
    uniform_groups: SentinelConfig = field(default_factory=partial(SentinelConfig, 0.95))
    """Largest share of groups that teach nothing."""
    entropy: SentinelConfig = field(default_factory=partial(SentinelConfig, 1e-3))
    """Smallest entropy of the policy, in nats a token."""
