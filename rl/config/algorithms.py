"""Settings of the algorithms: one class each, so that a setting of another algorithm is an error."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING


class OldLogprobs(Enum):
    """Where the log-probs in the denominator of the policy ratio come from."""

    trainer = "trainer"
    """A pass of the trainer before the first update of a step."""
    rollout = "rollout"
    """The engine's own, as sampled: no extra pass, and staleness is part of the ratio (bypass mode)."""


class KlEstimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


@dataclass
class AlgorithmConfig:
    _target_: str = MISSING
    prompts_per_step: int = MISSING
    """P: prompts whose groups make one rollout batch."""
    group_size: int = MISSING
    """G: answers sampled per prompt."""
    prompts_per_mini_batch: int | None = None
    """Prompts per optimizer update; divides prompts_per_step. None: all of them, one update a step."""
    old_logprobs: OldLogprobs = OldLogprobs.trainer

    @property
    def updates_per_step(self) -> int:
        return self.prompts_per_step // (self.prompts_per_mini_batch or self.prompts_per_step)


@dataclass
class GRPOConfig(AlgorithmConfig):
    """Group relative policy optimization (arXiv:2402.03300) with the token-mean loss of DAPO (arXiv:2503.14476)."""

    _target_: str = "rl.algorithms.grpo.GRPO"
    clip_low: float = 0.2
    """Lower clip: ratio >= 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip: ratio <= 1 + clip_high."""
    normalize_std: bool = True
    """Divide advantages by the group's sample standard deviation (n-1) plus 1e-6."""
    kl_coef: float = 0.0
    """Weight of the KL to the frozen initial policy in the loss. 0: no reference policy is kept."""
    kl_estimator: KlEstimator = KlEstimator.k3
